"""What a restart is made of: warm spares, room in memory, and victims of somebody else's reset."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec
import psutil
import pytest
from mlx_bulkhead.orchestrator.policy.restart import RestartPolicy
from mlx_bulkhead.protocol.errors import OutOfMemory

from tests.support.hosts import QUICK, fake_host, misbehave, status, until
from tests.support.misbehaving_worker import expected_text

pytestmark = pytest.mark.timeout(60)


async def test_a_crash_is_answered_by_a_spare_and_the_spare_replaced(short_tmp: Path) -> None:
    limits = msgspec.structs.replace(QUICK, spare_workers=1)
    async with fake_host(short_tmp / "r", limits=limits) as host:
        await until(lambda: host.stats_reply(None).daemon["spares"] == 1.0)
        [spare] = psutil.Process().children()
        await host.load("m", "fake")
        assert status(host, "m").pid == spare.pid
        await until(lambda: host.stats_reply(None).daemon["spares"] == 1.0)
        os.kill(spare.pid, signal.SIGKILL)
        assert (await host.complete("m", prompt="a", max_tokens=5)).text == expected_text("a", 5)
        assert status(host, "m").pid != spare.pid
        log = (await host.stats("m")).models[0]
        assert log.restarts == 1
    assert psutil.Process().children() == []


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
