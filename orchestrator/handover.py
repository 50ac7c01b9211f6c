"""Replaces a worker on purpose without dropping a stream: the new incarnation first, where memory allows.

The successor handshakes and loads beside the worker in charge. When it is ready it takes over all new requests; the
old one finishes its own and then ends. Where there is no room for two, the old one is drained first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from ..protocol.codec import Message
from ..protocol.commands import Load, Shutdown
from ..protocol.events import Hello, Loaded, LoadFailed, LoadProgress
from ..protocol.values import WorkerInfo
from .incarnation import Incarnation
from .policy import health
from .policy.lifecycle import Budgets

log = logging.getLogger(__name__)

RETRY_S = 60.0
"""After a handover failed, how long before the next is tried."""


class Charge(Protocol):
    """What a handover asks of the supervisor."""

    def hire(self, load: Load) -> Incarnation:
        """A new incarnation. Its owner is to be set. Raises `OSError`."""
        ...

    def promote(self, incarnation: Incarnation, info: WorkerInfo) -> Incarnation:
        """Put it in charge; gives the one that was."""
        ...

    def frame(self, kind: int, request_id: bytes, body: bytes) -> None:
        """A frame of a request that the old worker still serves."""
        ...

    def lost(self, incarnation: Incarnation, returncode: int) -> None:
        """The old worker is gone; what it still had must be saved."""
        ...

    def holds(self, incarnation: Incarnation) -> bool:
        """Whether it still has requests."""
        ...


class Handover:
    """At most one handover of one model. Idle most of its life."""

    def __init__(self, charge: Charge, budgets: Budgets) -> None:
        self._charge = charge
        self._budgets = budgets
        self._successor: _Successor | None = None
        self._leaving: set[Incarnation] = set()
        self._retiring: _Retiring | None = None
        self._not_before = 0.0
        self._when_gone: list[Callable[[], None]] = []
        self.count = 0

    @property
    def possible(self) -> bool:
        """Whether one may be started now."""
        return self._successor is None and not self._leaving and time.monotonic() >= self._not_before

    @property
    def loading(self) -> bool:
        """Whether a successor is on its way."""
        return self._successor is not None

    def begin(self, load: Load, reason: str) -> None:
        """Start the successor."""
        log.info("%s: recycling: %s", load.name, reason)
        try:
            incarnation = self._charge.hire(load)
        except OSError as error:
            self._failed(str(error))
            return
        self._leaving.add(incarnation)
        self._successor = _Successor(incarnation, load, self)

    def request_closed(self) -> None:
        """A request has ended; perhaps it was the old worker's last."""
        if self._retiring is not None:
            self._retiring.consider()

    def retiring(self, token: str) -> Incarnation | None:
        """The old worker, if it is the one with this token."""
        if self._retiring is not None and self._retiring.incarnation.token == token:
            return self._retiring.incarnation
        return None

    def call_off(self) -> None:
        """End a successor that is still on its way. The next may be begun once it is gone."""
        if self._successor is not None:
            gone, self._successor = self._successor, None
            gone.incarnation.process.kill()

    def abandon(self) -> None:
        """The model is being stopped or has crashed: no successor is wanted, and the old worker must go."""
        self._successor = None
        if self._retiring is not None:
            self._retiring.abandoned = True
        for incarnation in self._leaving:
            incarnation.process.kill()

    def check_health(self, stall_budget_s: float, forgiven_until: float, now: float) -> None:
        """Kill what is stuck: a successor that does not get ahead, an old worker that makes no step."""
        if self._successor is not None and self._successor.is_late(self._budgets, now):
            self._successor.incarnation.process.kill()
        if self._retiring is not None:
            old = self._retiring.incarnation
            if old.health(stall_budget_s, forgiven_until, now) is health.Health.STALLED:
                log.warning("a retiring worker (%d) stalled and is killed", old.pid)
                old.process.kill()

    def when_gone(self, tell: Callable[[], None]) -> None:
        """Call `tell` once no process of a handover is left; at once if there is none."""
        if self._leaving:
            self._when_gone.append(tell)
        else:
            tell()

    # ---- from the two incarnations ----------------------------------------------------------------------

    def ready(self, successor: _Successor, info: WorkerInfo) -> None:
        if self._successor is not successor:
            return
        self._successor = None
        self._leaving.discard(successor.incarnation)
        old = self._charge.promote(successor.incarnation, info)
        self.count += 1
        self._leaving.add(old)
        self._retiring = _Retiring(old, self._charge, self, self._budgets)

    def gone(self, incarnation: Incarnation) -> None:
        self._leaving.discard(incarnation)
        if self._successor is not None and self._successor.incarnation is incarnation:
            self._successor = None
            self._failed("the successor died")
        if self._retiring is not None and self._retiring.incarnation is incarnation:
            self._retiring = None
        if not self._leaving:
            tell, self._when_gone = self._when_gone, []
            for one in tell:
                one()

    def _failed(self, why: str) -> None:
        log.warning("a handover failed: %s", why)
        self._not_before = time.monotonic() + RETRY_S


class _Successor:
    """Owner of the new incarnation until it is loaded."""

    def __init__(self, incarnation: Incarnation, load: Load, handover: Handover) -> None:
        self.incarnation = incarnation
        self._load = load
        self._handover = handover
        self._moved_at = time.monotonic()
        self._told = False
        incarnation.owner = self
        if incarnation.greeted:
            self._send_load()

    def is_late(self, budgets: Budgets, now: float) -> bool:
        """Whether its Hello, or the next progress of its load, is overdue."""
        return now - self._moved_at > (budgets.load_silence_s if self._told else budgets.hello_s)

    def _send_load(self) -> None:
        self._told, self._moved_at = True, time.monotonic()
        self.incarnation.send(msgspec.structs.replace(self._load, env={}))

    def heard(self, message: Message) -> None:
        match message:
            case Hello():
                if self.incarnation.refusal_of(message) is None:
                    self._send_load()
                else:
                    self.incarnation.process.kill()
            case LoadProgress():
                self._moved_at = time.monotonic()
            case Loaded():
                self._handover.ready(self, message.info)
            case LoadFailed():
                log.warning("%s: the successor could not load: %s", self._load.name, message.message)
            case _:
                pass

    def stream(self, kind: int, request_id: bytes, body: bytes) -> None:
        """It has no requests yet."""

    def exited(self, returncode: int) -> None:
        self._handover.gone(self.incarnation)


class _Retiring:
    """Owner of the old incarnation until its last request has ended and it is reaped."""

    def __init__(self, incarnation: Incarnation, charge: Charge, handover: Handover, budgets: Budgets) -> None:
        self.incarnation = incarnation
        self._charge = charge
        self._handover = handover
        self._budgets = budgets
        self._timers: list[asyncio.TimerHandle] = []
        self.abandoned = False
        """Killed because of another; its requests are not to blame."""
        incarnation.owner = self
        self.consider()

    def consider(self) -> None:
        """End it once it has nothing to do."""
        if self._timers or self._charge.holds(self.incarnation):
            return
        self.incarnation.send(Shutdown())
        loop, process = asyncio.get_running_loop(), self.incarnation.process
        polite = self._budgets.polite_s
        self._timers = [
            loop.call_later(polite, process.terminate),
            loop.call_later(polite + self._budgets.term_s, process.kill),
        ]

    def heard(self, message: Message) -> None:
        """Heartbeats are kept by the incarnation itself."""

    def stream(self, kind: int, request_id: bytes, body: bytes) -> None:
        self._charge.frame(kind, request_id, body)

    def exited(self, returncode: int) -> None:
        for timer in self._timers:
            timer.cancel()
        self._charge.lost(self.incarnation, 0 if self.abandoned else returncode)
        self._handover.gone(self.incarnation)
