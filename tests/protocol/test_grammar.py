"""The state machine accepts what the regular expression of the document accepts, and nothing else."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mlx_bulkhead.protocol import codec
from mlx_bulkhead.protocol.events import Accepted, Done, Failed, Progress, Snapshot
from mlx_bulkhead.protocol.grammar import GrammarError, RequestState, advance

LETTERS = {
    letter: codec.kind_of(cls)
    for letter, cls in {"A": Accepted, "P": Progress, "S": Snapshot, "D": Done, "F": Failed}.items()
}
WHOLE = re.compile(r"A(P|S)*(D|F)|F")
PREFIX = re.compile(r"(A(P|S)*(D|F)?)?|F")


def run(word: str) -> RequestState:
    state = RequestState.NEW
    for letter in word:
        state = advance(state, LETTERS[letter])
    return state


likely = st.from_regex(r"A?[PS]{0,6}[DF]?[APSDF]?", fullmatch=True)
"""Words near the grammar; purely random ones are nearly always outside of it."""


@given(st.text("APSDF", max_size=8) | likely)
@example("F")
@example("AD")
@example("FF")
@example("")
def test_accepts_exactly_the_grammar(word: str) -> None:
    try:
        state = run(word)
    except GrammarError:
        assert not PREFIX.fullmatch(word)
    else:
        assert PREFIX.fullmatch(word)
        assert (state is RequestState.CLOSED) == bool(WHOLE.fullmatch(word))


def test_every_other_kind_is_illegal_everywhere() -> None:
    for state in RequestState:
        for kind in set(range(256)) - set(LETTERS.values()):
            with pytest.raises(GrammarError, match=f"in state {state.value}"):
                advance(state, kind)


def test_the_error_names_message_and_state() -> None:
    with pytest.raises(GrammarError, match="Snapshot is not allowed in state new"):
        advance(RequestState.NEW, LETTERS["S"])
    with pytest.raises(GrammarError, match="kind 0x7f is not allowed in state closed"):
        advance(RequestState.CLOSED, 0x7F)
