"""Owns the checks of the stop scanner, against a definition of it that is obviously right."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_bulkhead.worker.text.stops import StopScanner


def naive(text: str, stops: list[str]) -> str | None:
    """The text before the stop string that is complete first; None without one."""
    for end in range(len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)]
    return None


def may_continue(text: str, stops: list[str]) -> int:
    """Length of the longest end of the text that is the beginning of a stop string."""
    return max(
        (length for stop in stops for length in range(1, len(stop)) if text.endswith(stop[:length])), default=0
    )


stop_lists = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=5)


@given(stop_lists, st.lists(st.text("abcd", max_size=4), max_size=30))
def test_text_is_cut_and_held_back_as_defined(stops: list[str], pieces: list[str]) -> None:
    scanner = StopScanner(stops)
    seen = shown = ""
    for piece in pieces:
        shown += scanner.feed(piece)
        seen += piece
        cut = naive(seen, stops)
        assert scanner.stopped == (cut is not None)
        if cut is not None:
            assert shown == cut
            assert scanner.feed("abc") == ""
            assert scanner.flush() == ""
            return
        assert shown == seen[: len(seen) - may_continue(seen, stops)]
    assert shown + scanner.flush() == seen


@given(stop_lists, st.text("abcd", max_size=40), st.randoms())
def test_pieces_do_not_matter(stops: list[str], text: str, random: object) -> None:
    whole, single = StopScanner(stops), StopScanner(stops)
    at_once = whole.feed(text)
    one_by_one = "".join(single.feed(char) for char in text)
    assert one_by_one == at_once
    assert single.stopped == whole.stopped
    assert single.flush() == whole.flush()


@pytest.mark.parametrize(
    ("stops", "pieces", "shown"),
    [
        (["STOP"], ["ab ST", "OP cd"], "ab "),
        (["STOP"], ["ab S", "TO", "x STO"], "ab STOx STO"),
        (["\n\n"], ["a\n", "b\n", "\nc"], "a\nb"),
        (["aab"], ["aaa", "aaab"], "aaaa"),
        (["bc", "abcd"], ["xabcd"], "xa"),
        (["c", "abc"], ["xabc"], "x"),
        (["🙂🚢"], ["a🙂", "🙂", "🚢"], "a🙂"),
        (["a"], ["a"], ""),
    ],
)
def test_examples(stops: list[str], pieces: list[str], shown: str) -> None:
    scanner = StopScanner(stops)
    assert "".join([scanner.feed(piece) for piece in pieces]) + scanner.flush() == shown


def test_time_is_linear_in_the_text_whatever_the_stops() -> None:
    stops = ["a" * length + "b" for length in range(900, 964)]
    scanner = StopScanner(stops)
    began = time.perf_counter()
    for _ in range(2000):
        scanner.feed("aaaaaaaaaaaaaaaa")
    assert time.perf_counter() - began < 2.0  # 32,000 characters; a check of each stop at each takes minutes
    assert not scanner.stopped
    assert scanner.feed("b") == ""
    assert scanner.stopped
