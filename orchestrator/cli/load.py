"""`bulkhead load`: load a model into the daemon and wait until it is ready."""

from __future__ import annotations

from typing import Annotated

import typer

from ...protocol.errors import BadRequest, BulkheadError, Disconnected, UnknownModel
from ...protocol.exit_codes import CliExit
from ...protocol.values import WorkerInfo
from .common import Json, Name, RunDir, connect, mib, note, print_json
from .errors import report


def load(
    name: Name,
    model: Annotated[str, typer.Option("--model", "-m", help="A directory, or a Hugging Face id.")],
    context_limit: Annotated[int | None, typer.Option(help="Tokens of prompt and answer together.")] = None,
    memory_limit: Annotated[int | None, typer.Option(help="Bytes.")] = None,
    max_running: Annotated[int | None, typer.Option(help="Requests decoded together.")] = None,
    max_queued: Annotated[int | None, typer.Option(help="Requests that may wait behind them.")] = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's own code.")] = False,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="One request at a time.")] = False,
    draft: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Decode speculatively with this draft; auto: a known one.")
    ] = None,
    env: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="For the worker; repeatable.")] = None,
    adapter: Annotated[
        list[str] | None, typer.Option(metavar="NAME=PATH", help="LoRA or DoRA adapter; repeatable.")
    ] = None,
    default_adapter: Annotated[str, typer.Option(help="The one for requests that name none.")] = "",
    json: Json = False,
    run_dir: RunDir = None,
) -> int:
    """Load a model under a name. Loading what is loaded already is a no-op."""
    from ..options import LoadOptions
    from .progress import load_progress

    options: LoadOptions = {
        "context_limit": context_limit,
        "memory_limit": memory_limit,
        "trust_remote_code": trust_remote_code,
        "deterministic": deterministic,
        "env": _pairs("--env", "KEY=VALUE", env or []),
        "adapters": _pairs("--adapter", "NAME=PATH", adapter or []),
        "adapter": default_adapter,
    }
    if draft is not None:
        options["draft"] = draft
    if max_running is not None:
        options["max_running"] = max_running
    if max_queued is not None:
        options["max_queued"] = max_queued
    with connect(run_dir) as client:
        try:
            with load_progress(name) as show:
                info = client.load(name, model, on_progress=show, **options)
        except BulkheadError as error:
            return load_exit(error)
    if json:
        print_json(info)
    else:
        note(ready(name, info))
    return CliExit.OK


def ready(name: str, info: WorkerInfo) -> str:
    """The line that a load or restart ends with."""
    line = f"{name}: ready in {info.load_seconds:.1f} s, engine {info.engine}, {mib(info.memory_after.footprint)}"
    if (speculation := info.speculation) is None:
        return line
    if not speculation.active:
        return f"{line}\n{name}: no speculation: {speculation.reason}"
    return f"{line}, speculation in blocks of {speculation.block_tokens}"


def load_exit(error: BulkheadError) -> CliExit:
    """Say why a load failed; a model that crashed or ran out of memory in loading failed to load too."""
    code = report(error)
    return code if isinstance(error, (BadRequest, Disconnected, UnknownModel)) else CliExit.LOAD_FAILED


def _pairs(option: str, form: str, given: list[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals:
            raise BadRequest(f"{option} wants {form}, got {text[:60]!r}")
        pairs[key] = value
    return pairs
