"""What callers get wrong, and what their host does to us: each a typed error, and nothing broken or lost by it."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from mlx_bulkhead.orchestrator.embedded import Orchestrator
from mlx_bulkhead.protocol import codec, limits
from mlx_bulkhead.protocol.commands import Generate
from mlx_bulkhead.protocol.errors import BadRequest, BulkheadError, ProtocolMismatch, TooLarge, WorkerCrashed
from mlx_bulkhead.protocol.events import Done

from tests.support.hosts import MISBEHAVING, fake_host, misbehave, status, until
from tests.support.misbehaving_worker import expected_text

pytestmark = pytest.mark.timeout(60)


async def test_verbs_before_the_start_say_what_to_do(short_tmp: Path) -> None:
    host = Orchestrator(run_dir=short_tmp / "r")
    for verb in (lambda: host.generate("m", prompt="a"), lambda: host.attach("00" * 16), lambda: host.run_dir):
        with pytest.raises(BulkheadError):
            verb()
    for work in (host.load("m", "fake"), host.stats()):
        with pytest.raises(BadRequest, match="async with"):
            await work
    await host.close()  # nothing to close


async def test_an_orchestrator_is_started_once(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r") as host:
        with pytest.raises(BadRequest, match="started before"):
            await host.__aenter__()
        await host.load("m", "fake")
    with pytest.raises(BadRequest, match="started before"):
        await host.__aenter__()


async def test_a_start_that_fails_holds_nothing(short_tmp: Path) -> None:
    (short_tmp / "r" / "daemon.sock").mkdir(parents=True)
    (short_tmp / "r" / "lock").touch()
    with pytest.raises(BadRequest, match="cannot listen"):
        await Orchestrator(run_dir=short_tmp / "r", front_door=True).__aenter__()
    (short_tmp / "r" / "daemon.sock").rmdir()
    async with fake_host(short_tmp / "r", front_door=True) as host:
        await host.load("m", "fake")


@pytest.mark.parametrize("kind", ["file", "below a file", "not ours", "too long", "nul"])
async def test_a_run_directory_that_cannot_be_used_is_refused_and_left_alone(short_tmp: Path, kind: str) -> None:
    (short_tmp / "file").write_text("mine")
    (short_tmp / "mine").mkdir(mode=0o755)
    (short_tmp / "mine" / "workers").mkdir()
    (short_tmp / "mine" / "workers" / "staff.json").write_text("{}")
    path = {
        "file": str(short_tmp / "file"),
        "below a file": str(short_tmp / "file" / "x"),
        "not ours": str(short_tmp / "mine"),
        "too long": str(short_tmp / ("y" * 300)),
        "nul": str(short_tmp / "a") + "\0b",
    }[kind]
    with pytest.raises(BadRequest):
        await Orchestrator(run_dir=path).__aenter__()
    assert (short_tmp / "file").read_text() == "mine"
    assert (short_tmp / "mine" / "workers" / "staff.json").exists()
    assert (short_tmp / "mine").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("name", ["-x", "--help", "-1", "a b/../c", "ž" * 200])
async def test_any_name_is_a_name(short_tmp: Path, name: str) -> None:
    async with fake_host(short_tmp / "r") as host:
        await host.load(name, "-model")
        assert (await host.complete(name, prompt="a", max_tokens=2)).text == expected_text("a", 2)


async def test_a_progress_callback_that_raises_stops_no_load(short_tmp: Path) -> None:
    def bad(_: object) -> None:
        raise RuntimeError("the caller's fault")

    async with fake_host(short_tmp / "r") as host:
        await host.load("m", "fake", env=misbehave("load_slow:0.3"), on_progress=bad)
        assert status(host, "m").state == "READY"


async def test_a_request_that_only_we_make_too_large_is_refused(short_tmp: Path) -> None:
    """The client's frame fits; with what we add to it, it would not."""
    async with fake_host(short_tmp / "r") as host:
        await host.load("m", "fake")
        spare = limits.MAX_FRAME_BYTES - len(codec.encode_body(Generate("m", prompt=""))) - 4
        stream = host.follow(host.start(codec.new_request_id(), Generate("m", prompt="a" * spare, max_tokens=None)))
        stream.cancel()
        await stream.result()
        too_large = Generate("m", prompt="a" * (limits.MAX_FRAME_BYTES - 10))
        request = host.start(codec.new_request_id(), too_large)
        with pytest.raises(TooLarge):
            await host.follow(request).result()
        assert status(host, "m").in_flight == 0
        assert (await host.complete("m", prompt="b", max_tokens=2)).text == expected_text("b", 2)


async def test_leaving_an_attached_stream_is_not_the_owners_end(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r") as host:
        await host.load("m", "fake")
        owner = host.generate("m", prompt="a", max_tokens=60)
        async for _ in host.attach(owner.request_id):
            break
        assert (await owner.result()).text == expected_text("a", 60)


async def test_a_stream_collected_in_another_thread_is_cancelled_on_the_loop(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r") as host:
        await host.load("m", "fake")
        holder = [host.generate("m", prompt="a", max_tokens=100_000)]
        await until(lambda: status(host, "m").in_flight == 1)

        def drop() -> None:
            holder.clear()
            gc.collect()

        thread = threading.Thread(target=drop)
        thread.start()
        thread.join()
        await until(lambda: status(host, "m").in_flight == 0)


async def test_a_cancelled_task_cancels_its_request(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r") as host:
        await host.load("m", "fake")
        task = asyncio.ensure_future(host.complete("m", prompt="a", max_tokens=100_000))
        await until(lambda: status(host, "m").in_flight == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: status(host, "m").in_flight == 0)


async def test_a_load_during_a_drain_or_an_unload_loads_afresh(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r") as host:
        await host.load("m", "fake")
        first = status(host, "m").pid
        running = host.generate("m", prompt="a", max_tokens=60)
        drain = asyncio.ensure_future(host.unload("m", drain=True))
        await until(lambda: status(host, "m").state == "DRAINING")
        await host.load("m", "fake", max_running=3)
        await drain
        assert (await running.result()).text == expected_text("a", 60)
        assert status(host, "m").pid != first
        unload = asyncio.ensure_future(host.unload("m"))
        await asyncio.sleep(0)  # it has been asked for
        await host.load("m", "fake", max_running=4)
        await unload
        assert (await host.complete("m", prompt="b", max_tokens=2)).text == expected_text("b", 2)


async def test_on_crash_fail_ends_a_request_that_dies_before_it_begins(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r") as host:
        await host.load("m", "fake", env=misbehave("die_on:POISON"))
        with pytest.raises(WorkerCrashed):
            await host.complete("m", prompt="POISON", max_tokens=5, on_crash="fail")
        assert status(host, "m").crashes == 1
        assert (await host.complete("m", prompt="fine", max_tokens=2)).text == expected_text("fine", 2)


async def test_bad_prompts_do_not_fail_the_model_or_the_innocent(short_tmp: Path) -> None:
    """More of them than the model may be restarted for: deaths of a request on trial are the request's."""
    async with fake_host(short_tmp / "r") as host:
        await host.load("m", "fake", env=misbehave("die_on:POISON"))
        poisons = [host.generate("m", prompt=f"POISON {i}", max_tokens=5) for i in range(5)]
        fine = host.generate("m", prompt="fine", max_tokens=20)
        for poison in poisons:
            with pytest.raises(WorkerCrashed, match="Two workers died"):
                await poison.result()
        assert (await fine.result()).text == expected_text("fine", 20)
        assert status(host, "m").state == "READY"


async def test_close_goes_on_whoever_is_cancelled_in_it(short_tmp: Path) -> None:
    host = Orchestrator(run_dir=short_tmp / "r", worker_command=MISBEHAVING)
    await host.__aenter__()
    await host.load("m", "fake", env=misbehave("ignore_sigterm"))
    first = asyncio.ensure_future(host.close())
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await host.close()  # waits for the same end
    async with fake_host(short_tmp / "r"):
        pass


async def test_a_junk_terminal_frame_is_an_error_and_not_a_silence(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r") as host:
        await host.load("m", "fake")
        stream = host.generate("m", prompt="a", max_tokens=1000)
        await anext(aiter(stream.snapshots()))
        raw = bytes.fromhex(stream.request_id)
        done = codec.kind_of(Done)
        host._table.worker_event("m", done, raw, b"\x81\xa4type")
        for _ in range(2):
            with pytest.raises(ProtocolMismatch):
                await stream.result()


_FORKING_PARENT = """
import asyncio, os, sys
from mlx_bulkhead.orchestrator.embedded import Orchestrator

async def main():
    async with Orchestrator(run_dir=sys.argv[1], worker_command=sys.argv[2:]) as host:
        await host.load("m", "fake")
        if os.fork() == 0:  # as multiprocessing does, in a parent app
            sys.stdin.read()
            os._exit(0)
        print(host.model_statuses()[0].pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_fork_of_the_parent_app_keeps_no_worker_alive(short_tmp: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _FORKING_PARENT, str(short_tmp / "r"), *MISBEHAVING],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdin is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        os.kill(parent.pid, signal.SIGKILL)
        worker.wait(5)
        parent.stdin.close()  # now the fork may go, too
