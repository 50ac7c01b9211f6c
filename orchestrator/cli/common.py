"""What several commands share: options, the connection, names and numbers for people."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..client import Client

RunDir = Annotated[
    Path | None,
    typer.Option(
        "--run-dir", metavar="DIR", help="The daemon's run directory; without it $BULKHEAD_RUN_DIR, else yours."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The model's name.")]


def run_dir_of(given: Path | None) -> Path:
    """The run directory that a command means."""
    from ..run_dir import default_run_dir

    return given.expanduser().absolute() if given is not None else default_run_dir()


def connect(run_dir: Path | None) -> Client:
    """A client of the daemon. Raises `Disconnected`."""
    from ..client import Client

    return Client(run_dir_of(run_dir))


def print_json(value: object) -> None:
    """One JSON document on stdout, with every field, also those at their default."""
    import msgspec

    print(msgspec.json.encode(_whole(value)).decode())


def _whole(value: object) -> object:
    fields = getattr(value, "__struct_fields__", None)
    if fields is not None:
        return {name: _whole(getattr(value, name)) for name in fields}
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return value


def mib(count: float) -> str:
    """Bytes, readable."""
    if count >= 1024**3:
        return f"{count / 1024**3:.1f} GiB"
    return f"{count / 1024**2:.0f} MiB" if count else "-"


def mib_of(done: int, total: int) -> str:
    """How much of some bytes, readable; `total` 0: nobody knows."""
    if total:
        return f"{done / 1024**2:.0f}/{total / 1024**2:.0f} MiB"
    return mib(done) if done else ""


def span(seconds: float) -> str:
    """A duration, readable."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d{hours % 24}h"
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


def table(rows: list[list[str]], headings: list[str]) -> str:
    """Aligned columns."""
    widths = [max(len(row[column]) for row in [headings, *rows]) for column in range(len(headings))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [headings, *rows]
    ]
    return "\n".join(line.rstrip() for line in lines)


def is_path(model: str) -> bool:
    """Whether an argument is a model's path or hub id rather than only a name."""
    return model.startswith((".", "/", "~")) or "/" in model or os.path.isdir(model)


def note(message: str) -> None:
    """A line for people, apart from the output."""
    print(message, file=sys.stderr, flush=True)
