"""Owns the checks of guard, ladder and caps with a real model, real memory and low limits."""

from __future__ import annotations

import gc
import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_bulkhead.protocol.codec import Message
from mlx_bulkhead.protocol.commands import Cancel, Generate, Load, Shutdown
from mlx_bulkhead.protocol.events import Done, Failed, Progress
from mlx_bulkhead.protocol.values import Memory
from mlx_bulkhead.worker.engines.base import Engine, LoadProblem, PrefillOut, StepOut
from mlx_bulkhead.worker.mailbox import Mailbox, Order
from mlx_bulkhead.worker.memory import caps as caps_module
from mlx_bulkhead.worker.memory.caps import backend
from mlx_bulkhead.worker.memory.footprint import footprint, give_back
from mlx_bulkhead.worker.memory.keeper import Keeper, Means
from mlx_bulkhead.worker.progress import WorkerProgress
from mlx_bulkhead.worker.service import Service

from tests.support.worker_harness import WorkerHarness

from .test_adapters import adapters
from .test_engine import PROMPTS, Driver, expected, model_directory, open_tiny
from .test_memory import Platform

pytestmark = pytest.mark.skipif(backend() != "cpu", reason="limits are set by what a process takes on a CPU")

MIB = 2**20
A, B, C, D = (bytes([letter]) * 16 for letter in b"abcd")
LONG = [300 + index % 400 for index in range(2500)]
LONGER = LONG * 3
"""On a CPU its attention takes some 80 MiB: scores of a chunk of 2048 tokens."""
SHORT = LONG[:20]


class Ballast:
    """Memory of MLX that belongs to nobody."""

    def __init__(self) -> None:
        self.held: list[mx.array] = []

    def add(self, mib: int) -> None:
        made = mx.ones((mib, MIB // 4))
        mx.eval(made)
        self.held.append(made)

    def drop(self) -> None:
        self.held.clear()
        give_back()


@pytest.fixture
def ballast() -> Iterator[Ballast]:
    made = Ballast()
    yield made
    made.drop()


def open_with_room(mib: int, **options: Any) -> Engine:
    """A tiny model that may take so much more than this process does, up to its hard line."""
    gc.collect()
    mx.clear_cache()
    give_back()
    open_tiny().close()  # what a load leaves behind is there already
    give_back()
    shares = {"memory_soft": 0.97, "memory_hard": 0.99} | options
    return open_tiny(memory_limit=int((footprint() + mib * MIB) / shares["memory_hard"]), **shares)


class Stage:
    """A service over a real engine. What is to happen in a step is put into `on_step`."""

    def __init__(self, engine: Engine) -> None:
        self.mailbox = Mailbox()
        self.outs: list[StepOut] = []
        self.on_step: Callable[[], None] = lambda: None
        self._step = engine.step
        engine.step = self._stepped  # type: ignore[method-assign]
        self.engine = engine
        self.service = Service(engine, Load("tiny", "p"), self.mailbox, WorkerProgress())

    def _stepped(self) -> list[StepOut]:
        outs = self._step()
        self.outs += outs
        self.on_step()
        return outs

    def send(self, request_id: bytes, tokens: list[int], max_tokens: int = 5) -> None:
        self.mailbox.order(Order(request_id, Generate("tiny", tokens=tokens, max_tokens=max_tokens), 0.0))

    def end(self) -> None:
        self.mailbox.order(Order(bytes(16), Shutdown(grace_s=60, drain=True), 0.0))

    def serve(self) -> dict[bytes, list[Message]]:
        self.service.serve()
        sent: dict[bytes, list[Message]] = {}
        while item := self.mailbox.next_outgoing():
            sent.setdefault(item.request_id, []).append(item.message)
        self.mailbox.close()
        return sent


def failure(messages: list[Message]) -> str:
    assert isinstance(messages[-1], Failed)
    assert messages[-1].code == "out_of_memory"
    return messages[-1].message


def test_a_prompt_that_does_not_fit_computes_nothing_and_the_next_request_works() -> None:
    engine = open_with_room(20)
    assert engine.info.limits.hard_bytes < engine.info.limits.memory_bytes
    assert engine.info.kv_token_bytes == 4 * 2 * 2 * 32 * 4
    assert engine.info.weight_bytes > 2**20
    stage = Stage(engine)
    stage.send(A, LONGER)
    stage.send(B, SHORT, max_tokens=2**31 - 1)  # how much is asked for is no reason to refuse
    stage.on_step = lambda: stage.mailbox.order(Order(B, Cancel(), 0.0)) if len(stage.outs) > 5 else None
    stage.end()
    sent = stage.serve()
    assert "a prompt of 7500 tokens needs" in failure(sent[A])
    assert not any(out.request_id == A for out in stage.outs)
    assert not any(isinstance(message, Progress) for message in sent[A])
    assert [out for out in stage.outs if out.request_id == B]
    engine.close()


def test_a_refusal_ends_with_its_reason(ballast: Ballast) -> None:
    engine = open_with_room(384)
    ballast.add(365)
    chunk = engine.prefill_chunk
    assert engine.keeper.admit(len(LONGER), [], chunk)[0] == "refuse"
    ballast.drop()
    assert engine.keeper.admit(len(LONGER), [], chunk)[0] == "admit"
    driver = Driver(engine)
    driver.add("a", LONG, 4)
    driver.run()
    assert driver.tokens["a"] == expected("qwen3", tuple(LONG), 4)
    assert engine.keeper.look().footprint <= engine.info.limits.hard_bytes, "the estimate was enough"
    engine.close()


def test_a_prompt_that_needs_short_chunks_gets_them() -> None:
    """Attention over chunks of 2048 tokens would take 82 MB."""
    engine = open_with_room(40)
    stage = Stage(engine)
    chunks: list[int] = []
    stage.on_step = lambda: chunks.append(engine.keeper.chunk)
    stage.send(A, LONG)
    stage.end()
    sent = stage.serve()
    assert isinstance(sent[A][-1], Done)
    assert chunks[0] < engine.prefill_chunk
    assert engine.keeper.look().footprint <= engine.info.limits.memory_bytes
    engine.close()


def test_a_prompt_that_no_longer_fits_gives_way_between_its_chunks(ballast: Ballast) -> None:
    engine = open_with_room(512, memory_off=["fail"])
    stage = Stage(engine)
    stage.send(A, LONGER)
    stage.send(B, SHORT, max_tokens=60)

    def fill() -> None:
        begun = any(isinstance(out, PrefillOut) and out.request_id == A for out in stage.outs)
        if begun and not ballast.held:
            ballast.add(500)

    stage.on_step = fill
    stage.end()
    sent = stage.serve()
    # It waited for the other to end, and even then there was no room.
    assert "a prompt of 7500 tokens needs" in failure(sent[A])
    assert any(isinstance(message, Progress) for message in sent[A])
    assert isinstance(sent[B][-1], Done)
    assert sent[B][-1].usage.completion_tokens == 60
    engine.close()


def test_memory_fills_and_each_rung_is_taken_in_turn(ballast: Ballast) -> None:
    shares = {"memory_soft": 0.9, "memory_hard": 0.99}
    engine = open_with_room(192, cache_entries=8, **shares)
    driver = Driver(engine)
    for name, prompt in (("x", PROMPTS[0]), ("y", PROMPTS[2])):
        driver.add(name, prompt, 8)
        driver.run()
    assert engine.cache_stats().entries == 2
    log: list[str] = []
    means = engine.keeper.means

    def noted(name: str, act: Callable[[], None]) -> Callable[[], None]:
        def call() -> None:
            log.append(name)
            act()

        return call

    def look() -> Memory:
        looks.append(len(ballast.held))
        return means.sample()

    looks: list[int] = []
    store: Any = engine.keeper.holders[0]
    store.drop_oldest = noted("drop", store.drop_oldest)
    watched = Means(look, noted("clear", means.clear))
    load, limit = Load("tiny", "p", **shares), engine.info.limits.memory_bytes
    keeper = engine.keeper = Keeper(limit, load, watched, engine.keeper.dims, [store])
    remove = engine.remove

    def removed(request_id: bytes, *, keep: bool = True) -> bool:
        if not keep:
            assert keeper.stats().holding, "new requests waited before one failed"
            log.append("fail")
            ballast.drop()
            stage.send(D, SHORT)
            stage.end()
        return remove(request_id, keep=keep)

    engine.remove = removed  # type: ignore[method-assign]
    stage = Stage(engine)
    stage.send(A, LONG[:600], max_tokens=3000)
    stage.send(B, SHORT, max_tokens=1000)

    def fill() -> None:
        if "fail" in log:
            return
        if looks and looks[-1] == len(ballast.held):  # it has seen what there is
            room = (engine.info.limits.hard_bytes - keeper.usage) // MIB
            ballast.add(max(3, room // 4))
        if keeper.stats().holding and "arrival" not in log:
            log.append("arrival")
            stage.send(C, SHORT)
        if C in {out.request_id for out in stage.outs}:
            log.append("C runs")
        if len(stage.outs) > 3900:
            stage.end()

    stage.on_step = fill
    sent = stage.serve()
    assert list(dict.fromkeys(log)) == ["clear", "drop", "arrival", "fail"]
    assert log.count("drop") == 2
    why = failure(sent[A])
    assert "the biggest of 2" in why
    assert "MiB are in use" in why
    for request_id, count in ((B, 1000), (C, 5), (D, 5)):
        done = sent[request_id][-1]
        assert isinstance(done, Done)
        assert done.usage.completion_tokens == count
    stats = keeper.stats()
    assert (stats.level, stats.holding, stats.drops, stats.waits, stats.fails) == ("calm", False, 2, 1, 1)
    engine.close()


def test_a_model_over_its_own_limit_is_not_loaded() -> None:
    with pytest.raises(LoadProblem, match=r"do not fit: .* MiB are in use, .* memory limit is 8\.0 MiB") as found:
        open_tiny(memory_limit=8 * MIB)
    assert found.value.code == "out_of_memory"


@pytest.mark.parametrize("adapted", [False, True])
def test_our_wired_limit_is_in_force_at_every_step(monkeypatch: pytest.MonkeyPatch, adapted: bool) -> None:
    """Metal is not here: the seam is, and the library's calls to MLX go to the same place."""
    metal = Platform()
    monkeypatch.setattr(caps_module, "this_device", lambda: metal)
    library = importlib.import_module("mlx_lm.generate")
    monkeypatch.setattr(library, "maybe_set_recommended_wired_limit", lambda: metal.set_wired(metal.size))
    monkeypatch.setattr(mx, "set_wired_limit", metal.set_wired)
    limit = 50 * 2**30
    engine = open_tiny(memory_limit=limit, max_running=4, adapters=adapters() if adapted else {})
    assert engine.info.limits.wired_bytes == metal.now["wired"] == limit
    assert metal.settled, "the limit is not changed while the device computes"
    seen: set[int] = set()
    step = engine.step

    def stepped() -> list[StepOut]:
        seen.add(metal.now["wired"])
        outs = step()
        seen.add(metal.now["wired"])
        return outs

    engine.step = stepped  # type: ignore[method-assign]
    driver = Driver(engine)
    driver.add("a", PROMPTS[0], 90)
    driver.until(driver.generated("a", 3))
    for name in "bc":
        driver.add(name, PROMPTS[1], 10)
    if adapted:
        driver.add("d", PROMPTS[1], 10, adapter="A")  # makes another generator, while a row is being computed
        assert metal.now["wired"] == limit
    driver.run()
    assert seen == {limit}
    engine.close()
    assert metal.now == Platform().now


WATCH = """
import threading
import mlx_bulkhead.worker.executor as executor
def watch():
    import mlx.core as mx
    for name in ("get_active_memory", "get_cache_memory", "get_peak_memory", "clear_cache"):
        def asked(*args, real=getattr(mx, name), name=name):
            print(f"{name} is asked on {threading.current_thread().name}", flush=True)
            return real(*args)
        setattr(mx, name, asked)
settle = executor.settle_network
executor.settle_network = lambda model: (settle(model), watch())
"""


def test_mlx_is_asked_on_the_executor_thread_only(short_tmp: Path) -> None:
    with WorkerHarness(short_tmp, prelude=WATCH) as worker:
        worker.load(model_directory("qwen3"))
        assert worker.run(prompt="a", max_tokens=20).done is not None
        assert worker.stats().memory.mlx_active > 0
        asked = re.findall("is asked on (.*)", worker.log())
        assert set(asked) == {"executor"}


def test_a_worker_with_a_limit_says_what_is_in_force_and_what_it_did(short_tmp: Path) -> None:
    model = model_directory("qwen3")
    first, second = short_tmp / "1", short_tmp / "2"
    for directory in (first, second):
        directory.mkdir()
    with WorkerHarness(first) as worker:
        needed = worker.load(model).info.memory_after.footprint
    limit = int((needed + 20 * MIB) / 0.95)
    with WorkerHarness(second) as worker:
        info = worker.load(model, memory_limit=limit).info
        assert info.limits.memory_bytes == limit
        assert info.limits.soft_bytes < info.limits.hard_bytes < limit
        assert info.limits.unsupported == ["wired"]
        refused = worker.run(tokens=LONGER, max_tokens=2).failed
        assert refused is not None
        assert (refused.code, refused.retryable) == ("out_of_memory", True)
        assert "memory_limit" in refused.message
        assert worker.run(tokens=SHORT, max_tokens=2).done is not None
        stats = worker.until_stats(lambda stats: stats.ladder.refusals == 1)
        assert stats.memory.footprint > stats.memory.mlx_active > info.weight_bytes // 2
        assert (stats.ladder.fails, stats.ladder.level) == (0, "calm")
