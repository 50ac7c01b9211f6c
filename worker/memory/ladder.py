"""Decides what a worker gives up as its memory fills, one rung after the other. Pure.

Clear MLX's cache, drop kept prefixes, let new requests wait, and at the hard line fail the biggest request. Each rung
is taken when those before it have nothing left to give. The pressure ends a little below the line at which it began.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Literal


class Rung(StrEnum):
    """What may be done, mildest first."""

    CLEAR = "clear"
    """Give MLX's cache of freed buffers back to the system."""
    DROP = "drop"
    """Let go of the kept prefix that was used longest ago."""
    WAIT = "wait"
    """Start no request beside those that run."""
    FAIL = "fail"
    """End the biggest request with `out_of_memory`."""


SOFT: Final = 0.85
HARD: Final = 0.95
BACK: Final = 0.05
"""Share of the limit that usage must fall below the soft line until the pressure is over."""
REFILL: Final = 0.02
"""Share of the limit that MLX's cache must have grown to until it is cleared again."""

Level = Literal["calm", "soft", "hard"]


@dataclass(frozen=True, slots=True)
class Lines:
    """Bytes at which rungs begin, and below which pressure ends."""

    limit: int
    soft: int
    hard: int
    back: int
    refill: int

    @classmethod
    def of(cls, limit: int, soft: float = SOFT, hard: float = HARD) -> Lines:
        """Of a limit in bytes, and shares of it."""
        return cls(
            limit=limit,
            soft=int(limit * soft),
            hard=int(limit * hard),
            back=max(0, int(limit * soft) - int(limit * BACK)),
            refill=int(limit * REFILL),
        )


@dataclass(frozen=True, slots=True)
class Seen:
    """What is there now."""

    usage: int
    cache: int = 0
    """Of `usage`, bytes in MLX's cache."""
    entries: int = 0
    """Kept prefixes."""
    running: int = 0
    """Requests that run."""


@dataclass(frozen=True, slots=True)
class State:
    """What was done under the present pressure."""

    cleared: bool = False
    holding: bool = False
    """New requests wait."""


def level(usage: int, lines: Lines) -> Level:
    """Which line is reached."""
    return "hard" if usage >= lines.hard else "soft" if usage >= lines.soft else "calm"


def decide(state: State, seen: Seen, lines: Lines, rungs: Collection[Rung]) -> tuple[State, Rung | None]:
    """The next thing to do, and the state once it is done. To be asked again, with a new look, until it is None."""
    if seen.usage < lines.back:
        return State(), None
    if seen.usage < lines.soft:
        return state, None
    state = replace(state, cleared=state.cleared and seen.cache < max(1, lines.refill))
    if Rung.CLEAR in rungs and not state.cleared:
        return replace(state, cleared=True), Rung.CLEAR
    if Rung.DROP in rungs and seen.entries:
        return state, Rung.DROP
    if Rung.WAIT in rungs and not state.holding:
        return replace(state, holding=True), Rung.WAIT
    if Rung.FAIL in rungs and seen.running and seen.usage >= lines.hard:
        return replace(state, cleared=False), Rung.FAIL
    return state, None


def biggest(tokens: Mapping[bytes, int]) -> bytes:
    """The request with most tokens; of equals the one that came last."""
    most = max(tokens.values())
    return [request for request, count in tokens.items() if count == most][-1]
