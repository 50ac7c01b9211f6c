"""What a test may not leave behind: child processes, threads, descriptors, held run directories.

`take` before, `find` after. `find` first waits for what is about to end, so a process that is being reaped is
no leak; it returns one line for each thing that stays.
"""

from __future__ import annotations

import fcntl
import gc
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

FD_DIR = Path("/proc/self/fd") if Path("/proc/self/fd").is_dir() else Path("/dev/fd")
ENDING_S = 5.0
"""How long things that are about to end may take."""
_POLL_S = 0.02


@dataclass(frozen=True)
class Held:
    """What this process holds at one moment."""

    children: frozenset[psutil.Process]
    threads: frozenset[threading.Thread]
    fds: dict[int, str]


def take() -> Held:
    """Note what there is now. About a millisecond."""
    return Held(_children(), frozenset(threading.enumerate()), _fds())


def find(before: Held, within_s: float = ENDING_S) -> list[str]:
    """One line for each child, thread and descriptor that was not there before."""
    deadline = time.monotonic() + within_s
    return [
        *_left_children(before, deadline),
        *_left_threads(before, deadline),
        *_until_empty(lambda: _left_fds(before), deadline),
    ]


def find_run_dirs(root: Path, within_s: float = ENDING_S) -> list[str]:
    """One line for each run directory below `root` that a live process, child of ours or not, still holds."""
    return _until_empty(lambda: _held_run_dirs(root), time.monotonic() + within_s)


def end_children(before: Held) -> None:
    """Kill and reap the children that a test left, so that the next test starts clean."""
    left = _children() - before.children
    for child in left:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            pass
    psutil.wait_procs(left, timeout=ENDING_S)


def _children() -> frozenset[psutil.Process]:
    return frozenset(psutil.Process().children(recursive=True))


def _left_children(before: Held, deadline: float) -> list[str]:
    left = _children() - before.children
    _, alive = psutil.wait_procs(left, timeout=max(0.0, deadline - time.monotonic()))
    return [f"child process {child.pid}: {_command(child)}" for child in alive]


def _command(process: psutil.Process) -> str:
    try:
        return f"{process.status()}, {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return "gone by now"


def _left_threads(before: Held, deadline: float) -> list[str]:
    left = [thread for thread in threading.enumerate() if thread not in before.threads]
    for thread in left:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [f"thread {thread.name}{' (daemon)' if thread.daemon else ''}" for thread in left if thread.is_alive()]


def _fds() -> dict[int, str]:
    found: dict[int, str] = {}
    for fd in map(int, os.listdir(FD_DIR)):
        try:
            found[fd] = os.readlink(FD_DIR / str(fd)).removesuffix(" (deleted)")
        except OSError:  # closed by now, as the one that listed the folder, or a system where it is no link
            if _is_open(fd):
                found[fd] = "open"
    return found


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _left_fds(before: Held) -> list[str]:
    left = {fd: target for fd, target in _fds().items() if before.fds.get(fd) != target}
    if left:
        gc.collect()  # what only a reference cycle holds is closed late, but it is closed
        left = {fd: target for fd, target in _fds().items() if before.fds.get(fd) != target}
    return [f"descriptor {fd}: {target}" for fd, target in sorted(left.items())]


def _held_run_dirs(root: Path) -> list[str]:
    return [f"run directory {lock.parent}" for lock in root.rglob("lock") if _is_held(lock)]


def _is_held(lock: Path) -> bool:
    try:
        with open(lock) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _until_empty(look: Callable[[], list[str]], deadline: float) -> list[str]:
    while (left := look()) and time.monotonic() < deadline:
        threading.Event().wait(_POLL_S)
    return left
