"""The health policy, as tables."""

from __future__ import annotations

import pytest
from mlx_bulkhead.orchestrator.policy.health import Health, Pulse, judge, slept


@pytest.mark.parametrize(
    ("pulse", "now", "suspended", "forgiven", "expected"),
    [
        (Pulse(100.0, None), 100.5, False, 0.0, Health.FINE),
        (Pulse(100.0, 5.0), 100.1, False, 0.0, Health.FINE),  # busy is not dead
        (Pulse(100.0, 9.9), 100.2, False, 0.0, Health.STALLED),  # 9.9 s at the beat, 10.1 s now
        (Pulse(100.0, None), 103.0, False, 0.0, Health.SUSPECT),  # late heartbeat
        (Pulse(100.0, None), 111.0, False, 0.0, Health.STALLED),  # silent longer than the budget
        (Pulse(100.0, 9.9), 130.0, True, 0.0, Health.SUSPENDED),  # SIGSTOP is no stall
        (Pulse(100.0, 9.9), 130.0, False, 131.0, Health.FINE),  # the host slept
    ],
)
def test_judge(pulse: Pulse, now: float, suspended: bool, forgiven: float, expected: Health) -> None:
    verdict = judge(pulse, budget_s=10.0, suspended=suspended, forgiven_until=forgiven, now=now)
    assert verdict is expected


def test_an_idle_worker_is_not_judged_by_a_budget_shorter_than_its_heartbeats() -> None:
    verdict = judge(Pulse(100.0, None), budget_s=0.1, suspended=False, forgiven_until=0.0, now=101.0)
    assert verdict is Health.FINE


def test_a_late_tick_of_our_own_means_that_we_slept() -> None:
    assert not slept(100.0, 0.25, 100.9)
    assert slept(100.0, 0.25, 130.0)
