"""What a restart is made of: warm spares, room in memory, and victims of somebody else's reset."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec
import psutil
import pytest
from mlx_bulkhead.orchestrator.policy.restart import RestartPolicy
from mlx_bulkhead.protocol.errors import ModelUnloaded, OutOfMemory

from tests.support.hosts import QUICK, fake_host, misbehave, status, until, workers
from tests.support.misbehaving_worker import expected_text

pytestmark = pytest.mark.timeout(60)


async def test_a_crash_is_answered_by_a_spare_and_the_spare_replaced(short_tmp: Path) -> None:
    limits = msgspec.structs.replace(QUICK, spare_workers=1)
    async with fake_host(short_tmp / "r", limits=limits) as host:
        await until(lambda: host.stats_reply(None).daemon["spares"] == 1.0)
        [spare] = workers()
        await host.load("m", "fake")
        assert status(host, "m").pid == spare.pid
        await until(lambda: host.stats_reply(None).daemon["spares"] == 1.0)
        os.kill(spare.pid, signal.SIGKILL)
        assert (await host.complete("m", prompt="a", max_tokens=5)).text == expected_text("a", 5)
        assert status(host, "m").pid != spare.pid
        log = (await host.stats("m")).models[0]
        assert log.restarts == 1
    assert workers() == []


async def test_a_model_with_its_own_environment_takes_no_spare(short_tmp: Path) -> None:
    limits = msgspec.structs.replace(QUICK, spare_workers=1)
    async with fake_host(short_tmp / "r", limits=limits) as host:
        await until(lambda: host.stats_reply(None).daemon["spares"] == 1.0)
        await host.load("m", "fake", env=misbehave("", rate=0))
        assert host.stats_reply(None).daemon["spares"] == 1.0


async def test_a_restart_is_refused_with_numbers_while_the_host_has_no_memory(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [2**40]
    monkeypatch.setattr("mlx_bulkhead.orchestrator.embedded.free_memory", lambda: free[0])
    async with fake_host(short_tmp / "r") as host:
        await host.load("m", "fake", env=misbehave("balloon:8"))
        await until(lambda: (line := status(host, "m")).stats is not None and line.stats.memory.footprint > 0)
        free[0] = 1
        os.kill(status(host, "m").pid or 0, signal.SIGKILL)
        await until(lambda: status(host, "m").state == "BACKOFF")
        assert "MiB of memory are free" in status(host, "m").problem
        free[0] = 2**40
        assert (await host.complete("m", prompt="a", max_tokens=5)).text == expected_text("a", 5)
        assert OutOfMemory.code == "out_of_memory"


async def test_a_victim_of_another_models_reset_keeps_its_restarts(short_tmp: Path) -> None:
    policy = RestartPolicy(base_delay_s=0.05, max_restarts=1)
    async with fake_host(short_tmp / "r", restart=policy) as host:
        await host.load("cause", "fake")
        await host.load("victim", "fake")
        for _ in range(3):  # more often than the policy allows
            cause, victim = status(host, "cause"), status(host, "victim")
            os.kill(cause.pid or 0, signal.SIGABRT)
            await until(lambda seen=cause.pid: status(host, "cause").pid != seen)
            os.kill(victim.pid or 0, signal.SIGABRT)
            await until(lambda seen=victim.pid: status(host, "victim").pid not in (seen, None))
            await until(lambda: status(host, "victim").state == "READY")
            if status(host, "cause").state != "READY":
                await host.restart("cause")
        assert status(host, "victim").crashes == 3


async def test_recycling_drops_no_stream(short_tmp: Path) -> None:
    """N + 5 requests with a limit of N, streams running all the while: new worker first, old one drained."""
    async with fake_host(short_tmp / "r") as host:
        await host.load("m", "fake", recycle_requests=10)
        first = status(host, "m").pid
        long = host.generate("m", prompt="long", max_tokens=400)
        for i in range(15):
            assert (await host.complete("m", prompt=str(i), max_tokens=3)).restarts == 0
        await until(lambda: status(host, "m").recycles == 1)
        assert status(host, "m").pid != first
        result = await long.result()
        assert result.text == expected_text("long", 400)
        assert result.restarts == 0
        assert (await host.complete("m", prompt="after", max_tokens=3)).text == expected_text("after", 3)
        await until(lambda: not psutil.pid_exists(first or 0))
        assert status(host, "m").crashes == 0
        assert status(host, "m").restarts == 0


async def test_cancel_reaches_a_retiring_worker_and_unload_waits_for_it(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r") as host:
        await host.load("m", "fake", recycle_age_s=0.5)
        first = status(host, "m").pid or 0
        one = host.generate("m", prompt="one", max_tokens=100_000)
        two = host.generate("m", prompt="two", max_tokens=100_000)
        await until(lambda: status(host, "m").recycles == 1)
        one.cancel()
        assert (await one.result()).finish_reason == "cancelled"
        assert psutil.pid_exists(first)  # it still serves the other
        await host.unload("m")
        assert not psutil.pid_exists(first)
        with pytest.raises(ModelUnloaded):
            await two.result()
        assert workers() == []


async def test_the_death_of_a_retiring_worker_is_a_crash_like_any_other(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r") as host:
        await host.load("m", "fake", recycle_age_s=0.5)
        first = status(host, "m").pid or 0
        stream = host.generate("m", prompt="one", max_tokens=300)
        await until(lambda: status(host, "m").recycles == 1)
        os.kill(first, signal.SIGKILL)
        result = await stream.result()
        assert result.text == expected_text("one", 300)
        assert result.restarts == 1


async def test_without_room_for_two_the_old_one_is_drained_first(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [2**40]
    monkeypatch.setattr("mlx_bulkhead.orchestrator.embedded.free_memory", lambda: free[0])
    async with fake_host(short_tmp / "r") as host:
        await host.load("m", "fake", env=misbehave("balloon:8"), recycle_requests=2)
        await host.complete("m", prompt="one", max_tokens=2)
        await until(lambda: (line := status(host, "m")).stats is not None and line.stats.memory.footprint > 0)
        free[0] = 1
        running = host.generate("m", prompt="run", max_tokens=300)
        await host.complete("m", prompt="two", max_tokens=2)
        pid = status(host, "m").pid
        assert (await running.result()).text == expected_text("run", 300)
        free[0] = 2**40
        await until(lambda: status(host, "m").pid not in (pid, None))
        assert status(host, "m").recycles == 0
        assert (await host.complete("m", prompt="three", max_tokens=2)).text == expected_text("three", 2)
