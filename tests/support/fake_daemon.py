"""A daemon of one thread and one real ROUTER socket that says what a test tells it to.

It answers `Models` (unless `mute`), records all else, and sends what the test hands to `Received.reply`.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import zmq
from mlx_bulkhead.protocol import codec
from mlx_bulkhead.protocol.codec import Message
from mlx_bulkhead.protocol.commands import Command, Models
from mlx_bulkhead.protocol.events import Accepted, Done, ModelsReply, Snapshot
from mlx_bulkhead.protocol.values import ModelStatus, Timings, Usage

PATIENCE_S = 20.0
C = TypeVar("C", bound=Command)


class Received:
    """One command that came in, and the way back to who sent it."""

    def __init__(self, daemon: FakeDaemon, identity: bytes, request_id: bytes, message: Message) -> None:
        self._daemon = daemon
        self.identity = identity
        self.request_id = request_id
        self.message = message

    def reply(self, *messages: Message) -> None:
        """Send events under the command's id. From any thread."""
        for message in messages:
            self.reply_raw(codec.encode(message, self.request_id))

    def reply_raw(self, parts: list[bytes]) -> None:
        self._daemon.do(lambda socket: socket.send_multipart([self.identity, *parts]))


class FakeDaemon:
    """Listens on `<run dir>/daemon.sock` from construction to `close`."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "daemon.sock"
        self.mute = False
        self.models: list[ModelStatus] = []
        self.received: list[Received] = []
        self.answers: dict[type[Command], Callable[[Received], None]] = {}
        """Called in the daemon's thread for each command of a type."""
        self._arrived: dict[type, queue.Queue[Received]] = {}
        self._lock = threading.Lock()
        self._work: deque[Callable[[zmq.Socket[bytes]], object]] = deque()
        self._wake_read, self._wake_write = os.pipe()
        self._ended = False
        self._closed = False
        self._again = False
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fake-daemon")
        self._thread.start()
        assert self._ready.wait(PATIENCE_S)

    def do(self, work: Callable[[zmq.Socket[bytes]], object]) -> None:
        """Run something in the thread that owns the socket."""
        self._work.append(work)
        os.write(self._wake_write, b"!")

    def expect(self, kind: type[C]) -> Received:
        """Wait for the next command of a type that no earlier call has taken."""
        return self._queue(kind).get(timeout=PATIENCE_S)

    def count(self, kind: type[Command]) -> int:
        return sum(isinstance(received.message, kind) for received in self.received)

    def rebind(self) -> None:
        """Drop all connections and listen anew on the same path, as a daemon does that lost its socket."""
        done = threading.Event()
        self._again = True
        self.do(lambda socket: done.set())
        assert done.wait(PATIENCE_S)

    def vanish(self) -> None:
        """Stop after the command that is being answered, without a word; for `answers`."""
        self._ended = True

    def close(self, *, keep_socket_file: bool = False) -> None:
        if self._closed:
            return
        self._ended = self._closed = True
        self.do(lambda socket: None)
        self._thread.join(PATIENCE_S)
        os.close(self._wake_read)
        os.close(self._wake_write)
        if not keep_socket_file:
            self.path.unlink(missing_ok=True)

    def __enter__(self) -> FakeDaemon:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _queue(self, kind: type) -> queue.Queue[Received]:
        with self._lock:
            return self._arrived.setdefault(kind, queue.Queue())

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        while not self._ended:
            self._again = False
            socket = context.socket(zmq.ROUTER)
            socket.linger = 500
            socket.setsockopt(zmq.SNDHWM, 0)  # a ROUTER drops what is over the limit; the real one asks first
            socket.bind(f"ipc://{self.path}")
            self._ready.set()
            self._serve(socket)
            socket.close()
        context.term()

    def _serve(self, socket: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        while not (self._ended or self._again):
            ready = dict(poller.poll())
            if self._wake_read in ready:
                os.read(self._wake_read, 1)
                self._work.popleft()(socket)
            if socket in ready:
                identity, *parts = socket.recv_multipart()
                self._take(socket, identity, parts)

    def _take(self, socket: zmq.Socket[bytes], identity: bytes, parts: list[bytes]) -> None:
        frame = codec.decode(parts)
        received = Received(self, identity, frame.request_id, frame.message)
        if isinstance(frame.message, Models) and not self.mute:
            reply = codec.encode(ModelsReply(models=self.models), frame.request_id)
            socket.send_multipart([identity, *reply])
        self.received.append(received)
        if answer := self.answers.get(type(frame.message)):  # pyright: ignore[reportArgumentType, reportCallIssue]
            answer(received)
        self._queue(type(frame.message)).put(received)


def accepted_and(text: str, *, chunk: int = 3) -> list[Message]:
    """`Accepted` and the snapshots of a text, a few characters each."""
    pieces = [text[start : start + chunk] for start in range(0, len(text), chunk)]
    snapshots: list[Message] = [
        Snapshot(seq=seq, offset=seq * chunk, text=piece, tokens=[seq]) for seq, piece in enumerate(pieces)
    ]
    return [Accepted(), *snapshots]


def done(text: str, *, reason: str = "stop", tokens: int = 1) -> Done:
    """The `Done` of a text."""
    return Done(
        finish_reason=reason,  # pyright: ignore[reportArgumentType]
        usage=Usage(prompt_tokens=4, completion_tokens=tokens),
        timings=Timings(predicted_n=tokens),
        engine="text",
        chars=len(text),
    )


def answer_with(text: str) -> Callable[[Received], None]:
    """An answer that streams a text and ends well."""
    return lambda received: received.reply(*accepted_and(text), done(text))
