"""Warm spares: workers that have imported their libraries and wait for a model, so that a crash costs no imports.

Optional. A spare fits any model that sets no environment of its own. Never forked: each is a fresh interpreter.
"""

from __future__ import annotations

import asyncio
import itertools
import logging

from ..protocol.codec import Message
from ..protocol.commands import Load
from ..protocol.events import Hello
from .incarnation import Incarnation, Plant
from .log_ring import LogRing

log = logging.getLogger(__name__)

SPARE_NAME = "(spare)"
RETRY_S = 30.0
"""After a spare died by itself, how long before another is tried."""


class SparePool:
    """Keeps `count` spares. `take` gives one away and starts its replacement a little later."""

    def __init__(self, plant: Plant, count: int) -> None:
        self._plant = plant
        self._count = count
        self._numbers = itertools.count(1)
        self._spares: list[_Spare] = []
        self._leaving: list[_Spare] = []
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self.fill()

    def fill(self) -> None:
        """Start what is missing."""
        self._timer = None
        while not self._closed and len(self._spares) < self._count:
            try:
                self._spares.append(_Spare(self, self._plant, next(self._numbers)))
            except OSError as error:
                log.warning("no spare worker could be started: %s", error)
                self._later(RETRY_S)
                return

    def take(self, load: Load) -> Incarnation | None:
        """A spare for this load, or None. The caller becomes its owner, and has not yet heard its `Hello`."""
        if load.env or self._closed:
            return None
        for spare in self._spares:
            if spare.ready:
                self._spares.remove(spare)
                self._later(1.0)  # the load goes first; two cores are soon full
                return spare.incarnation
        return None

    @property
    def waiting(self) -> int:
        """Spares that are ready."""
        return sum(spare.ready for spare in self._spares)

    def _later(self, delay_s: float) -> None:
        if self._timer is None and not self._closed:
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.fill)

    def gone(self, spare: _Spare) -> None:
        """A spare's process has ended."""
        if spare in self._leaving:
            self._leaving.remove(spare)
        elif spare in self._spares:
            self._spares.remove(spare)
            self._later(RETRY_S)

    async def close(self) -> None:
        """Kill the spares, and wait until they are reaped: they hold nothing."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._leaving, self._spares = self._leaving + self._spares, []
        waits = [spare.ended for spare in self._leaving]
        for spare in self._leaving:
            spare.incarnation.process.kill()
        await asyncio.gather(*waits)


class _Spare:
    """One spare; the owner of its incarnation until somebody takes it."""

    def __init__(self, pool: SparePool, plant: Plant, number: int) -> None:
        self._pool = pool
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.incarnation = Incarnation(
            plant, self, name=SPARE_NAME, model="-", number=number, env={}, log=LogRing(), prewarm=True
        )

    @property
    def ready(self) -> bool:
        return self.incarnation.greeted and self.incarnation.process.alive

    def heard(self, message: Message) -> None:
        """Only a good Hello makes it ready: with it the libraries need not be imported yet, but soon will be."""
        if isinstance(message, Hello) and self.incarnation.refusal_of(message) is not None:
            self.incarnation.process.kill()

    def stream(self, kind: int, request_id: bytes, body: bytes) -> None:
        """A spare has no requests."""

    def exited(self, returncode: int) -> None:
        self.ended.set_result(None)
        self._pool.gone(self)
