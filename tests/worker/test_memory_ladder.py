"""Owns the table and the laws of the memory ladder."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_bulkhead.worker.memory.ladder import Lines, Rung, Seen, State, biggest, decide, level

LINES = Lines.of(1000)
ALL = tuple(Rung)
NEW, CLEARED, HELD = State(), State(cleared=True), State(cleared=True, holding=True)


def test_lines_are_shares_of_the_limit() -> None:
    assert Lines(limit=1000, soft=850, hard=950, back=800, refill=20) == LINES
    assert [level(usage, LINES) for usage in (849, 850, 949, 950)] == ["calm", "soft", "soft", "hard"]
    assert Lines.of(1000, 0.03, 1.0).back == 0


@pytest.mark.parametrize(
    ("state", "seen", "rung", "after"),
    [
        (NEW, Seen(849), None, NEW),
        (NEW, Seen(850), Rung.CLEAR, CLEARED),
        (CLEARED, Seen(850, entries=2), Rung.DROP, CLEARED),
        (CLEARED, Seen(850), Rung.WAIT, HELD),
        (HELD, Seen(949, running=3), None, HELD),
        (HELD, Seen(950, running=3), Rung.FAIL, State(holding=True)),
        (HELD, Seen(950), None, HELD),  # nobody is there to fail
        (State(holding=True), Seen(960, running=2), Rung.CLEAR, HELD),  # after a failure what it held is given back
        (HELD, Seen(990, entries=1, running=3), Rung.DROP, HELD),  # mild rungs first, also at the hard line
        (HELD, Seen(900, cache=20), Rung.CLEAR, HELD),  # MLX's cache has grown again
        (HELD, Seen(900, cache=19), None, HELD),
        (HELD, Seen(849), None, HELD),  # not far enough below the line yet
        (HELD, Seen(800), None, HELD),
        (HELD, Seen(799), None, NEW),
    ],
)
def test_rungs(state: State, seen: Seen, rung: Rung | None, after: State) -> None:
    assert decide(state, seen, LINES, ALL) == (after, rung)


@pytest.mark.parametrize(
    ("off", "first"),
    [
        ([Rung.CLEAR], Rung.DROP),
        ([Rung.CLEAR, Rung.DROP], Rung.WAIT),
        ([Rung.CLEAR, Rung.DROP, Rung.WAIT], Rung.FAIL),
        (ALL, None),
    ],
)
def test_a_rung_that_is_off_is_passed_over(off: Collection[Rung], first: Rung | None) -> None:
    rungs = [rung for rung in ALL if rung not in off]
    assert decide(NEW, Seen(990, entries=1, running=1), LINES, rungs)[1] == first


def test_the_biggest_is_failed_and_of_equals_the_newest() -> None:
    assert biggest({b"a": 5, b"b": 9, b"c": 9, b"d": 1}) == b"c"
    assert biggest({b"a": 5}) == b"a"


SEEN = st.builds(
    Seen, usage=st.integers(0, 1200), cache=st.integers(0, 50), entries=st.integers(0, 3), running=st.integers(0, 3)
)
STATES = st.builds(State, cleared=st.booleans(), holding=st.booleans())
RUNGS = st.sets(st.sampled_from(ALL))


@given(STATES, SEEN, RUNGS)
def test_laws_of_a_single_look(state: State, seen: Seen, rungs: set[Rung]) -> None:
    after, rung = decide(state, seen, LINES, rungs)
    assert rung is None or (rung in rungs and seen.usage >= LINES.soft)
    if rung is Rung.FAIL:
        assert seen.usage >= LINES.hard
        assert seen.running
        assert not (seen.entries and Rung.DROP in rungs)
        assert after.holding or Rung.WAIT not in rungs
    if rung is Rung.DROP:
        assert seen.entries
    if seen.usage < LINES.back:
        assert after == State()
    assert state.holding <= after.holding or seen.usage < LINES.back


@given(STATES, SEEN, RUNGS)
def test_a_visit_ends(state: State, seen: Seen, rungs: set[Rung]) -> None:
    """Although nothing that is done brings any memory back."""
    taken: list[Rung] = []
    while True:
        state, rung = decide(state, seen, LINES, rungs)
        if rung is None:
            break
        taken.append(rung)
        match rung:
            case Rung.CLEAR:
                seen = replace(seen, cache=0)
            case Rung.DROP:
                seen = replace(seen, entries=seen.entries - 1)
            case Rung.FAIL:
                seen = replace(seen, running=seen.running - 1)
            case Rung.WAIT:
                pass
    assert len(taken) <= 2 * 3 + 3 + 1 + 1
    assert decide(state, seen, LINES, rungs) == (state, None)
