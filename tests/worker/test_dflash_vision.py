"""A draft for a vision model: texts go to DFlash, pictures to the eyes, and both share the weights."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from mlx_bulkhead.protocol.values import Draft

from tests.support.tiny_drafts import make_draft

from .test_vision_engine import ask, open_vlm, play, shared_vlm, vlm_directory

FAMILIES = ("qwen2_vl", "qwen3_vl", "qwen3_5")
"""Those whose text both libraries compute alike."""


@cache
def draft_for(family: str) -> Path:
    """A draft for the text model within: what `make_draft` reads is that model's configuration."""
    folder = Path(tempfile.mkdtemp(prefix="bh-model-"))
    config = json.loads((vlm_directory(family) / "config.json").read_text())
    text = {**config, **config.get("text_config", {}), "model_type": "gemma4_text" if family == "gemma4" else "qwen3"}
    (folder / "text").mkdir()
    (folder / "text" / "config.json").write_text(json.dumps(text))
    return make_draft(folder / "draft", folder / "text")


def open_pair(family: str, **options: Any) -> Any:
    return open_vlm(family, draft=Draft(str(draft_for(family)), cache_entries=0, required=True), **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_and_pictures_take_turns(family: str) -> None:
    """A text, a picture, a text again: each by its engine, each with the tokens of a worker without a draft."""
    plain = shared_vlm(family)
    [text] = play(plain, ask("The harbour at night", max_tokens=24))
    [picture] = play(plain, ask("What is this?", "red"))
    engine = open_pair(family)
    try:
        for turn in range(2):
            [tokens] = play(engine, ask("The harbour at night", max_tokens=24, speculative="on"))
            assert tokens == text, turn
            assert engine.served(bytes(16)).engine == "dflash"
            [tokens] = play(engine, ask("What is this?", "red", speculative="on"))
            assert tokens == picture, turn
            served = engine.served(bytes(16))
            assert served.engine == "vision"
            assert served.fallback_reason == "the request has pictures"
    finally:
        engine.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_picture_that_comes_beside_a_text_moves_it(family: str) -> None:
    plain = shared_vlm(family)
    [text] = play(plain, ask("The harbour at night", max_tokens=24))
    [picture] = play(plain, ask("What is this?", "red"))
    engine = open_pair(family)
    try:
        both = play(engine, ask("The harbour at night", max_tokens=24, speculative="on"), ask("What is this?", "red"))
        assert both == [text, picture]
    finally:
        engine.close()


def test_a_model_that_the_libraries_compute_differently_keeps_its_eyes() -> None:
    """A Gemma 4 with shared KV caches: after the first token mlx-lm's logits are others. It says so."""
    [picture] = play(shared_vlm("gemma4"), ask("What is this?", "red"))
    engine = open_vlm("gemma4", draft=Draft(str(draft_for("gemma4"))))
    assert engine.info.speculation is not None
    assert "computes this model otherwise" in engine.info.speculation.reason
    [tokens] = play(engine, ask("What is this?", "red"))
    assert tokens == picture
    assert engine.served(bytes(16)).fallback_reason == engine.info.speculation.reason
    engine.close()


def test_the_weights_are_there_once() -> None:
    import gc

    import mlx.core as mx

    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    plain = open_vlm("qwen3_vl")
    mx.clear_cache()
    alone = mx.get_active_memory() - before
    plain.close()
    del plain
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    engine = open_pair("qwen3_vl")
    mx.clear_cache()
    assert engine.info.speculation is not None
    assert mx.get_active_memory() - before <= alone + engine.info.speculation.bytes + 65_536
    engine.close()
