"""Starts, signals and reaps worker processes, and the helper that keeps the host awake. Nothing else here does.

A worker is a fresh interpreter: no fork after imports, no multiprocessing. It holds the read end of a pipe
whose write end lives here, so that it ends when we do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from ..protocol.codec import PROTOCOL_VERSION
from .log_ring import LogRing

DEFAULT_COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "mlx_bulkhead.worker")


@dataclass(frozen=True, slots=True)
class SpawnSpec:
    """All that a new worker process is given."""

    name: str
    model: str
    endpoint: str
    token: str
    run_dir: Path
    env: Mapping[str, str]
    command: Sequence[str] = DEFAULT_COMMAND
    prewarm: bool = False


_lifelines: set[int] = set()
"""Write ends of the pipes of all live workers and helpers."""


def _close_in_fork() -> None:
    """A fork of this process (a parent app may use them) must not keep our workers alive after we are gone."""
    for fd in _lifelines:
        with contextlib.suppress(OSError):
            os.close(fd)
    _lifelines.clear()


os.register_at_fork(after_in_child=_close_in_fork)


class WorkerProcess:
    """One worker process, from its start until it is reaped.

    `on_exit(returncode)` is called on the loop, once, after the process is reaped and its output is read.
    """

    def __init__(self, spec: SpawnSpec, log: LogRing, on_exit: Callable[[int], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self.log = log
        self._on_exit = on_exit
        self.killed = False
        """We sent SIGKILL, and not the system."""
        lifeline_read, self._lifeline = os.pipe()
        try:
            self._popen = subprocess.Popen(
                [*spec.command, *_arguments(spec, lifeline_read)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(lifeline_read,),
                start_new_session=True,
                env=_environment(spec.env),
            )
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(lifeline_read)
        _lifelines.add(self._lifeline)
        self.pid = self._popen.pid
        assert self._popen.stdout is not None
        self._output = self._popen.stdout.fileno()
        os.set_blocking(self._output, False)
        self._loop.add_reader(self._output, self._read_output)
        _when_gone(self._popen, self._loop, self._reaped)

    @property
    def alive(self) -> bool:
        """Whether the process is not yet reaped. A handle is kept until it is."""
        return self._popen.returncode is None

    @property
    def suspended(self) -> bool:
        """Whether the process is stopped by a signal (SIGSTOP, a debugger), which is not a stall."""
        try:
            return psutil.Process(self.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        except psutil.Error:
            return False

    @property
    def footprint(self) -> int:
        """Resident bytes as the system says, 0 when it cannot say."""
        try:
            return int(psutil.Process(self.pid).memory_info().rss)
        except psutil.Error:
            return 0

    def terminate(self) -> None:
        """SIGTERM: end yourself, soon."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the whole group, helpers of the worker included."""
        self.killed = self.killed or self.alive
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def _reaped(self, returncode: int) -> None:
        self._read_output()
        self._close_output()
        if self._lifeline >= 0:
            _lifelines.discard(self._lifeline)
            os.close(self._lifeline)
            self._lifeline = -1
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # helpers that a worker may have started
        self._on_exit(returncode)

    def _read_output(self) -> None:
        for _ in range(64):  # bounded: a worker that floods its log must not hold the loop
            if self._output < 0:
                return
            try:
                data = os.read(self._output, 65536)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._close_output()
                return
            self.log.feed(data)

    def _close_output(self) -> None:
        if self._output >= 0:
            self._loop.remove_reader(self._output)
            self._output = -1
            self.log.close()
            if self._popen.stdout is not None:
                self._popen.stdout.close()


class HelperProcess:
    """A small program that holds something of the system for us while it lives, such as a sleep assertion.

    Its stdin is a pipe that says nothing and closes when we end. `on_exit(self)` is called on the loop, once, after
    it is reaped. Raises `OSError` if it cannot be started.
    """

    def __init__(self, command: Sequence[str], on_exit: Callable[[HelperProcess], None]) -> None:
        self._on_exit = on_exit
        self.last_words = ""
        """Once it has ended: how, and the last that it said."""
        stdin, self._lifeline = os.pipe()
        try:
            self._popen = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,  # a Ctrl-C is for us
            )
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(stdin)
        _lifelines.add(self._lifeline)
        _when_gone(self._popen, asyncio.get_running_loop(), self._reaped)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def end(self) -> None:
        """SIGKILL to the whole group: it has nothing to lose, and the system drops what it held."""
        if self._popen.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def _reaped(self, returncode: int) -> None:
        _lifelines.discard(self._lifeline)
        os.close(self._lifeline)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # a child of its own
        said = ""
        if self._popen.stderr is not None:
            os.set_blocking(self._popen.stderr.fileno(), False)
            with contextlib.suppress(BlockingIOError):
                said = os.read(self._popen.stderr.fileno(), 400).decode(errors="replace").strip()
            self._popen.stderr.close()
        self.last_words = f"exit code {returncode}" + (f"; it said: {said}" if said else "")
        self._on_exit(self)


def _when_gone(popen: subprocess.Popen[bytes], loop: asyncio.AbstractEventLoop, tell: Callable[[int], None]) -> None:
    """Reap a process and call `tell(returncode)` on the loop as soon as the system knows that it is gone: by a pidfd
    on Linux, a waiting thread elsewhere."""
    pidfd = -1
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError):  # an old kernel or a sandbox without it
            pidfd = os.pidfd_open(popen.pid)

    def gone() -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        tell(popen.wait())  # returns at once

    def wait() -> None:
        returncode = popen.wait()
        with contextlib.suppress(RuntimeError):  # the loop may have ended first
            loop.call_soon_threadsafe(tell, returncode)

    if pidfd >= 0:
        loop.add_reader(pidfd, gone)
    else:
        threading.Thread(target=wait, name=f"reap-{popen.pid}", daemon=True).start()


def _arguments(spec: SpawnSpec, lifeline_fd: int) -> list[str]:
    options = {
        "endpoint": spec.endpoint,
        "incarnation": spec.token,
        "lifeline-fd": lifeline_fd,
        "run-dir": spec.run_dir,
        "parent": os.getpid(),
        "name": spec.name,
        "model": spec.model,
    }
    # One word an option: a name may begin with a dash.
    return [f"--{key}={value}" for key, value in options.items()] + (["--prewarm"] if spec.prewarm else [])


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    base = dict(os.environ)
    base.update(PYTHONUNBUFFERED="1", TOKENIZERS_PARALLELISM="false")
    base.update(extra)
    return base


def process_figures(started_at: float) -> dict[str, float]:
    """What `stats` says of this process itself. `started_at`: monotonic seconds."""
    process = psutil.Process()
    return {
        "protocol": float(PROTOCOL_VERSION),
        "pid": float(process.pid),
        "rss_bytes": float(process.memory_info().rss),
        "uptime_s": time.monotonic() - started_at,
    }


def free_memory() -> int:
    """Bytes that the host can give to a new process without swapping, as the system estimates it."""
    return int(psutil.virtual_memory().available)


def created_at(pid: int) -> float | None:
    """When a process was started, by which a recycled pid is told from the old one; None if it is gone."""
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return None


def reap_stale(notes: Path) -> list[int]:
    """Kill workers that a dead orchestrator left notes of in a directory, if pid, start time and token agree.

    Returns the pids killed.
    """
    killed: list[int] = []
    for note in notes.glob("*.json"):
        try:
            record = json.loads(note.read_text())
            process = psutil.Process(int(record["pid"]))
            same = abs(process.create_time() - float(record["created"])) < 1.0
            if same and any(str(record["token"]) in word for word in process.cmdline()):
                process.kill()
                killed.append(process.pid)
        except (OSError, ValueError, KeyError, TypeError, psutil.Error):
            pass  # gone already, or not ours: nothing to reap
        note.unlink(missing_ok=True)
    return killed
