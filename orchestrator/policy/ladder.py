"""When a worker has more memory than its cap allows, and what is done from outside. Pure.

The worker's own, soft steps begin at 0.85 of the cap (see the page on memory). These are the hard ones, for a worker
that did not hold it all the same, or does not answer any more.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Step(StrEnum):
    """What is to be done."""

    DRAIN = "drain"
    """Let its requests finish, then replace it."""
    KILL = "kill"


class Lines(msgspec.Struct, frozen=True):
    """Shares of the cap. 0 turns a step off."""

    drain: float = 0.95
    kill: float = 1.0
    at_once: float = 0.25
    """So much of the cap above `kill`, a worker is killed at the first look; else at the second in a row. A buffer
    that is copied is over the cap for a moment."""
    rearm: float = 0.9
    """Once drained, a worker is drained again only if it was below this meanwhile: a model whose cap is too small for
    it is not replaced for ever."""
    patience_s: float = 1.0
    """How long a worker is given to come back below `drain` by its own steps."""


class Watch(msgspec.Struct, frozen=True):
    """What is remembered of one worker from sample to sample."""

    armed: bool = False
    """It has been below `rearm`."""
    over_since: float | None = None
    """Since when it is at or over `drain`."""
    over_kill: bool = False
    """It was over `kill` at the last look."""


def judge(watch: Watch, *, used: int, cap: int, answers: bool, lines: Lines, now: float) -> tuple[Watch, Step | None]:
    """What to do about a worker.

    Args:
        used: bytes of its process, 0 when nobody can tell.
        cap: bytes; 0 or less: none.
        answers: its heartbeats come. One that is silent cannot be drained.
        now: monotonic seconds.
    """
    if cap <= 0 or used <= 0:
        return watch, None
    share = used / cap
    over = bool(lines.kill) and share > lines.kill
    if over and (watch.over_kill or not answers or share > lines.kill + lines.at_once):
        return watch, Step.KILL
    if lines.drain and share >= lines.drain:
        if not answers and lines.kill:
            return watch, Step.KILL
        since = watch.over_since if watch.over_since is not None else now
        if watch.armed and answers and now >= since + lines.patience_s:
            return Watch(), Step.DRAIN
        return Watch(watch.armed, since, over), None
    return Watch(watch.armed or share < lines.rearm, over_kill=over), None
