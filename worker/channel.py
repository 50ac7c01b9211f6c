"""Owns the worker's only socket and the io thread that uses it: frames in and out, heartbeats, statistics.

Decides nothing about requests: well-formed commands go to the mailbox, junk is counted.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from typing import Final

import msgspec
import zmq

from ..protocol.codec import (
    NO_REQUEST,
    PROTOCOL_VERSION,
    FrameError,
    Message,
    UnknownKind,
    decode,
    encode,
    kind_of,
)
from ..protocol.commands import AddAdapter, Cancel, Command, DropAdapter, Generate, Load, Shutdown, Stats
from ..protocol.errors import RETRYABLE, ErrorCode
from ..protocol.events import Failed, Heartbeat, Hello, Snapshot, StatsReply
from ..protocol.limits import MAX_FRAME_BYTES
from .mailbox import Backlog, Mailbox, Order, Outgoing
from .progress import Observer, WorkerProgress

BEAT_BUSY_S: Final = 0.25
BEAT_IDLE_S: Final = 0.5
LINGER_MS: Final = 500
DRAIN_S: Final = 0.5
"""How long the last frames may wait for a peer that reads slowly, before the linger."""
RECEIVE_BATCH: Final = 256
"""Frames read in one turn, so that a flood does not hold up what goes out."""
REFUSE_OVER: Final = 4096
"""Commands in the mailbox over which new requests are refused."""
WAITING_MAX: Final = 65_536
"""Commands in the mailbox, or messages not sent, over which the socket is not read: the sender blocks."""

_GENERATE: Final = kind_of(Generate)
_SURROGATE = re.compile("[\ud800-\udfff]")

log = logging.getLogger(__name__)


class Channel:
    """The io thread's body. Everything but the constructor runs on that thread."""

    def __init__(self, endpoint: str, incarnation: str, mailbox: Mailbox, progress: WorkerProgress) -> None:
        self._endpoint = endpoint
        self._incarnation = incarnation
        self._mailbox = mailbox
        self._progress = progress
        self._observer = Observer(progress)
        self._backlog = Backlog()
        self._owner = 0
        self._next_beat = 0.0
        self._finish_by: float | None = None
        self._socket: zmq.Socket[bytes]
        self._poller = zmq.Poller()

    def run(self) -> None:
        """Connect, say hello, and serve until the mailbox is finished. Raises what the socket raises."""
        self._owner = threading.get_ident()
        context = zmq.Context(1)
        self._socket = context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.connect(self._endpoint)
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._mailbox.wake_fd, zmq.POLLIN)
        self._reply(NO_REQUEST, Hello(PROTOCOL_VERSION, self._incarnation, os.getpid()))
        while not self._is_over():
            self._turn()
        self._socket.close(LINGER_MS)
        context.term()

    def _is_over(self) -> bool:
        if not self._mailbox.finished:
            return False
        if self._finish_by is None:
            self._finish_by = time.monotonic() + DRAIN_S
        self._pump()
        return not self._backlog or time.monotonic() >= self._finish_by

    def _turn(self) -> None:
        """Wait for something to do, do all of it once."""
        wait = self._next_beat - time.monotonic()
        if self._finish_by is not None:
            wait = min(wait, 0.02)
        self._watch()
        sleep = self._mailbox.may_sleep() or bool(self._backlog)
        timeout = max(0, int(wait * 1000) + 1) if sleep else 0
        ready = dict(self._poller.poll(timeout))
        self._mailbox.woken(self._mailbox.wake_fd in ready)
        if ready.get(self._socket, 0) & zmq.POLLIN:
            self._receive()
        self._pump()
        now = time.monotonic()
        if now >= self._next_beat:
            self._beat(now)

    def _watch(self) -> None:
        is_swamped = self._mailbox.waiting > WAITING_MAX or len(self._backlog) > WAITING_MAX
        flags = 0 if is_swamped else zmq.POLLIN
        if self._backlog:
            flags |= zmq.POLLOUT
        self._poller.modify(self._socket, flags)

    # Out.

    def _send(self, item: Outgoing) -> bool:
        """Give one message to the socket; False if it has no room."""
        if threading.get_ident() != self._owner:
            raise RuntimeError("the worker's socket was used from another thread than its own")
        try:
            frame = encode(item.message, item.request_id)
        except FrameError as error:
            log.error("a message could not be encoded: %s", error)
            frame = encode(_mended(item.message), item.request_id)
        try:
            self._socket.send_multipart(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _reply(self, request_id: bytes, message: Message) -> None:
        """Send, in order behind whatever waits."""
        item = Outgoing(request_id, message)
        if self._backlog or not self._send(item):
            self._backlog.push(item)

    def _pump(self) -> None:
        """Send what waits, oldest first. What the socket refuses goes to the backlog."""
        while self._backlog:
            if not self._send(self._backlog.head()):
                break
            self._backlog.pop()
        while (item := self._mailbox.next_outgoing()) is not None:
            if self._backlog or not self._send(item):
                self._backlog.push(item)

    def _beat(self, now: float) -> None:
        self._next_beat = now + (BEAT_BUSY_S if self._progress.is_active else BEAT_IDLE_S)
        if self._backlog:
            return  # a peer that does not read needs no heartbeats in its queue
        stats = self._observer.stats(now)
        self._reply(NO_REQUEST, Heartbeat(stats.steps, stats, self._observer.busy_since_s(now)))

    # In.

    def _receive(self) -> None:
        for _ in range(RECEIVE_BATCH):
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                _, request_id, message = decode(parts)
            except FrameError as error:
                self._refuse(error)
                continue
            self._accept(request_id, message)

    def _accept(self, request_id: bytes, message: Message) -> None:
        now = time.monotonic()
        match message:
            case Stats():
                self._reply(request_id, StatsReply(worker=self._observer.stats(now)))
            case Generate() if self._mailbox.waiting >= REFUSE_OVER:
                text = f"{self._mailbox.waiting} commands wait for the model already; the limit is {REFUSE_OVER}"
                self._reply(request_id, Failed(ErrorCode.QUEUE_FULL, text, retryable=True))
            case Load() | Generate() | Cancel() | AddAdapter() | DropAdapter():
                self._mailbox.order(Order(request_id, message, now))
            case Shutdown():
                self._mailbox.order(Order(request_id, message, now))
                self._mailbox.shutdown_seen = True
            case Command():
                self._refuse(FrameError(f"{type(message).__name__} is not for a worker"))
            case _:
                self._refuse(FrameError(f"{type(message).__name__} is an event, not a command"))

    def _refuse(self, error: FrameError) -> None:
        """Count a frame that means nothing here, and answer it if it asked for text."""
        if isinstance(error, UnknownKind):
            self._observer.frames_unknown += 1
        else:
            self._observer.frames_refused += 1
        count = self._observer.frames_unknown + self._observer.frames_refused
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th …: a flood does not flood the log
            log.warning("frame refused (%d so far): %s", count, error)
        if error.kind == _GENERATE and error.request_id is not None:
            self._reply(error.request_id, Failed(error.code, str(error), error.code in RETRYABLE))


def _mended(message: Message) -> Message:
    """A message that can be encoded in place of one that could not."""
    if isinstance(message, Snapshot):
        return msgspec.structs.replace(message, text=_SURROGATE.sub("\ufffd", message.text))
    if isinstance(message, Failed):
        return Failed(message.code, ascii(message.message)[:4096], message.retryable)
    return Failed(ErrorCode.INTERNAL, f"a {type(message).__name__} could not be encoded")
