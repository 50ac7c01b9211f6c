"""What placement speaks of: places, the ledger, what can happen to it, and what it can ask for."""

from __future__ import annotations

from enum import IntEnum, StrEnum

import msgspec


class Phase(StrEnum):
    """Where a model is, seen from the ledger. All but WAITING hold their share."""

    WAITING = "waiting"
    LOADING = "loading"
    """It has its place; its worker is being started."""
    RESIDENT = "resident"
    LEAVING = "leaving"
    """Its worker is being ended; the share is free only once the process is reaped."""


class Pressure(IntEnum):
    """How short of memory the system says that it is."""

    NORMAL = 0
    WARN = 1
    CRITICAL = 2


class Rules(msgspec.Struct, frozen=True):
    """What does not change while the orchestrator runs."""

    budget: int | None = None
    """Bytes for all workers together. None: no bound."""
    max_loaded: int | None = None
    """Workers at once. None: no bound."""
    min_residency_s: float = 10.0
    """A loaded model makes no room for another before that."""
    queue_s: float = 60.0
    """How long a model may wait for a place."""
    calm_s: float = 5.0
    """Pressure counts as fallen only after so long."""
    groups: dict[str, int] = {}
    """Group → workers of it at once."""


class Place(msgspec.Struct, frozen=True):
    """One model in the ledger. Times are monotonic seconds."""

    name: str
    share: int
    """Bytes that it holds of the budget: its cap."""
    need: int = 0
    """Bytes that its load is predicted to take of the host."""
    pinned: bool = False
    """Never made to leave."""
    ttl_s: float | None = None
    """Idle seconds after which it leaves. None: never."""
    phase: Phase = Phase.WAITING
    since: float = 0.0
    """In this phase."""
    used_at: float = 0.0
    """End of its last request, or of its load if there was none."""
    busy: bool = False
    """Somebody needs it: it has live requests, or a load that waits. Else it was asked for ahead of need."""
    group: str = ""
    """Of those in `Rules.groups`; empty: none."""


class Ledger(msgspec.Struct, frozen=True):
    """All places, in the order in which they were asked for, and what the host said last."""

    places: tuple[Place, ...] = ()
    free: int | None = None
    """Bytes that the host can give away. None: not known."""
    pressure: Pressure = Pressure.NORMAL
    easing_since: float | None = None
    """Since when the host says less than `pressure`."""
    ceiling: int = 0
    """What was held when the pressure began: no more may be, while it lasts."""

    def place(self, name: str) -> Place | None:
        """The place of a model, if it has or waits for one."""
        return next((p for p in self.places if p.name == name), None)

    @property
    def holding(self) -> tuple[Place, ...]:
        """The places whose shares are taken."""
        return tuple(p for p in self.places if p.phase is not Phase.WAITING)

    @property
    def held(self) -> int:
        """Bytes of the budget that are taken."""
        return sum(p.share for p in self.holding)


class Event(msgspec.Struct, frozen=True):
    """Base of what can happen to the ledger."""


class Asked(Event, frozen=True):
    """A model is to be loaded and has no place yet."""

    place: Place


class Starts(Event, frozen=True):
    """A model that has a place gets a new worker: after a crash, or on request."""

    name: str


class Loaded(Event, frozen=True):
    """Its worker is READY."""

    name: str


class Leaves(Event, frozen=True):
    """Somebody ends its worker."""

    name: str


class Gone(Event, frozen=True):
    """Its worker is reaped, or nobody waits for it any more."""

    name: str


class Busy(Event, frozen=True):
    """It has a live request, or a load that waits."""

    name: str


class Idle(Event, frozen=True):
    """Nobody needs it any more."""

    name: str


class Sampled(Event, frozen=True):
    """What the host says of its memory."""

    free: int | None
    pressure: Pressure = Pressure.NORMAL


class Tick(Event, frozen=True):
    """Time passed."""


class Effect(msgspec.Struct, frozen=True):
    """Base of what placement asks for."""

    name: str


class Grant(Effect, frozen=True):
    """Start its worker, with its share as the cap."""


class Evict(Effect, frozen=True):
    """End its worker, which is idle."""

    why: str


class Refuse(Effect, frozen=True):
    """Tell all that wait for it."""

    message: str
