"""The asyncio client against a real ROUTER socket: the same behaviour as the blocking one, on one loop."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from mlx_bulkhead.orchestrator.async_client import AsyncClient
from mlx_bulkhead.protocol.commands import Attach, Cancel, Generate, Load, Models, Stats
from mlx_bulkhead.protocol.errors import BadRequest, Disconnected, QueueFull, RequestTimeout
from mlx_bulkhead.protocol.events import (
    Accepted,
    Failed,
    Loaded,
    LoadProgress,
    Progress,
    Snapshot,
    StatsReply,
)
from mlx_bulkhead.protocol.values import ModelStatus, WorkerInfo

from tests.support.fake_daemon import FakeDaemon, Received, accepted_and, answer_with, done

TEXT = "Der Hahn ist tot, café 👩‍👩‍👧, 漢字."


@pytest.fixture
def daemon(short_tmp: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(short_tmp) as fake:
        yield fake


@pytest.fixture
async def client(daemon: FakeDaemon, short_tmp: Path) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(short_tmp) as connected:
        yield connected


async def expect(daemon: FakeDaemon, kind: type) -> Received:
    return await asyncio.to_thread(daemon.expect, kind)


async def test_verbs(daemon: FakeDaemon, client: AsyncClient) -> None:
    daemon.models = [ModelStatus(name="a", state="READY")]
    daemon.answers[Load] = lambda r: r.reply(LoadProgress("weights", 1, 2), Loaded("a", WorkerInfo(engine="text")))
    daemon.answers[Stats] = lambda r: r.reply(StatsReply(daemon={"clients": 1.0}))
    seen: list[LoadProgress] = []
    assert (await client.load("a", "x/y", on_progress=seen.append)).engine == "text"
    assert seen == [LoadProgress("weights", 1, 2)]
    assert await client.models() == daemon.models
    assert (await client.stats()).daemon == {"clients": 1.0}
    with pytest.raises(BadRequest):
        await client.unload("")


async def test_streams(daemon: FakeDaemon, client: AsyncClient) -> None:
    daemon.answers[Generate] = answer_with(TEXT)
    stream = client.generate("m", prompt="hi")
    snaps = [snap async for snap in stream]
    assert "".join(snap.new_text for snap in snaps) == snaps[-1].text == TEXT
    assert (await stream.result()).text == TEXT
    assert (await client.complete("m", prompt="hi")).text == TEXT


async def test_many_streams_at_once(daemon: FakeDaemon, client: AsyncClient) -> None:
    daemon.answers[Generate] = answer_with(TEXT * 20)
    results = await asyncio.gather(*(client.complete("m", prompt="hi") for _ in range(100)))
    assert {result.text for result in results} == {TEXT * 20}


async def test_progress_only_for_those_who_ask(daemon: FakeDaemon, client: AsyncClient) -> None:
    daemon.answers[Generate] = lambda r: r.reply(
        Accepted(), Progress("prefill", 5, 9), Snapshot(0, 0, "a", [1]), done("a")
    )
    assert [snap.new_text async for snap in client.generate("m", prompt="hi")] == ["a"]
    phases = [snap.phase async for snap in client.generate("m", prompt="hi").snapshots()]
    assert phases == ["prefill", "decode"]


async def test_errors_are_typed(daemon: FakeDaemon, client: AsyncClient) -> None:
    daemon.answers[Generate] = lambda r: r.reply(Failed("queue_full", "256 wait"))
    with pytest.raises(QueueFull):
        await client.complete("m", prompt="hi")
    with pytest.raises(QueueFull):
        async for _ in client.generate("m", prompt="hi"):
            pass


async def test_cancel_and_leaving_early(daemon: FakeDaemon, client: AsyncClient) -> None:
    stream = client.generate("m", prompt="hi")
    request = await expect(daemon, Generate)
    request.reply(Accepted(), Snapshot(0, 0, "ab"))
    assert (await anext(aiter(stream))).text == "ab"
    stream.cancel()
    stream.cancel()
    assert (await expect(daemon, Cancel)).request_id == request.request_id
    request.reply(done("ab", reason="cancelled"))
    assert (await stream.result()).finish_reason == "cancelled"
    await expect(daemon, Cancel)

    async with client.generate("m", prompt="hi"):
        left = await expect(daemon, Generate)
    assert (await expect(daemon, Cancel)).request_id == left.request_id


async def test_a_forgotten_stream_and_a_cancelled_task_cancel(daemon: FakeDaemon, client: AsyncClient) -> None:
    client.generate("m", prompt="hi")
    gc.collect()
    forgotten = await expect(daemon, Generate)
    assert (await expect(daemon, Cancel)).request_id == forgotten.request_id

    task = asyncio.create_task(client.complete("m", prompt="hi"))
    request = await expect(daemon, Generate)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await expect(daemon, Cancel)).request_id == request.request_id


async def test_a_late_result_times_out_and_goes_on(daemon: FakeDaemon, client: AsyncClient) -> None:
    stream = client.generate("m", prompt="hi")
    request = await expect(daemon, Generate)
    with pytest.raises(RequestTimeout):
        await stream.result(timeout=0.05)
    request.reply(Accepted(), Snapshot(0, 0, "ok"), done("ok"))
    assert (await stream.result()).text == "ok"


async def test_attach(daemon: FakeDaemon, client: AsyncClient) -> None:
    daemon.answers[Attach] = answer_with(TEXT)
    assert (await client.attach("ab" * 16).result()).text == TEXT
    with pytest.raises(BadRequest):
        client.attach("ab")


async def test_no_daemon(short_tmp: Path) -> None:
    with pytest.raises(Disconnected, match="bulkhead serve"):
        async with AsyncClient(short_tmp):
            pass
    client = AsyncClient(short_tmp)
    with pytest.raises(Disconnected):
        await client.complete("m", prompt="hi")
    await client.aclose()
    with pytest.raises(Disconnected, match="closed"):
        await client.models()


async def test_the_end_of_the_daemon_ends_its_streams(daemon: FakeDaemon, client: AsyncClient) -> None:
    stream = client.generate("m", prompt="hi")
    (await expect(daemon, Generate)).reply(*accepted_and(TEXT))
    assert await anext(aiter(stream))
    await asyncio.to_thread(daemon.close)
    async with asyncio.timeout(3):
        with pytest.raises(Disconnected):
            await stream.result()


async def test_a_lost_connection_is_taken_up_again(daemon: FakeDaemon, client: AsyncClient) -> None:
    stream = client.generate("m", prompt="hi")
    request = await expect(daemon, Generate)
    request.reply(Accepted(), Snapshot(0, 0, "abc", [1]))
    assert (await anext(aiter(stream))).text == "abc"
    await asyncio.to_thread(daemon.rebind)
    attach = await expect(daemon, Attach)
    assert attach.message == Attach(request=request.request_id)
    attach.reply(Accepted(), Snapshot(1, 0, "abcde", [1, 2]), done("abcde"))
    assert [snap.new_text async for snap in stream] == ["de"]


async def test_silence_is_probed(daemon: FakeDaemon, short_tmp: Path) -> None:
    async with AsyncClient(short_tmp, silence=0.2) as client:
        stream = client.generate("m", prompt="hi")
        (await expect(daemon, Generate)).reply(Accepted(), Snapshot(0, 0, "a"))
        (await expect(daemon, Attach)).reply(Accepted(), Snapshot(1, 0, "ab"), done("ab"))
        assert (await stream.result()).text == "ab"
        assert daemon.count(Models) >= 2


async def test_close_fails_who_waits_and_cancels(daemon: FakeDaemon, short_tmp: Path) -> None:
    client = AsyncClient(short_tmp)
    task = asyncio.create_task(client.complete("m", prompt="hi"))
    request = await expect(daemon, Generate)
    await client.aclose()
    await client.aclose()
    with pytest.raises(Disconnected, match="closed"):
        await task
    assert (await expect(daemon, Cancel)).request_id == request.request_id


async def test_a_second_task_that_reads_a_stream_is_told_so(daemon: FakeDaemon, client: AsyncClient) -> None:
    stream = client.generate("m", prompt="hi")
    received = await expect(daemon, Generate)
    first = asyncio.create_task(stream.result())
    await asyncio.sleep(0.05)
    with pytest.raises(RuntimeError, match="another task is reading"):
        await stream.result()
    received.reply(*accepted_and(TEXT), done(TEXT))
    assert (await first).text == TEXT


async def test_closing_a_stream_wakes_the_task_that_reads_it(daemon: FakeDaemon, client: AsyncClient) -> None:
    stream = client.generate("m", prompt="hi")
    await expect(daemon, Generate)
    reader = asyncio.create_task(stream.result())
    await asyncio.sleep(0.05)
    stream.close()
    with pytest.raises(Disconnected, match="closed before its end"):
        await asyncio.wait_for(reader, 5)
