"""Predictions from headers and dimensions, for models whose sizes can be worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlx_bulkhead.orchestrator import sizes
from mlx_bulkhead.orchestrator.policy import prediction as pr
from mlx_bulkhead.protocol.commands import Load
from mlx_bulkhead.protocol.values import Draft

LOAD = Load(name="m", model="m")
QWEN3_8B = {
    "model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12288,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960, "torch_dtype": "bfloat16", "sliding_window": None,
}  # fmt: skip


def dims(config: dict[str, Any]) -> pr.Dims:
    found = sizes.dims_of(config)
    assert found is not None
    return found


def write(folder: Path, tensors: dict[str, int], name: str = "model.safetensors") -> None:
    """A safetensors file with tensors of so many bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    at = 0
    for tensor, count in tensors.items():
        header[tensor] = {"dtype": "U8", "shape": [count], "data_offsets": [at, at + count]}
        at += count
    raw = json.dumps(header).encode()
    (folder / name).write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(at))


def test_keys_and_values_of_every_layer_for_the_working_context() -> None:
    tokens = pr.context_of(LOAD, dims(QWEN3_8B), 16384)
    assert tokens == 16384
    assert pr.kv_bytes(LOAD, dims(QWEN3_8B), tokens) == 16384 * 36 * 2 * 8 * 128 * 2


@pytest.mark.parametrize(
    ("limit", "own", "tokens"),
    [
        (None, 40960, 16384),
        (None, 4096, 16384),  # of four requests or more together
        (None, 512, 2048),
        (1024, 40960, 4096),
        (32768, 40960, 32768),
        (99999, 40960, 40960),
    ],
)
def test_room_for_the_working_context_and_for_one_request_as_long_as_the_load_allows(
    limit: int | None, own: int, tokens: int
) -> None:
    load = Load(name="m", model="m", context_limit=limit)
    assert pr.context_of(load, dims({**QWEN3_8B, "max_position_embeddings": own}), 16384) == tokens


def test_a_quantised_cache_and_one_of_bounded_size_are_smaller() -> None:
    plain = pr.kv_bytes(LOAD, dims(QWEN3_8B), 16384)
    eight = pr.kv_bytes(Load(name="m", model="m", kv_bits=8), dims(QWEN3_8B), 16384)
    assert eight / plain == pytest.approx((1 + 4 / 64) / 2)
    bounded = pr.kv_bytes(Load(name="m", model="m", max_kv_size=1024), dims(QWEN3_8B), 16384)
    assert bounded * 16 == plain


@pytest.mark.parametrize(
    ("more", "full", "window", "states"),
    [
        ({}, 36, 0, False),
        ({"sliding_window": 4096}, 36, 0, False),  # named, and not used by the code
        ({"sliding_window": 512, "sliding_window_pattern": 6}, 6, 30, False),
        ({"sliding_window": 512, "layer_types": ["sliding_attention"] * 35 + ["full_attention"]}, 1, 35, False),
        ({"full_attention_interval": 4, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
          "linear_value_head_dim": 128}, 9, 0, True),
    ],
)  # fmt: skip
def test_layers_by_what_they_keep(more: dict[str, Any], full: int, window: int, states: bool) -> None:
    found = dims({**QWEN3_8B, **more})
    assert (found.full_layers, found.window_layers) == (full, window)
    assert (found.state_bytes > 0) is states


def test_compressed_attention_keeps_one_vector_a_token() -> None:
    found = dims({**QWEN3_8B, "kv_lora_rank": 512, "qk_rope_head_dim": 64})
    assert pr.kv_bytes(LOAD, found, 1024) == 1024 * 36 * 576 * 2


def test_the_text_part_counts_of_a_model_with_several() -> None:
    assert dims({"model_type": "x", "text_config": QWEN3_8B}) == dims(QWEN3_8B)


@pytest.mark.parametrize("config", [{}, {"num_hidden_layers": True}, {"num_hidden_layers": "36"}])
def test_dimensions_that_are_not_told_are_a_guess(config: dict[str, Any]) -> None:
    assert sizes.dims_of(config) is None
    found = pr.predict(LOAD, None, weights=8000, working_context=1, fused=True)
    assert found.guessed
    assert found.kv + found.work == 2000


def test_shards_and_adapters_are_summed_from_their_headers(tmp_path: Path) -> None:
    write(tmp_path / "m", {"a": 1000, "b": 24}, "model-00001-of-00002.safetensors")
    write(tmp_path / "m", {"c": 500}, "model-00002-of-00002.safetensors")
    write(tmp_path / "legal", {"lora": 77}, "adapters.safetensors")
    (tmp_path / "m" / "config.json").write_text(json.dumps(QWEN3_8B))
    load = Load(name="m", model=str(tmp_path / "m"), adapters={"legal": str(tmp_path / "legal")})
    found = sizes.predict_load(load, 16384)
    assert (found.weights, found.adapters, found.context) == (1524, 77, 16384)
    assert found.total == pr.PROCESS_BYTES + 1524 + 77 + found.kv + found.work
    assert found.total <= found.share * pr.FILL


def test_a_draft_counts_and_one_that_is_not_here_is_a_guess(tmp_path: Path) -> None:
    write(tmp_path / "m", {"a": 1000})
    write(tmp_path / "draft", {"a": 300})
    for draft, weights in ((str(tmp_path / "draft"), 1300), ("auto", 1200)):
        load = Load(name="m", model=str(tmp_path / "m"), draft=Draft(model=draft))
        assert sizes.predict_load(load, 1024).weights == weights


def test_max_tokens_plays_no_part() -> None:
    """D10: a prediction has no request in it. It is of a model, not of what somebody may ask it for."""
    assert "max_tokens" not in pr.predict.__code__.co_varnames


def test_a_downloaded_model_is_found_by_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(sizes.UnknownSize, match="org/name is neither a directory here nor a downloaded model"):
        sizes.find("org/name")
    write(tmp_path / "models--org--name" / "snapshots" / "abc", {"a": 1})
    assert sizes.find("org/name").name == "abc"


@pytest.mark.parametrize("junk", [b"", b"\xff" * 8, (5).to_bytes(8, "little") + b"[1,2]", (9).to_bytes(8, "little")])
def test_junk_is_an_unknown_size(tmp_path: Path, junk: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(junk)
    with pytest.raises(sizes.UnknownSize, match=r"header of .*model\.safetensors cannot be read"):
        sizes.tensor_bytes(tmp_path, "model*.safetensors")


def test_what_was_measured_replaces_what_was_predicted() -> None:
    before = pr.Prediction(weights=1000 * 2**20, kv=100, work=10)
    after = before.corrected(1500 * 2**20)
    assert after.measured
    assert after.resident == 1500 * 2**20
    assert after.total == after.resident + 110
    assert before.corrected(0) is before
