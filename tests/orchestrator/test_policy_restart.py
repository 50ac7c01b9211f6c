"""The restart policy, as tables."""

from __future__ import annotations

import signal

import pytest
from mlx_bulkhead.orchestrator.policy.restart import (
    GiveUp,
    RestartHistory,
    RestartPolicy,
    Retry,
    decide,
    delay_for,
    is_stable,
    is_victim,
)
from mlx_bulkhead.protocol.exit_codes import WorkerExit
from mlx_bulkhead.worker.engines.schedule import chunk_size

POLICY = RestartPolicy()


def crash(history: RestartHistory, now: float, *, stable: bool = False, code: int = -9) -> Retry | GiveUp:
    return decide(POLICY, history, returncode=code, was_stable=stable, now=now, dice=0.5)


def test_the_first_retry_is_immediate() -> None:
    verdict = crash(RestartHistory(), 10.0)
    assert isinstance(verdict, Retry)
    assert verdict.at == 10.0


@pytest.mark.parametrize(("unstable", "delay"), [(0, 0.0), (1, 0.5), (2, 1.0), (3, 2.0), (7, 30.0), (60, 30.0)])
def test_delays_double_to_the_limit(unstable: int, delay: float) -> None:
    assert delay_for(POLICY, unstable, 0.5) == pytest.approx(delay)


def test_jitter_is_twenty_percent_either_way() -> None:
    assert delay_for(POLICY, 2, 0.0) == pytest.approx(0.8)
    assert delay_for(POLICY, 2, 1.0) == pytest.approx(1.2)


def test_the_fourth_restart_within_a_minute_is_refused() -> None:
    history = RestartHistory()
    for now in (0.0, 10.0, 20.0):
        verdict = crash(history, now)
        assert isinstance(verdict, Retry)
        history = verdict.history
    verdict = crash(history, 30.0)
    assert isinstance(verdict, GiveUp)
    assert "3 restarts within 60 s" in verdict.reason


def test_the_window_slides() -> None:
    history = RestartHistory(times=(0.0, 30.0, 50.0), unstable=3)
    assert isinstance(crash(history, 59.0), GiveUp)
    assert isinstance(crash(history, 61.0), Retry)


def test_only_real_steps_reset_the_delay() -> None:
    history = RestartHistory(times=(), unstable=3)
    shaky, stable = crash(history, 100.0), crash(history, 100.0, stable=True)
    assert isinstance(shaky, Retry)
    assert isinstance(stable, Retry)
    assert shaky.at == pytest.approx(102.0)
    assert stable.at == 100.0


@pytest.mark.parametrize(
    ("steps", "needed", "stable"),
    [
        (0, 512, False),
        (3, 512, False),  # a poison prompt, after its first prefill chunks
        (256, 512, False),  # the same, half a minute into its prefill
        (511, 512, False),
        (512, 512, True),
        (100_000, 512, True),  # an hour of decoding, no request has ended
        (1, 1, True),
    ],
)
def test_enough_steps_make_a_worker_stable(steps: int, needed: int, stable: bool) -> None:
    assert is_stable(RestartPolicy(stable_steps=needed), steps) is stable


@pytest.mark.parametrize("tokens_per_second", [20, 100, 1_000, 13_000, 20_000, 100_000])
def test_a_prompt_alone_looks_stable_only_after_a_minute_or_a_million_tokens(tokens_per_second: float) -> None:
    """Why `stable_steps` is what it is: prefill chunks are steps too."""
    cost, seconds, tokens = None, 0.0, 0
    for _ in range(POLICY.stable_steps):
        chunk = chunk_size(cost, prompts=1, decoding=False, decode_seconds=0.0)
        cost = 1.0 / tokens_per_second
        seconds, tokens = seconds + chunk * cost, tokens + chunk
    assert seconds > POLICY.window_s or tokens > 1_000_000


def test_the_limit_holds_for_stable_workers_too() -> None:
    history = RestartHistory(times=(0.0, 10.0, 20.0), unstable=1)
    assert isinstance(crash(history, 30.0, stable=True), GiveUp)


def test_a_victim_of_another_workers_gpu_reset_is_not_charged() -> None:
    history = RestartHistory(times=(0.0, 1.0, 2.0), unstable=3)
    verdict = decide(POLICY, history, returncode=-6, was_stable=True, now=3.0, dice=0.5, victim=True)
    assert isinstance(verdict, Retry)
    assert verdict.history == history
    assert isinstance(crash(history, 3.0, code=-6), GiveUp)


@pytest.mark.parametrize(
    ("deaths", "code", "victim"),
    [
        ({"other": 9.0}, -6, True),
        ({"other": 7.0}, -6, False),  # too long ago
        ({"me": 9.9}, -6, False),
        ({"other": 9.0}, -9, False),  # a GPU reset aborts
        ({}, -6, False),
    ],
)
def test_who_is_a_victim(deaths: dict[str, float], code: int, victim: bool) -> None:
    assert is_victim(deaths, "me", code, 10.0) is victim


@pytest.mark.parametrize("code", [WorkerExit.LOAD_FAILED, WorkerExit.PROTOCOL_MISMATCH, WorkerExit.BAD_ARGUMENTS])
def test_causes_that_a_restart_cannot_cure(code: int) -> None:
    assert isinstance(crash(RestartHistory(), 0.0, code=code), GiveUp)


@pytest.mark.parametrize("code", [-signal.SIGSEGV, -signal.SIGABRT, 0, 1, WorkerExit.EXECUTOR_DIED])
def test_causes_that_a_restart_may_cure(code: int) -> None:
    assert isinstance(crash(RestartHistory(), 0.0, code=code), Retry)
