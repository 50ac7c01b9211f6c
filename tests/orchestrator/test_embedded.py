"""The embedded orchestrator's verbs: load, unload, cancel, deadline, queue, attach, shutdown."""

from __future__ import annotations

import asyncio
import os
import stat
import time
from pathlib import Path

import psutil
import pytest
from mlx_bulkhead.orchestrator.config import Config, ModelConfig
from mlx_bulkhead.protocol.errors import (
    BadRequest,
    BulkheadError,
    ModelUnloaded,
    QueueFull,
    RequestTimeout,
    ShuttingDown,
    UnknownModel,
)

from tests.support.hosts import QUICK, fake_host, misbehave, status, until, workers
from tests.support.misbehaving_worker import expected_text

pytestmark = pytest.mark.timeout(60)


async def test_ten_first_requests_load_a_configured_model_once(short_tmp: Path) -> None:
    config = Config(models={"m": ModelConfig("fake", env=misbehave("load_slow:0.5"))})
    async with fake_host(short_tmp / "r", config=config) as host:
        results = await asyncio.gather(*(host.complete("m", prompt=str(i), max_tokens=5) for i in range(10)))
        assert [r.text for r in results] == [expected_text(str(i), 5) for i in range(10)]
        assert status(host, "m").incarnation == 1


async def test_a_request_that_waits_for_a_load_says_so(short_tmp: Path) -> None:
    config = Config(models={"m": ModelConfig("fake", env=misbehave("load_slow:1"))})
    async with fake_host(short_tmp / "r", config=config) as host:
        stream = host.generate("m", prompt="a", max_tokens=5)
        phases = [snap.phase async for snap in stream.snapshots(progress=True)]
        assert phases.count("loading") > 2  # keep-alives come from a clock


async def test_a_step_that_takes_long_still_shows_life(short_tmp: Path) -> None:
    """Field report G05: the sign of life comes from a clock, not from what the worker gets done."""
    async with fake_host(short_tmp / "r") as host:
        await host.load("m", "fake", env=misbehave("hang:5"), stall_budget_s=600.0)
        phases: list[str] = []
        async for snap in host.generate("m", prompt="a", max_tokens=50).snapshots(progress=True):
            phases.append("" if snap.new_text else snap.phase)
            if phases[-4:] == ["decode"] * 4:
                break
        assert "" in phases  # there were tokens before it


async def test_preload_starts_without_a_request(short_tmp: Path) -> None:
    config = Config(models={"m": ModelConfig("fake", preload=True)})
    async with fake_host(short_tmp / "r", config=config) as host:
        await until(lambda: status(host, "m").state == "READY")


async def test_loading_again_is_a_no_op_and_other_options_are_refused_with_names(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r") as host:
        await host.load("m", "fake")
        pid = status(host, "m").pid
        await host.load("m", "fake")
        assert status(host, "m").pid == pid
        with pytest.raises(BadRequest, match=r"max_running.*unload it first"):
            await host.load("m", "fake", max_running=3)


async def test_unknown_models_are_refused_by_every_verb(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r") as host:
        with pytest.raises(UnknownModel, match="no model 'x'"):
            host.generate("x", prompt="a")
        for work in (host.unload("x"), host.restart("x"), host.stats("x")):
            with pytest.raises(UnknownModel):
                await work


async def test_unload_ends_streams_and_returns_when_the_process_is_gone(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r") as host:
        await host.load("m", "fake")
        pid = status(host, "m").pid or 0
        stream = host.generate("m", prompt="a", max_tokens=10_000)
        await anext(aiter(stream))
        assert await host.unload("m") is True
        assert not psutil.pid_exists(pid)
        with pytest.raises(ModelUnloaded):
            await stream.result()
        with pytest.raises(UnknownModel):
            host.generate("m", prompt="a")


async def test_unload_with_drain_lets_streams_finish(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r") as host:
        await host.load("m", "fake")
        stream = host.generate("m", prompt="a", max_tokens=50)
        done, _ = await asyncio.gather(stream.result(), host.unload("m", drain=True))
        assert done.text == expected_text("a", 50)


async def test_unload_of_a_load_in_progress_kills_it(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r") as host:
        load = asyncio.ensure_future(host.load("m", "fake", env=misbehave("load_slow:30")))
        await until(lambda: bool(host.model_statuses()) and status(host, "m").state == "LOADING")
        pid = status(host, "m").pid or 0
        await host.unload("m")
        assert not psutil.pid_exists(pid)
        with pytest.raises(ModelUnloaded):
            await load


async def test_a_worker_that_ignores_politeness_is_killed(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r") as host:
        await host.load("m", "fake", env=misbehave("ignore_sigterm"))
        begun = time.monotonic()
        await host.unload("m")
        assert time.monotonic() - begun < QUICK.polite_s + QUICK.term_s + 1.0


async def test_fifty_races_of_unload_and_generate(short_tmp: Path) -> None:
    """Each request ends once: with its text, or with a typed error. No process is left over."""
    config = Config(models={"m": ModelConfig("fake", env={"BULKHEAD_FAKE_RATE": "0"})})
    async with fake_host(short_tmp / "r", config=config) as host:
        ended = 0
        for i in range(50):
            request = asyncio.ensure_future(host.complete("m", prompt=str(i), max_tokens=3))
            await asyncio.sleep(0.001 * (i % 5))
            await host.unload("m")
            try:
                assert (await request).text == expected_text(str(i), 3)
            except (ModelUnloaded, BulkheadError):
                pass
            ended += 1
            assert len(workers()) <= 1
        assert ended == 50
        await host.unload("m")
        assert workers() == []


async def test_cancel_in_every_phase_is_idempotent(short_tmp: Path) -> None:
    config = Config(models={"m": ModelConfig("fake", env=misbehave("load_slow:1"))})
    async with fake_host(short_tmp / "r", config=config) as host:
        waiting = host.generate("m", prompt="a", max_tokens=10)
        waiting.cancel()
        waiting.cancel()
        result = await waiting.result()
        assert result.finish_reason == "cancelled"
        assert result.usage.completion_tokens == 0
        running = host.generate("m", prompt="b", max_tokens=10_000)
        async for snap in running:
            if snap.usage.completion_tokens >= 3:
                running.cancel()
                running.cancel()
        result = await running.result()
        assert result.finish_reason == "cancelled"
        assert expected_text("b", 10_000).startswith(result.text)
        running.cancel()  # long over: nothing happens


async def test_leaving_a_stream_early_cancels_it(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r") as host:
        await host.load("m", "fake")
        async with host.generate("m", prompt="a", max_tokens=10_000) as stream:
            async for _ in stream:
                break
        await until(lambda: status(host, "m").in_flight == 0)
        async for _ in host.generate("m", prompt="b", max_tokens=10_000):
            break
        await until(lambda: status(host, "m").in_flight == 0)


async def test_a_deadline_ends_a_request_with_what_it_has(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r") as host:
        await host.load("m", "fake")
        result = await host.complete("m", prompt="a", max_tokens=10_000, deadline_s=0.3)
        assert result.finish_reason == "deadline"
        assert result.text
        assert expected_text("a", 10_000).startswith(result.text)


async def test_the_queue_is_bounded_and_says_its_numbers(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r") as host:
        await host.load("m", "fake", max_running=2, max_queued=1)
        streams = [host.generate("m", prompt=str(i), max_tokens=1000) for i in range(3)]
        with pytest.raises(QueueFull, match="max_running 2 and max_queued 1"):
            host.generate("m", prompt="one too many")
        for stream in streams:
            stream.cancel()
            await stream.result()
        assert (await host.complete("m", prompt="now", max_tokens=2)).text == expected_text("now", 2)


async def test_attach_gives_the_whole_text_to_a_second_reader_and_after_the_end(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r") as host:
        await host.load("m", "fake")
        stream = host.generate("m", prompt="a", max_tokens=100, detached=True)
        async for snap in stream:
            if snap.usage.completion_tokens > 20:
                break
        second = host.attach(stream.request_id)
        assert (await second.result()).text == expected_text("a", 100)
        assert (await host.attach(stream.request_id).result()).text == expected_text("a", 100)
        with pytest.raises(BadRequest, match="no request"):
            host.attach("00" * 16)
        with pytest.raises(BadRequest):
            host.attach("xyz")


async def test_a_result_may_be_awaited_for_a_while_only(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r") as host:
        await host.load("m", "fake")
        stream = host.generate("m", prompt="a", max_tokens=60)
        with pytest.raises(RequestTimeout):
            await stream.result(timeout=0.05)
        assert (await stream.result()).text == expected_text("a", 60)


async def test_closing_ends_every_request_and_every_worker(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r") as host:
        for name in ("a", "b", "c"):
            await host.load(name, "fake")
        streams = [host.generate(n, prompt="x", max_tokens=10_000) for n in ("a", "b", "c")]
        pids = [status(host, n).pid or 0 for n in ("a", "b", "c")]
        begun = time.monotonic()
        await host.close()
        assert time.monotonic() - begun < 5.0
        for stream in streams:
            with pytest.raises(ShuttingDown):
                await stream.result()
        assert not any(psutil.pid_exists(pid) for pid in pids)
        with pytest.raises(ShuttingDown):
            host.generate("a", prompt="x")


async def test_the_host_is_private_and_named(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r") as host:
        await host.load("my model", "fake")
        assert stat.S_IMODE(os.stat(host.run_dir).st_mode) == 0o700
        for entry in host.run_dir.iterdir():
            if entry.is_socket():
                assert stat.S_IMODE(entry.stat().st_mode) == 0o600
        command = psutil.Process(status(host, "my model").pid or 0).cmdline()
        assert "--name=my model" in command
        assert f"--parent={os.getpid()}" in command


async def test_worker_logs_are_kept(short_tmp: Path) -> None:
    from mlx_bulkhead.orchestrator.run_dir import log_path

    async with fake_host(short_tmp / "r") as host:
        await host.load("m", "fake", env=misbehave("long_line:1"))
        await host.complete("m", prompt="a", max_tokens=5)
        path = log_path(host.run_dir, "m")
        await until(lambda: path.exists() and "[cut]" in path.read_text())
        assert path.stat().st_size < 100_000
