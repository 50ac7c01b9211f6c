"""Ends of processes in words, and which of them allow a restart."""

from __future__ import annotations

import signal

import pytest
from mlx_bulkhead.protocol.exit_codes import CliExit, WorkerExit, describe_exit, may_restart

WORDS: list[tuple[int, str]] = [
    (0, "exit code 0: ended cleanly"),
    (1, "exit code 1"),
    (2, "exit code 2: started with bad arguments"),
    (42, "exit code 42: could not load its model"),
    (44, "exit code 44: ran out of memory"),
    (47, "exit code 47: was asked to end (SIGTERM)"),
    (134, "exit code 134"),
    (255, "exit code 255"),
    (-signal.SIGABRT, "SIGABRT: aborted, usually a GPU command that failed"),
    (-signal.SIGKILL, "SIGKILL: killed, often by the system for lack of memory"),
    (-signal.SIGSEGV, "SIGSEGV: segmentation fault in native code"),
    (-signal.SIGBUS, "SIGBUS: bus error in native code, often a model file that changed or shrank"),
    (-signal.SIGTERM, "SIGTERM: asked to end"),
    (-signal.SIGHUP, "SIGHUP"),
    (-1000, "signal 1000"),
]


@pytest.mark.parametrize(("returncode", "words"), WORDS)
def test_describe_exit(returncode: int, words: str) -> None:
    assert describe_exit(returncode) == words


RESTARTS: dict[int, bool] = {
    WorkerExit.CLEAN: True,
    WorkerExit.BAD_ARGUMENTS: False,
    WorkerExit.PARENT_GONE: False,
    WorkerExit.RUN_DIR_GONE: False,
    WorkerExit.LOAD_FAILED: False,
    WorkerExit.EXECUTOR_DIED: True,
    WorkerExit.OUT_OF_MEMORY: True,
    WorkerExit.PROTOCOL_MISMATCH: False,
    WorkerExit.IO_THREAD_DIED: True,
    WorkerExit.TERMINATED: False,
    1: True,
    134: True,
    255: True,
    -signal.SIGABRT: True,
    -signal.SIGKILL: True,
    -signal.SIGSEGV: True,
    -1000: True,
}


@pytest.mark.parametrize(("returncode", "expected"), RESTARTS.items())
def test_may_restart(returncode: int, expected: bool) -> None:
    assert may_restart(returncode) is expected


def test_every_code_of_ours_has_words_and_a_verdict() -> None:
    for code in WorkerExit:
        assert describe_exit(code).startswith(f"exit code {code.value}: ")
        assert code in RESTARTS


def test_codes_are_stable_and_within_a_byte() -> None:
    assert {code.name: code.value for code in WorkerExit} == {
        "CLEAN": 0,
        "BAD_ARGUMENTS": 2,
        "PARENT_GONE": 40,
        "RUN_DIR_GONE": 41,
        "LOAD_FAILED": 42,
        "EXECUTOR_DIED": 43,
        "OUT_OF_MEMORY": 44,
        "PROTOCOL_MISMATCH": 45,
        "IO_THREAD_DIED": 46,
        "TERMINATED": 47,
    }
    assert {code.name: code.value for code in CliExit} == {
        "OK": 0,
        "FAILED": 1,
        "USAGE": 2,
        "NO_DAEMON": 3,
        "LOAD_FAILED": 4,
        "UNKNOWN_MODEL": 5,
        "ALREADY_RUNNING": 6,
        "GAVE_UP": 7,
        "INTERRUPTED": 130,
    }
