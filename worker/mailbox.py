"""Owns what passes between io thread and executor thread: commands in, messages out, and both wake-ups.

Nothing else is shared but `WorkerProgress`, which has one writer.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import NamedTuple

import msgspec

from ..protocol.codec import Message
from ..protocol.commands import Command
from ..protocol.events import Snapshot


class Order(NamedTuple):
    """A decoded command, with the monotonic time at which it arrived."""

    request_id: bytes
    command: Command
    received: float


class Outgoing(NamedTuple):
    """A message on its way to the orchestrator. Not encoded yet, so that snapshots can still be merged."""

    request_id: bytes
    message: Message


class Mailbox:
    """Two queues. Deques are appended to by one side and popped by the other, so neither needs a lock."""

    def __init__(self) -> None:
        self._orders: deque[Order] = deque()
        self._outgoing: deque[Outgoing] = deque()
        self._work = threading.Event()
        self._io_sleeps = False
        self._wake_in, self._wake_out = os.pipe()
        os.set_blocking(self._wake_in, False)
        os.set_blocking(self._wake_out, False)
        self.terminating = False
        """Set by the main thread: end now."""
        self.shutdown_seen = False
        """Set by the io thread: a `Shutdown` waits. A load looks at it, since it takes no orders."""
        self.finished = False
        """Set by the executor, or for a stuck executor by main: no message will follow."""

    # Commands: io thread → executor thread.

    def order(self, order: Order) -> None:
        """Hand a command to the executor."""
        self._orders.append(order)
        self._work.set()

    def terminate(self) -> None:
        """Ask the executor to end, from the main thread."""
        self.terminating = True
        self._work.set()

    @property
    def waiting(self) -> int:
        """Commands that the executor has not taken yet."""
        return len(self._orders)

    def take(self) -> list[Order]:
        """All commands that wait, oldest first."""
        orders: list[Order] = []
        while self._orders:
            orders.append(self._orders.popleft())
        return orders

    def wait(self, timeout: float | None = None) -> None:
        """Block the executor until there may be something to take. Always `take` afterwards."""
        self._work.wait(timeout)
        self._work.clear()

    # Messages: executor thread → io thread.

    def post(self, request_id: bytes, message: Message) -> None:
        """Queue a message. `kick` afterwards, once for a batch."""
        self._outgoing.append(Outgoing(request_id, message))

    def kick(self) -> None:
        """Wake the io thread if it sleeps and something is queued: one small write for each sleep at most."""
        if self._io_sleeps and self._outgoing:
            self._io_sleeps = False
            self._wake()

    def finish(self) -> None:
        """Say that no message follows, and wake the io thread for the last time."""
        self.finished = True
        self._wake()

    def _wake(self) -> None:
        try:
            os.write(self._wake_out, b"!")
        except BlockingIOError:
            pass  # the pipe is full of wake-ups already

    @property
    def wake_fd(self) -> int:
        """Readable when the io thread should look."""
        return self._wake_in

    def may_sleep(self) -> bool:
        """Announce that the io thread is about to block; False if it must not. Then `woken`."""
        self._io_sleeps = True  # before the look: whoever posts after it will write to the pipe
        return not self._outgoing and not self.finished

    def woken(self, readable: bool) -> None:
        """The io thread runs again. `readable`: the wake-up pipe has bytes."""
        self._io_sleeps = False
        if readable:
            os.read(self._wake_in, 4096)

    def close(self) -> None:
        """Give back the pipe. A process that ends needs not."""
        os.close(self._wake_in)
        os.close(self._wake_out)

    def next_outgoing(self) -> Outgoing | None:
        """The oldest message, taken out."""
        return self._outgoing.popleft() if self._outgoing else None


class _Entry:
    """One place in the backlog: a message, or several snapshots of one request to be sent as one."""

    __slots__ = ("channel", "messages", "request_id")

    def __init__(self, item: Outgoing) -> None:
        self.request_id = item.request_id
        self.messages = [item.message]
        self.channel = item.message.channel if isinstance(item.message, Snapshot) else None

    def merged(self) -> Outgoing:
        if len(self.messages) > 1:
            self.messages = [merge([m for m in self.messages if isinstance(m, Snapshot)])]
        return Outgoing(self.request_id, self.messages[0])


def merge(snapshots: list[Snapshot]) -> Snapshot:
    """Consecutive snapshots of one channel of a request as one: last number, first offset, all text and tokens."""
    return msgspec.structs.replace(
        snapshots[-1],
        offset=snapshots[0].offset,
        text="".join(s.text for s in snapshots),
        tokens=[token for s in snapshots for token in s.tokens],
        logprobs=[value for s in snapshots for value in s.logprobs],
        top_logprobs=[top for s in snapshots for top in s.top_logprobs],
    )


class Backlog:
    """What the socket would not take yet, in order. Held by the io thread alone.

    Snapshots of a channel that follow each other become one, so the bound is the length of the live outputs.
    """

    def __init__(self) -> None:
        self._entries: deque[_Entry] = deque()
        self._open: dict[bytes, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, item: Outgoing) -> None:
        """Append a message, or join it to the last snapshot of its request, if that is of the same channel."""
        if isinstance(item.message, Snapshot):
            entry = self._open.get(item.request_id)
            if entry is not None and entry.channel == item.message.channel:
                entry.messages.append(item.message)
                return
            self._open[item.request_id] = entry = _Entry(item)
        else:
            self._open.pop(item.request_id, None)
            entry = _Entry(item)
        self._entries.append(entry)

    def head(self) -> Outgoing:
        """The message to send next. It stays until `pop`."""
        return self._entries[0].merged()

    def pop(self) -> None:
        """The head was sent."""
        entry = self._entries.popleft()
        if self._open.get(entry.request_id) is entry:
            del self._open[entry.request_id]
