"""Whether a worker that ended is started again, and when. Pure."""

from __future__ import annotations

import signal

import msgspec

from ...protocol.exit_codes import may_restart


class RestartPolicy(msgspec.Struct, frozen=True):
    """At most `max_restarts` in a sliding `window_s`; delay `base · 2ⁿ` up to `max_delay_s`, ± `jitter`."""

    max_restarts: int = 3
    window_s: float = 60.0
    base_delay_s: float = 0.5
    max_delay_s: float = 30.0
    jitter: float = 0.2
    retry_failed_s: float = 0.0
    """So long after a model was given up, a request for it tries once more. 0: only a load or a restart does."""
    stable_steps: int = 512
    """Executor steps after which a worker is stable. Prefill chunks are steps too, and a prompt that always crashes
    its worker in its prefill must not restart it without delay in quick succession. Chunks are sized by time: so many
    of one prompt take more than a minute, or are a million tokens. Decoding, it is some seconds of real answers."""


class RestartHistory(msgspec.Struct, frozen=True):
    """Past restarts of one model: when (monotonic seconds), and how many since the last stable run."""

    times: tuple[float, ...] = ()
    unstable: int = 0


class Retry(msgspec.Struct, frozen=True):
    """Start again at this time."""

    at: float
    history: RestartHistory


class GiveUp(msgspec.Struct, frozen=True):
    """Do not start again by yourself."""

    reason: str
    history: RestartHistory


VICTIM_WINDOW_S = 2.0
"""A reset of the GPU ends all processes that use it, the cause first."""


def is_victim(deaths: dict[str, float], name: str, returncode: int, now: float) -> bool:
    """Whether an abort followed so shortly on another model's that it was a reset of the GPU by that one.

    Args:
        deaths: model → when its worker last aborted without being a victim itself (monotonic seconds).
    """
    others = (at for other, at in deaths.items() if other != name)
    return returncode == -signal.SIGABRT and any(0.0 <= now - at <= VICTIM_WINDOW_S for at in others)


def delay_for(policy: RestartPolicy, unstable: int, dice: float) -> float:
    """Seconds before the next start. `dice` is a random number in [0, 1); the first retry is immediate."""
    if unstable == 0:
        return 0.0
    plain = min(policy.max_delay_s, policy.base_delay_s * 2.0 ** min(unstable - 1, 30))
    return plain * (1.0 + policy.jitter * (2.0 * dice - 1.0))


def is_stable(policy: RestartPolicy, steps: int) -> bool:
    """Whether a worker with so many completed executor steps has proven itself, whether or not a request ended."""
    return steps >= policy.stable_steps


def decide(
    policy: RestartPolicy,
    history: RestartHistory,
    *,
    returncode: int | None,
    was_stable: bool,
    now: float,
    dice: float,
    victim: bool = False,
) -> Retry | GiveUp:
    """What to do about a worker that ended without being asked to.

    Args:
        returncode: as `subprocess` gives it; None when the process could not even be started.
        was_stable: by `is_stable`; trouble starts to be counted anew for the delay, and goes on for the limit.
        victim: another worker's fault took this one along (`is_victim`); it is not counted against it.
        now, dice: the clock (monotonic seconds) and a random number in [0, 1), passed in.
    """
    recent = tuple(t for t in history.times if now - t < policy.window_s)
    if returncode is not None and not may_restart(returncode):
        return GiveUp("a fresh process would end the same way", RestartHistory(recent, history.unstable))
    if victim:
        return Retry(now + delay_for(policy, 1, dice), RestartHistory(recent, history.unstable))
    if len(recent) >= policy.max_restarts:
        reason = f"{len(recent)} restarts within {policy.window_s:g} s; the limit is {policy.max_restarts}"
        return GiveUp(reason, RestartHistory(recent, history.unstable))
    unstable = 0 if was_stable else history.unstable
    at = now + delay_for(policy, unstable, dice)
    return Retry(at, RestartHistory((*recent, now), unstable + 1))
