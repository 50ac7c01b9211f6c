"""What speculation gains and when it pauses, as tables."""

from __future__ import annotations

import pytest
from mlx_bulkhead.worker.engines.dflash.gain import FEWEST, FIRST_PAUSE, LAST_PAUSE, WINDOW, Cycles, Gain
from mlx_bulkhead.worker.engines.dflash.policy import leaves, unsuitable


def cycles(count: int, tokens: int, seconds: float) -> Cycles:
    made = Cycles()
    for _ in range(count):
        made.add(tokens, seconds)
    return made


def test_gain_is_tokens_a_cycle_against_its_cost() -> None:
    gain = Gain(8)
    assert gain.gain is None
    gain.calibrate(0.010, 0.020)
    assert gain.gain == pytest.approx(2.0)  # 4 tokens are assumed
    gain.row_done(cycles(10, 3, 0.020))
    assert gain.gain == pytest.approx(1.5)
    gain.row_done(cycles(10, 1, 0.020))
    assert 1.0 < (gain.gain or 0) < 1.5


def test_hopeless_costs_pause_before_the_first_row() -> None:
    gain = Gain(8)
    gain.calibrate(0.010, 0.085)
    assert gain.paused_for == FIRST_PAUSE


def test_pauses_double_and_end_with_a_success() -> None:
    gain = Gain(8)
    gain.calibrate(0.010, 0.020)
    pauses = []
    for _ in range(8):
        gain.row_done(cycles(FEWEST, 1, 0.020))
        pauses.append(gain.paused_for)
    assert pauses == [min(FIRST_PAUSE * 2**n, LAST_PAUSE) for n in range(8)]
    for _ in range(30):
        gain.row_done(cycles(FEWEST, 6, 0.020))
    assert gain.paused_for == 0


def test_a_row_is_judged_by_its_newest_cycles() -> None:
    gain = Gain(8)
    gain.calibrate(0.010, 0.020)
    assert not gain.loses(cycles(FEWEST - 1, 1, 0.1))
    assert gain.loses(cycles(FEWEST, 1, 0.1))
    slightly = cycles(FEWEST, 9, 0.1)  # 0.9 times as fast: a whole window is waited for
    assert not gain.loses(slightly)
    for _ in range(WINDOW - FEWEST):
        slightly.add(9, 0.1)
    assert gain.loses(slightly)
    for _ in range(WINDOW):
        slightly.add(20, 0.1)
    assert not gain.loses(slightly)


def test_few_cycles_say_nothing() -> None:
    gain = Gain(8)
    gain.calibrate(0.010, 0.020)
    gain.row_done(cycles(FEWEST - 1, 1, 9.0))
    assert gain.gain == pytest.approx(2.0)


def test_one_hiccup_of_a_plain_step_does_not_count_whole() -> None:
    gain = Gain(8)
    gain.calibrate(0.010, 0.020)
    gain.plain_step(10.0)
    assert (gain.plain_seconds or 0) < 0.015


def test_rows_are_tried_again_after_their_pause() -> None:
    assert unsuitable(alone=True, forced=False, paused_for=1, gain=0.5) == (
        "speculation does not pay: measured gain 0.50"
    )
    assert unsuitable(alone=True, forced=True, paused_for=1, gain=0.5) == ""
    assert unsuitable(alone=True, forced=False, paused_for=1, gain=1.2) == ""
    assert unsuitable(alone=True, forced=False, paused_for=0, gain=0.5) == ""
    assert unsuitable(alone=False, forced=True, paused_for=0, gain=9.0) == "other requests run"


@pytest.mark.parametrize(
    ("others", "left", "forced", "loses", "why"),
    [
        (False, 100, False, False, ""),
        (True, 100, False, False, "other requests run"),
        (True, 6, False, False, ""),
        (True, 7, False, False, "other requests run"),
        (False, 100, False, True, "speculation does not pay"),
        (False, 100, True, True, ""),
    ],
)
def test_when_a_row_leaves(others: bool, left: int, forced: bool, loses: bool, why: str) -> None:
    assert leaves(others_wait=others, tokens_left=left, tokens_a_cycle=3.0, forced=forced, loses=loses) == why
