"""Who waits for a model: for its load, for its end, and for news of a load that moves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import TypeVar

from ..protocol.errors import BulkheadError
from ..protocol.events import LoadProgress
from ..protocol.values import WorkerInfo

log = logging.getLogger(__name__)

_T = TypeVar("_T")
OnProgress = Callable[[LoadProgress], None]


class Waiters:
    """The futures and callbacks of one model's callers. A caller that is cancelled is forgotten."""

    def __init__(self) -> None:
        self._loads: list[asyncio.Future[WorkerInfo]] = []
        self._ends: list[asyncio.Future[None]] = []
        self._watchers: list[OnProgress] = []

    @property
    def loading(self) -> bool:
        """Whether somebody waits for a load."""
        return bool(self._loads)

    async def loaded(self, ask: Callable[[], None], on_progress: OnProgress | None) -> WorkerInfo:
        """`ask()`, then wait until the model is READY. Raises the typed error of a failed load."""
        waiter: asyncio.Future[WorkerInfo] = asyncio.get_running_loop().create_future()
        self._loads.append(waiter)
        if on_progress is not None:
            self._watchers.append(on_progress)
        try:
            ask()
            return await waiter
        finally:
            with contextlib.suppress(ValueError):
                self._loads.remove(waiter)
            if on_progress is not None:
                self._watchers.remove(on_progress)

    async def ended(self, ask: Callable[[], None]) -> None:
        """`ask()`, then wait until the process is gone."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ends.append(waiter)
        ask()
        await waiter

    def tell_loaded(self, info: WorkerInfo) -> None:
        for waiter in _take(self._loads):
            waiter.set_result(info)

    def tell_load_failed(self, make_error: Callable[[], BulkheadError]) -> None:
        """Each gets an exception of its own: they are raised in different tasks."""
        for waiter in _take(self._loads):
            waiter.set_exception(make_error())

    def tell_ended(self) -> None:
        for waiter in _take(self._ends):
            waiter.set_result(None)

    def tell_progress(self, progress: LoadProgress) -> None:
        for watcher in tuple(self._watchers):
            try:
                watcher(progress)
            except Exception:  # a caller's code
                log.exception("a progress callback raised")


def _take(waiters: list[asyncio.Future[_T]]) -> list[asyncio.Future[_T]]:
    """All that still wait; the list is empty then."""
    waiting = [w for w in waiters if not w.done()]
    waiters.clear()
    return waiting
