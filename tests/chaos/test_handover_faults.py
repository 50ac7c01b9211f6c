"""Faults in the middle of a handover: the worker that retires, the one in charge, the successor."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec
import pytest

from tests.support.hosts import QUICK, fake_host, misbehave, status, until, workers
from tests.support.misbehaving_worker import expected_text

pytestmark = pytest.mark.timeout(60)


async def test_a_retiring_worker_that_hangs_is_replaced_like_any_other(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r") as host:
        env = misbehave("hang:150", once=short_tmp / "once", rate=100)
        await host.load("m", "fake", env=env, stall_budget_s=1.0, recycle_requests=1)
        await host.complete("m", prompt="one", max_tokens=5)
        stream = host.generate("m", prompt="two", max_tokens=300)
        await until(lambda: status(host, "m").recycles == 1)
        result = await stream.result(timeout=20.0)
        assert result.text == expected_text("two", 300)
        assert result.restarts == 1


@pytest.mark.parametrize("on_crash", ["resume", "fail"])
async def test_the_death_of_the_worker_in_charge_is_no_fault_of_the_retiring_ones_requests(
    short_tmp: Path, on_crash: str
) -> None:
    async with fake_host(short_tmp / "r") as host:
        await host.load("m", "fake", env=misbehave("", rate=50), recycle_requests=1)
        await host.complete("m", prompt="one", max_tokens=5)
        stream = host.generate("m", prompt="two", max_tokens=200, on_crash=on_crash)  # pyright: ignore
        request = host.find(bytes.fromhex(stream.request_id))
        await until(lambda: status(host, "m").recycles == 1)
        os.kill(status(host, "m").pid or 0, signal.SIGKILL)
        assert (await stream.result(timeout=20.0)).text == expected_text("two", 200)
        assert request.charge == 0


async def test_a_successor_that_is_stuck_is_given_up(short_tmp: Path) -> None:
    limits = msgspec.structs.replace(QUICK, hello_s=1.0, load_silence_s=1.0)
    async with fake_host(short_tmp / "r", limits=limits) as host:
        await host.load("m", "fake", recycle_requests=1)
        first = status(host, "m").pid
        await host.complete("m", prompt="one", max_tokens=5)
        await until(lambda: len(workers()) == 2)
        [successor] = [child for child in workers() if child.pid != first]
        successor.suspend()
        await until(lambda: not successor.is_running())
        assert (await host.complete("m", prompt="two", max_tokens=5)).text == expected_text("two", 5)
        assert status(host, "m").pid == first
