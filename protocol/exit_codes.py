"""How a process ended, in numbers that are part of the protocol and in words for people."""

from __future__ import annotations

import signal
from enum import IntEnum


class WorkerExit(IntEnum):
    """Exit codes of a worker process."""

    CLEAN = 0
    BAD_ARGUMENTS = 2
    PARENT_GONE = 40
    RUN_DIR_GONE = 41
    LOAD_FAILED = 42
    EXECUTOR_DIED = 43
    OUT_OF_MEMORY = 44
    PROTOCOL_MISMATCH = 45
    IO_THREAD_DIED = 46
    TERMINATED = 47


class CliExit(IntEnum):
    """Exit codes of the `bulkhead` command."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NO_DAEMON = 3
    LOAD_FAILED = 4
    UNKNOWN_MODEL = 5
    ALREADY_RUNNING = 6
    GAVE_UP = 7
    """The daemon ended with at least one model in state FAILED."""
    INTERRUPTED = 130


_WORDS: dict[int, str] = {
    WorkerExit.CLEAN: "ended cleanly",
    WorkerExit.BAD_ARGUMENTS: "started with bad arguments",
    WorkerExit.PARENT_GONE: "ended because its orchestrator was gone",
    WorkerExit.RUN_DIR_GONE: "ended because its run directory was gone",
    WorkerExit.LOAD_FAILED: "could not load its model",
    WorkerExit.EXECUTOR_DIED: "its MLX thread died of a Python error",
    WorkerExit.OUT_OF_MEMORY: "ran out of memory",
    WorkerExit.PROTOCOL_MISMATCH: "speaks another protocol version",
    WorkerExit.IO_THREAD_DIED: "its socket thread died of a Python error",
    WorkerExit.TERMINATED: "was asked to end (SIGTERM)",
}

_SIGNAL_HINTS: dict[int, str] = {
    signal.SIGABRT: "aborted, usually a GPU command that failed",
    signal.SIGKILL: "killed, often by the system for lack of memory",
    signal.SIGSEGV: "segmentation fault in native code",
    signal.SIGBUS: "bus error in native code, often a model file that changed or shrank",
    signal.SIGTERM: "asked to end",
    signal.SIGILL: "illegal instruction in native code",
    signal.SIGTRAP: "trap in native code",
}


def describe_exit(returncode: int) -> str:
    """Say in words how a process ended.

    Args:
        returncode: as `subprocess.Popen.returncode` gives it, negative for a signal.
    """
    if returncode < 0:
        number = -returncode
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = f"signal {number}"
        hint = _SIGNAL_HINTS.get(number)
        return f"{name}: {hint}" if hint else name
    words = _WORDS.get(returncode)
    return f"exit code {returncode}: {words}" if words else f"exit code {returncode}"


RESTARTABLE_EXITS: frozenset[int] = frozenset(
    {WorkerExit.CLEAN, WorkerExit.EXECUTOR_DIED, WorkerExit.OUT_OF_MEMORY, WorkerExit.IO_THREAD_DIED}
)
"""Exit codes after which a fresh process may do better. Signals are always restartable."""


def may_restart(returncode: int) -> bool:
    """Whether a worker that ended so may be started again: not for a bad model or a wrong version."""
    return returncode < 0 or returncode in RESTARTABLE_EXITS or returncode not in _WORDS
