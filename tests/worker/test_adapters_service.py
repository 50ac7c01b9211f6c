"""The service loop and changes of adapters, over a scripted engine: what it may do, and what must come of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from mlx_bulkhead.protocol.commands import AddAdapter, DropAdapter, Generate, Shutdown
from mlx_bulkhead.protocol.events import AdaptersReply, Done, Failed
from mlx_bulkhead.protocol.values import AdapterInfo, WorkerInfo
from mlx_bulkhead.worker.engines.base import StepOut, TokenOut

from .test_worker_service import A, B, Bench, Scripted, keeper, text_of

ADD = AddAdapter("m", "a", "/a")


class Adapting(Scripted):
    """A scripted engine that takes every adapter, unless `on_add` raises."""

    def __init__(self, *steps: list[StepOut] | Callable[[], list[StepOut]]) -> None:
        super().__init__(*steps)
        self.on_add: Callable[[], None] = lambda: None

    def add_adapter(self, name: str, folder: Path) -> None:
        self.on_add()
        self.info = WorkerInfo(adapters=[AdapterInfo(name, "lora", 4, 1, 2)])

    def drop_adapter(self, name: str) -> None:
        self.info = WorkerInfo()


def test_what_is_held_of_a_stream_leaves_first_and_the_clock_runs() -> None:
    """A hung file system is a stall of the worker, also when it had nothing to do."""
    bench: Bench
    seen: list[tuple[int, str]] = []

    def add() -> None:
        assert bench.progress.busy_since is not None
        posted = list(bench.mailbox._outgoing)
        seen.append((len(posted), bench.progress.phase))

    def second() -> list[StepOut]:
        bench.order(B, ADD)
        return [TokenOut(A, 2, None)]

    def third() -> list[StepOut]:
        bench.order(bytes(16), Shutdown())
        return [TokenOut(A, 3, "length")]

    engine = Adapting([TokenOut(A, 1, None)], second, third)
    engine.on_add = add
    bench = Bench(engine)
    bench.order(A, Generate("m", prompt="x", stream_interval=4))
    bench.service.serve()
    sent = bench.sent()
    [(before, phase)] = seen
    assert phase == "loading"
    assert before == 2, "the first token, then the second that was held"
    assert text_of(sent[A]) == "1 2 3 "
    assert isinstance(sent[A][-1], Done)
    assert sent[B] == [AdaptersReply("m", [AdapterInfo("a", "lora", 4, 1, 2)])]


def test_a_fault_is_answered_and_the_streams_go_on() -> None:
    def fail() -> None:
        raise RuntimeError("a fault of ours")

    engine = Adapting([TokenOut(A, 1, "length")])
    engine.on_add = fail
    bench = Bench(engine)
    bench.order(A, Generate("m", prompt="x"))
    bench.order(B, ADD)
    sent = bench.serve()
    assert sent[B] == [Failed("internal", "adapter 'a': RuntimeError: a fault of ours")]
    assert isinstance(sent[A][-1], Done)


def test_memory_that_ran_out_ends_the_worker() -> None:
    def fail() -> None:
        raise RuntimeError("[metal::malloc] Unable to allocate 9 bytes")

    engine = Adapting()
    engine.on_add = fail
    bench = Bench(engine)
    bench.order(B, ADD)
    with pytest.raises(RuntimeError, match="Unable to allocate"):
        bench.service.serve()
    bench.sent()


def test_one_without_room_is_refused_and_not_read(tmp_path: Path) -> None:
    (tmp_path / "adapters.safetensors").write_bytes(bytes(1000))
    engine = Adapting()
    engine.on_add = lambda: pytest.fail("it was read")
    engine.keeper = keeper(1000)
    bench = Bench(engine)
    bench.order(B, AddAdapter("m", "a", str(tmp_path)))
    [failed] = bench.serve()[B]
    assert isinstance(failed, Failed)
    assert (failed.code, failed.retryable) == ("out_of_memory", True)
    assert "adapter 'a' takes" in failed.message


def test_one_that_a_waiting_request_names_is_not_dropped() -> None:
    engine = Adapting([TokenOut(A, 1, "length")])
    bench = Bench(engine)
    bench.order(A, Generate("m", prompt="x", adapter="a"))
    bench.order(B, DropAdapter("m", "a"))
    [failed] = bench.serve()[B]
    assert isinstance(failed, Failed)
    assert failed.message == "adapter 'a' serves a live request; drop it when they have ended, or cancel them"


def test_a_worker_that_ends_takes_none() -> None:
    bench = Bench(Adapting())
    bench.order(A, Shutdown())
    bench.order(B, ADD)
    sent = bench.serve()
    assert sent[B] == [Failed("shutting_down", "the worker is shutting down", True)]
