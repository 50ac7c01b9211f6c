"""Which models are opened as vision models, with which options, and what the others say to pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mlx_bulkhead.protocol.commands import Generate, Load
from mlx_bulkhead.protocol.errors import ErrorCode
from mlx_bulkhead.protocol.values import ChatMessage, Part
from mlx_bulkhead.worker.engines.base import LoadProblem, Refused

from .test_vision_engine import TOKENS, ask, expected, open_vlm, play, shared_vlm, vlm_directory


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_bits": 8}, "kv_bits cannot be used with a vision model"),
        ({"max_kv_size": 64}, "max_kv_size cannot be used with a vision model"),
        ({"adapters": {"a": "/a"}}, "adapters cannot be used with a vision model"),
    ],
)
def test_options_that_it_does_not_have(options: dict[str, Any], words: str) -> None:
    with pytest.raises(LoadProblem, match=words) as caught:
        open_vlm(**options)
    assert caught.value.code is ErrorCode.UNSUPPORTED


def test_caches_of_another_kind_are_not_batched() -> None:
    """mlx-lm's batches do not know the recurrent state of mlx-vlm's Qwen 3.5."""
    assert shared_vlm("qwen3_5").info.limits.max_running == 1
    assert shared_vlm("qwen3_vl").info.limits.max_running == 32


def test_deterministic_decodes_one_by_one() -> None:
    engine = open_vlm(deterministic=True)
    try:
        assert engine.info.limits.max_running == 1
        assert tuple(play(engine, ask("What is this?", "red"))[0]) == expected("qwen2_vl", "What is this?", "red")
    finally:
        engine.close()


def test_a_text_only_model_refuses_pictures(tiny_model: Path) -> None:
    from mlx_bulkhead.worker.engines.loader import open_engine

    engine = open_engine(Load(name="tiny", model=str(tiny_model)), lambda phase, done, total: None)
    try:
        for request in (
            ask("What is this?", "red"),
            Generate("tiny", messages=[ChatMessage("user", [Part("image", data=b"x"), Part("text", "what?")])]),
        ):
            with pytest.raises(Refused, match="this model takes text only") as caught:
                engine.prepare(b"a" * 16, request)
            assert caught.value.code is ErrorCode.UNSUPPORTED
        assert len(play(engine, ask("total"))[0]) == TOKENS
    finally:
        engine.close()


def test_a_conversion_to_text_only_is_a_text_model(tmp_path: Path, tiny_model: Path) -> None:
    """It may keep the configuration of its tower, but has no weights for it."""
    import json

    from mlx_bulkhead.worker.engines.vision import is_vision

    config = json.loads((tiny_model / "config.json").read_text())
    assert not is_vision(tiny_model, {**config, "vision_config": {"depth": 2}})
    assert is_vision(vlm_directory("qwen2_vl"), json.loads((vlm_directory("qwen2_vl") / "config.json").read_text()))


def test_without_its_eyes_a_model_is_a_text_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_bulkhead.worker.engines import vision

    engine = open_vlm("gemma3", max_images=0)
    try:
        assert engine.info.engine == "text"
        assert len(play(engine, ask("total"))[0]) == TOKENS
        with pytest.raises(Refused, match="this model takes text only"):
            engine.prepare(b"a" * 16, ask("What?", "red"))
    finally:
        engine.close()

    def fails(*arguments: Any) -> None:
        raise LoadProblem("cannot load the image processor: no such thing")

    monkeypatch.setattr(vision, "load_vision", fails)
    engine = open_vlm("gemma3")
    try:
        assert engine.info.engine == "text"
        with pytest.raises(Refused, match="text only: cannot load the image processor: no such thing"):
            engine.prepare(b"a" * 16, ask("What?", "red"))
    finally:
        engine.close()
    with pytest.raises(LoadProblem, match="no such thing"):
        open_vlm("smolvlm")  # which mlx-lm does not know


def test_an_adapter_at_run_time_is_refused() -> None:
    with pytest.raises(LoadProblem, match="a vision model takes none") as caught:
        shared_vlm().add_adapter("a", Path("/a"))
    assert caught.value.code is ErrorCode.UNSUPPORTED
