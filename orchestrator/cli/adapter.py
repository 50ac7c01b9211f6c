"""`bulkhead adapter`: add, drop and list the adapters of a loaded model."""

from __future__ import annotations

from typing import Annotated

import typer

from ...protocol.errors import UnknownModel
from ...protocol.exit_codes import CliExit
from ...protocol.values import AdapterInfo
from .common import Json, Name, RunDir, connect, mib, note, print_json, table

HEADINGS = ["ADAPTER", "KIND", "RANK", "LAYERS", "MEMORY", "NOTE"]

Adapter = Annotated[str, typer.Argument(metavar="ADAPTER", help="The adapter's name.")]

adapter = typer.Typer(name="adapter", help="Add, drop and list the adapters of a model.", no_args_is_help=True)


@adapter.command()
def add(
    name: Name,
    called: Adapter,
    path: Annotated[str, typer.Argument(metavar="PATH", help="Its directory.")],
    json: Json = False,
    run_dir: RunDir = None,
) -> int:
    """Add a LoRA or DoRA adapter without a reload. It stays until the model is unloaded."""
    with connect(run_dir) as client:
        info = client.add_adapter(name, called, path)
    if json:
        print_json(info)
    else:
        note(f"{name}: adapter {called} added, {info.kind} of rank {info.rank}, {mib(info.bytes)}")
    return CliExit.OK


@adapter.command()
def drop(name: Name, called: Adapter, run_dir: RunDir = None) -> int:
    """Drop an adapter that no request uses."""
    with connect(run_dir) as client:
        client.drop_adapter(name, called)
    note(f"{name}: adapter {called} dropped")
    return CliExit.OK


@adapter.command(name="list")
def list_adapters(name: Name, json: Json = False, run_dir: RunDir = None) -> int:
    """List the adapters of a model."""
    with connect(run_dir) as client:
        models = client.models()
    model = next((model for model in models if model.name == name), None)
    if model is None:
        known = ", ".join(sorted(model.name for model in models)) or "none"
        raise UnknownModel(f"no model {name[:80]!r}; known are {known}")
    adapters = model.info.adapters if model.info is not None else []
    if json:
        print_json(adapters)
    else:
        print(table([_row(one) for one in adapters], HEADINGS))
    return CliExit.OK


def _row(info: AdapterInfo) -> list[str]:
    serves = "default" if info.default else ""
    return [info.name, info.kind, str(info.rank), str(info.layers), mib(info.bytes), serves]
