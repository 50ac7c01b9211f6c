"""Owns what the library changes in the model: in force while DFlash computes, and at no other time.

The library replaces `__call__` of attention classes. Batches of two or more rows do not survive that, so both
versions are noted, and a switch puts one of them in. Kernels for quantised targets are modules, and come and go
likewise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from mlx.utils import tree_flatten

from .rollback import noting

_RECURRENT = "_dflash_speculative_call_installed"
_FLAGS = (_RECURRENT, "_dflash_full_attention_gqa_installed")
"""Set on a class by the library when it has replaced its `__call__`."""


class _Change(NamedTuple):
    owner: type
    own: Any
    hooked: Any


class _Module(NamedTuple):
    parent: Any
    key: Any
    own: Any
    hooked: Any


class Hooks:
    """The changes of one model. They are off after construction."""

    def __init__(self, model: Any, install: Callable[[], Any], exact: bool = False) -> None:
        """`install` lets the library make its changes, once. If it raises, nothing stays changed.

        exact: recurrent layers note what `rollback.take_back` needs.
        """
        classes = {type(module): type(module).__call__ for _, module in model.named_modules()}
        before = _leaves(model)
        self._changes: list[_Change] = []
        self._modules: list[_Module] = []
        try:
            install()
        finally:
            for owner, own in classes.items():
                if (hooked := owner.__call__) is not own:
                    recurrent = _RECURRENT in vars(owner)
                    self._changes.append(_Change(owner, own, noting(hooked) if exact and recurrent else hooked))
                    owner.__call__ = own
            after = _leaves(model)
            for path, own in before.items():
                if after.get(path) is not own:
                    parent, key = _parent(model, path)
                    self._modules.append(_Module(parent, key, own, after[path]))
            for change in self._changes:
                # A second model of this class in the process gets hooks of its own.
                for flag in _FLAGS:
                    if flag in vars(change.owner):
                        delattr(change.owner, flag)
        self._own = {change.owner: change.own for change in self._changes}
        self._on = False
        for module in self._modules:
            _put(module, module.own)

    @property
    def count(self) -> int:
        """Classes and modules that the library changes."""
        return len(self._changes) + len(self._modules)

    def set(self, on: bool) -> None:
        """Put the library's versions in, or the model's own."""
        if on == self._on:
            return
        self._on = on
        for change in self._changes:
            change.owner.__call__ = change.hooked if on else change.own
        for module in self._modules:
            _put(module, module.hooked if on else module.own)

    def own_call(self, module: Any) -> Callable[..., Any]:
        """`__call__` of a module as the model has it."""
        return self._own[type(module)]


def _put(module: _Module, value: Any) -> None:
    if isinstance(module.parent, list):
        module.parent[module.key] = value
    else:
        setattr(module.parent, module.key, value)


def _leaves(model: Any) -> dict[str, Any]:
    flat: Any = tree_flatten(model.leaf_modules(), is_leaf=lambda node: hasattr(node, "parameters"))
    return dict(flat)


def _parent(model: Any, path: str) -> tuple[Any, Any]:
    """What holds the module of a dotted path, and under which key."""
    *way, last = path.split(".")
    parent = model
    for part in way:
        parent = parent[int(part)] if isinstance(parent, list) else getattr(parent, part)
    return parent, int(last) if isinstance(parent, list) else last
