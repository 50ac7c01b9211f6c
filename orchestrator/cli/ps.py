"""`bulkhead ps`: the models and their processes."""

from __future__ import annotations

from ...protocol.exit_codes import CliExit
from ...protocol.values import ModelStatus
from .common import Json, RunDir, connect, mib, print_json, span, table

HEADINGS = ["NAME", "STATE", "PID", "MEMORY", "ENGINE", "IN FLIGHT", "RESTARTS", "UPTIME", "NOTE"]


def ps(json: Json = False, run_dir: RunDir = None) -> int:
    """List the models: state, process, memory, requests in flight."""
    with connect(run_dir) as client:
        models = client.models()
    if json:
        print_json(models)
    else:
        print(table([_row(model) for model in models], HEADINGS))
    return CliExit.OK


def _row(model: ModelStatus) -> list[str]:
    return [
        model.name,
        model.state,
        str(model.pid or "-"),
        mib(model.footprint),
        model.engine or "-",
        str(model.in_flight),
        str(model.restarts),
        span(model.uptime_s) if model.pid else "-",
        _note(model),
    ]


def _note(model: ModelStatus) -> str:
    """The one thing that a person should know about a model that is not fine."""
    retry = "" if model.next_retry_s is None else f" (again in {model.next_retry_s:.0f} s)"
    words = model.problem or ("" if model.health in ("", "fine") else model.health)
    return " ".join(words.split())[:100] + retry
