"""The stream object of an embedded orchestrator: a cursor into the request's log, for an asyncio caller."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import cast

from ..protocol import codec
from ..protocol.errors import InternalError, ProtocolMismatch, RequestTimeout
from .requests import LiveRequest
from .streams import Cursor
from .views import Assembler, Result, Snap, StreamEvent


class LocalStream:
    """The answer to one request, in this process. Iterate it for `Snap`s, or await `result()`.

    Leaving the `async with` block or the iteration early cancels the request, unless it was started detached or is
    somebody else's (`owner` False, after `attach`).
    """

    def __init__(self, request: LiveRequest, cancel: Callable[[LiveRequest], None], *, owner: bool = True) -> None:
        self._loop = asyncio.get_running_loop()
        self._cancels = owner and not request.message.detached
        self._request = request
        self._cancel = cancel
        self._assembler = Assembler(request.id)
        self._fresh = asyncio.Event()
        self._fresh.set()
        self._snaps: deque[Snap] = deque()
        self._cursor = request.log.cursor(self._fresh.set)

    @property
    def request_id(self) -> str:
        """Hexadecimal; what `attach` takes."""
        return self._request.id.hex()

    def cancel(self) -> None:
        """Cancel the request. Idempotent; the stream then ends with finish_reason `cancelled`."""
        self._cancel(self._request)

    def __aiter__(self) -> AsyncIterator[Snap]:
        return self.snapshots(progress=False)

    async def snapshots(self, *, progress: bool = True) -> AsyncIterator[Snap]:
        """Snaps as they come; with `progress`, also while prefill or a restart goes on. Raises the typed error."""
        self._assembler.progress = progress
        try:
            while True:
                while self._snaps:
                    yield self._snaps.popleft()
                if self._assembler.closed:
                    break
                await self._more()
        finally:
            self._give_up()  # not more: `result()` may still be asked for what there is
        if self._assembler.error is not None:
            raise self._assembler.error

    async def result(self, timeout: float | None = None) -> Result:
        """Read to the end. Raises the typed error, or `RequestTimeout` after `timeout` seconds (it goes on then)."""
        try:
            async with asyncio.timeout(timeout):
                while not self._assembler.closed:
                    await self._more()
                    self._snaps.clear()
        except TimeoutError:
            raise RequestTimeout(f"no end within {timeout:g} s", request_id=self.request_id) from None
        self._leave()
        if self._assembler.error is not None:
            raise self._assembler.error
        if self._assembler.result is None:
            raise InternalError("a request closed without result or error")
        return self._assembler.result

    async def _more(self) -> None:
        await self._fresh.wait()
        self._fresh.clear()
        try:
            events = [codec.decode_body(kind, self._request.id, body) for kind, body in self._cursor.take()]
        except codec.FrameError as error:
            self._assembler.fail(ProtocolMismatch(f"the worker sent a frame that makes no sense: {error}"))
            self._cancel(self._request)
            return
        for event in events:
            snap = self._assembler.feed(cast(StreamEvent, event))
            if snap is not None:
                self._snaps.append(snap)

    def _give_up(self) -> None:
        """Cancel what still runs, unless it was started to outlive its reader."""
        if not self._assembler.closed and self._cancels:
            self._cancel(self._request)

    def _leave(self) -> None:
        """No more is read."""
        self._give_up()
        self._cursor.close()

    async def __aenter__(self) -> LocalStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def __del__(self) -> None:
        if not self._request.closed:
            with contextlib.suppress(RuntimeError):  # the loop may have ended first
                self._loop.call_soon_threadsafe(_abandon, self._request, self._cursor, self._cancel, self._cancels)


def _abandon(request: LiveRequest, cursor: Cursor, cancel: Callable[[LiveRequest], None], cancels: bool) -> None:
    """A stream was collected, in whatever thread: on the loop, cancel its request and stop reading."""
    if cancels and not request.closed:
        cancel(request)
    cursor.close()
