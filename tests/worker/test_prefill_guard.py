"""Owns the table of the prefill guard: each term of the estimate, and its verdicts to the byte."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from mlx_bulkhead.worker.memory.dims import read_dims
from mlx_bulkhead.worker.memory.prefill_guard import (
    Dims,
    Estimate,
    Group,
    Prefill,
    Tile,
    demand,
    estimate,
    is_fused,
    judge,
    superfluous,
)

# Two thirds windowed, as in a model of 30 layers, in half precision.
TOKEN = 8 * 128 * 2 * 2
DIMS = Dims(heads=32, kv_heads=8, head_dim=128, act_bytes=2, groups=(Group(30, 0, TOKEN),))
NARROW = replace(DIMS, head_dim=112)


def test_kv_of_full_layers_and_fused_attention() -> None:
    need = estimate(DIMS, Prefill(10_000), 2048)
    assert need == Estimate(10_000 * 30 * 8 * 128 * 2 * 2, 32 * 2048 * 128 * 4)
    assert need.peak == need.kv + need.attention


def test_a_short_prompt_is_charged_as_short() -> None:
    """The chunk is cut to the prompt: a full one would be charged to a prompt of 30 tokens else."""
    assert estimate(DIMS, Prefill(30), 2048).attention == 32 * 30 * 128 * 4
    assert estimate(NARROW, Prefill(30), 2048).attention == 32 * 30 * 112 * 4 + 32 * 30 * 30 * 2


@pytest.mark.parametrize("new", [0, -1])
def test_nothing_new_needs_nothing(new: int) -> None:
    assert estimate(replace(DIMS, state_bytes=100), Prefill(new, 5), 2048).peak == 0


def test_windows_hold_a_window_and_a_chunk() -> None:
    dims = replace(DIMS, groups=(Group(10, 0, TOKEN), Group(20, 1024, TOKEN)))
    assert estimate(dims, Prefill(10_000), 2048).kv == (10 * 10_000 + 20 * (1024 + 2048 - 1)) * TOKEN
    assert estimate(dims, Prefill(500), 2048).kv == 30 * 500 * TOKEN
    assert estimate(dims, Prefill(10_000), 256).kv == (10 * 10_000 + 20 * (1024 + 256 - 1)) * TOKEN
    assert dims.held(10_000) == (10 * 10_000 + 20 * 1024) * TOKEN
    assert dims.token_bytes == 10 * TOKEN


@pytest.mark.parametrize(
    ("dims", "queries", "length", "fused"),
    [
        *((replace(DIMS, head_dim=size), 2048, 9000, True) for size in (64, 72, 80, 96, 128)),
        *((replace(DIMS, head_dim=size), 2048, 9000, False) for size in (32, 112, 192, 256)),
        (replace(DIMS, head_dim=72), 9, 9000, True),
        (replace(DIMS, head_dim=72), 8, 9000, False),
        *((replace(DIMS, head_dim=size), 8, 9000, True) for size in (64, 96, 128, 256)),
        (replace(DIMS, heads=40), 8, 9000, False),  # 8 queries of 5 heads a KV head are over 32
        (replace(DIMS, heads=40), 6, 9000, True),
        (replace(DIMS, heads=4, kv_heads=8), 8, 9000, True),  # fewer heads than KV heads count as one
        (DIMS, 100, 99, False),
        (DIMS, 100, 100, True),
        (replace(DIMS, fused=False), 2048, 9000, False),
    ],
)
def test_which_attention_is_fused(dims: Dims, queries: int, length: int, fused: bool) -> None:
    assert is_fused(dims, queries, length) is fused


def test_attention_that_is_not_fused_has_scores_for_every_key() -> None:
    out = 32 * 2048 * 112 * 4
    assert estimate(NARROW, Prefill(10_000), 2048).attention == out + 32 * 2048 * 10_000 * 2
    assert estimate(NARROW, Prefill(4000, 6000), 2048).attention == out + 32 * 2048 * 10_000 * 2


def test_a_tiled_kernel_has_scores_for_a_tile_from_its_floor_on() -> None:
    tiled = replace(NARROW, tiles={112: Tile()})
    out = 32 * 2048 * 112 * 4
    assert estimate(tiled, Prefill(8192), 2048).attention == out + 32 * 2048 * 1024 * 2
    assert estimate(tiled, Prefill(8191), 2048).attention == out + 32 * 2048 * 8191 * 2
    assert estimate(replace(NARROW, tiles={96: Tile()}), Prefill(8192), 2048).attention > out + 32 * 2048 * 1024 * 2


def test_a_state_is_charged_until_it_is_there() -> None:
    dims = replace(DIMS, state_bytes=12345)
    assert estimate(dims, Prefill(100), 64).state == 12345
    assert estimate(dims, Prefill(50, 50), 64).state == 0
    assert dims.held(100) == 100 * 30 * TOKEN + 12345


def test_prompts_in_prefill_are_charged_together_and_their_attention_once() -> None:
    prompts = [Prefill(4000), Prefill(1000, 3000), Prefill(0, 4000)]
    need = [estimate(NARROW, prompt, 512) for prompt in prompts]
    assert demand(NARROW, prompts, 512) == need[0].kv + need[1].kv + max(need[0].attention, need[1].attention)
    assert demand(DIMS, [], 512) == 0


def test_the_line_may_be_reached_and_not_passed() -> None:
    assert judge(600, 400, 1000) == "admit"
    assert judge(601, 400, 1000) == "refuse"
    assert judge(600, 401, 1000) == "refuse"


def test_it_waits_only_for_what_can_come_back() -> None:
    assert judge(900, 300, 1000, freed=200, alone=300) == "wait"
    assert judge(900, 300, 1000, freed=199, alone=300) == "refuse"
    assert judge(900, 1300, 1000, freed=5000, alone=1001) == "refuse"
    assert judge(900, 300, 1000, freed=0, alone=100) == "refuse"


@pytest.mark.parametrize(
    ("prefills", "room", "index"),
    [
        ([100, 100, 100], 250, 2),  # any would do: the newest
        ([100, 200, 10], 150, 1),  # the newest alone would be too little
        ([200, 100, 10], 150, 0),
        ([300, 200, 300], 100, 0),  # none is enough: the biggest
        ([100], 50, 0),
    ],
)
def test_which_prefill_must_go(prefills: list[int], room: int, index: int) -> None:
    dims = Dims(heads=1, kv_heads=1, head_dim=1, act_bytes=1, groups=(Group(1, 0, 10**6),))  # attention is nothing
    assert superfluous(dims, [Prefill(new) for new in prefills], 1, room * 10**6 + 10**5) == index


# From a model.


class KV:
    keys: Any = None
    values: Any = None

    def update_and_fetch(self, keys: Any, values: Any) -> None: ...


class Rotating(KV):
    def __init__(self, max_size: int = 512) -> None:
        self.max_size, self.keep = max_size, 0


class ArraysCache:
    def __init__(self, *sizes: int) -> None:
        self.cache = [None if size == 0 else Array((1, size), 4) for size in sizes]


class MambaCache(ArraysCache):
    pass


class Listed:
    def __init__(self, *caches: Any) -> None:
        self.caches = caches


class Array:
    def __init__(self, shape: tuple[int, ...], width: int) -> None:
        self.shape, self.nbytes = shape, math.prod(shape) * width
        self.dtype = type("dtype", (), {"size": width})


class Model:
    def __init__(self, **fields: Any) -> None:
        self.args = type("Args", (), fields)


PLAIN: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_size": 1024,
}


def test_plain_dims_from_the_arguments() -> None:
    dims = read_dims(Model(**PLAIN), [KV()] * 4)
    assert dims == Dims(8, 2, 64, 2, (Group(4, 0, 2 * 64 * 2 * 2),))


def test_the_head_dimension_falls_back_to_the_hidden_size() -> None:
    dims = read_dims(Model(**{**PLAIN, "head_dim": None}), [KV()] * 4)
    assert dims is not None
    assert dims.head_dim == 128


@pytest.mark.parametrize("missing", ["num_hidden_layers", "num_key_value_heads"])
@pytest.mark.parametrize("value", [None, 0, -1, True, "2", [2, 2]])
def test_without_dims_there_is_no_estimate(missing: str, value: Any) -> None:
    assert read_dims(Model(**{**PLAIN, missing: value}), [KV()] * 4) is None


def test_without_a_configuration_there_is_no_estimate() -> None:
    assert read_dims(object(), [KV()]) is None
    assert read_dims(Model(**{**PLAIN, "head_dim": 0, "hidden_size": 0}), [KV()]) is None


@pytest.mark.parametrize("name", ["text_config", "language_config", "llm_config"])
def test_a_part_of_the_configuration_with_layers_wins(name: str) -> None:
    inner = {**PLAIN, "num_key_value_heads": 4}
    dims = read_dims(Model(**PLAIN, **{name: inner}), [KV()] * 4)
    assert dims is not None
    assert dims.kv_heads == 4
    dims = read_dims(Model(**PLAIN, **{name: {"num_key_value_heads": 4}}), [KV()] * 4)
    assert dims is not None
    assert dims.kv_heads == 2


@pytest.mark.parametrize(("name", "width"), [("float32", 4), ("torch.float32", 4), ("bfloat16", 2), (None, 2)])
def test_float32_is_twice_as_wide(name: str | None, width: int) -> None:
    dims = read_dims(Model(**PLAIN, torch_dtype=name), [KV()] * 4)
    assert dims is not None
    assert (dims.act_bytes, dims.groups[0].token_bytes) == (width, 2 * 64 * width * 2)


def test_latent_attention_keeps_one_vector_and_one_key() -> None:
    dims = read_dims(Model(**PLAIN, kv_lora_rank=512, qk_rope_head_dim=64), [KV()] * 4)
    assert dims is not None
    assert dims.groups == (Group(4, 0, (512 + 64) * 2),)


def test_layers_are_grouped_by_their_caches() -> None:
    caches = [Rotating(), Rotating(), KV(), Listed(KV(), Rotating(64)), MambaCache(3), Listed(Listed(ArraysCache()))]
    dims = read_dims(Model(**PLAIN), caches)
    assert dims is not None
    assert [(group.layers, group.window) for group in dims.groups] == [(2, 0), (1, 64), (2, 512)]


def test_caches_of_an_unknown_kind_count_as_full_layers() -> None:
    dims = read_dims(Model(**PLAIN), [object()] * 3)
    assert dims is not None
    assert [(group.layers, group.window) for group in dims.groups] == [(4, 0)]


def test_states_are_measured_and_are_no_kv() -> None:
    dims = read_dims(Model(**PLAIN), [ArraysCache(0), MambaCache(0)], [ArraysCache(10, 0, 5), MambaCache(100)])
    assert dims is not None
    assert dims.groups == ()
    assert dims.state_bytes == 4 * 115


def test_what_caches_really_hold_goes_before_the_configuration() -> None:
    wide, narrow = KV(), Rotating()
    wide.keys = wide.values = Array((1, 1, 256, 512), 4)
    narrow.keys = narrow.values = Array((1, 4, 256, 64), 4)
    dims = read_dims(Model(**PLAIN), [KV(), Rotating()], [wide, narrow])
    assert dims is not None
    assert dims.groups == (Group(1, 0, 2 * 512 * 4), Group(1, 512, 2 * 4 * 64 * 4))
    assert dims.act_bytes == 4


def test_a_quantised_cache_counts_its_scales() -> None:
    quantised = KV()
    quantised.keys = quantised.values = (Array((1, 2, 256, 8), 4), Array((1, 2, 256, 1), 2), Array((1, 2, 256, 1), 2))
    dims = read_dims(Model(**PLAIN), [KV()], [quantised], fused=False)
    assert dims is not None
    assert dims.groups == (Group(1, 0, 2 * 2 * (8 * 4 + 2 + 2)),)
    assert (dims.act_bytes, dims.fused) == (2, False)


@pytest.mark.parametrize(
    ("architecture", "groups", "states"),
    [
        ("qwen3", [(4, 0)], False),
        ("llama", [(4, 0)], False),
        ("gemma3_text", [(1, 0), (3, 64)], False),
        ("gemma4_text", [(1, 0), (3, 64)], False),
        ("qwen3_5", [(1, 0)], True),
    ],
)
def test_real_models(architecture: str, groups: list[tuple[int, int]], states: bool) -> None:
    """The estimate of a row's KV is what its caches then hold, up to the room that they grow by."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    from .test_engine import library

    model, _ = library(architecture)
    filled = make_prompt_cache(model)
    mx.eval(model(mx.array([[0]]), cache=filled))
    dims = read_dims(model, make_prompt_cache(model), filled, fused=False)
    assert dims is not None
    assert [(group.layers, group.window) for group in dims.groups] == groups
    assert (dims.state_bytes > 0) is states
    assert (dims.act_bytes, dims.head_dim) == (4, 32)
    cache = make_prompt_cache(model)
    mx.eval(model(mx.zeros((1, 512), dtype=mx.int32), cache=cache))
    held = sum(layer.nbytes for layer in cache)
    assert held <= estimate(dims, Prefill(512), 512).kv + dims.state_bytes
    assert dims.held(512) <= held
