"""`bulkhead restart`: replace a model's worker by a fresh one."""

from __future__ import annotations

from ...protocol.errors import BulkheadError
from ...protocol.exit_codes import CliExit
from .common import Name, RunDir, connect, note
from .load import load_exit, ready


def restart(name: Name, run_dir: RunDir = None) -> int:
    """Replace a model's worker by a fresh one, also when it was given up. Running requests go on in it."""
    from .progress import load_progress

    with connect(run_dir) as client:
        try:
            with load_progress(name) as show:
                info = client.restart(name, on_progress=show)
        except BulkheadError as error:
            return load_exit(error)
    note(ready(name, info))
    return CliExit.OK
