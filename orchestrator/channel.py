"""zmq sockets on an asyncio loop: a pump for any socket, and the channel to one worker incarnation.

pyzmq's own asyncio sockets cost a future a message; the pump drains in bulk from the descriptor's callback.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path

import zmq

from ..protocol import codec
from ..protocol.limits import MAX_FRAME_BYTES

log = logging.getLogger(__name__)

Context = zmq.Context[zmq.Socket[bytes]]
"""The zmq context that all sockets of one orchestrator share."""

BATCH = 256
"""Messages taken in one callback before other work of the loop gets its turn."""

LINGER_MS = 200


def open_context() -> Context:
    """A context with one io thread. `term` it when all its sockets are closed."""
    return zmq.Context(io_threads=1)


def open_socket(context: Context, kind: int) -> zmq.Socket[bytes]:
    """A socket with the limits that all our sockets have: bounded linger, frame size and queues."""
    socket = context.socket(kind)
    socket.linger = LINGER_MS
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + codec.HEAD_BYTES)
    socket.setsockopt(zmq.SNDHWM, 1000)
    socket.setsockopt(zmq.RCVHWM, 1000)
    return socket


def bind(socket: zmq.Socket[bytes], path: Path) -> None:
    """Bind a socket to a path that only its owner can use. Raises `OSError`; the socket is then closed."""
    try:
        socket.bind(f"ipc://{path}")
        path.chmod(0o600)
    except (zmq.ZMQError, OSError) as error:
        socket.close()
        raise OSError(f"cannot listen on {path}: {error}") from error


class Pump:
    """Receives all messages of a socket on the loop.

    The descriptor of a zmq socket is edge-triggered: after every receive and every send its event flags have
    to be looked at again, or a message can wait unseen.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        on_message: Callable[[list[bytes]], None],
        on_writable: Callable[[], None] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = socket
        self._on_message = on_message
        self._on_writable = on_writable
        self._fd = int(socket.getsockopt(zmq.FD))  # pyright: ignore[reportArgumentType]
        self._scheduled = False
        self._loop.add_reader(self._fd, self._ready)
        self.check()

    def check(self) -> None:
        """Look for messages that an edge may have hidden. Call after every send."""
        if not self._scheduled and self._readable():
            self._scheduled = True
            self._loop.call_soon(self._ready)

    def _readable(self) -> bool:
        return bool(self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN)  # pyright: ignore[reportOperatorIssue]

    def _ready(self) -> None:
        self._scheduled = False
        if self._socket.closed:
            return
        for _ in range(BATCH):
            if not self._readable():
                break
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                self._on_message(parts)
            except Exception:  # a fault of ours with one message must not leave the others unread
                log.exception("a message could not be handled")
            if self._socket.closed:
                return
        if self._on_writable is not None:
            self._on_writable()
        self.check()

    def close(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close()


class WorkerChannel:
    """The bound end of one incarnation's endpoint. Frames come in by `on_frame(kind, request_id, body)`.

    Commands that the socket cannot take at once wait in order; they are bounded by the requests.
    """

    def __init__(
        self,
        context: Context,
        path: Path,
        on_frame: Callable[[int, bytes, bytes], None],
        on_junk: Callable[[], None],
    ) -> None:
        self._path = path
        self._on_frame = on_frame
        self._on_junk = on_junk
        self._outbox: deque[list[bytes]] = deque()
        self._socket = open_socket(context, zmq.PAIR)
        self.endpoint = f"ipc://{path}"
        bind(self._socket, path)
        self._pump = Pump(self._socket, self._receive, self._flush)

    def send(self, kind: int, request_id: bytes, body: bytes) -> None:
        """Send a command, or keep it until the worker takes it."""
        self._outbox.append([codec.head_of(kind, request_id), body])
        self._flush()
        if not self._socket.closed:
            self._pump.check()

    def _flush(self) -> None:
        while self._outbox and not self._socket.closed:
            try:
                self._socket.send_multipart(self._outbox[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            self._outbox.popleft()

    def _receive(self, parts: list[bytes]) -> None:
        try:
            if len(parts) != 2:
                raise codec.FrameError("wrong number of parts")
            kind, request_id = codec.split_head(parts[0])
        except codec.FrameError:
            self._on_junk()
            return
        self._on_frame(kind, request_id, parts[1])

    def close(self) -> None:
        """Close the socket and remove its path. Idempotent."""
        self._outbox.clear()
        self._pump.close()
        self._path.unlink(missing_ok=True)
