"""The assembler: however the orchestrator merges or repeats snapshots, the caller sees one text."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_bulkhead.orchestrator.streams import merge_snapshots
from mlx_bulkhead.orchestrator.views import Assembler, Snap, StreamEvent
from mlx_bulkhead.protocol.errors import BulkheadError, ProtocolMismatch, WorkerCrashed
from mlx_bulkhead.protocol.events import Accepted, Done, Failed, Progress, Snapshot
from mlx_bulkhead.protocol.values import Timings, Usage

ID = bytes(range(16))


def done(chars: int) -> Done:
    return Done("stop", Usage(3, 0, 2), Timings(), "batch", fallback_reason="why", chars=chars, restarts=1)


def feed(assembler: Assembler, *events: StreamEvent) -> list[Snap]:
    return [snap for event in events if (snap := assembler.feed(event)) is not None]


@st.composite
def streams(draw: st.DrawFn) -> list[Snapshot]:
    """Snapshots of both channels, each piece with one or two ids."""
    pieces = draw(st.lists(st.tuples(st.sampled_from(["content", "reasoning"]), st.text(max_size=6)), max_size=20))
    offsets = {"content": 0, "reasoning": 0}
    snapshots = []
    for seq, (channel, text) in enumerate(pieces):
        snapshots.append(
            Snapshot(seq, offsets[channel], text, [2 * seq, 2 * seq + 1][: 1 + seq % 2], channel)  # pyright: ignore
        )
        offsets[channel] += len(text)
    return snapshots


def whole(snapshots: list[Snapshot], channel: str) -> str:
    return "".join(s.text for s in snapshots if s.channel == channel)


@given(streams(), st.data())
def test_any_merging_of_neighbours_gives_the_same(snapshots: list[Snapshot], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(snapshots)))) | {0, len(snapshots)})
    merged = [s for low, high in itertools.pairwise(cuts) for s in merge_snapshots(snapshots[low:high])]
    assembler = Assembler(ID)
    snaps = feed(assembler, Accepted(), *merged, done(len(whole(snapshots, "content"))))
    assert assembler.error is None
    assert assembler.result is not None
    assert assembler.result.text == "".join(s.new_text for s in snaps) == whole(snapshots, "content")
    assert assembler.result.reasoning == "".join(s.new_reasoning for s in snaps) == whole(snapshots, "reasoning")
    assert assembler.result.tokens == [t for s in snapshots for t in s.tokens] == [t for s in snaps for t in s.tokens]


@given(streams(), st.data())
def test_a_rewind_anywhere_leaves_no_seam(snapshots: list[Snapshot], data: st.DataObject) -> None:
    had = data.draw(st.integers(0, len(snapshots)))
    assembler = Assembler(ID)
    snaps = feed(assembler, Accepted(), *snapshots[:had])
    assembler.rewind()
    snaps += feed(assembler, Accepted(), *merge_snapshots(snapshots), done(len(whole(snapshots, "content"))))
    assert assembler.error is None
    assert assembler.result is not None
    assert "".join(s.new_text for s in snaps) == assembler.result.text == whole(snapshots, "content")
    assert assembler.result.reasoning == whole(snapshots, "reasoning")
    assert [t for s in snaps for t in s.tokens] == [t for s in snapshots for t in s.tokens]


@given(streams())
def test_a_snap_keeps_the_text_of_its_moment_in_any_order_of_reading(snapshots: list[Snapshot]) -> None:
    snaps = feed(Assembler(ID), Accepted(), *snapshots)
    texts = list(itertools.accumulate(s.new_text for s in snaps))
    assert [s.text for s in reversed(snaps)] == texts[::-1]
    assert [s.text for s in snaps] == texts


@given(streams(), st.data(), st.booleans())
def test_log_probabilities_stay_with_their_tokens(
    snapshots: list[Snapshot], data: st.DataObject, rewind: bool
) -> None:
    snapshots = [
        Snapshot(
            s.seq,
            s.offset,
            s.text,
            s.tokens,
            s.channel,
            [-float(token) for token in s.tokens],
            [{token: -float(token)} for token in s.tokens],
        )
        for s in snapshots
    ]
    assembler = Assembler(ID)
    cut = data.draw(st.integers(0, len(snapshots)))
    snaps = feed(assembler, Accepted(), *snapshots[:cut])
    rest = snapshots[cut:]
    if rewind:
        assembler.rewind()
        rest = snapshots
        snaps += feed(assembler, Accepted())
    snaps += feed(assembler, *merge_snapshots(rest), done(len(whole(snapshots, "content"))))
    assert assembler.error is None
    assert assembler.result is not None
    tokens = [token for s in snapshots for token in s.tokens]
    for tokens_here, values, tops in (
        (assembler.result.tokens, assembler.result.logprobs, assembler.result.top_logprobs),
        (
            [token for s in snaps for token in s.tokens],
            [value for s in snaps for value in s.logprobs],
            [top for s in snaps for top in s.top_logprobs],
        ),
    ):
        assert tokens_here == tokens
        assert values == [-float(token) for token in tokens]
        assert tops == [{token: -float(token)} for token in tokens]


def test_log_probabilities_that_do_not_match_their_tokens_break_the_stream() -> None:
    assembler = Assembler(ID)
    feed(assembler, Accepted(), Snapshot(0, 0, "a", [1, 2], logprobs=[-1.0]))
    assert isinstance(assembler.error, ProtocolMismatch)
    assert "2 tokens and 1 logprobs" in str(assembler.error)


def test_the_result_carries_what_the_daemon_said() -> None:
    assembler = Assembler(ID)
    feed(assembler, Accepted(), Snapshot(0, 0, "hé", [7]), done(2))
    result = assembler.result
    assert result is not None
    assert (result.text, result.tokens, result.finish_reason, result.engine) == ("hé", [7], "stop", "batch")
    assert (result.fallback_reason, result.restarts, result.request_id) == ("why", 1, ID.hex())
    assert result.usage.total_tokens == 5


def test_progress_gives_snaps_only_when_wanted_and_the_prompt_count_always() -> None:
    events = (Accepted(), Progress("prefill", 4, 10), Snapshot(0, 0, "a", [1]))
    quiet = feed(Assembler(ID), *events)
    assert [(s.phase, s.processed, s.total) for s in quiet] == [("decode", 4, 10)]
    assert quiet[0].usage == Usage(prompt_tokens=10, completion_tokens=1)
    loud = feed(Assembler(ID, progress=True), *events)
    assert [(s.phase, s.new_text) for s in loud] == [("prefill", ""), ("decode", "a")]


def test_held_back_text_still_shows_its_ids() -> None:
    snaps = feed(Assembler(ID), Accepted(), Snapshot(0, 0, "", [1]), Snapshot(1, 0, "ab", [2]))
    assert [(s.new_text, s.tokens) for s in snaps] == [("", [1]), ("ab", [2])]


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([Snapshot(0, 0, "a")], "grammar"),
        ([Accepted(), Accepted()], "grammar"),
        ([done(0)], "grammar"),
        ([Accepted(), Snapshot(0, 0, "ab"), Snapshot(2, 5, "x")], "3 characters of the content channel are missing"),
        ([Accepted(), Snapshot(0, 0, "ab"), Snapshot(1, 1, "xy")], "contradicts"),
        ([Accepted(), Snapshot(0, 0, "ab"), done(3)], "2 characters, the sender counted 3"),
        ([Accepted(), Snapshot(0, 1, "r", channel="reasoning")], "reasoning channel"),
    ],
)
def test_a_broken_stream_closes_with_a_protocol_error(events: list[StreamEvent], words: str) -> None:
    assembler = Assembler(ID)
    feed(assembler, *events)
    assert assembler.closed
    assert assembler.result is None
    assert isinstance(assembler.error, ProtocolMismatch)
    assert words in str(assembler.error)
    assert assembler.error.request_id == ID.hex()


def test_overlap_is_cut() -> None:
    snaps = feed(Assembler(ID), Accepted(), Snapshot(0, 0, "abc"), Snapshot(1, 1, "bcde"), Snapshot(2, 0, "ab"))
    assert [s.new_text for s in snaps] == ["abc", "de"]


def test_failure_is_typed_and_final() -> None:
    assembler = Assembler(ID)
    feed(assembler, Accepted(), Failed("worker_crashed", "SIGABRT"), Snapshot(0, 0, "late"), done(4))
    assert isinstance(assembler.error, WorkerCrashed)
    assert assembler.result is None
    assembler.fail(BulkheadError("later"))
    assert isinstance(assembler.error, WorkerCrashed)


def test_streaming_is_linear_while_nobody_reads_the_whole() -> None:
    assembler = Assembler(ID)
    assembler.feed(Accepted())
    snaps = [assembler.feed(Snapshot(seq, seq, "x", [seq])) for seq in range(50_000)]
    assert snaps[-1] is not None
    assert len(snaps[-1].text) == 50_000
