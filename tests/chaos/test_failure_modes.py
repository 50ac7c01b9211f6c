"""Failures of docs/failure-modes.md that no other file tests."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from pathlib import Path

import psutil
import pytest
from mlx_bulkhead.orchestrator.requests import CANCEL_GRACE_S

from mlx_bulkhead import AsyncClient
from tests.support.hosts import QUICK, fake_host, misbehave, status, until
from tests.support.misbehaving_worker import expected_text

pytestmark = pytest.mark.timeout(60)


async def test_a_cancelled_request_is_not_resumed_when_its_worker_dies_first(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r") as host:
        await host.load("m", "fake")
        pid = status(host, "m").pid or 0
        stream = host.generate("m", prompt="hello", max_tokens=400)
        async for _ in stream:
            os.kill(pid, signal.SIGSTOP)  # so that it cannot obey
            stream.cancel()
            os.kill(pid, signal.SIGKILL)
            break
        result = await stream.result(timeout=10.0)
        assert result.finish_reason == "cancelled"
        assert expected_text("hello", 400).startswith(result.text)
        assert status(host, "m").requests_resumed == 0
        assert (await host.complete("m", prompt="next", max_tokens=5)).text == expected_text("next", 5)


async def test_a_deadline_holds_although_its_worker_dies_in_that_moment(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r") as host:
        await host.load("m", "fake")
        pid = status(host, "m").pid or 0
        stream = host.generate("m", prompt="hello", max_tokens=4000, deadline_s=0.3)
        request = host.find(bytes.fromhex(stream.request_id))
        await until(lambda: request.log.has_text)
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: request.cancelled == "deadline")
        os.kill(pid, signal.SIGKILL)
        assert (await stream.result(timeout=10.0)).finish_reason == "deadline"


async def test_a_cancel_ends_although_the_worker_is_stopped(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r") as host:
        await host.load("m", "fake")
        pid = status(host, "m").pid or 0
        stream = host.generate("m", prompt="hello", max_tokens=400)
        try:
            os.kill(pid, signal.SIGSTOP)
            stream.cancel()
            result = await stream.result(timeout=CANCEL_GRACE_S + 3.0)
            assert result.finish_reason == "cancelled"
        finally:
            os.kill(pid, signal.SIGCONT)
        assert (await host.complete("m", prompt="next", max_tokens=5)).text == expected_text("next", 5)


async def test_two_hundred_clients_come_and_go(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r", front_door=True) as host:
        await host.load("m", "fake", env={"BULKHEAD_FAKE_RATE": "0"})
        for number in range(200):
            async with AsyncClient(short_tmp / "r") as client:
                if number % 20 == 0:
                    await client.complete("m", prompt="a", max_tokens=2)
        assert (await host.stats()).daemon["clients"] <= 64


async def test_a_worker_deaf_to_sigterm_is_killed(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r") as host:
        await host.load("m", "fake", env=misbehave("ignore_sigterm"))
        process = psutil.Process(status(host, "m").pid)
        await host.unload("m")
        assert not process.is_running()


async def test_a_balloon_costs_only_its_own_process(short_tmp: Path) -> None:
    """What is in force today: the size is seen. Nothing is stopped because of it."""
    async with fake_host(short_tmp / "r") as host:
        await host.load("big", "fake", env=misbehave("balloon:128"))
        await host.load("small", "fake")
        await until(lambda: status(host, "big").footprint > 128 * 2**20)
        assert status(host, "small").footprint < 64 * 2**20
        assert (await host.complete("small", prompt="a", max_tokens=5)).text == expected_text("a", 5)


async def test_a_full_disk_for_logs_stops_nobody(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r") as host:
        logs = host.run_dir / "logs"
        logs.rmdir()
        logs.write_text("in the way: no log can be opened")
        await host.load("m", "fake", env=misbehave("long_line:3"))
        assert (await host.complete("m", prompt="a", max_tokens=20)).text == expected_text("a", 20)


async def test_a_load_that_hangs_with_a_pulse_ends_by_its_deadline(short_tmp: Path) -> None:
    import msgspec
    from mlx_bulkhead.protocol.errors import LoadError

    limits = msgspec.structs.replace(QUICK, load_silence_s=0.5)
    async with fake_host(short_tmp / "r", limits=limits) as host:
        with pytest.raises(LoadError, match="no progress"):
            await host.load("m", "fake", env=misbehave("load_hangs"))
        assert status(host, "m").state == "FAILED"
        await host.load("m", "fake")


async def test_a_client_picks_up_what_a_lost_one_left(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r", front_door=True) as host:
        await host.load("m", "fake")
        async with AsyncClient(short_tmp / "r") as first:
            stream = first.generate("m", prompt="hello", max_tokens=60, detached=True)
            async for _ in stream:
                break
            request_id = stream.request_id
        del stream
        gc.collect()
        async with AsyncClient(short_tmp / "r") as second:
            result = await second.attach(request_id).result()
        assert result.text == expected_text("hello", 60)


async def test_a_stream_left_early_still_gives_its_result(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r") as host:
        await host.load("m", "fake")
        stream = host.generate("m", prompt="hello", max_tokens=400)
        async for _ in stream:
            break
        async with asyncio.timeout(10):
            assert (await stream.result()).finish_reason == "cancelled"
