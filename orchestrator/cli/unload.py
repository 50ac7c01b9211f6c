"""`bulkhead unload`: end a model's process."""

from __future__ import annotations

from ...protocol.exit_codes import CliExit
from .common import Name, RunDir, connect, note


def unload(name: Name, run_dir: RunDir = None) -> int:
    """Unload a model; returns once its process is gone."""
    with connect(run_dir) as client:
        was_loaded = client.unload(name)
    note(f"{name}: {'unloaded' if was_loaded else 'was not loaded'}")
    return CliExit.OK
