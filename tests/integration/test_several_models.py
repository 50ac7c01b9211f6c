"""Several models side by side: each with a prompt cache of its own, and an end of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Daemon, reference
from tests.support.tiny_models import make_tiny

LONG = "The boats come back one after another with the tide, and the lamp goes out at seven. " * 6
"""Longer than the window of the windowed model."""


@pytest.fixture(scope="module")
def windowed_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("windowed"), architecture="gemma3_text")


def test_two_models_in_turn_keep_their_prefixes_apart(
    own_daemon: Daemon, tiny_model: Path, windowed_model: Path
) -> None:
    """Field reports I04 and I10: the same chats, turn by turn, beyond the window of one of the models."""
    chats: dict[str, list[Any]] = {name: [] for name in ("plain", "windowed")}
    models = {"plain": tiny_model, "windowed": windowed_model}
    wanted: dict[str, list[dict[str, object]]] = {name: [] for name in models}
    results: dict[str, list[Any]] = {name: [] for name in models}
    with own_daemon.client() as client:
        for name, model in models.items():
            client.load(name, model)
        for said in (LONG, "Why?", "And then?"):
            for name, chat in chats.items():
                chat.append({"role": "user", "content": said})
                result = client.complete(name, messages=chat, max_tokens=24)
                results[name].append(result)
                wanted[name].append({"prompt": [*chat], "max_tokens": 24})
                chat.append({"role": "assistant", "content": result.text})
    for name, model in models.items():
        texts = [want["text"] for want in reference(model, wanted[name])]
        assert [result.text for result in results[name]] == texts
        cached = [result.usage.cached_tokens for result in results[name]]
        assert cached[0] == 0, "what another model computed is not used"
        assert all(cached[1:]), "callers see what was reused"


def test_the_unload_of_one_model_costs_another_nothing(
    own_daemon: Daemon, tiny_model: Path, tiny_llama: Path
) -> None:
    """Field report I07."""
    prompt = {"prompt": LONG, "max_tokens": 400}
    [want] = reference(tiny_model, [prompt])
    with own_daemon.client() as client:
        client.load("stays", tiny_model)
        client.load("goes", tiny_llama)
        client.complete("goes", prompt=LONG, max_tokens=4)
        stream = client.generate("stays", **prompt)
        next(snap for snap in stream if snap.tokens)
        client.unload("goes")
        result = stream.result()
        assert (result.text, result.restarts) == (want["text"], 0)
        again = client.complete("stays", **prompt)
    assert again.text == want["text"]
    assert again.usage.cached_tokens == again.usage.prompt_tokens - 1
