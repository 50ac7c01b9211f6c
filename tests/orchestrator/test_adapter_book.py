"""Adapters at run time as the orchestrator keeps them: answers, silence, and what a death makes of both."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from mlx_bulkhead.orchestrator.adapters import AdapterBook
from mlx_bulkhead.orchestrator.policy.lifecycle import State
from mlx_bulkhead.protocol import codec
from mlx_bulkhead.protocol.codec import Message
from mlx_bulkhead.protocol.commands import AddAdapter, DropAdapter, Load
from mlx_bulkhead.protocol.errors import BadRequest, BulkheadError, ErrorCode, ModelUnloaded, WorkerCrashed
from mlx_bulkhead.protocol.events import AdaptersReply, Failed, Unloaded
from mlx_bulkhead.protocol.values import AdapterInfo, WorkerInfo

from tests.support.hosts import fake_host, status, until

ADD = AddAdapter("m", "a", "/a")
INFO = AdapterInfo("a", "lora", 4, 10, 1000)


class Model:
    """A model in a state, and the socket to its worker."""

    def __init__(self, state: State = State.READY, **adapters: str) -> None:
        self.load = Load("m", "/m", adapters=adapters)
        self.state = state
        self.sent: list[tuple[Message, bytes]] = []
        self.book = AdapterBook(self, self, self._send)  # pyright: ignore[reportArgumentType]

    async def wait_loaded(self) -> WorkerInfo:
        self.state = State.READY
        return WorkerInfo()

    def all(self) -> list[Any]:
        return []

    def _send(self, message: Message, request_id: bytes) -> str:
        self.sent.append((message, request_id))
        return "token"

    async def ask(self, change: AddAdapter | DropAdapter) -> asyncio.Task[list[AdapterInfo]]:
        """Begin a change; gives its caller once the worker has the command."""
        before = len(self.sent)
        caller = asyncio.ensure_future(self.book.change(change))
        await until(lambda: len(self.sent) > before or caller.done())
        return caller

    def answer(self, message: Message) -> bool:
        kind, request_id = codec.kind_of(type(message)), self.sent[-1][1]
        assert self.book.asked(request_id)
        done = self.book.answered(kind, request_id, codec.encode_body(message))
        assert not self.book.asked(request_id)
        return done


async def test_a_change_counts_once_the_worker_has_made_it() -> None:
    model = Model()
    caller = await model.ask(ADD)
    assert model.sent[0][0] == ADD
    assert model.book.load.adapters == {}
    assert model.answer(AdaptersReply("m", [INFO]))
    assert await caller == [INFO]
    assert model.book.load.adapters == {"a": "/a"}
    told = model.book.told_of(WorkerInfo(engine="text"))
    assert told == WorkerInfo(engine="text", adapters=[INFO])
    caller = await model.ask(DropAdapter("m", "a"))
    model.answer(AdaptersReply("m"))
    assert await caller == []
    assert model.book.load == model.load


async def test_a_refusal_and_junk_change_nothing() -> None:
    model = Model(b="/b")
    for message, code, words in (
        (Failed("load_failed", "adapter 'a': cannot read /a"), ErrorCode.LOAD_FAILED, "cannot read"),
        (Unloaded("m"), ErrorCode.PROTOCOL, "the worker answered with Unloaded"),
    ):
        caller = await model.ask(ADD)
        assert not model.answer(message)
        with pytest.raises(BulkheadError, match=words) as caught:
            await caller
        assert caught.value.code is code
    caller = await model.ask(ADD)
    model.book.answered(codec.kind_of(AdaptersReply), model.sent[-1][1], b"\xc1")
    with pytest.raises(BulkheadError, match="bad AdaptersReply"):
        await caller
    assert model.book.load.adapters == {"b": "/b"}


async def test_the_next_worker_in_charge_is_asked_what_the_last_did_not_answer() -> None:
    model = Model()
    caller = await model.ask(ADD)
    model.book.ask_again()
    assert model.sent[0] == model.sent[1]
    model.answer(AdaptersReply("m", [INFO]))
    assert await caller == [INFO]
    model.book.ask_again()
    assert len(model.sent) == 2


async def test_a_caller_that_gives_up_does_not_make_the_book_wrong() -> None:
    model = Model()
    caller = await model.ask(ADD)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert model.answer(AdaptersReply("m", [INFO]))
    assert model.book.load.adapters == {"a": "/a"}
    model.book.forget()
    assert model.book.load.adapters == {}


@pytest.mark.parametrize("state", [State.STOPPED, State.BACKOFF, State.FAILED])
async def test_without_a_worker_one_can_be_dropped_but_not_added(state: State) -> None:
    model = Model(state, a="/a", b="/b")
    assert await model.book.change(DropAdapter("m", "a")) == []
    assert model.sent == []
    assert model.book.load.adapters == {"b": "/b"}
    with pytest.raises(BadRequest, match="no adapter 'a', and the adapters of this model are b"):
        await model.book.change(DropAdapter("m", "a"))
    caller = await model.ask(ADD)
    assert model.state is State.READY, "it was loaded first"
    model.answer(AdaptersReply("m", [INFO]))
    assert await caller == [INFO]


async def test_a_worker_that_dies_before_it_answers(short_tmp: Path) -> None:
    """The fake worker never answers. The change is not tried again, and the next worker comes without it."""
    async with fake_host(short_tmp / "r") as host:
        await host.load("m", "fake")
        caller = asyncio.ensure_future(host.add_adapter("m", "a", "/a"))
        await asyncio.sleep(0)
        os.kill(status(host, "m").pid or 0, signal.SIGKILL)
        with pytest.raises(WorkerCrashed, match=r"SIGKILL.* before it answered; adapter 'a' is not added") as caught:
            await caller
        assert caught.value.retryable
        await host.load("m", "fake")
        caller = asyncio.ensure_future(host.add_adapter("m", "a", "/a"))
        await asyncio.sleep(0)
        await host.unload("m")
        with pytest.raises(ModelUnloaded, match="before it answered; adapter 'a' is not added"):
            await caller
