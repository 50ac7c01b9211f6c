"""`bulkhead plan`: what would fit into the memory budget, told from the files; nothing is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from ...protocol.errors import BadRequest
from ...protocol.exit_codes import CliExit
from .common import Json, RunDir, mib, note, print_json, run_dir_of, table

HEADINGS = [
    "MODEL",
    "PROCESS",
    "WEIGHTS",
    "ADAPTERS",
    "KV CACHE",
    "WORK",
    "NEEDS",
    "SHARE",
    "TOGETHER",
    "FITS",
    "NOTE",
]


class Planned(NamedTuple):
    """One model. Bytes."""

    model: str
    process: int
    weights: int
    adapters: int
    kv: int
    work: int
    needs: int
    share: int
    together: int
    """Shares of this one and those before it that fit."""
    fits: bool
    context: int
    note: str


def plan(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]...", help="Directories, downloaded ids, configured names.")
    ] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="The daemon's TOML file.")] = None,
    budget: Annotated[int | None, typer.Option(metavar="BYTES", help="Instead of memory.budget.")] = None,
    context: Annotated[int | None, typer.Option(metavar="TOKENS", help="context_limit of all of them.")] = None,
    json: Json = False,
    run_dir: RunDir = None,
) -> int:
    """Tell what models would take, and which fit together. Exit code 1 if not all do."""
    limit, source, planned = _plan(models or [], config, budget, context, run_dir)
    if json:
        print_json({"budget": limit, "source": source, "models": [one._asdict() for one in planned]})
    else:
        print(table([_row(one) for one in planned], HEADINGS))
        print(f"budget: {mib(limit)} ({source})")
    return CliExit.OK if all(one.fits for one in planned) else CliExit.FAILED


def _plan(
    names: list[str], file: Path | None, budget: int | None, context: int | None, run_dir: Path | None
) -> tuple[int, str, list[Planned]]:
    import msgspec

    from .. import host_memory
    from ..config import Config, ModelConfig, load_config
    from ..policy.placement import bounds
    from ..sizes import UnknownSize, predict_load

    settings = Config.default() if file is None else load_config(file)
    names = names or list(settings.models)
    if not names:
        raise BadRequest("name a model, or give the --config FILE that has some")
    if budget is not None and budget <= 0:
        raise BadRequest(f"--budget is {budget}: it must be bytes, above 0")
    rules = settings.memory.rules(host_memory.usable())
    limit, source = _budget(budget, rules.budget, run_dir)
    together, planned, groups = 0, list[Planned](), list[str]()
    for name in names:
        model = settings.models.get(name) or ModelConfig(name)
        if context is not None:
            model = msgspec.structs.replace(model, context_limit=context)
        load = model.load(name[:256])
        try:
            found = predict_load(load, settings.memory.working_context)
        except UnknownSize as error:
            planned.append(Planned(name, 0, 0, 0, 0, 0, 0, 0, together, False, 0, str(error)))
            continue
        share = load.memory_limit or found.share
        crowd = [one for one in bounds(model.group, rules) if _count(groups, one[2]) >= one[1]]
        fits = together + share <= limit and not crowd
        if fits:
            together += share
            groups.append(model.group)
        words = "its config.json tells no dimensions: cache and work are guessed" if found.guessed else ""
        if load.memory_limit is not None and load.memory_limit < found.total:
            words = f"its memory_limit is below what it needs by {mib(found.total - load.memory_limit)}"
        if crowd:
            words = f"{crowd[0][0]} is {crowd[0][1]}: not beside the ones above"
        words = words or f"{found.context} tokens"
        parts = (found.process, found.weights, found.adapters, found.kv, found.work, found.total)
        planned.append(Planned(name, *parts, share, together, fits, found.context, words))
    return limit, source, planned


def _count(groups: list[str], group: str) -> int:
    """Models of a group; of all if it is empty."""
    return groups.count(group) if group else len(groups)


def _budget(given: int | None, configured: int | None, run_dir: Path | None) -> tuple[int, str]:
    """The budget, and whence it is: the option, the file, a running daemon, or the machine."""
    from ..client import Client, Disconnected
    from ..host_memory import usable

    if given is not None:
        return given, "--budget"
    if configured is not None:
        return configured, "memory.budget of the file"
    try:
        with Client(run_dir_of(run_dir)) as client:
            running = client.stats().placement
    except Disconnected:
        running = None
    if running is not None and running.budget:
        note(f"the running daemon holds {mib(running.held)} of it now")
        return running.budget, "memory.budget of the running daemon"
    return usable(), "no memory.budget is set; this is what models can have on this machine"


def _row(one: Planned) -> list[str]:
    sizes = (one.process, one.weights, one.adapters, one.kv, one.work, one.needs, one.share, one.together)
    return [one.model, *map(mib, sizes), "yes" if one.fits else "no", one.note]
