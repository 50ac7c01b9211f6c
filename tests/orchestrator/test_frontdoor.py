"""The socket for many clients, met with raw frames: junk, strangers, slow ones, dead ones."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import zmq
from mlx_bulkhead.orchestrator.embedded import Orchestrator
from mlx_bulkhead.orchestrator.run_dir import socket_path
from mlx_bulkhead.orchestrator.views import Assembler
from mlx_bulkhead.protocol import codec
from mlx_bulkhead.protocol.codec import Message
from mlx_bulkhead.protocol.commands import Attach, Cancel, Generate, Load, Models, Stats, Unload
from mlx_bulkhead.protocol.events import (
    Accepted,
    Done,
    Failed,
    Loaded,
    LoadFailed,
    ModelsReply,
    Snapshot,
    StatsReply,
    Unloaded,
)

from tests.support.hosts import QUICK, fake_host, misbehave, status, until
from tests.support.misbehaving_worker import expected_text

pytestmark = pytest.mark.timeout(60)


class Raw:
    """A client of nothing but zmq."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket

    def send(self, message: Message, request_id: bytes | None = None) -> bytes:
        request_id = request_id or codec.new_request_id()
        self.socket.send_multipart(codec.encode(message, request_id))
        return request_id

    async def next(self, timeout_s: float = 10.0) -> codec.Frame:
        async with asyncio.timeout(timeout_s):
            while not self.socket.poll(0):
                await asyncio.sleep(0.002)
        return codec.decode(self.socket.recv_multipart())

    async def ask(self, message: Message) -> Message:
        request_id = self.send(message)
        while True:
            frame = await self.next()
            if frame.request_id == request_id:
                return frame.message

    async def text(self, message: Message, request_id: bytes | None = None) -> Assembler:
        """Follow a stream to its end."""
        request_id = self.send(message, request_id)
        assembler = Assembler(request_id)
        while not assembler.closed:
            frame = await self.next()
            if frame.request_id == request_id:
                assembler.feed(frame.message)  # pyright: ignore[reportArgumentType]
        return assembler


@contextmanager
def raw(host: Orchestrator, *, rcvhwm: int = 1000) -> Iterator[Raw]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.rcvhwm = rcvhwm
    socket.connect(f"ipc://{socket_path(host.run_dir, 'daemon.sock')}")
    try:
        yield Raw(socket)
    finally:
        socket.close()
        context.term()


async def test_a_whole_session_in_frames(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r", front_door=True) as host:
        with raw(host) as client:
            assert isinstance(await client.ask(Models()), ModelsReply)
            request_id = client.send(Load("m", "fake", env=misbehave("load_slow:0.3")))
            kinds: list[str] = []
            while not kinds or kinds[-1] != "Loaded":
                frame = await client.next()
                assert frame.request_id == request_id
                kinds.append(type(frame.message).__name__)
            assert "LoadProgress" in kinds
            got = await client.text(Generate("m", prompt="a", max_tokens=20))
            assert got.text == expected_text("a", 20)
            stats = await client.ask(Stats("m"))
            assert isinstance(stats, StatsReply)
            assert stats.models[0].state == "READY"
            assert stats.daemon["clients"] == 1.0
            assert await client.ask(Unload("m")) == Unloaded("m")


@pytest.mark.parametrize(
    "request_",
    [
        Generate("m"),
        Generate("m", prompt=""),
        Generate("m", prompt="a", tokens=[1]),
        Generate("m", prompt="a", max_tokens=0),
        Generate("m", prompt="a", max_tokens=2**40),
        Generate("m", prompt="a", temperature=float("nan")),
        Generate("m", prompt="a", top_p=0.0),
        Generate("m", prompt="a", seed=-1),
        Generate("m", prompt="a", stop=["x"] * 10_000),
        Generate("m", prompt="a", resume_tokens=[1]),
        Generate("m", prompt="a", max_tokens="10"),  # pyright: ignore[reportArgumentType]
        Generate("m", prompt="a", max_tokens=True),
        Generate("m", prompt="a", stop=5),  # pyright: ignore[reportArgumentType]
        Generate("m", messages=[]),
    ],
    ids=lambda g: str(g)[:0] or "bad",
)
async def test_a_bad_request_fails_alone_and_the_next_is_served(short_tmp: Path, request_: Generate) -> None:
    async with fake_host(short_tmp / "r", front_door=True) as host:
        await host.load("m", "fake")
        with raw(host) as client:
            answer = await client.ask(request_)
            assert isinstance(answer, Failed)
            assert answer.code == "bad_request"
            assert len(answer.message) > 10
            assert (await client.text(Generate("m", prompt="a", max_tokens=3))).text == expected_text("a", 3)


async def test_unknown_models_and_ids(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r", front_door=True) as host:
        with raw(host) as client:
            for message in (Generate("nope", prompt="a"), Unload("nope"), Stats("nope")):
                answer = await client.ask(message)
                assert isinstance(answer, Failed)
                assert answer.code == "unknown_model"
            answer = await client.ask(Attach(b"\x07" * 16))
            assert isinstance(answer, Failed)
            client.send(Cancel())  # an unknown id: nothing happens
            answer = await client.ask(Load("m", ""))
            assert isinstance(answer, LoadFailed)
            assert isinstance(await client.ask(Models()), ModelsReply)


async def test_junk_never_ends_the_daemon(short_tmp: Path) -> None:
    """Random bytes, truncated and mutated frames, any number of parts; then a good request is served."""
    dice = random.Random(7)
    async with fake_host(short_tmp / "r", front_door=True) as host:
        await host.load("m", "fake", env={"BULKHEAD_FAKE_RATE": "0"})
        good = codec.encode(Generate("m", prompt="a", max_tokens=3), bytes(16))
        with raw(host) as client:
            for i in range(20_000):
                match i % 4:
                    case 0:
                        parts = [dice.randbytes(dice.randrange(40)) for _ in range(dice.randrange(1, 5))]
                    case 1:
                        parts = [good[0], good[1][: dice.randrange(len(good[1]))]]
                    case 2:
                        body = bytearray(good[1])
                        body[dice.randrange(len(body))] ^= 1 << dice.randrange(8)
                        parts = [codec.head_of(good[0][0], dice.randbytes(16)), bytes(body)]
                    case _:
                        parts = [bytes((dice.randrange(256),)) + dice.randbytes(16), dice.randbytes(30)]
                while not client.socket.poll(0, zmq.POLLOUT):
                    await asyncio.sleep(0)
                client.socket.send_multipart(parts)
                if i % 100 == 0:
                    while client.socket.poll(0):
                        client.socket.recv_multipart()
                    await asyncio.sleep(0)
        with raw(host) as client:
            await until(lambda: status(host, "m").in_flight == 0)  # some mutants were good requests
            got = await client.text(Generate("m", prompt="b", max_tokens=3))
            assert got.error is None
            assert got.text == expected_text("b", 3)
            reply = await host.stats()
            assert reply.daemon["client_frames_refused"] > 1000


async def test_a_frame_over_the_limit_costs_its_sender_the_connection_and_nobody_else(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r", front_door=True) as host:
        await host.load("m", "fake")
        with raw(host) as client, raw(host) as other:
            client.socket.send_multipart([codec.head_of(2, bytes(16)), bytes(64 * 2**20 + 100)])
            assert (await other.text(Generate("m", prompt="a", max_tokens=3))).text == expected_text("a", 3)


async def test_a_slow_client_gets_everything_merged_and_holds_up_nobody(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r", front_door=True) as host:
        await host.load("m", "fake", env={"BULKHEAD_FAKE_RATE": "0"})
        with raw(host, rcvhwm=1) as slow, raw(host) as quick:
            slow_id = slow.send(Generate("m", prompt="slow", max_tokens=20_000))
            assert (await quick.text(Generate("m", prompt="quick", max_tokens=50))).text == expected_text("quick", 50)
            await until(lambda: status(host, "m").in_flight == 0)  # long done; nothing of it was read
            assembler = Assembler(slow_id)
            frames = 0
            while not assembler.closed:
                frame = await slow.next()
                frames += 1
                assembler.feed(frame.message)  # pyright: ignore[reportArgumentType]
            assert assembler.text == expected_text("slow", 20_000)
            assert assembler.result is not None
            assert assembler.result.usage.completion_tokens == 20_000


_KILLED_CLIENT = """
import sys, zmq
from mlx_bulkhead.protocol import codec
from mlx_bulkhead.protocol.commands import Generate
socket = zmq.Context().socket(zmq.DEALER)
socket.connect("ipc://" + sys.argv[1])
for detached in (False, True):
    request = Generate("m", prompt="x", max_tokens=100000, detached=detached)
    socket.send_multipart(codec.encode(request, bytes([1 + detached] * 16)))
for _ in range(6):
    socket.recv_multipart()
print("streaming", flush=True)
sys.stdin.read()
"""


async def test_a_killed_clients_requests_are_cancelled_within_a_second_unless_detached(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r", front_door=True) as host:
        await host.load("m", "fake", env={"BULKHEAD_FAKE_RATE": "50"})
        path = socket_path(host.run_dir, "daemon.sock")
        with subprocess.Popen(
            [sys.executable, "-c", _KILLED_CLIENT, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as client:
            assert client.stdout is not None
            await asyncio.to_thread(client.stdout.readline)
            assert status(host, "m").in_flight == 2
            client.kill()
            killed = time.monotonic()
            await until(lambda: status(host, "m").in_flight == 1, 5.0)
            assert time.monotonic() - killed < 1.0
        with raw(host) as other:
            attach = other.send(Attach(bytes([2] * 16)))
            frame = await other.next()
            assert frame.request_id == attach
            assert isinstance(frame.message, Accepted)
            other.send(Cancel(), attach)
            while not isinstance(frame.message, Done):
                frame = await other.next()
        await until(lambda: status(host, "m").in_flight == 0)


async def test_clients_are_bounded(short_tmp: Path) -> None:
    import msgspec

    limits = msgspec.structs.replace(QUICK, max_clients=1)
    async with fake_host(short_tmp / "r", front_door=True, limits=limits) as host:
        with raw(host) as first, raw(host) as second:
            assert isinstance(await first.ask(Models()), ModelsReply)
            answer = await second.ask(Models())
            assert isinstance(answer, Failed)
            assert "limit is 1" in answer.message


async def test_large_prompts_do_not_stay_in_the_orchestrator(short_tmp: Path) -> None:
    process = psutil.Process(os.getpid())
    async with fake_host(short_tmp / "r", front_door=True) as host:
        await host.load("m", "fake", env={"BULKHEAD_FAKE_RATE": "0"})
        with raw(host) as client:
            await client.text(Generate("m", prompt="a" * 10, max_tokens=2))
            before = process.memory_info().rss
            for i in range(12):
                await client.text(Generate("m", prompt=str(i) * 5_000_000, max_tokens=2))
            assert process.memory_info().rss - before < 80 * 2**20


async def test_the_stream_on_the_wire_is_linear(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r", front_door=True) as host:
        await host.load("m", "fake", env={"BULKHEAD_FAKE_RATE": "0"})
        sizes: list[float] = []
        with raw(host) as client:
            for tokens in (1000, 8000):
                request_id = client.send(Generate("m", prompt="a", max_tokens=tokens))
                total = 0
                while True:
                    frame = await client.next()
                    assert frame.request_id == request_id
                    if isinstance(frame.message, Snapshot):
                        total += 17 + len(codec.encode_body(frame.message))
                    if isinstance(frame.message, Done):
                        break
                sizes.append(total / tokens)
        assert sizes[1] < 2.0 * sizes[0]  # eight times the tokens; how many share a frame differs a little


async def test_loaded_names_what_is_in_force(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r", front_door=True) as host:
        with raw(host) as client:
            request_id = client.send(Load("m" * 200, "fake"))
            while True:
                frame = await client.next()
                assert frame.request_id == request_id
                if isinstance(frame.message, Loaded):
                    assert frame.message.info.engine
                    break
