"""Whether a worker is fine, suspect or stalled. Pure.

Death is what the system says, and not decided here. A stall is what the step counter says: no step for longer
than the budget while there is work. A late heartbeat alone only makes a worker suspect.
"""

from __future__ import annotations

from enum import Enum

import msgspec

SUSPECT_AFTER_S = 2.0
"""Heartbeats come two to four times a second."""


SILENT_AFTER_S = 10.0
"""Shortest silence that counts as a stall of an idle worker, however small the budget."""


class Health(Enum):
    """What to think of a worker."""

    FINE = "fine"
    SUSPECT = "suspect"
    SUSPENDED = "suspended"
    STALLED = "stalled"


class Pulse(msgspec.Struct, frozen=True):
    """The last heartbeat: when it came (monotonic seconds) and for how long no step had been made then."""

    at: float
    busy_since_s: float | None


def judge(pulse: Pulse, *, budget_s: float, suspended: bool, forgiven_until: float, now: float) -> Health:
    """Judge a worker.

    Args:
        budget_s: longest time without a step while busy; also, but for a minimum, the longest silence.
        suspended: the process is stopped by a signal; it cannot be judged.
        forgiven_until: after our own process slept (host sleep, SIGSTOP), nobody is judged until then.
    """
    if suspended:
        return Health.SUSPENDED
    if now < forgiven_until:
        return Health.FINE
    silence = now - pulse.at
    stuck = (pulse.busy_since_s or 0.0) + (silence if pulse.busy_since_s is not None else 0.0)
    if stuck > budget_s or silence > max(budget_s, SILENT_AFTER_S):
        return Health.STALLED
    if silence > SUSPECT_AFTER_S:
        return Health.SUSPECT
    return Health.FINE


def slept(last_tick: float, expected_s: float, now: float) -> bool:
    """Whether our own loop was away far longer than it meant to be: the host slept or we were stopped."""
    return now - last_tick > expected_s + 1.5
