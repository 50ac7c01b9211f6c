"""What a run has seen: faults, ends of requests, times, violations. Written from many threads."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass, field

Place = tuple[str, str]
"""Server and model."""


@dataclass(frozen=True)
class Gap:
    """The time between two neighbouring pieces of one stream."""

    ended: float
    seconds: float
    place: Place


@dataclass
class Record:
    """The notebook of one run."""

    faults: Counter[str] = field(default_factory=Counter[str])
    ends: Counter[str] = field(default_factory=Counter[str])
    requests: int = 0
    resumed: int = 0
    told_s: list[float] = field(default_factory=list[float])
    recovered_s: list[float] = field(default_factory=list[float])
    gaps: list[Gap] = field(default_factory=list[Gap])
    violations: list[str] = field(default_factory=list[str])
    calm_until: float = 0.0
    active: dict[int, tuple[float, str]] = field(default_factory=dict[int, tuple[float, str]])
    _deaths: defaultdict[Place, list[float]] = field(default_factory=lambda: defaultdict(list[float]))
    _stops: defaultdict[Place, list[float]] = field(default_factory=lambda: defaultdict(list[float]))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fault(self, kind: str) -> None:
        with self._lock:
            self.faults[kind] += 1

    def violation(self, what: str) -> None:
        with self._lock:
            self.violations.append(what)

    def began(self, what: str) -> int:
        """A request starts; the number to `ended` it with."""
        with self._lock:
            self.requests += 1
            self.active[self.requests] = (time.monotonic(), what)
            return self.requests

    def ended(self, number: int, how: str, restarts: int = 0) -> None:
        """The one terminal event of a request."""
        with self._lock:
            if self.active.pop(number, None) is None:
                self.violations.append(f"request {number} ended twice, the second time with {how}")
            self.ends[how] += 1
            self.resumed += restarts > 0

    def died(self, place: Place) -> None:
        """A worker was killed just now."""
        with self._lock:
            self._deaths[place].append(time.monotonic())

    def stopped(self, place: Place) -> None:
        """A worker was stopped by a signal until just now."""
        with self._lock:
            self._stops[place].append(time.monotonic())

    def _own_stop(self, gap: Gap) -> bool:
        """Whether a gap is that of a stopped worker."""
        return any(gap.ended - gap.seconds < stop <= gap.ended + 0.1 for stop in self._stops[gap.place])

    def death_before(self, place: Place, moment: float) -> float | None:
        """The last death of a model's worker before a moment."""
        with self._lock:
            deaths = self._deaths[place]
            index = bisect_right(deaths, moment)
            return deaths[index - 1] if index else None

    def overdue(self, limit_s: float) -> list[str]:
        """Requests that have had no end for so long."""
        now = time.monotonic()
        with self._lock:
            return [what for began, what in self.active.values() if now - began > limit_s]

    def calm_gaps(self) -> list[float]:
        """Gaps before the first fault."""
        return [gap.seconds for gap in self.gaps if gap.ended < self.calm_until]

    def crash_gaps(self, within_s: float = 1.0) -> list[float]:
        """Gaps of streams while a worker of another model of the same server had just died."""
        found: list[float] = []
        for gap in self.gaps:
            for place, deaths in self._deaths.items():
                if place[0] != gap.place[0] or place == gap.place:
                    continue
                index = bisect_right(deaths, gap.ended)
                if index and gap.ended - gap.seconds < deaths[index - 1] + within_s and not self._own_stop(gap):
                    found.append(gap.seconds)
                    break
        return found


def quantile(values: list[float], share: float) -> float:
    """A quantile of what may be nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
