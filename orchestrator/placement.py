"""Holds the ledger of the memory budget, and is the only writer of it: grants places, evicts and refuses.

Deciding is `policy/placement.py`'s. A model's supervisor meets it through its seat (`seat.py`) only. Without a
budget, a bound or a TTL it is not `active`, and everybody has a place at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import Protocol

from ..protocol.commands import Load
from ..protocol.values import PlaceInfo, PlacementInfo, WorkerInfo
from . import host_memory
from .config import Config, ConfigError
from .memory_config import Configured, check_host, check_ranges
from .policy import ladder, placement
from .policy.placement import size
from .policy.placement_values import (
    Asked,
    Effect,
    Event,
    Evict,
    Gone,
    Grant,
    Ledger,
    Loaded,
    Phase,
    Place,
    Pressure,
    Refuse,
    Sampled,
    Tick,
)
from .policy.prediction import Prediction
from .sizes import UnknownSize, predict_load

log = logging.getLogger(__name__)

WAITING_S = 0.25
"""How often the host's memory is looked at while somebody waits for it."""
WATCH_S = 1.0
"""The same while nobody does."""
DECISIONS = 32
"""Last decisions that are kept for `stats`."""


class LimitTooLow(Exception):
    """A load's own limit is below what its files hold; the message has the numbers."""


class Tenant(Protocol):
    """A model as the ledger's owner sees it."""

    name: str

    def place_given(self) -> None:
        """It may start its worker."""
        ...

    def place_refused(self, message: str) -> None:
        """It may not, and must not wait any longer."""
        ...

    def evict(self, why: str) -> None:
        """End its worker, which is idle."""
        ...


class Placement:
    """The one ledger of an orchestrator. Raises `ConfigError` for what can never work."""

    def __init__(self, config: Config) -> None:
        memory, models = config.memory, config.models
        problem = check_ranges(memory, {name: model.wish for name, model in models.items()})
        self._memory = memory
        self._models = models
        self.active = memory.active(model.ttl_s for model in models.values())
        self.rules = memory.rules(host_memory.usable())
        self.lines: ladder.Lines | None = memory.lines()
        self._ledger = Ledger()
        self._tenants: dict[str, Tenant] = {}
        self._predictions: dict[str, Prediction] = {}
        """By name, of the last time that it asked."""
        self._measured: dict[str, int] = {}
        """By `_key`: bytes that a loaded worker was seen to take, for the life of this orchestrator."""
        self._peaks: dict[str, int] = {}
        self._events: deque[Event] = deque()
        self._busy = False
        self._entering: str | None = None
        self._answer: Effect | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._decisions: deque[tuple[float, str]] = deque(maxlen=DECISIONS)
        if problem is None and self.budgeted:
            problem = check_host(memory, self._configured(), host_memory.total(), self.rules)
        if problem is not None:
            raise ConfigError(problem)

    @property
    def budgeted(self) -> bool:
        """Whether there is a budget, of which each worker gets its share as its cap."""
        return self.rules.budget is not None

    def counts(self, name: str) -> bool:
        """Whether a second worker of this model would break a bound, so that it never has two at once."""
        model = self._models.get(name)
        return self.budgeted or bool(placement.bounds(model.group if model is not None else "", self.rules))

    def _configured(self) -> dict[str, Configured]:
        found: dict[str, Configured] = {}
        for name, model in self._models.items():
            load = model.load(name)
            try:
                found[name] = Configured(load, model.pin, model.preload, self._share(load))
            except LimitTooLow as error:
                raise ConfigError(f"models.{name}: {error}") from None
            except UnknownSize:  # not there yet, or no model at all, which its load will say
                found[name] = Configured(load, model.pin, model.preload, load.memory_limit)
        return found

    # ---- what a seat says -------------------------------------------------------------------------------

    def enter(self, tenant: Tenant, load: Load, *, busy: bool) -> str | Refuse | None:
        """A worker is to be started. None: it has a place. Words: it waits for one. Or it is refused."""
        if not self.active:
            return None
        name = tenant.name
        place = self._ledger.place(name)
        if place is not None and place.phase in (Phase.LOADING, Phase.RESIDENT):
            return None
        if place is not None:  # its worker has left only now, and it is wanted again: last in the queue
            self.post(Gone(name))
        self._tenants[name] = tenant
        try:
            asked = self._place(load, busy)
        except (UnknownSize, LimitTooLow) as error:
            self._forget(name)
            remedy = "; set its memory_limit" if isinstance(error, UnknownSize) else ""
            message = f"model {name!r} has no place in memory.budget: {error}{remedy}"
            self.tell(f"refused {name}: {message}")
            return Refuse(name, message)
        self._entering, self._answer = name, None
        self.post(Asked(asked))
        answer, self._entering = self._answer, None
        if isinstance(answer, Grant):
            return None
        if isinstance(answer, Refuse):
            return answer
        waits = self._ledger.place(name)
        return placement.why_waiting(waits, self._ledger, time.monotonic(), self.rules) if waits else ""

    def post(self, event: Event) -> None:
        """Take an event. Events posted while one is carried out wait for their turn."""
        if not self.active:
            return
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._events:
                event = self._events.popleft()
                if isinstance(event, (Asked, Loaded, Gone)):
                    self._take(self._sample())
                self._take(event)
        finally:
            self._busy = False
        self._arm()

    def cap(self, load: Load) -> int | None:
        """What its worker is told as its memory limit: its share, or what the load says."""
        place = self._ledger.place(load.name) if self.budgeted else None
        return place.share if place is not None else load.memory_limit

    def learn(self, load: Load, info: WorkerInfo) -> None:
        """A worker is loaded: what it takes now is better than any prediction."""
        memory = info.memory_after
        if resident := max(memory.footprint, memory.mlx_active):
            prediction = self._predictions.get(load.name)
            if self.active and prediction is not None:
                beside = "measured" if prediction.measured else "predicted"
                self.tell(
                    f"loaded {load.name}: it takes {size(resident)}, {beside} before {size(prediction.resident)}"
                )
            self._measured[_key(load)] = resident
            self.saw(load, resident)

    def saw(self, load: Load, used: int) -> None:
        """Bytes that its worker takes now."""
        self._peaks[load.name] = max(used, self._peaks.get(load.name, 0))

    def tell(self, words: str) -> None:
        """Keep a decision for `stats`, and log it."""
        log.info("%s", words)
        self._decisions.append((time.monotonic(), words))

    def close(self) -> None:
        """Stop the clock."""
        self.active = False
        if self._timer is not None:
            self._timer.cancel()

    # ---- what callers see -------------------------------------------------------------------------------

    def view(self) -> PlacementInfo | None:
        """For `stats`; None without placement."""
        if not self.active:
            return None
        now, ledger = time.monotonic(), self._ledger
        return PlacementInfo(
            budget=self.rules.budget or 0,
            held=ledger.held,
            max_loaded=self.rules.max_loaded or 0,
            host_free=host_memory.free() or 0,
            pressure=self._pressure_word(),
            places=[self._info(place, now) for place in ledger.places],
            next_eviction=next((place.name for place in placement.candidates(ledger)), ""),
            groups=self.rules.groups,
            decisions=[f"{now - at:.1f} s ago: {words}" for at, words in self._decisions],
        )

    def _pressure_word(self) -> str:
        if not self._memory.host_pressure:
            return "off"
        return "unsupported" if host_memory.unsupported() else self._ledger.pressure.name.lower()

    def _info(self, place: Place, now: float) -> PlaceInfo:
        prediction = self._predictions.get(place.name)
        resident = place.phase is Phase.RESIDENT
        return PlaceInfo(
            name=place.name,
            phase=place.phase.value,
            share=place.share,
            predicted=prediction.total if prediction is not None else 0,
            peak=self._peaks.get(place.name, 0),
            pinned=place.pinned,
            busy=place.busy,
            idle_s=now - place.used_at if resident and not place.busy else None,
            waiting_s=now - place.since if place.phase is Phase.WAITING else None,
            group=place.group,
        )

    # ---- inside -----------------------------------------------------------------------------------------

    def _take(self, event: Event) -> None:
        before = self._ledger
        self._ledger, effects = placement.advance(before, event, time.monotonic(), self.rules)
        if self._ledger.pressure is not before.pressure:
            self.tell(f"memory pressure of the host: {self._ledger.pressure.name.lower()}")
        for effect in effects:
            self._carry_out(effect)
        if isinstance(event, Gone):
            self._forget(event.name)

    def _forget(self, name: str) -> None:
        """Names come and go: what has no place, and does not ask for one just now, leaves nothing behind."""
        asks = any(isinstance(event, Asked) and event.place.name == name for event in self._events)
        if not asks and name != self._entering and self._ledger.place(name) is None:
            self._tenants.pop(name, None)
            self._peaks.pop(name, None)
            if name not in self._models:
                self._predictions.pop(name, None)

    def _carry_out(self, effect: Effect) -> None:
        name = effect.name
        tenant = self._tenants[name]
        match effect:
            case Grant():
                self.tell(f"granted {name} {self._words(name)}")
            case Evict(_, why):
                self.tell(f"evicted {name}: {why}")
                tenant.evict(why)
                return
            case Refuse(_, message):
                self.tell(f"refused {name}: {message}")
            case _:
                raise AssertionError(effect)
        if name == self._entering:
            self._answer = effect
            if isinstance(effect, Refuse):
                self._entering = None
                self._forget(name)
        elif isinstance(effect, Refuse):
            tenant.place_refused(effect.message)
        else:
            tenant.place_given()

    def _words(self, name: str) -> str:
        place = self._ledger.place(name)
        if self.rules.budget is None or place is None:
            return "a place"
        return f"{size(place.share)}, now {size(self._ledger.held)} of {size(self.rules.budget)} are held"

    def _place(self, load: Load, busy: bool) -> Place:
        model = self._models.get(load.name)
        share = self._share(load)
        prediction = self._predictions.get(load.name)
        own_ttl = model.ttl_s if model is not None else None
        return Place(
            name=load.name,
            share=share,
            need=min(prediction.total, share) if prediction is not None and self.budgeted else 0,
            pinned=model is not None and model.pin,
            ttl_s=own_ttl if own_ttl is not None else self._memory.ttl_s,
            busy=busy,
            group=model.group if model is not None else "",
        )

    def _share(self, load: Load) -> int:
        """What a load holds of the budget: its own limit, else what it is predicted to need. Raises `UnknownSize` and
        `LimitTooLow`."""
        self._predictions.pop(load.name, None)
        if not self.budgeted:
            return 0
        try:
            prediction = predict_load(load, self._memory.working_context)
        except UnknownSize:
            if load.memory_limit is None:
                raise
            return load.memory_limit
        if load.memory_limit is not None and load.memory_limit < (files := prediction.weights + prediction.adapters):
            raise LimitTooLow(f"its weights take {size(files)}, and its memory_limit is {size(load.memory_limit)}")
        prediction = prediction.corrected(self._measured.get(_key(load), 0))
        self._predictions[load.name] = prediction
        return load.memory_limit or prediction.share

    def _sample(self) -> Sampled:
        level = host_memory.pressure() if self._memory.host_pressure else Pressure.NORMAL
        return Sampled(host_memory.free() if self.budgeted else None, level)

    def _arm(self) -> None:
        """Come back when a time is due, and look at the host now and then while there is a model."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self.active or not self._ledger.places:
            return
        now = time.monotonic()
        waiting = any(place.phase is Phase.WAITING for place in self._ledger.places)
        due = placement.next_at(self._ledger, now, self.rules)
        look = now + (WAITING_S if waiting else WATCH_S)
        at = look if due is None else min(look, max(due, now + 0.005))
        self._timer = asyncio.get_running_loop().call_later(at - now, self._look)

    def _look(self) -> None:
        self.post(self._sample())
        self.post(Tick())


def _key(load: Load) -> str:
    """What makes two loads take the same memory: model and adapters."""
    return repr((load.model, sorted(load.adapters.items())))
