"""Owns the two reasons for which a worker ends without being told: orchestrator gone, run directory gone.

The thread needs nothing but the interpreter lock, so it works during imports and inside long device calls.
"""

from __future__ import annotations

import os
import select
import threading
from pathlib import Path
from typing import Final, NoReturn

from ..protocol.exit_codes import WorkerExit

TICK_S: Final = 0.5
"""How often the run directory is looked for."""


def arm(fd: int, run_dir: Path) -> threading.Thread:
    """Start the watch over the read end of the orchestrator's pipe. Call it before anything heavy.

    Args:
        fd: read end of a pipe whose write end only the orchestrator holds. Nothing is ever written to it.
        run_dir: directory that exists as long as the orchestrator wants its workers.
    """
    os.set_inheritable(fd, False)  # a grandchild that kept it open would change nothing, but it is not theirs
    thread = threading.Thread(target=_watch, args=(fd, run_dir), name="lifeline", daemon=True)
    thread.start()
    return thread


def _watch(fd: int, run_dir: Path) -> NoReturn:
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while True:
            if poll.poll(TICK_S * 1000) and not os.read(fd, 4096):
                _end(WorkerExit.PARENT_GONE, "the orchestrator is gone")
            if _is_gone(run_dir):
                _end(WorkerExit.RUN_DIR_GONE, f"the run directory {run_dir} is gone")
    except BaseException as error:  # without its watch a worker could outlive everybody
        _end(WorkerExit.PARENT_GONE, f"the lifeline broke: {error!r}")


def _is_gone(directory: Path) -> bool:
    try:
        os.stat(directory)
    except FileNotFoundError:
        return True
    except OSError:
        return False  # a passing fault of the file system ends nothing
    return False


def _end(code: WorkerExit, why: str) -> NoReturn:
    try:
        os.set_blocking(2, False)  # with nobody left to drain the log pipe, a write could block for ever
        os.write(2, f"worker {os.getpid()} ends: {why}\n".encode())
    except OSError:
        pass
    os._exit(code)
