"""The client's sockets: a thread that owns one for `Client`, and the same on an asyncio loop for `AsyncClient`.

Both drive a `ClientCore` and decide nothing. The only client file that touches zmq.
"""

from __future__ import annotations

import atexit
import math
import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import zmq
from zmq.utils.monitor import parse_monitor_message

from ..protocol.errors import Disconnected, InternalError
from .channel import BATCH, LINGER_MS, open_socket
from .client_core import ClientCore, Connect

Input = Callable[[ClientCore, float], None]
"""Something a caller wants of the core."""

DROPPED = "its connection ended"
Context = zmq.Context[zmq.Socket[bytes]]


class Home:
    """The process that a client was made in. In a fork of it there is no socket thread, and zmq may not be used."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._pid = os.getpid()

    @property
    def left(self) -> bool:
        """Whether this is another process."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Raises `Disconnected` in another process."""
        if self.left:
            raise Disconnected(f"made before a fork; make a new {self._owner} in this process")


def why_not_there(path: Path) -> str:
    """Why nobody answers on a Unix socket, or nothing if somebody listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except BlockingIOError:
            return ""  # a full backlog: there, and busy
        except FileNotFoundError:
            return f"there is no socket {path}"
        except ConnectionRefusedError:
            return f"nobody listens on {path}"
        except OSError as error:
            return f"cannot connect to {path}: {error.strerror or error}"
    return ""


def new_context() -> Context:
    """A zmq context of one client."""
    return zmq.Context()


def is_drop(event: list[bytes]) -> bool:
    """Whether a monitor's message says that the connection ended."""
    return parse_monitor_message(event)["event"] == zmq.EVENT_DISCONNECTED


def _events(socket: zmq.Socket[bytes]) -> int:
    return int(socket.getsockopt(zmq.EVENTS))  # pyright: ignore[reportArgumentType]


def _descriptor(socket: zmq.Socket[bytes]) -> int:
    return int(socket.getsockopt(zmq.FD))  # pyright: ignore[reportArgumentType]


class Wire:
    """One socket to the daemon, with its connection's end reported and an outbox for what it cannot take yet."""

    def __init__(self, context: Context, path: Path, kind: int = zmq.DEALER) -> None:
        self.socket = open_socket(context, kind)
        self.socket.setsockopt(zmq.RECONNECT_IVL, -1)  # a new connection is a new peer: the core must know
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.outbox: deque[list[bytes]] = deque()
        self._owner = threading.get_ident()
        self.socket.connect(f"ipc://{path}")
        self.descriptor = _descriptor(self.socket)
        self.monitor_descriptor = _descriptor(self.monitor)
        self.unsure = True
        """A message may wait that the edge-triggered descriptor no longer tells of. `receive` settles it."""

    def send(self, frame: list[bytes]) -> None:
        self.outbox.append(frame)
        self.flush()

    def flush(self) -> None:
        assert threading.get_ident() == self._owner, "a zmq socket has one thread"
        while self.outbox and not self.socket.closed:
            self.unsure = True
            try:
                self.socket.send_multipart(self.outbox[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            self.outbox.popleft()

    def receive(self) -> list[bytes] | None:
        """The next message, if one waits."""
        self.unsure = True
        try:
            return self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            self.unsure = False
            return None

    def dropped(self) -> bool:
        """Whether the monitor has reported the connection's end."""
        ended = False
        while _events(self.monitor) & zmq.POLLIN:
            ended = is_drop(self.monitor.recv_multipart(zmq.NOBLOCK)) or ended
        return ended

    def close(self, linger: int | None = None) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(linger)


class ThreadDriver:
    """Drives a core from a thread of its own; any thread may `post`."""

    def __init__(self, core: ClientCore, path: Path) -> None:
        self.home = Home("Client")
        self._core = core
        self._path = path
        self._inputs: deque[Input] = deque()
        self._lock = threading.RLock()  # re-entrant: a collected Stream may post from inside a post
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._signalled = False
        self._stopping = False
        self._closed = False
        self._wire: Wire | None = None
        self._poll = select.poll()
        self._poll.register(self._wake_read, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="bulkhead-client", daemon=True)
        self._thread.start()
        _drivers.add(self)

    @property
    def alive(self) -> bool:
        """Whether the thread runs, so that answers can still come."""
        return self._thread.is_alive()

    def post(self, wanted: Input) -> None:
        """Have the thread do something with the core. Raises `Disconnected` once closed, and after a fork."""
        self.home.check()  # before the lock: the fork may have copied it locked
        if self._stopping:
            raise Disconnected("the client is closed")
        with self._lock:
            if self._stopping or self._closed:
                raise Disconnected("the client is closed")
            self._inputs.append(wanted)
            self._wake()

    def stop(self) -> None:
        """Ask the thread to end; does not wait."""
        if self._stopping or self.home.left:
            return
        with self._lock:
            self._stopping = True
            if not self._closed:
                self._wake()

    def close(self) -> None:
        """End the thread and wait for it, a second at most. Idempotent."""
        self.stop()
        if self.home.left:
            return
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)

    def _wake(self) -> None:
        if not self._signalled:
            self._signalled = True
            os.write(self._wake_write, b"!")

    def _run(self) -> None:
        context = new_context()
        try:
            while not self._stopping:
                self._step(context)
            self._core.close()
            self._perform(context)
        except Exception as error:  # a fault of ours must not leave callers waiting
            self._core.fail_all(InternalError(f"the client's socket thread ended: {error!r}"))
        finally:
            with self._lock:
                self._closed = True
                os.close(self._wake_read)
                os.close(self._wake_write)
            try:
                while self._inputs:  # posted in the last moment: their sinks hear of it too
                    self._inputs.popleft()(self._core, time.monotonic())
                self._core.close()
                self._drop_wire()
            finally:
                context.destroy(LINGER_MS)  # bounded, whatever went wrong before

    def _step(self, context: Context) -> None:
        self._perform(context)
        now = time.monotonic()
        until = self._core.wait_until(now)
        dropped = self._wait(None if until is None else max(0.0, until - now))
        now = time.monotonic()
        if self._wire is not None:
            self._receive(self._wire, now, dropped=dropped)
        while self._inputs:
            self._inputs.popleft()(self._core, now)
        self._core.tick(now)

    def _wait(self, timeout: float | None) -> bool:
        """Wait for a frame, a caller, or time. Whether the connection has ended."""
        wire = self._wire
        unsure = wire is not None and wire.unsure
        if unsure:
            timeout = 0.0
        ready = self._poll.poll(None if timeout is None else math.ceil(timeout * 1000))
        # A zmq socket that was never looked at does not signal its first message: hence also when unsure.
        told = wire is not None and (unsure or any(fd == wire.monitor_descriptor for fd, _ in ready))
        dropped = wire is not None and told and wire.dropped()
        with self._lock:  # between a poster's mark and its byte there is nothing to read
            if self._signalled:
                os.read(self._wake_read, 64)
                self._signalled = False  # before the inputs are taken: a later post wakes again
        return dropped

    def _receive(self, wire: Wire, now: float, *, dropped: bool) -> None:
        """What has arrived, first of all; the connection's end only after it."""
        for _ in range(BATCH if not dropped else 1_000_000):
            parts = wire.receive()
            if parts is None:
                break
            self._core.frame(parts, now)
        wire.flush()
        if dropped:
            self._core.lost(DROPPED, now)

    def _perform(self, context: Context) -> None:
        while actions := self._core.actions():
            for action in actions:
                if isinstance(action, list):
                    if self._wire is not None:
                        self._wire.send(action)
                    continue
                self._drop_wire()
                if isinstance(action, Connect):
                    if why := why_not_there(self._path):
                        self._core.lost(why, time.monotonic(), refused=True)
                        break
                    self._wire = Wire(context, self._path)
                    self._poll.register(self._wire.descriptor, select.POLLIN)
                    self._poll.register(self._wire.monitor_descriptor, select.POLLIN)

    def _drop_wire(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            self._poll.unregister(wire.descriptor)
            self._poll.unregister(wire.monitor_descriptor)
            wire.close()


_drivers: weakref.WeakSet[ThreadDriver] = weakref.WeakSet()


@atexit.register
def _close_drivers() -> None:
    """End the threads while they can still run: later one may have been stopped for ever with a lock held."""
    for driver in list(_drivers):
        driver.stop()
    for driver in list(_drivers):
        driver.close()


_tapped: set[Context] = set()
"""Contexts in use, kept from a collector, which would take them before their sockets and wait for those."""


def watch_tap(path: Path) -> Iterator[list[bytes]]:
    """Frames of the daemon's tap, `[direction, model, head, body]`, until the daemon ends."""
    context = new_context()
    _tapped.add(context)
    wire: Wire | None = None
    try:
        wire = Wire(context, path, zmq.SUB)
        wire.socket.setsockopt(zmq.SUBSCRIBE, b"")
        poller = zmq.Poller()
        poller.register(wire.socket, zmq.POLLIN)
        poller.register(wire.monitor, zmq.POLLIN)
        while True:
            poller.poll()
            ended = wire.dropped()
            while (parts := wire.receive()) is not None:
                if len(parts) == 4:
                    yield parts
            if ended:
                return
    finally:
        if wire is not None:
            wire.close()
        context.destroy(0)
        _tapped.discard(context)
