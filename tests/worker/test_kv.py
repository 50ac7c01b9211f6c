"""Owns the checks of quantised and bounded KV caches: text equal to mlx-lm's, clear refusals, the prompt cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mlx_bulkhead.protocol.checks import check_load
from mlx_bulkhead.protocol.commands import Load
from mlx_bulkhead.worker.engines.base import LoadProblem

from .test_engine import Driver, library, open_tiny

LONG = [300 + (7 * number) % 450 for number in range(300)]


def reference(architecture: str, prompt: list[int], count: int, make: Any) -> list[int]:
    """mlx-lm's greedy tokens with caches of a kind."""
    from mlx_lm.generate import generate_step

    model, _ = library(architecture)
    import mlx.core as mx

    caches = [make() for _ in model.layers]
    return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=count, prompt_cache=caches)]


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_text_equals_the_library_s(bits: int) -> None:
    from mlx_lm.models.cache import QuantizedKVCache

    engine = open_tiny("qwen3", kv_bits=bits, kv_group_size=32, cache_entries=16)
    info = engine.info.kv_cache
    assert (info.bits, info.group_size, info.quantised_layers) == (bits, 32, info.layers)
    assert engine.info.limits.max_running == 1
    drive = Driver(engine)
    wanted = reference("qwen3", LONG, 16, lambda: QuantizedKVCache(group_size=32, bits=bits))
    for name in ("cold", "again"):
        drive.add(name, LONG, 16)
        drive.run()
        assert drive.tokens[name] == wanted
    assert drive.cached["again"] >= len(LONG) - 1 - 256
    engine.close()


def test_a_bounded_cache_equals_the_library_s_beyond_its_bound() -> None:
    from mlx_lm.models.cache import RotatingKVCache

    engine = open_tiny("qwen3", max_kv_size=64, cache_entries=16)
    assert engine.info.kv_cache.max_tokens == 64
    assert engine.info.limits.max_running == 1
    drive = Driver(engine)
    wanted = reference("qwen3", PROMPTS_IDS, 120, lambda: RotatingKVCache(max_size=64, keep=4))
    drive.add("one", PROMPTS_IDS, 120)
    drive.add("two", PROMPTS_IDS, 120)
    drive.run()
    assert drive.tokens["one"] == drive.tokens["two"] == wanted
    edited = [*PROMPTS_IDS, *wanted[:60], 9, 9]
    drive.add("edited", edited, 10)
    drive.run()
    assert drive.tokens["edited"] == reference("qwen3", edited, 10, lambda: RotatingKVCache(max_size=64, keep=4))
    engine.close()


PROMPTS_IDS = LONG[:40]


def test_recurrent_states_are_left_as_they_are() -> None:
    engine = open_tiny("qwen3_5", kv_bits=8, kv_group_size=32)
    info = engine.info.kv_cache
    assert 0 < info.quantised_layers < info.layers
    drive = Driver(engine)
    drive.add("one", LONG, 8)
    drive.run()
    assert len(drive.tokens["one"]) == 8
    engine.close()


@pytest.mark.parametrize(
    ("architecture", "options", "words"),
    [
        ("gemma3_text", {"kv_bits": 8, "kv_group_size": 32}, "RotatingKVCache"),
        ("gemma3_text", {"max_kv_size": 64}, "max_kv_size cannot be used"),
        ("qwen3_5", {"max_kv_size": 64}, "caches of its own"),
        ("qwen3", {"kv_bits": 8, "kv_group_size": 128}, "8 bits in groups of 128"),
        ("qwen3", {"rank": 1, "size": 2}, "rank 1 of 2: distributed models are not built yet"),
    ],
)
def test_what_cannot_be_is_refused_by_name(architecture: str, options: dict[str, int], words: str) -> None:
    with pytest.raises(LoadProblem) as caught:
        open_tiny(architecture, **options)
    assert words in caught.value.message
    assert caught.value.code.value == "unsupported"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_bits": 7}, "kv_bits must be one of 2, 3, 4, 5, 6, 8, got 7"),
        ({"kv_bits": 8, "kv_group_size": 48}, "kv_group_size must be one of 32, 64, 128, got 48"),
        ({"max_kv_size": 3}, "max_kv_size must be 16 to"),
        ({"kv_bits": 8, "max_kv_size": 64}, "cannot be used together"),
        ({"rank": 2, "size": 2}, "rank must be 0 to 1, got 2"),
        ({"size": 0}, "size must be 1 to"),
    ],
)
def test_numbers_out_of_range(options: dict[str, int], words: str) -> None:
    problem = check_load(Load("m", "/models/m", **options))
    assert problem is not None
    assert words in problem.message


def test_it_survives_a_restart_on_disk(tmp_path: Path) -> None:
    options: dict[str, Any] = {"kv_bits": 8, "kv_group_size": 32, "cache_entries": 8, "cache_dir": str(tmp_path)}
    tokens: list[list[int]] = []
    reused: list[int] = []
    for name in ("before", "after"):
        engine = open_tiny("qwen3", cache_disk_bytes=2**24, **options)
        drive = Driver(engine)
        drive.add(name, LONG, 8)
        drive.run()
        while engine.tend():
            pass
        tokens.append(drive.tokens[name])
        reused.append(drive.cached[name])
        engine.close()
    assert tokens[0] == tokens[1]
    assert reused[0] == 0
    assert reused[1] > 0
