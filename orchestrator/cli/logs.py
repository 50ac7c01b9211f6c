"""`bulkhead logs`: what a model's workers wrote to stdout and stderr."""

from __future__ import annotations

import sys
import time
from collections import deque
from pathlib import Path
from typing import Annotated

import typer

from ...protocol.errors import UnknownModel
from ...protocol.exit_codes import CliExit
from .common import Name, RunDir, run_dir_of

LOOK_AGAIN_S = 0.2


def logs(
    name: Name,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as it grows, until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the last lines.")] = 100,
    run_dir: RunDir = None,
) -> int:
    """Show the log of a model's workers. Needs no daemon."""
    from ..run_dir import log_path

    where = run_dir_of(run_dir)
    path = log_path(where, name)
    if not path.exists() and not follow:
        raise UnknownModel(f"no log of a model {name!r} in run directory {where}")
    position = _tail(path, lines)
    while follow:
        time.sleep(LOOK_AGAIN_S)
        position = _since(path, position)
    return CliExit.OK


def _tail(path: Path, lines: int) -> int:
    """Print the last lines; gives how many bytes the file had."""
    if not path.exists():
        return 0
    with open(path, "rb") as file:
        last = deque(file, maxlen=lines)
        _write(b"".join(last))
        return file.tell()


def _since(path: Path, position: int) -> int:
    """Print what the file has gained. A shorter one is a new one: the old was moved aside at its limit."""
    try:
        with open(path, "rb") as file:
            if file.seek(0, 2) < position:
                position = 0
            file.seek(position)
            _write(file.read())
            return file.tell()
    except FileNotFoundError:
        return 0


def _write(data: bytes) -> None:
    sys.stdout.write(data.decode("utf-8", "replace"))
    sys.stdout.flush()
