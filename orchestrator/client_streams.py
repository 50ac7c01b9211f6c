"""The streams that `Client` and `AsyncClient` hand out, and the inboxes that their frames come through."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from ..protocol.errors import Disconnected, RequestTimeout
from .client_answers import PROGRESS, StreamReader
from .client_live import ENDED, Item, Live
from .views import Result, Snap

if TYPE_CHECKING:
    from .client_io import ThreadDriver
    from .client_loop import LoopDriver


_Driver = TypeVar("_Driver", "ThreadDriver", "LoopDriver")

CLOSED: Final = "the stream was closed before its end"
BUSY: Final = "a stream has one reader at a time, and another {} is reading this one"
LOOK_S: Final = 1.0
"""How often one who waits looks whether the socket's thread still runs."""


class Inbox:
    """The sink of one request: filled by the socket's thread, emptied by a caller's. Bounded by the output."""

    def __init__(self, driver: ThreadDriver) -> None:
        self._driver = driver
        self._items: deque[Item] = deque()
        self._filled = threading.Condition(threading.Lock())

    def push(self, item: Item) -> None:
        with self._filled:
            _put(self._items, item)
            self._filled.notify()

    def pop(self, until: float | None = None) -> Item:
        """The next item. Raises `RequestTimeout` when none has come by then (monotonic seconds), and
        `Disconnected` when none can come."""
        self._driver.home.check()  # before the lock: the fork may have copied it locked
        with self._filled:
            while not self._items:
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    raise RequestTimeout("the request has not ended within the time given; it goes on")
                if not self._driver.alive:
                    raise Disconnected("the client's socket thread has ended")
                self._filled.wait(LOOK_S if left is None else min(left, LOOK_S))
            return self._items.popleft()


def _put(items: deque[Item], item: Item) -> None:
    """Add an item. Progress is a state, not a sequence: a newer one replaces one that nobody has read."""
    if items and _is_progress(item) and _is_progress(items[-1]):
        items[-1] = item
    else:
        items.append(item)


def _is_progress(item: Item) -> bool:
    return isinstance(item, tuple) and item[0] == PROGRESS


class _Following(ABC, Generic[_Driver]):
    """What both kinds of stream have in common: one live request, and the reader that assembles its answer."""

    def __init__(self, driver: _Driver, live: Live, *, own: bool) -> None:
        self._driver = driver
        self._live = live
        self._own = own
        self._reader = StreamReader(live.request_id)

    @abstractmethod
    def _abandon(self) -> None:
        """Nobody reads any more."""

    def cancel(self) -> None:
        """End the request with what it has. Idempotent; the stream then ends with finish_reason `cancelled`."""
        if not self._reader.assembler.closed:
            self._driver.home.check()
            try:
                self._driver.post(lambda core, _: core.cancel(self._live))
            except Disconnected:
                pass  # a closed client has cancelled it

    def _outcome(self) -> Result:
        assembler = self._reader.assembler
        if assembler.result is not None:
            return assembler.result
        raise assembler.error or Disconnected(CLOSED)

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "request_id") and not self._reader.assembler.closed and not ending():
            self._abandon()


class Stream(_Following["ThreadDriver"]):
    """One request as it runs: iterate for `Snap`s, or call `result()`.

    One thread at a time may read; a second gets a `RuntimeError`.

    Leaving a `with` block early, or dropping the last reference, cancels the request, unless it is detached or
    was only attached to. `cancel()` and `close()` may be called from any thread.
    """

    def __init__(self, driver: ThreadDriver, live: Live, body: bytes, inbox: Inbox, *, own: bool) -> None:
        super().__init__(driver, live, own=own)
        self._inbox = inbox
        self._reading = threading.Lock()
        self.request_id = live.request_id.hex()
        driver.post(lambda core, now: core.submit(live, body, now))

    def __iter__(self) -> Iterator[Snap]:
        return self

    def __next__(self) -> Snap:
        snap = self._next(None)
        if snap is None:
            if error := self._reader.assembler.error:
                raise error
            raise StopIteration
        return snap

    def snapshots(self, *, progress: bool = True) -> Iterator[Snap]:
        """Iterate; with `progress`, also over snaps without text that tell of queue, load and prefill."""
        self._reader.assembler.progress = progress
        return self

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the end. Raises the typed error of a request that failed, and `RequestTimeout`, after which
        the request still goes on, if `timeout` seconds were not enough."""
        until = None if timeout is None else time.monotonic() + timeout
        while self._next(until) is not None:
            pass
        return self._outcome()

    def close(self) -> None:
        """Stop reading: cancels an unfinished request of this client's own. Idempotent, does not wait."""
        assembler = self._reader.assembler
        if assembler.closed:
            return
        assembler.fail(Disconnected(CLOSED))
        self._abandon()
        if self._reading.locked() and not self._driver.home.left:
            self._inbox.push(Disconnected(CLOSED))  # for the thread that waits for it

    def _abandon(self) -> None:
        live, own = self._live, self._own  # no reference to self: this runs from __del__ too
        try:
            self._driver.post(lambda core, _: core.abandon(live, cancel=own))
        except Disconnected:
            pass

    def _next(self, until: float | None) -> Snap | None:
        reader = self._reader
        if reader.assembler.closed:
            return None
        self._driver.home.check()
        if not self._reading.acquire(blocking=False):
            raise RuntimeError(BUSY.format("thread"))
        try:
            while not reader.assembler.closed:
                snap = reader.feed(self._inbox.pop(until))
                if reader.broken:
                    self._abandon()
                if snap is not None:
                    return snap
            return None
        finally:
            self._reading.release()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncInbox:
    """The sink of one request on the loop."""

    def __init__(self, driver: LoopDriver) -> None:
        self._driver = driver
        self._items: deque[Item] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def push(self, item: Item) -> None:
        _put(self._items, item)
        waiter = self._waiter
        if waiter is not None and not waiter.done() and not self._driver.loop.is_closed():
            waiter.set_result(None)

    async def pop(self) -> Item:
        self._driver.home.check()
        while not self._items:
            if asyncio.get_running_loop() is not self._driver.loop:
                raise Disconnected(ENDED)  # nobody would wake this one
            self._waiter = self._driver.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._items.popleft()


class AsyncStream(_Following["LoopDriver"]):
    """One request as it runs: `async for` gives `Snap`s, `await result()` the whole.

    One task at a time may read; a second gets a `RuntimeError`.

    Leaving an `async with` block early, or dropping the last reference, cancels the request, unless it is
    detached or was only attached to.
    """

    def __init__(self, driver: LoopDriver, live: Live, body: bytes, inbox: AsyncInbox, *, own: bool) -> None:
        super().__init__(driver, live, own=own)
        self._inbox = inbox
        self._reading = False
        self.request_id = live.request_id.hex()
        driver.post(lambda core, now: core.submit(live, body, now))

    def __aiter__(self) -> AsyncIterator[Snap]:
        return self

    async def __anext__(self) -> Snap:
        snap = await self._next()
        if snap is None:
            if error := self._reader.assembler.error:
                raise error
            raise StopAsyncIteration
        return snap

    def snapshots(self, *, progress: bool = True) -> AsyncIterator[Snap]:
        """Iterate; with `progress`, also over snaps without text that tell of queue, load and prefill."""
        self._reader.assembler.progress = progress
        return self

    async def result(self, timeout: float | None = None) -> Result:
        """Wait for the end. Raises the typed error of a request that failed, and `RequestTimeout`, after which
        the request still goes on, if `timeout` seconds were not enough."""
        try:
            async with asyncio.timeout(timeout):
                while await self._next() is not None:
                    pass
        except TimeoutError:
            raise RequestTimeout("the request has not ended within the time given; it goes on") from None
        return self._outcome()

    def close(self) -> None:
        """Stop reading: cancels an unfinished request of this client's own. Idempotent, does not wait."""
        assembler = self._reader.assembler
        if assembler.closed:
            return
        assembler.fail(Disconnected(CLOSED))
        if self._driver.loop.is_closed():
            self._driver.close()  # with its loop the client has ended; this still cancels
            return
        self._abandon()
        if self._reading and not self._driver.home.left:
            self._inbox.push(Disconnected(CLOSED))  # for the task that waits for it

    def _abandon(self) -> None:
        driver, live, own = self._driver, self._live, self._own

        def abandon() -> None:
            if not driver.gone:
                driver.post(lambda core, _: core.abandon(live, cancel=own))

        driver.call(abandon)

    async def _next(self) -> Snap | None:
        reader = self._reader
        if reader.assembler.closed:
            return None
        self._driver.home.check()
        if self._reading:
            raise RuntimeError(BUSY.format("task"))
        self._reading = True
        try:
            while not reader.assembler.closed:
                snap = reader.feed(await self._inbox.pop())
                if reader.broken:
                    self._abandon()
                if snap is not None:
                    return snap
            return None
        finally:
            self._reading = False

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
