"""`bulkhead stop`: end the daemon and wait until it is gone."""

from __future__ import annotations

from typing import Annotated

import typer

from ...protocol.exit_codes import CliExit
from .common import RunDir, connect, note
from .errors import say_error

EXTRA_S = 15.0
"""Beyond the grace: workers that must be killed take their time too."""


def stop(
    grace: Annotated[float, typer.Option(metavar="SECONDS", help="For running requests, with --drain.")] = 5.0,
    drain: Annotated[bool, typer.Option("--drain", help="Let running requests finish within the grace.")] = False,
    run_dir: RunDir = None,
) -> int:
    """End the daemon; returns once its process is gone."""
    import psutil

    with connect(run_dir) as client:
        pid = int(client.stats().daemon.get("pid", 0))
        client.shutdown(grace, drain=drain)
    if pid:
        try:
            psutil.Process(pid).wait(grace + EXTRA_S)
        except psutil.NoSuchProcess:
            pass
        except psutil.TimeoutExpired:
            say_error(f"the daemon (process {pid}) has not ended after {grace + EXTRA_S:g} s")
            return CliExit.FAILED
    note("stopped")
    return CliExit.OK
