"""Adapters through the whole chain, and across the death of a worker."""

from __future__ import annotations

import concurrent.futures
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from mlx_bulkhead.protocol.values import AdapterInfo

from mlx_bulkhead import BadRequest, Client, LoadError
from tests.integration.conftest import Daemon
from tests.support.tiny_adapters import make_adapter

ASK: dict[str, Any] = {"prompt": "The harbour at night", "max_tokens": 200}


def load(client: Client, model: Path, folder: Path) -> list[AdapterInfo]:
    adapters = {
        "a": make_adapter(folder / "a", model, seed=1),
        "b": make_adapter(folder / "b", model, kind="dora", seed=2),
    }
    return client.load("tiny", model, adapters=adapters, adapter="a").adapters


def kill(client: Client) -> None:
    [model] = [m for m in client.stats("tiny").models if m.name == "tiny"]
    assert model.pid is not None
    os.kill(model.pid, signal.SIGKILL)


def test_requests_choose_and_a_killed_worker_goes_on_with_the_same(
    own_daemon: Daemon, tiny_model: Path, tmp_path: Path
) -> None:
    names = (None, "base", "a", "b")
    with own_daemon.client() as client:
        infos = load(client, tiny_model, tmp_path)
        assert [(i.name, i.kind, i.rank, i.default) for i in infos] == [
            ("a", "lora", 4, True),
            ("b", "dora", 4, False),
        ]
        whole = {name: client.complete("tiny", adapter=name, **ASK) for name in names}
        assert {name: result.adapter for name, result in whole.items()} == {None: "a", "base": "", "a": "a", "b": "b"}
        assert whole[None].tokens == whole["a"].tokens
        assert len({tuple(result.tokens) for result in whole.values()}) == 3
        # Side by side, with the worker killed in the midst of it.
        streams = {name: client.generate("tiny", adapter=name, **ASK) for name in names}
        for stream in streams.values():
            next(snap for snap in stream if len(snap.tokens) > 0)
        kill(client)
        with concurrent.futures.ThreadPoolExecutor(len(names)) as pool:
            results = dict(zip(names, pool.map(lambda stream: stream.result(), streams.values()), strict=True))
        for name, result in results.items():
            assert result.tokens == whole[name].tokens, name
            assert result.text == whole[name].text
            assert result.adapter == whole[name].adapter
        assert any(result.restarts == 1 for result in results.values())


def test_what_is_not_there_is_refused(own_daemon: Daemon, tiny_model: Path, tmp_path: Path) -> None:
    with own_daemon.client() as client:
        with pytest.raises(LoadError, match="adapter 'x': cannot read"):
            client.load("tiny", tiny_model, adapters={"x": tmp_path / "nothing"})
        load(client, tiny_model, tmp_path)
        with pytest.raises(BadRequest, match="adapter is 'c', and the adapters of this model are a, b"):
            client.complete("tiny", adapter="c", **ASK)
        with pytest.raises(BadRequest, match="adapter must be 1 to 256"):
            client.complete("tiny", adapter="", **ASK)
        with pytest.raises(BadRequest, match="adapters"):
            client.load("tiny", tiny_model, adapters={"a": tmp_path / "b"})
        assert client.complete("tiny", adapter="b", **ASK).adapter == "b"
