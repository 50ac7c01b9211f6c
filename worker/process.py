"""Owns the process: wires its threads together, waits for signals and ends, and holds the exit code.

It always ends with `os._exit`: nothing that runs at the end of an interpreter may change the code or hang.
"""

from __future__ import annotations

import faulthandler
import io
import logging
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from ..protocol.codec import NO_REQUEST
from ..protocol.events import Exiting
from ..protocol.exit_codes import WorkerExit
from . import lifeline
from .executor import Executor
from .mailbox import Mailbox
from .progress import WorkerProgress

TERM_S: Final = 1.2
"""Time for the executor to end its requests after SIGTERM."""
FLUSH_S: Final = 0.6
"""Time for the io thread to send the last frames after that; together under 2 seconds."""
CLOSE_S: Final = 2.0
"""Time for the io thread when the executor has ended by itself."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Options:
    """The command line."""

    endpoint: str
    incarnation: str
    lifeline_fd: int
    run_dir: Path
    parent: int
    name: str
    model: str
    prewarm: bool


def run(options: Options) -> NoReturn:
    """Be a worker until something ends it."""
    lifeline.arm(options.lifeline_fd, options.run_dir)
    _open_log()
    bell = Bell()
    for signum, handler in ((signal.SIGTERM, _ignore), (signal.SIGINT, signal.SIG_IGN)):
        signal.signal(signum, handler)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    log.info("worker of %s (parent %d) starts", options.name, options.parent)

    from .channel import Channel  # after the lifeline: zmq is the first heavy import

    mailbox, progress = Mailbox(), WorkerProgress()
    channel = Channel(options.endpoint, options.incarnation, mailbox, progress)
    executor = Executor(mailbox, progress, prewarm=options.prewarm)
    io_thread = Guarded("io", channel.run, bell)
    mlx_thread = Guarded("executor", executor.run, bell)
    io_thread.start()
    mlx_thread.start()

    while True:
        terminated = bell.wait(None)
        if io_thread.failed:
            _end(WorkerExit.IO_THREAD_DIED, "the io thread died")
        if not mlx_thread.is_working:
            _join(io_thread, bell, CLOSE_S)
            _end(executor.exit_code, executor.reason)
        if terminated:
            code = _terminate(mailbox, mlx_thread, executor, bell)
            _join(io_thread, bell, FLUSH_S)
            _end(code, executor.reason or "SIGTERM during a long operation")


def _terminate(mailbox: Mailbox, thread: Guarded, executor: Executor, bell: Bell) -> WorkerExit:
    """SIGTERM came: give the executor a moment, then speak for it."""
    log.info("SIGTERM: ending")
    mailbox.terminate()
    _join(thread, bell, TERM_S)
    if not thread.is_working:
        return executor.exit_code
    text = "terminated (SIGTERM) while the executor was in a long operation"
    mailbox.post(NO_REQUEST, Exiting(text, WorkerExit.TERMINATED))
    mailbox.finish()
    return WorkerExit.TERMINATED


def _join(thread: Guarded, bell: Bell, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while thread.is_working and (left := deadline - time.monotonic()) > 0:
        bell.wait(left)


def _end(code: int, why: str) -> NoReturn:
    log.info("worker ends with code %d: %s", code, why)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass
    os._exit(code)


class Guarded(threading.Thread):
    """A thread whose end, good or bad, rings the bell."""

    def __init__(self, name: str, body: Callable[[], None], bell: Bell) -> None:
        super().__init__(name=name, daemon=True)
        self._body = body
        self._bell = bell
        self.is_working = True
        self.failed = False

    def run(self) -> None:
        try:
            self._body()
        except BaseException:
            traceback.print_exc()
            self.failed = True
        finally:
            self.is_working = False
            self._bell.ring()


class Bell:
    """What the main thread waits on: signals and the ends of threads, both as bytes in one pipe.

    A pipe, because a signal handler must not take a lock that the waiting code may hold.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._poll = select.poll()
        self._poll.register(self._read, select.POLLIN)
        self._terminated = False

    def ring(self) -> None:
        """Wake the main thread."""
        try:
            os.write(self._write, b"\0")
        except BlockingIOError:
            pass

    def wait(self, timeout: float | None) -> bool:
        """Block until something rings, for `timeout` seconds at most. True once SIGTERM has come."""
        if self._poll.poll(None if timeout is None else max(0, timeout * 1000)):
            self._terminated |= signal.SIGTERM in os.read(self._read, 4096)
        return self._terminated


def _ignore(signum: int, frame: object) -> None:
    """The byte in the bell's pipe is the message; a handler is needed for it to be written."""


def _open_log() -> None:
    """Lines of text on stderr, whole and at once: the orchestrator keeps them."""
    faulthandler.enable()
    logging.raiseExceptions = False
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.WARNING,
        format="%(asctime)s %(levelname)s %(threadName)s: %(message)s",
    )
    logging.getLogger("mlx_bulkhead").setLevel(logging.INFO)
