"""The service loop over a scripted engine, without a process: what an engine may do, and what must come of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from mlx_bulkhead.protocol.codec import Message
from mlx_bulkhead.protocol.commands import Cancel, Command, Generate, Load, Shutdown
from mlx_bulkhead.protocol.events import Done, Failed, Progress, Snapshot
from mlx_bulkhead.protocol.exit_codes import WorkerExit
from mlx_bulkhead.protocol.values import CacheStats, Limits, Memory, ToolCall, WorkerInfo
from mlx_bulkhead.worker.engines.base import PrefillOut, Prepared, Row, RowFailed, Sampling, Served, StepOut, TokenOut
from mlx_bulkhead.worker.mailbox import Mailbox, Order
from mlx_bulkhead.worker.memory.keeper import Keeper, Means
from mlx_bulkhead.worker.progress import WorkerProgress
from mlx_bulkhead.worker.service import Service
from mlx_bulkhead.worker.text.channels import Piece

A, B = b"a" * 16, b"b" * 16


class Words:
    """Token n is "n "; 99 is a stop."""

    stopped = False

    def push(self, token: int) -> list[Piece]:
        self.stopped = self.stopped or token == 99
        return [] if self.stopped else [("content", f"{token} ")]

    def finish(self) -> list[Piece]:
        return []

    def calls(self) -> tuple[list[ToolCall], str]:
        return [], ""


def keeper(limit: int = 0, sample: Callable[[], Memory] = lambda: Memory(footprint=5)) -> Keeper:
    """It can see, and has nothing to give back."""
    return Keeper(limit, Load("m", "p"), Means(sample, lambda: None), None)


class Scripted:
    """An engine whose steps are written down. A step may be a call, for what is to happen meanwhile."""

    def __init__(self, *steps: list[StepOut] | Callable[[], list[StepOut]]) -> None:
        self.info = WorkerInfo(engine="text", limits=Limits(max_running=2))
        self.steps = list(steps)
        self.rows: list[bytes] = []
        self.removed: list[bytes] = []
        self.prefills = True
        self.keeper = keeper()
        self.on_prepare: Callable[[], None] = lambda: None

    def prepare(self, request_id: bytes, request: Generate) -> Prepared:
        self.on_prepare()
        return Prepared(Row(request_id, [1, 2], 9, Sampling()), Words())

    def insert(self, row: Row) -> None:
        self.rows.append(row.request_id)

    def remove(self, request_id: bytes, *, keep: bool = True) -> bool:
        self.removed.append(request_id)
        if request_id in self.rows:
            self.rows.remove(request_id)
            return True
        return False

    def step(self) -> list[StepOut]:
        step = self.steps.pop(0)
        outs = step() if callable(step) else step
        for out in outs:
            if isinstance(out, TokenOut) and out.finish:
                self.rows.remove(out.request_id)
        return outs

    @property
    def prefill_chunk(self) -> int:
        return 2048

    @property
    def busy(self) -> bool:
        return bool(self.rows)

    def next_is_prefill(self) -> bool:
        return self.prefills

    def served(self, request_id: bytes) -> Served:
        return Served("batch")

    def speculation_stats(self) -> None:
        return None

    def cache_stats(self) -> CacheStats:
        return CacheStats(entries=3)

    def tend(self) -> bool:
        return False

    def close(self) -> None:
        pass


class Bench:
    """A service, what is sent to it, and what it sends."""

    def __init__(self, engine: Scripted) -> None:
        self.mailbox = Mailbox()
        self.progress = WorkerProgress()
        self.service = Service(engine, Load("m", "p"), self.mailbox, self.progress)

    def order(self, request_id: bytes, command: Command) -> None:
        self.mailbox.order(Order(request_id, command, 0.0))

    def serve(self) -> dict[bytes, list[Message]]:
        """Serve until everything is done."""
        self.order(bytes(16), Shutdown(grace_s=10, drain=True))
        assert self.service.serve()[2] == WorkerExit.CLEAN
        return self.sent()

    def sent(self) -> dict[bytes, list[Message]]:
        sent: dict[bytes, list[Message]] = {}
        while item := self.mailbox.next_outgoing():
            sent.setdefault(item.request_id, []).append(item.message)
        self.mailbox.close()
        return sent


def serve(engine: Scripted, *ids: bytes) -> dict[bytes, list[Message]]:
    bench = Bench(engine)
    for request_id in ids:
        bench.order(request_id, Generate("m", prompt="x"))
    return bench.serve()


def text_of(messages: list[Message]) -> str:
    return "".join(message.text for message in messages if isinstance(message, Snapshot))


def test_a_block_of_tokens_is_cut_at_the_stop_string() -> None:
    """An engine may give several tokens of a row in one step; nothing after the stop leaves."""
    block = [TokenOut(A, token, None) for token in (1, 2, 99, 3, 4)]
    engine = Scripted([PrefillOut(A, 2, 2), *block])
    messages = serve(engine, A)[A]
    assert text_of(messages) == "1 2 "
    assert engine.removed == [A]
    done = messages[-1]
    assert isinstance(done, Done)
    assert (done.finish_reason, done.usage.completion_tokens, done.engine) == ("stop", 3, "batch")
    assert done.chars == 4


def test_a_lost_row_fails_instead_of_hanging() -> None:
    def lose() -> list[StepOut]:
        engine.rows.clear()
        return []

    engine = Scripted([TokenOut(A, 1, None)], lose)
    messages = serve(engine, A)[A]
    failed = messages[-1]
    assert isinstance(failed, Failed)
    assert failed.code == "internal"
    assert failed.usage.completion_tokens == 1


def test_a_row_that_fails_ends_alone_with_what_it_has() -> None:
    def fail() -> list[StepOut]:
        engine.rows.remove(A)
        return [TokenOut(B, 2, None), RowFailed(A, "the next token could not be chosen: a bad day")]

    engine = Scripted([TokenOut(A, 1, None), TokenOut(B, 1, None)], fail, [TokenOut(B, 3, "length")])
    sent = serve(engine, A, B)
    failed, done = sent[A][-1], sent[B][-1]
    assert isinstance(failed, Failed)
    assert (failed.code, failed.retryable) == ("internal", False)
    assert "a bad day" in failed.message
    assert failed.usage.completion_tokens == 1
    assert text_of(sent[A]) == "1 "
    assert isinstance(done, Done)
    assert text_of(sent[B]) == "1 2 3 "


def test_log_probabilities_leave_beside_their_tokens() -> None:
    outs = [TokenOut(A, token, None, -float(token), {token: -float(token)}) for token in (1, 2, 3)]
    engine = Scripted([outs[0]], [outs[1]], [outs[2], TokenOut(A, 4, "length", -4.0, {4: -4.0})])
    snapshots = [message for message in serve(engine, A)[A] if isinstance(message, Snapshot)]
    assert len(snapshots) > 1
    for snapshot in snapshots:
        assert snapshot.logprobs == [-float(token) for token in snapshot.tokens]
        assert snapshot.top_logprobs == [{token: -float(token)} for token in snapshot.tokens]
    assert [token for snapshot in snapshots for token in snapshot.tokens] == [1, 2, 3, 4]


def test_tokens_for_nobody_are_ignored() -> None:
    engine = Scripted([TokenOut(B, 5, None), PrefillOut(B, 1, 1), TokenOut(A, 1, "length")])
    sent = serve(engine, A)
    assert set(sent) == {A}


def test_held_text_leaves_before_a_prefill_and_before_preparing() -> None:
    seen: list[str] = []
    taken: list[Message] = []

    def note(outs: list[StepOut]) -> list[StepOut]:
        while item := bench.mailbox.next_outgoing():
            taken.append(item.message)
        seen.append(text_of(taken))
        return outs

    def newcomer() -> list[StepOut]:
        bench.order(B, Generate("m", prompt="y"))
        return [TokenOut(A, 3, None)]

    def last() -> list[StepOut]:
        bench.order(bytes(16), Shutdown())
        return note([TokenOut(B, 1, "length"), TokenOut(A, 5, "length")])

    bench = Bench(
        Scripted(
            [TokenOut(A, 1, None)],
            lambda: note([TokenOut(A, 2, None)]),
            newcomer,
            lambda: note([PrefillOut(B, 2, 2), TokenOut(A, 4, None)]),
            last,
        )
    )
    bench.order(A, Generate("m", prompt="x"))
    bench.service.serve()
    bench.mailbox.close()
    assert seen == ["1 ", "1 2 3 ", "1 2 3 4 "]


def test_prefill_is_reported_in_the_order_of_things() -> None:
    engine = Scripted([PrefillOut(A, 1, 2)], [PrefillOut(A, 2, 2), TokenOut(A, 1, "length")])
    kinds = [type(message) for message in serve(engine, A)[A]]
    assert kinds == [Progress, Progress, Snapshot, Done]


def test_a_cancel_is_seen_between_two_steps() -> None:
    def cancelling() -> list[StepOut]:
        bench.order(A, Cancel("deadline"))
        return [TokenOut(A, 2, None), TokenOut(B, 2, None)]

    engine = Scripted(
        [TokenOut(A, 1, None), TokenOut(B, 1, None)], cancelling, [TokenOut(A, 9, None), TokenOut(B, 3, "length")]
    )
    bench = Bench(engine)
    bench.order(A, Generate("m", prompt="x"))
    bench.order(B, Generate("m", prompt="y"))
    sent = bench.serve()
    done = sent[A][-1]
    assert isinstance(done, Done)
    assert (done.finish_reason, text_of(sent[A])) == ("deadline", "1 2 ")
    assert text_of(sent[B]) == "1 2 3 "
    assert bench.progress.requests_cancelled == 1


def test_sigterm_ends_all_between_two_steps() -> None:
    def terminating() -> list[StepOut]:
        bench.mailbox.terminate()
        return [TokenOut(A, 2, None)]

    bench = Bench(Scripted([TokenOut(A, 1, None)], terminating))
    bench.order(A, Generate("m", prompt="x"))
    assert bench.service.serve()[2] == WorkerExit.TERMINATED
    done = bench.sent()[A][-1]
    assert isinstance(done, Done)
    assert done.finish_reason == "cancelled"


def test_an_error_of_a_step_is_not_caught_here() -> None:
    def failing() -> list[StepOut]:
        raise RuntimeError("planted")

    bench = Bench(Scripted(failing))
    bench.order(A, Generate("m", prompt="x"))
    with pytest.raises(RuntimeError, match="planted"):
        bench.serve()
    assert A not in bench.sent()


def test_progress_tells_phase_and_work() -> None:
    seen: list[tuple[str, bool, int]] = []

    def note(outs: list[StepOut]) -> list[StepOut]:
        p = bench.progress
        seen.append((p.phase, p.busy_since is not None, p.steps))
        return outs

    bench = Bench(
        Scripted(
            lambda: note([PrefillOut(A, 2, 2)]),
            lambda: note([TokenOut(A, 1, None)]),
            lambda: note([TokenOut(A, 1, "length")]),
        )
    )
    bench.order(A, Generate("m", prompt="x"))
    bench.serve()
    assert seen == [("prefill", True, 0), ("prefill", True, 1), ("decode", True, 2)]
    assert (bench.progress.steps, bench.progress.prompt_tokens, bench.progress.completion_tokens) == (3, 2, 2)
    assert bench.progress.memory.footprint == 5
