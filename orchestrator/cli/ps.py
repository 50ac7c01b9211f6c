"""`bulkhead ps`: the models and their processes."""

from __future__ import annotations

import shutil
import sys

from ...protocol.exit_codes import CliExit
from ...protocol.values import ModelStatus
from .common import Json, RunDir, connect, mib, print_json, span, table
from .ledger import headline

LEAST_NOTE = 20
"""Characters of a note that are shown however narrow the terminal is."""
HEADINGS = ["NAME", "STATE", "PID", "MEMORY", "ENGINE", "IN FLIGHT", "RESTARTS", "UPTIME", "NOTE"]


def ps(json: Json = False, run_dir: RunDir = None) -> int:
    """List the models: state, process, memory, requests in flight; and the memory budget."""
    with connect(run_dir) as client:
        models = client.models()
        placement = None if json else client.stats().placement
    if json:
        print_json(models)
    else:
        if placement is not None:
            print(headline(placement))
        print(listing(models, shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
    return CliExit.OK


def listing(models: list[ModelStatus], width: int | None) -> str:
    """The table. On a terminal of some width, notes end in an ellipsis where they would break the line."""
    rows = [_row(model) for model in models]
    room = None
    if width is not None:
        before = max(map(len, table([[*row, "|"] for row in rows], HEADINGS).splitlines()[1:]), default=1) - 1
        room = max(LEAST_NOTE, width - before)
    return table([[*row, _note(model, room)] for row, model in zip(rows, models, strict=True)], HEADINGS)


def _row(model: ModelStatus) -> list[str]:
    """All cells but the note."""
    return [
        model.name,
        model.state,
        str(model.pid or "-"),
        mib(model.footprint),
        model.engine or "-",
        str(model.in_flight),
        str(model.restarts),
        span(model.uptime_s) if model.pid else "-",
    ]


def _note(model: ModelStatus, room: int | None) -> str:
    """The one thing that a person should know about a model that is not fine."""
    retry = "" if model.next_retry_s is None else f" (again in {model.next_retry_s:.0f} s)"
    words = model.problem or ("" if model.health in ("", "fine") else model.health)
    words = " ".join(words.split())
    if room is not None and len(words) + len(retry) > room:
        words = words[: max(0, room - len(retry) - 1)] + "…"
    return words + retry
