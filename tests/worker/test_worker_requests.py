"""Requests without a process: counts, clocks, the table. The text side is a plain one."""

from __future__ import annotations

import pytest
from mlx_bulkhead.protocol.commands import Generate
from mlx_bulkhead.protocol.errors import ErrorCode
from mlx_bulkhead.protocol.events import Done, Failed, Progress, Snapshot
from mlx_bulkhead.protocol.values import ToolCall
from mlx_bulkhead.worker.emitter import PROGRESS_PAUSE_S, SNAPSHOT_PAUSE_S, Emitter
from mlx_bulkhead.worker.engines.base import PrefillOut, Prepared, Row, Sampling, Served, TokenOut
from mlx_bulkhead.worker.faults import is_out_of_memory
from mlx_bulkhead.worker.mailbox import Mailbox
from mlx_bulkhead.worker.progress import Observer, WorkerProgress
from mlx_bulkhead.worker.requests import Request, RequestTable
from mlx_bulkhead.worker.text.channels import Piece


class Letters:
    """Token 1 is "b", 2 is "c", and so on; the last letter is held back. Token 25, "z", is a stop."""

    def __init__(self) -> None:
        self.held = ""
        self.stopped = False

    def push(self, token: int) -> list[Piece]:
        if self.stopped:
            return []
        out, self.held = self.held, chr(97 + token)
        if self.held == "z":
            self.held, self.stopped = "", True
        return [("content", out)] if out else []

    def finish(self) -> list[Piece]:
        out, self.held = self.held, ""
        return [("content", out)] if out else []

    def calls(self) -> tuple[list[ToolCall], str]:
        return [], ""


def prepared(resumed: list[int], emitted: int, **fields: int) -> tuple[Request, str | None]:
    request = Request(b"a" * 16, Generate("m", prompt="x", resume_tokens=resumed, **fields), 10.0)
    text = Letters()
    for token in resumed[:emitted]:
        text.push(token)
    row = Row(request.request_id, [1, 2, 3, 4], 5, Sampling(), resumed[:emitted])
    return request, request.adopt(Prepared(row, text))


def test_a_life_in_numbers() -> None:
    request, finish = prepared([], 0)
    assert finish is None
    request.inserted_at = 12.0
    request.processed, request.total, request.cached = 4, 4, 1
    for token, at in ((0, 12.5), (1, 13.0), (2, 13.5)):
        assert request.take(TokenOut(b"", token, None), at) is None
    assert request.take(TokenOut(b"", 3, "length"), 14.5) == "length"
    assert request.snapshots(14.5) == [Snapshot(0, 0, "abcd", [0, 1, 2, 3])]
    assert request.snapshots(14.5) == []
    usage, timings = request.usage(), request.timings(99.0)
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (4, 1, 4)
    assert (timings.queued_ms, timings.prompt_ms, timings.predicted_ms) == (2000, 500, 2000)
    assert (timings.prompt_n, timings.cache_n, timings.predicted_n) == (3, 1, 4)
    assert timings.prompt_per_token_ms == pytest.approx(500 / 3)
    assert (timings.prompt_per_second, timings.predicted_per_second) == (6, 2)
    assert timings.predicted_per_token_ms == 500


def test_figures_without_a_base_are_zero() -> None:
    request, _ = prepared([], 0)
    timings = request.timings(11.0)
    assert timings.queued_ms == 1000
    assert (timings.prompt_per_second, timings.predicted_per_second, timings.prompt_n) == (0, 0, 0)
    request.inserted_at = 11.0
    request.take(TokenOut(b"", 0, "stop"), 11.0)
    timings = request.timings(11.0)
    assert (timings.prompt_per_second, timings.predicted_per_second, timings.predicted_n) == (0, 0, 1)


def test_the_token_that_ends_a_sequence_has_no_text() -> None:
    request, _ = prepared([], 0)
    request.inserted_at = 11.0
    request.take(TokenOut(b"", 0, None), 11.0)
    assert request.take(TokenOut(b"", 24, "stop"), 11.0) == "stop"
    assert request.snapshots(11.0) == [Snapshot(0, 0, "a", [0, 24])]


def test_a_stop_string_wins_over_length() -> None:
    request, _ = prepared([], 0)
    request.inserted_at = 11.0
    assert request.take(TokenOut(b"", 25, "length"), 11.0) == "stop"


@pytest.mark.parametrize(
    ("resumed", "emitted", "finish", "text"),
    [
        ([0, 1], 2, None, ""),
        ([0, 1, 24], 2, "stop", "by"),  # the engine left out a token in the middle: it ends the sequence
        ([0, 1, 2, 3, 4], 4, "length", "de"),
        ([0, 25], 2, "stop", ""),
    ],
)
def test_what_was_sent_can_be_all(resumed: list[int], emitted: int, finish: str | None, text: str) -> None:
    request, reason = prepared(resumed, emitted, resume_chars=7, resume_seq=3)
    assert reason == finish
    assert request.completion_tokens == len(resumed)
    sent = request.snapshots(1.0)
    assert "".join(one.text for one in sent) == text
    if sent:
        assert [(one.seq, one.offset) for one in sent] == [(3, 7)]


def test_snapshots_wait_for_the_clock_and_the_interval() -> None:
    request, _ = prepared([], 0, stream_interval=3)
    request.inserted_at = 11.0
    request.take(TokenOut(b"", 0, None), 11.0)
    assert request.is_due(11.0, SNAPSHOT_PAUSE_S), "the first one leaves at once"
    request.snapshots(11.0)
    request.take(TokenOut(b"", 0, None), 11.001)
    request.take(TokenOut(b"", 0, None), 11.002)
    request.take(TokenOut(b"", 0, None), 11.003)
    assert not request.is_due(11.003, SNAPSHOT_PAUSE_S), "enough tokens, too early"
    assert request.is_due(11.0 + 1.01 * SNAPSHOT_PAUSE_S, SNAPSHOT_PAUSE_S)
    request.snapshots(11.0081)
    request.take(TokenOut(b"", 0, None), 11.1)
    assert not request.is_due(11.1, SNAPSHOT_PAUSE_S), "late enough, too few tokens"


def table_of(count: int, max_running: int = 2, max_queued: int = 1) -> tuple[RequestTable, list[Request]]:
    table = RequestTable(max_running, max_queued)
    requests = [Request(bytes([n]) * 16, Generate("m", prompt="x"), float(n)) for n in range(count)]
    for request in requests:
        table.add(request)
    return table, requests


def adopt(request: Request) -> None:
    request.adopt(Prepared(Row(request.request_id, [1], 5, Sampling()), Letters()))


def test_requests_start_in_order_and_only_when_prepared() -> None:
    table, (first, second, third) = table_of(3)
    assert table.is_full
    assert table.next_admissible() is None
    assert table.next_unprepared() is first
    adopt(first)
    assert table.next_admissible() is first
    table.start(first, 5.0)
    assert table.next_admissible() is None
    table.drop(second.request_id)
    assert table.next_unprepared() is third, "the cancelled one is not prepared"
    adopt(third)
    assert table.oldest_received_at == 0.0
    assert (len(table), table.is_full, table.prefilling) == (2, False, 1)
    table.drop(first.request_id)
    assert (table.oldest_received_at, table.prefilling) == (2.0, 0)
    assert table.drop(first.request_id) is None


def emitter() -> tuple[Emitter, WorkerProgress, Mailbox]:
    mailbox, progress = Mailbox(), WorkerProgress()
    return Emitter(mailbox, progress), progress, mailbox


def sent_by(mailbox: Mailbox) -> list[object]:
    messages = []
    while item := mailbox.next_outgoing():
        messages.append(item.message)
    return messages


def test_prefill_reports_first_last_and_by_clock() -> None:
    emits, progress, mailbox = emitter()
    request, _ = prepared([], 0)
    for processed, at in ((10, 1.0), (20, 1.05), (30, 1.0 + PROGRESS_PAUSE_S), (40, 1.11)):
        emits.prefill(request, PrefillOut(request.request_id, processed, 40, 2), at)
    mailbox.close()
    assert sent_by(mailbox) == [Progress("prefill", n, 40) for n in (10, 30, 40)]
    assert progress.prompt_tokens == 38


def test_ends_are_counted_by_kind() -> None:
    emits, progress, mailbox = emitter()
    for reason in ("stop", "length", "cancelled", "deadline"):
        request, _ = prepared([], 0)
        request.inserted_at = 11.0
        request.take(TokenOut(b"", 0, None), 11.0)
        emits.done(request, reason, Served("text"), 12.0)  # pyright: ignore[reportArgumentType]
    emits.failed(b"a" * 16, ErrorCode.INTERNAL, "planted")
    mailbox.close()
    counts = progress.requests_done, progress.requests_cancelled, progress.requests_failed
    assert counts == (2, 2, 1)
    kinds = [type(message) for message in sent_by(mailbox)]
    assert kinds == [Snapshot, Done] * 4 + [Failed]


def test_rates_are_means_over_about_a_second() -> None:
    progress = WorkerProgress()
    observer = Observer(progress)
    assert observer.stats(0.0).decode_tokens_per_second == 0
    for tick in range(1, 41):
        progress.completion_tokens += 25
        stats = observer.stats(tick * 0.25)
    assert stats.decode_tokens_per_second == pytest.approx(100)
    assert observer.stats(20.0).decode_tokens_per_second == pytest.approx(0, abs=15)
    assert observer.busy_since_s(5.0) is None
    progress.busy_since = 4.0
    assert observer.busy_since_s(5.0) == 1.0


@pytest.mark.parametrize(
    ("error", "is_oom"),
    [
        (MemoryError(), True),
        (RuntimeError("[malloc] Unable to allocate 123 bytes."), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_words_for_lack_of_memory(error: BaseException, is_oom: bool) -> None:
    assert is_out_of_memory(error) is is_oom
