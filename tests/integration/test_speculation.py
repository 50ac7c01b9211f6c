"""Speculative decoding through the whole chain: what callers are told, two pairs at once, and a worker's death."""

from __future__ import annotations

import concurrent.futures
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from mlx_bulkhead.protocol.values import Draft

from mlx_bulkhead import Client, LoadError
from tests.integration.conftest import Daemon
from tests.support.tiny_drafts import make_draft

ASK: dict[str, Any] = {"prompt": "The harbour at night", "max_tokens": 120}


@pytest.fixture(scope="module")
def draft(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_draft(tmp_path_factory.mktemp("draft"), tiny_model)


def kill(client: Client, name: str) -> None:
    [model] = [m for m in client.stats(name).models if m.name == name]
    assert model.pid is not None
    os.kill(model.pid, signal.SIGKILL)


def test_each_answer_says_which_engine_served_it_and_why(own_daemon: Daemon, tiny_model: Path, draft: Path) -> None:
    with own_daemon.client() as client:
        client.load("plain", tiny_model)
        info = client.load("pair", tiny_model, draft={"model": draft, "cache_entries": 0})
        assert info.speculation is not None
        assert info.speculation.active
        assert info.speculation.cycle_cost > 0
        plain = client.complete("plain", **ASK)
        assert (plain.engine, plain.fallback_reason, plain.speculation) == ("text", "", None)
        on = client.complete("pair", speculative="on", **ASK)
        assert on.tokens == plain.tokens
        assert (on.engine, on.fallback_reason) == ("dflash", "")
        assert on.speculation is not None
        assert on.speculation.tokens == 120
        assert on.usage.completion_tokens == 120
        off = client.complete("pair", speculative="off", **ASK)
        assert off.tokens == plain.tokens
        assert (off.engine, off.fallback_reason) == ("text", "speculation is off for this request")
        stop = client.complete("pair", speculative="on", stop=plain.text[40:44], **ASK)
        assert stop.finish_reason == "stop"
        assert stop.text == plain.text[: plain.text.index(plain.text[40:44])]
        [status] = [m for m in client.stats("pair").models if m.name == "pair"]
        assert status.stats is not None
        assert status.stats.speculation is not None
        assert status.stats.speculation.requests >= 1  # a sample may be a moment old


def test_several_at_once_are_all_answered(own_daemon: Daemon, tiny_model: Path, draft: Path) -> None:
    """Four at the same time, sampled and greedy: each gets its answer, and the greedy ones the same."""
    with own_daemon.client() as client:
        client.load("pair", tiny_model, draft=str(draft))
        whole = client.complete("pair", speculative="off", **ASK)
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            options = ({}, {"speculative": "on"}, {"temperature": 1.0, "seed": 1}, {"speculative": "on"})
            results = list(pool.map(lambda more: client.complete("pair", **ASK, **more), options))
        assert all(len(result.tokens) == 120 for result in results)
        assert [result.tokens == whole.tokens for result in results] == [True, True, False, True]


def test_two_pairs_side_by_side_and_a_death(own_daemon: Daemon, tiny_model: Path, draft: Path) -> None:
    """One of two workers is killed in mid-answer: its request goes on in the next one, the other sees nothing."""
    with own_daemon.client() as client:
        for name in ("a", "b"):
            client.load(name, tiny_model, draft=str(draft))
        ask = {**ASK, "max_tokens": 400}
        whole = client.complete("a", speculative="off", **ask)
        streams = {name: client.generate(name, speculative="on", **ask) for name in ("b", "a")}
        next(snap for snap in streams["a"] if snap.tokens)
        kill(client, "a")
        results = {name: stream.result() for name, stream in streams.items()}
        assert results["a"].tokens == results["b"].tokens == whole.tokens
        assert results["a"].text == whole.text
        assert (results["a"].restarts, results["b"].restarts) == (1, 0)
        assert results["a"].engine == results["b"].engine == "dflash"


def test_a_required_draft_that_is_not_there_fails_the_load(own_daemon: Daemon, tiny_model: Path) -> None:
    with own_daemon.client() as client:
        with pytest.raises(LoadError, match="the draft is required"):
            client.load("strict", tiny_model, draft=Draft("/nowhere/at/all", required=True))
        info = client.load("lax", tiny_model, draft="/nowhere/at/all")
        assert info.speculation is not None
        assert not info.speculation.active
        result = client.complete("lax", **ASK)
        assert result.fallback_reason == info.speculation.reason
