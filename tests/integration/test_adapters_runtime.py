"""Adapters that come and go at run time through the whole chain, and what the next worker makes of them."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlx_bulkhead import AsyncClient, BadRequest, Client, LoadError, Orchestrator, UnknownModel
from tests.integration.conftest import Daemon
from tests.support.hosts import status, until
from tests.support.tiny_adapters import make_adapter

from .test_adapters import ASK, kill

SHORT: dict[str, Any] = {**ASK, "max_tokens": 20}


def adapters_of(client: Client) -> list[str]:
    [model] = [m for m in client.models() if m.name == "tiny"]
    return [] if model.info is None else [info.name for info in model.info.adapters]


def workers() -> list[psutil.Process]:
    """Those of an orchestrator in this process."""
    return [child for child in psutil.Process().children() if "mlx_bulkhead.worker" in child.cmdline()]


def test_n01_n02_on_off_on_beside_a_stream(own_daemon: Daemon, tiny_model: Path, tmp_path: Path) -> None:
    """Field reports N01 (chosen per request, no reload) and N02 (running requests go on undisturbed)."""
    a = make_adapter(tmp_path / "a", tiny_model, seed=1)
    with own_daemon.client() as client, own_daemon.client() as other:
        client.load("tiny", tiny_model)
        pid = client.models()[0].pid
        whole = client.complete("tiny", **ASK)
        stream = client.generate("tiny", **ASK)
        next(snap for snap in stream if len(snap.tokens) > 0)
        info = other.add_adapter("tiny", "a", a)
        assert (info.name, info.kind, info.rank, info.default) == ("a", "lora", 4, False)
        assert other.add_adapter("tiny", "a", a) == info, "the same once more is no mistake"
        assert adapters_of(client) == ["a"]
        answers = [other.complete("tiny", adapter=name, **ASK) for name in ("a", "base", "a")]
        assert [answer.adapter for answer in answers] == ["a", "", "a"]
        assert answers[0].tokens == answers[2].tokens != whole.tokens
        assert answers[1].tokens == whole.tokens
        assert stream.result().tokens == whole.tokens
        assert client.models()[0].pid == pid
        client.drop_adapter("tiny", "a")
        assert adapters_of(client) == []
        with pytest.raises(BadRequest, match="adapter is 'a', and the adapters of this model are none"):
            client.complete("tiny", adapter="a", **SHORT)


def test_after_a_crash_the_next_worker_has_what_was_added(
    own_daemon: Daemon, tiny_model: Path, tmp_path: Path
) -> None:
    a, b = (make_adapter(tmp_path / name, tiny_model, seed=seed) for name, seed in (("a", 1), ("b", 2)))
    with own_daemon.client() as client:
        client.load("tiny", tiny_model, adapters={"b": b})
        client.add_adapter("tiny", "a", a)
        client.drop_adapter("tiny", "b")
        whole = client.complete("tiny", adapter="a", **ASK)
        stream = client.generate("tiny", adapter="a", **ASK)
        next(snap for snap in stream if len(snap.tokens) > 0)
        kill(client)
        result = stream.result()
        assert result.tokens == whole.tokens
        assert (result.adapter, result.restarts) == ("a", 1)
        assert adapters_of(client) == ["a"]
        # The load as it was first asked for, and as it is now, are both no-ops.
        for adapters in ({"b": b}, {"a": a}):
            assert [i.name for i in client.load("tiny", tiny_model, adapters=adapters).adapters] == ["a"]
        with pytest.raises(BadRequest, match="is READY with other options"):
            client.load("tiny", tiny_model)
        client.restart("tiny")
        assert client.complete("tiny", adapter="a", **ASK).tokens == whole.tokens
        client.unload("tiny")
        client.load("tiny", tiny_model)
        assert adapters_of(client) == []


def test_one_in_use_is_not_dropped(own_daemon: Daemon, tiny_model: Path, tmp_path: Path) -> None:
    a = make_adapter(tmp_path / "a", tiny_model, seed=1)
    with own_daemon.client() as client:
        client.load("tiny", tiny_model, adapters={"d": a}, adapter="d")
        client.add_adapter("tiny", "a", a)
        streams = [client.generate("tiny", adapter="a", **{**ASK, "max_tokens": 400}) for _ in range(2)]
        next(snap for snap in streams[1] if len(snap.tokens) > 0)
        with pytest.raises(BadRequest, match="adapter 'a' serves 2 live requests; drop it when they have ended"):
            client.drop_adapter("tiny", "a")
        for stream in streams:
            stream.cancel()
            stream.result()
        client.drop_adapter("tiny", "a")
        with pytest.raises(BadRequest, match="no adapter 'a', and the adapters of this model are d"):
            client.drop_adapter("tiny", "a")
        with pytest.raises(BadRequest, match="adapter 'd' serves the requests that name none"):
            client.drop_adapter("tiny", "d")


def test_refusals_change_nothing(own_daemon: Daemon, tiny_model: Path, tmp_path: Path) -> None:
    a, b = (make_adapter(tmp_path / name, tiny_model, seed=seed) for name, seed in (("a", 1), ("b", 2)))
    with own_daemon.client() as client:
        with pytest.raises(UnknownModel, match="no model 'tiny'"):
            client.add_adapter("tiny", "a", a)
        client.load("tiny", tiny_model)
        client.add_adapter("tiny", "a", a)
        with pytest.raises(BadRequest, match="adapter 'a': the model has one of this name from"):
            client.add_adapter("tiny", "a", b)
        with pytest.raises(LoadError, match="adapter 'x': cannot read"):
            client.add_adapter("tiny", "x", tmp_path / "nothing")
        with pytest.raises(BadRequest, match="name must not be 'base'"):
            client.add_adapter("tiny", "base", b)
        kill(client)
        assert client.complete("tiny", adapter="a", **SHORT).adapter == "a"
        assert adapters_of(client) == ["a"]


def test_a_directory_that_is_gone_at_the_next_load_can_be_dropped(
    own_daemon: Daemon, tiny_model: Path, tmp_path: Path
) -> None:
    a = make_adapter(tmp_path / "a", tiny_model, seed=1)
    with own_daemon.client() as client:
        client.load("tiny", tiny_model)
        client.add_adapter("tiny", "a", a)
        shutil.rmtree(a)
        assert client.complete("tiny", adapter="a", **SHORT).adapter == "a"
        with pytest.raises(LoadError, match="adapter 'a': cannot read"):
            client.restart("tiny")
        client.drop_adapter("tiny", "a")
        client.restart("tiny")
        assert client.complete("tiny", **SHORT).adapter == ""


async def test_async_client(own_daemon: Daemon, tiny_model: Path, tmp_path: Path) -> None:
    a = make_adapter(tmp_path / "a", tiny_model, seed=1)
    async with AsyncClient(own_daemon.run_dir) as client:
        await client.load("tiny", tiny_model)
        assert (await client.add_adapter("tiny", "a", a)).name == "a"
        assert (await client.complete("tiny", adapter="a", **SHORT)).adapter == "a"
        await client.drop_adapter("tiny", "a")


async def test_a_successor_on_its_way_does_not_forget_it(short_tmp: Path, tiny_model: Path, tmp_path: Path) -> None:
    a = make_adapter(tmp_path / "a", tiny_model, seed=1)
    async with Orchestrator(run_dir=short_tmp / "r") as host:
        await host.load("tiny", tiny_model, recycle_requests=1)
        first = status(host, "tiny").pid
        await host.complete("tiny", **SHORT)
        await until(lambda: len(workers()) == 2)
        [successor] = [child for child in workers() if child.pid != first]
        os.kill(successor.pid, signal.SIGSTOP)
        await host.add_adapter("tiny", "a", a)
        assert status(host, "tiny").pid == first
        await until(lambda: status(host, "tiny").recycles == 1)
        assert not successor.is_running()
        info = status(host, "tiny").info
        assert info is not None
        assert [i.name for i in info.adapters] == ["a"]
        assert (await host.complete("tiny", adapter="a", **SHORT)).adapter == "a"


async def test_a_configured_model_is_loaded_for_it(short_tmp: Path, tiny_model: Path, tmp_path: Path) -> None:
    from mlx_bulkhead.orchestrator.config import load_config

    a = make_adapter(tmp_path / "a", tiny_model, seed=1)
    file = tmp_path / "c.toml"
    file.write_text(f'[models.tiny]\nmodel = "{tiny_model}"\n')
    async with Orchestrator(load_config(file), run_dir=short_tmp / "r") as host:
        assert (await host.add_adapter("tiny", "a", a)).name == "a"
        assert (await host.complete("tiny", adapter="a", **SHORT)).adapter == "a"
        await host.unload("tiny")
        with pytest.raises(BadRequest, match="the adapters of this model are none"):
            await host.complete("tiny", adapter="a", **SHORT)
