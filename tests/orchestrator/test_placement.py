"""The memory budget end to end, over workers that fake their models: who is loaded, who leaves, who waits."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest
from mlx_bulkhead.orchestrator import host_memory
from mlx_bulkhead.orchestrator.config import Config, ModelConfig
from mlx_bulkhead.orchestrator.embedded import Orchestrator
from mlx_bulkhead.orchestrator.local_stream import LocalStream
from mlx_bulkhead.orchestrator.memory_config import MemoryConfig
from mlx_bulkhead.orchestrator.policy.placement_values import Pressure
from mlx_bulkhead.protocol.errors import ModelUnloaded, OutOfMemory, UnknownModel
from mlx_bulkhead.protocol.values import PlacementInfo

from tests.support.hosts import fake_host, misbehave, status, until, workers
from tests.support.misbehaving_worker import expected_text

pytestmark = pytest.mark.timeout(60)

GIB = 2**30
ROOM_FOR_TWO = MemoryConfig(budget=10 * GIB, min_residency_s=0.0, enforce=False)
ROOM_FOR_ONE = MemoryConfig(budget=5 * GIB, min_residency_s=0.0, enforce=False)


@pytest.fixture(autouse=True)
def large_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "total", lambda: 64 * GIB)
    monkeypatch.setattr(host_memory, "pressure", lambda: Pressure.NORMAL)


def model(**more: object) -> ModelConfig:
    return ModelConfig("fake", memory_limit=4 * GIB, **more)  # pyright: ignore[reportArgumentType]


def three(memory: MemoryConfig = ROOM_FOR_TWO, **more: object) -> Config:
    return Config(models={name: model(**more) for name in "abc"}, memory=memory)


def view(host: Orchestrator) -> PlacementInfo:
    found = host.stats_reply(None).placement
    assert found is not None
    return found


def loaded(host: Orchestrator) -> set[str]:
    return {s.name for s in host.model_statuses() if s.state == "READY"}


async def ask(host: Orchestrator, name: str, tokens: int = 5) -> str:
    result = await host.complete(name, prompt=name, max_tokens=tokens)
    assert result.text == expected_text(name, tokens)
    return result.text


async def begin(host: Orchestrator, name: str, tokens: int) -> LocalStream:
    """A request that runs."""
    stream = host.generate(name, prompt=name, max_tokens=tokens)
    await until(lambda: status(host, name).state == "READY")
    return stream


async def test_with_a_bound_on_workers_a_model_is_recycled_without_a_second_one(short_tmp: Path) -> None:
    config = Config(models={"a": model(recycle_requests=1)}, memory=MemoryConfig(max_loaded=1))
    async with fake_host(short_tmp / "r", config=config) as host:
        await ask(host, "a")
        first = status(host, "a").pid

        def replaced() -> bool:
            assert len(workers()) <= 1
            return status(host, "a").state == "READY" and status(host, "a").pid != first

        await until(replaced)
        await ask(host, "a")


async def test_without_settings_nothing_is_placed(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r", config=three(MemoryConfig())) as host:
        for name in "abc":
            await ask(host, name)
        assert loaded(host) == {"a", "b", "c"}
        assert host.stats_reply(None).placement is None


async def test_three_models_with_room_for_two_make_room_by_last_use(short_tmp: Path) -> None:
    """E07."""
    async with fake_host(short_tmp / "r", config=three()) as host:
        for name in "aba":
            await ask(host, name)
        pid = status(host, "b").pid or 0
        await ask(host, "c")  # b was used before a
        assert not psutil.pid_exists(pid)
        assert loaded(host) == {"a", "c"}
        assert status(host, "a").incarnation == 1
        seen = view(host)
        assert (seen.budget, seen.held, seen.next_eviction) == (10 * GIB, 8 * GIB, "a")
        assert any("evicted b: c needs its room" in words for words in seen.decisions)
        await ask(host, "b")
        assert status(host, "b").incarnation == 2


async def test_the_next_worker_starts_when_the_last_is_gone(short_tmp: Path) -> None:
    """D08, E02: the busy one finishes, is reaped, and only then is the other one spawned."""
    async with fake_host(short_tmp / "r", config=three(ROOM_FOR_ONE)) as host:
        first = await begin(host, "a", 60)
        second = asyncio.ensure_future(ask(host, "b"))
        await until(lambda: status(host, "b").state == "QUEUED")
        assert len(workers()) == 1
        assert status(host, "b").pid is None
        assert "a with 4.00 GiB (busy)" in status(host, "b").problem
        assert (await first.result()).text == expected_text("a", 60)
        while not second.done():
            assert len(workers()) <= 1
            await asyncio.sleep(0.001)
        await second


async def test_one_load_serves_all_that_wait(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r", config=three(ROOM_FOR_ONE)) as host:
        await ask(host, "a")
        await asyncio.gather(*(ask(host, "b") for _ in range(20)))
        assert status(host, "b").incarnation == 1


async def test_a_request_for_a_resident_model_is_served_while_others_wait(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r", config=three(ROOM_FOR_ONE)) as host:
        busy = await begin(host, "a", 100)
        waiting = asyncio.ensure_future(ask(host, "b"))
        await until(lambda: status(host, "b").state == "QUEUED")
        await ask(host, "a")
        assert status(host, "b").state == "QUEUED"
        await busy.result()
        await waiting


async def test_who_waits_too_long_gets_the_numbers_and_can_come_again(short_tmp: Path) -> None:
    """D11, D13."""
    memory = MemoryConfig(budget=5 * GIB, min_residency_s=0.0, queue_s=0.3, enforce=False)
    async with fake_host(short_tmp / "r", config=three(memory)) as host:
        busy = await begin(host, "a", 10_000)
        with pytest.raises(OutOfMemory, match=r"memory\.budget is 5\.00 GiB.*a with 4\.00 GiB \(busy\)") as caught:
            await ask(host, "b")
        assert caught.value.retryable
        with pytest.raises(OutOfMemory):
            await host.load("b", "fake", memory_limit=4 * GIB)
        assert status(host, "b").state == "STOPPED"
        assert host.gave_up == []
        busy.cancel()
        await ask(host, "b")


async def test_a_pinned_model_stays(short_tmp: Path) -> None:
    config = Config(models={"a": model(pin=True), "b": model(), "c": model()}, memory=ROOM_FOR_TWO)
    async with fake_host(short_tmp / "r", config=config) as host:
        for name in "abcbc":
            await ask(host, name)
        assert status(host, "a").incarnation == 1


async def test_two_clients_that_alternate_wait_for_the_residency(short_tmp: Path) -> None:
    """E11: with room for one, each load is followed by many requests, not by the next eviction."""
    memory = MemoryConfig(budget=5 * GIB, min_residency_s=1.0, enforce=False)
    async with fake_host(short_tmp / "r", config=three(memory)) as host:

        async def client(name: str) -> None:
            for _ in range(20):
                await ask(host, name)

        await asyncio.gather(client("a"), client("b"))
        assert status(host, "a").incarnation + status(host, "b").incarnation <= 20  # of 40 requests


async def test_an_idle_model_leaves_and_a_busy_one_does_not(short_tmp: Path) -> None:
    """E01."""
    config = Config(models={"a": model(ttl_s=0.2), "b": model()}, memory=MemoryConfig())
    async with fake_host(short_tmp / "r", config=config) as host:
        result = await host.complete("a", prompt="a", max_tokens=100)  # half a second
        assert result.text == expected_text("a", 100)
        assert status(host, "a").restarts == 0
        await ask(host, "b")
        await until(lambda: status(host, "a").state == "STOPPED")
        assert "idle" in status(host, "a").problem
        assert status(host, "b").state == "READY"
        await ask(host, "a")


async def test_a_request_in_the_midst_of_an_eviction_waits_and_loads_afresh(short_tmp: Path) -> None:
    """E05, E13: no request ends empty, and nobody is loaded outside the ledger."""
    async with fake_host(short_tmp / "r", config=three(ROOM_FOR_ONE)) as host:
        for _ in range(10):
            await asyncio.gather(ask(host, "a"), ask(host, "b"), ask(host, "a", 7))
            assert len(loaded(host)) <= 1
            assert len(workers()) <= 1


async def test_unload_against_requests_leaves_the_ledger_empty(short_tmp: Path) -> None:
    """E05 by hand: fifty unloads against requests."""
    config = three(ROOM_FOR_ONE, env={"BULKHEAD_FAKE_RATE": "0"})
    async with fake_host(short_tmp / "r", config=config) as host:
        for i in range(25):
            work = [asyncio.ensure_future(host.complete(name, prompt="x", max_tokens=3)) for name in "ab"]
            await asyncio.sleep(0.002 * (i % 7))
            await asyncio.gather(host.unload("a"), host.unload("b"))
            ends = await asyncio.gather(*work, return_exceptions=True)
            assert all(isinstance(end, ModelUnloaded) or getattr(end, "text", "") for end in ends)
        await until(lambda: not workers())
        assert view(host).held == 0
        assert view(host).places == []


async def test_a_load_that_hangs_holds_its_share_until_it_is_unloaded(short_tmp: Path) -> None:
    """D19."""
    config = Config(models={"a": model(env=misbehave("load_hangs")), "b": model()}, memory=ROOM_FOR_ONE)
    async with fake_host(short_tmp / "r", config=config) as host:
        frozen = host.generate("a", prompt="x")
        await until(lambda: status(host, "a").state == "LOADING")
        waits = asyncio.ensure_future(ask(host, "b"))
        await until(lambda: status(host, "b").state == "QUEUED")
        assert "a with 4.00 GiB (loading)" in status(host, "b").problem
        await host.unload("a")
        with pytest.raises(ModelUnloaded):
            await frozen.result()
        await waits


async def test_a_request_that_no_longer_waits_loads_nothing(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r", config=three(ROOM_FOR_ONE)) as host:
        busy = await begin(host, "a", 10_000)
        gone = host.generate("b", prompt="b")
        assert status(host, "b").state == "QUEUED"
        gone.cancel()
        assert (await gone.result()).finish_reason == "cancelled"
        assert status(host, "b").state == "STOPPED"
        busy.cancel()
        await ask(host, "a")
        assert loaded(host) == {"a"}


async def test_a_crash_keeps_its_place_and_a_failure_frees_it(short_tmp: Path) -> None:
    config = Config(
        models={"a": model(env=misbehave("kill:3", once=short_tmp / "once")), "b": model(env=misbehave("load_fails")),
                "c": model()},
        memory=ROOM_FOR_TWO,
    )  # fmt: skip
    async with fake_host(short_tmp / "r", config=config) as host:
        await ask(host, "a", 40)
        assert status(host, "a").crashes == 1
        with pytest.raises(Exception, match="missing"):
            await ask(host, "b")
        await until(lambda: status(host, "b").state == "FAILED")
        assert [place.name for place in view(host).places] == ["a"]
        await ask(host, "c")
        assert loaded(host) == {"a", "c"}


async def test_a_load_that_waits_makes_room_and_one_that_is_given_up_does_not(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r", config=three(ROOM_FOR_ONE)) as host:
        busy = await begin(host, "a", 10_000)
        load = asyncio.ensure_future(host.load("own", "fake", memory_limit=4 * GIB))
        await until(
            lambda: "own" in {s.name for s in host.model_statuses()} and status(host, "own").state == "QUEUED"
        )
        load.cancel()
        await until(lambda: status(host, "own").state == "STOPPED")
        busy.cancel()
        await busy.result()
        assert loaded(host) == {"a"}
        await host.load("own", "fake", memory_limit=4 * GIB)
        assert loaded(host) == {"own"}
        await host.restart("a")
        assert loaded(host) == {"a"}
        assert [place.busy for place in view(host).places] == [False]


async def test_unknown_names_are_refused_and_load_nothing(short_tmp: Path) -> None:
    """E10."""
    async with fake_host(short_tmp / "r", config=three()) as host:
        with pytest.raises(UnknownModel):
            host.generate("x", prompt="a")
        assert view(host).places == []


async def test_a_model_loaded_by_name_comes_back_after_it_made_room(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r", config=three(ROOM_FOR_ONE)) as host:
        await host.load("own", "fake", memory_limit=4 * GIB)
        await ask(host, "a")
        assert status(host, "own").state == "STOPPED"
        await ask(host, "own")
        await host.unload("own")
        with pytest.raises(UnknownModel):
            host.generate("own", prompt="a")


async def test_what_is_too_large_or_of_unknown_size_is_refused_at_once(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r", config=three()) as host:
        with pytest.raises(OutOfMemory, match=r"needs 11\.00 GiB, and memory\.budget is 10\.00 GiB"):
            await host.load("big", "fake", memory_limit=11 * GIB)
        with pytest.raises(OutOfMemory, match="a directory here nor a downloaded model; set its memory_limit"):
            await host.load("new", "fake")


async def test_critical_pressure_unloads_idle_models_and_serves_busy_ones(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    level = [Pressure.NORMAL]
    monkeypatch.setattr(host_memory, "pressure", lambda: level[0])
    memory = MemoryConfig(budget=20 * GIB, queue_s=0.5, enforce=False)
    async with fake_host(short_tmp / "r", config=three(memory)) as host:
        await ask(host, "a")
        busy = await begin(host, "b", 10_000)
        level[0] = Pressure.CRITICAL
        await until(lambda: status(host, "a").state == "STOPPED")
        assert "critically short of memory" in status(host, "a").problem
        with pytest.raises(OutOfMemory, match=r"the host reports memory pressure \(critical\)"):
            await ask(host, "c")
        await ask(host, "b")
        assert view(host).pressure == "critical"
        busy.cancel()


async def test_shares_are_the_caps_and_never_more_than_the_budget(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r", config=three()) as host:
        for name in "abcacb":
            await ask(host, name)
            seen = view(host)
            caps = sum(s.info.limits.memory_bytes for s in host.model_statuses() if s.info is not None and s.pid)
            assert caps <= seen.held <= seen.budget


async def test_names_that_come_and_go_leave_nothing_behind(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r", config=three(ROOM_FOR_ONE)) as host:
        for i in range(3):
            await host.load(f"m{i}", "fake", memory_limit=4 * GIB)
            await host.unload(f"m{i}")
            with pytest.raises(OutOfMemory):
                await host.load(f"big{i}", "fake", memory_limit=40 * GIB)
            with pytest.raises(OutOfMemory):
                await host.load(f"new{i}", "fake")
        placement = host._placement
        assert not placement._tenants
        assert not placement._peaks
        assert not placement._predictions
