"""Checks of names: of models, and of the adapters of a model. Pure; part of `checks`."""

from __future__ import annotations

from . import limits
from .commands import AddAdapter, DropAdapter, Generate, Load
from .problem import Problem, bad

BASE = "base"
"""Names the model without an adapter."""


def check_name(name: str, field: str = "model") -> Problem | None:
    """A name: 1 to 256 printable characters."""
    if not name or len(name) > limits.MAX_NAME_CHARS or not name.isprintable() or name != name.strip():
        return bad(
            f"{field} must be 1 to {limits.MAX_NAME_CHARS} printable characters without blanks at its ends, "
            f"got {len(name)} characters: {name[:60]!r}"
        )
    return None


def check_adapters(load: Load) -> Problem | None:
    """Names and directories of a load's adapters, and its default."""
    if len(load.adapters) > limits.MAX_ADAPTERS:
        return bad(f"adapters holds at most {limits.MAX_ADAPTERS}, got {len(load.adapters)}")
    for name, folder in load.adapters.items():
        if problem := check_name(name, "a name in adapters"):
            return problem
        if name == BASE:
            return bad(f"adapters must not have {BASE!r}: that names the model without an adapter")
        if problem := _check_folder(folder, f"adapters[{name!r}]"):
            return problem
    if load.adapter not in ("", BASE) and load.adapter not in load.adapters:
        return bad(f"adapter is {load.adapter[:60]!r}, {known(load.adapters)}")
    return None


def _check_folder(folder: str, field: str) -> Problem | None:
    if not folder.strip() or len(folder) > limits.MAX_PATH_CHARS or "\0" in folder:
        return bad(
            f"{field} must be a path of 1 to {limits.MAX_PATH_CHARS} characters without NUL, "
            f"got {len(folder)} characters"
        )
    return None


def check_change(command: AddAdapter | DropAdapter) -> Problem | None:
    """Names, and the directory, of an adapter that is to be added or dropped."""
    if problem := check_name(command.model) or check_name(command.name, "name"):
        return problem
    if command.name == BASE:
        return bad(f"name must not be {BASE!r}: that names the model without an adapter")
    return _check_folder(command.path, "path") if isinstance(command, AddAdapter) else None


def in_use(name: str, users: int) -> Problem:
    """Why an adapter cannot be dropped now."""
    requests = "a live request" if users == 1 else f"{users} live requests"
    return bad(f"adapter {name!r} serves {requests}; drop it when they have ended, or cancel them")


def check_adapter(request: Generate) -> Problem | None:
    """The name that a request may give. Whether there is such an adapter, its worker knows."""
    return None if request.adapter is None else check_name(request.adapter, "adapter")


def known(adapters: dict[str, str]) -> str:
    """Which names there are, for a message about another one."""
    names = ", ".join(sorted(adapters)) or "none"
    return f"and the adapters of this model are {names}; {BASE} is the model without one"
