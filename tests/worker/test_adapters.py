"""Owns the checks of adapters in the engine: text equal to mlx-lm's, alone, mixed, cached, on a quantised base."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from mlx_bulkhead.protocol.commands import Generate
from mlx_bulkhead.protocol.errors import ErrorCode
from mlx_bulkhead.worker.engines.base import Engine, Refused, RowFailed
from mlx_bulkhead.worker.engines.schedule import FIRST_SHARED_CHUNK

from tests.support.tiny_adapters import make_adapter

from .test_engine import CACHES, PROMPTS, Driver, expected, model_directory, open_tiny

LONG = [300 + (7 * number) % 450 for number in range(300)]
NAMES = ("A", "B")


@cache
def adapters(architecture: str = "qwen3") -> dict[str, str]:
    """A LoRA of all that can be, and a DoRA of the attention of some layers."""
    folder = Path(tempfile.mkdtemp(prefix="bh-adapters-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model = model_directory(architecture)
    some = {"qwen3_5": ["mlp.gate_proj", "mlp.down_proj"]}.get(architecture, ["self_attn.q_proj", "mlp.down_proj"])
    make_adapter(folder / "A", model, seed=1)
    make_adapter(folder / "B", model, kind="dora", seed=2, num_layers=1, keys=some, scale=20.0)
    return {name: str(folder / name) for name in NAMES}


def open_adapted(architecture: str = "qwen3", **options: Any) -> Engine:
    return open_tiny(architecture, adapters=adapters(architecture), **options)


def wanted(architecture: str, adapter: str, prompt: str | tuple[int, ...], count: int) -> list[int]:
    """mlx-lm's own greedy tokens, with an adapter loaded by it."""
    if adapter == "base":
        return expected(architecture, prompt, count)
    return list(_wanted(architecture, adapter, prompt, count))


@cache
def _wanted(architecture: str, adapter: str, prompt: str | tuple[int, ...], count: int) -> tuple[int, ...]:
    from mlx_lm import stream_generate

    model, tokenizer = _library(architecture, adapter)
    ids = prompt if isinstance(prompt, str) else list(prompt)
    return tuple(r.token for r in stream_generate(model, tokenizer, ids, max_tokens=count))


@cache
def _library(architecture: str, adapter: str) -> tuple[Any, Any]:
    from mlx_lm import load

    return load(str(model_directory(architecture)), adapter_path=adapters(architecture)[adapter])[:2]


@pytest.mark.parametrize("architecture", CACHES)
def test_each_alone_and_all_together(architecture: str) -> None:
    engine = open_adapted(architecture, cache_entries=16)
    drive = Driver(engine)
    for adapter in ("base", "A", "B", "base"):
        drive.add("alone", PROMPTS[0], 24, adapter=adapter)
        drive.run()
        assert drive.tokens["alone"] == wanted(architecture, adapter, PROMPTS[0], 24), adapter
    texts = {adapter: tuple(wanted(architecture, adapter, PROMPTS[0], 24)) for adapter in ("base", "A", "B")}
    assert len(set(texts.values())) == 3, "the adapters change nothing"
    for index, prompt in enumerate(PROMPTS[:3]):
        for adapter in ("base", "A", "B"):
            drive.add(f"{adapter} {index}", prompt, 24, adapter=adapter)
    drive.run()
    for index, prompt in enumerate(PROMPTS[:3]):
        for adapter in ("base", "A", "B"):
            assert drive.tokens[f"{adapter} {index}"] == wanted(architecture, adapter, prompt, 24)
    engine.close()


def test_rows_that_come_and_go_do_not_disturb_each_other() -> None:
    """Solo, guest, batch and back to solo in each group, with steps of the others in between."""
    engine = open_adapted()
    drive = Driver(engine)
    drive.add("A long", PROMPTS[0], 200, adapter="A")
    drive.until(drive.generated("A long", 5))
    drive.add("base", LONG, 90)
    drive.add("A guest", PROMPTS[2], 30, adapter="A")
    drive.until(drive.generated("A guest", 3))
    drive.add("gone", PROMPTS[3], 90, adapter="B")
    drive.add("B", PROMPTS[1], 60, adapter="B")
    drive.until(drive.generated("gone", 4))
    assert engine.remove(b"gone")
    assert not engine.remove(b"gone")
    assert engine.served(b"A guest").engine == "batch"
    drive.run()
    assert drive.tokens["A long"] == wanted("qwen3", "A", PROMPTS[0], 200)
    assert drive.tokens["A guest"] == wanted("qwen3", "A", PROMPTS[2], 30)
    assert drive.tokens["base"] == expected("qwen3", tuple(LONG), 90)
    assert drive.tokens["B"] == wanted("qwen3", "B", PROMPTS[1], 60)
    assert engine.served(b"base").engine == "text"
    engine.close()


def test_a_row_that_fails_leaves_the_model_as_it_was() -> None:
    """An adapter is in the model for a step only, whatever that step raises."""
    engine = open_adapted()
    drive = Driver(engine)

    def broken(emitted: Any) -> Any:
        def process(tokens: Any, logits: Any) -> Any:
            raise RuntimeError("a bad day")

        return process

    for company in (False, True):
        if company:
            drive.add("B", PROMPTS[1], 30, adapter="B")
            drive.until(drive.generated("B", 3))
        row = engine.prepare(b"bad", Generate(model="tiny", prompt=PROMPTS[0], adapter="A")).row
        engine.insert(replace(row, constrain=broken))
        failed: list[RowFailed] = []
        while not failed:
            failed = [out for out in engine.step() if isinstance(out, RowFailed)]
        assert "a bad day" in failed[0].message
        drive.drop("B")
        for adapter in ("base", "A"):
            drive.add(adapter, PROMPTS[0], 12, adapter=adapter)
            drive.run()
            assert drive.tokens[adapter] == wanted("qwen3", adapter, PROMPTS[0], 12)
    engine.close()


def test_groups_take_turns() -> None:
    engine = open_adapted()
    drive = Driver(engine)
    for adapter in ("base", "A", "B"):
        drive.add(adapter, PROMPTS[1], 30, adapter=adapter)
    drive.run()
    first = [name for name in drive.log if name in ("base", "A", "B")]
    counts = {name: first[:30].count(name) for name in ("base", "A", "B")}
    assert min(counts.values()) >= 9, counts
    engine.close()


def test_a_long_prompt_of_another_group_keeps_to_short_chunks() -> None:
    engine = open_adapted()
    drive = Driver(engine)
    drive.add("base", PROMPTS[0], 40)
    drive.until(drive.generated("base", 3))
    drive.add("A", LONG, 4, adapter="A")
    before = len(drive.log)
    drive.until(lambda: bool(drive.prefill["A"]))
    assert drive.prefill["A"][0][0] <= FIRST_SHARED_CHUNK
    drive.until(drive.generated("A", 1))
    assert drive.log[before:].count("base") >= 3, "it stood still meanwhile"
    drive.run()
    assert drive.tokens["A"] == wanted("qwen3", "A", tuple(LONG), 4)
    engine.close()


def test_an_adapter_does_not_find_the_prefixes_of_another() -> None:
    engine = open_adapted(cache_entries=16)
    drive = Driver(engine)
    for turn in ("cold", "warm"):
        for adapter in ("base", "A", "B"):
            name = f"{adapter} {turn}"
            drive.add(name, LONG, 12, adapter=adapter)
            drive.run()
            assert drive.cached[name] == (0 if turn == "cold" else len(LONG) - 1), name
            assert drive.tokens[name] == wanted("qwen3", adapter, tuple(LONG), 12)
    drive.add("other tenant", LONG, 4, adapter="A", tenant="other")
    drive.run()
    assert drive.cached["other tenant"] == 0
    engine.close()


def test_prefixes_on_disk_belong_to_the_files_not_to_the_name(tmp_path: Path) -> None:
    options: dict[str, Any] = {"cache_entries": 8, "cache_disk_bytes": 2**28, "cache_dir": str(tmp_path)}
    a, b = adapters()["A"], adapters()["B"]
    for number, (names, cached) in enumerate((({"x": a}, 0), ({"x": b}, 0), ({"x": b, "y": a}, len(LONG) - 1))):
        engine = open_tiny("qwen3", adapters=names, adapter=list(names)[-1], **options)
        drive = Driver(engine)
        drive.add(str(number), LONG, 8)
        drive.run()
        assert drive.cached[str(number)] == cached
        while engine.tend():
            pass
        engine.close()
    engine = open_tiny("qwen3", **options)
    drive = Driver(engine)
    drive.add("plain", LONG, 8)
    drive.run()
    assert drive.cached["plain"] == 0
    engine.close()


@pytest.mark.parametrize("bits", [4, 6])
def test_a_quantised_base(tmp_path: Path, bits: int) -> None:
    from mlx_lm import load, stream_generate
    from mlx_lm.convert import convert

    model = tmp_path / "quantised"
    convert(str(model_directory("qwen3")), str(model), quantize=True, q_bits=bits, q_group_size=32)
    some = ["self_attn.q_proj", "mlp.up_proj", "lm_head", "model.embed_tokens"]
    make_adapter(tmp_path / "lora", model, seed=3, keys=some)
    # Of 6 bits mlx-lm cannot load a DoRA that was made with the model before it was quantised; here it can be.
    make_adapter(tmp_path / "dora", model_directory("qwen3"), kind="dora", seed=4, keys=some[:2], scale=20.0)
    engine = open_tiny(
        "qwen3", model=str(model), adapters={"lora": str(tmp_path / "lora"), "dora": str(tmp_path / "dora")}
    )
    assert [(info.kind, info.layers > 0, info.bytes > 0) for info in engine.info.adapters] == [
        ("lora", True, True),
        ("dora", True, True),
    ]
    drive = Driver(engine)
    for adapter in ("base", "lora", "dora"):
        drive.add(adapter, PROMPTS[0], 16, adapter=adapter)
    drive.run()
    assert len({tuple(drive.tokens[name]) for name in ("base", "lora", "dora")}) == 3
    for adapter in ("base", "lora", "dora") if bits == 4 else ("base", "lora"):
        path = None if adapter == "base" else str(tmp_path / adapter)
        network, tokenizer = load(str(model), adapter_path=path)[:2]
        tokens = [r.token for r in stream_generate(network, tokenizer, PROMPTS[0], max_tokens=16)]
        assert drive.tokens[adapter] == tokens, adapter
    engine.close()


def test_experts(tmp_path: Path) -> None:
    """LoRASwitchLinear, of a model with experts."""
    from mlx_lm import load, stream_generate

    model = make_experts(tmp_path / "model")
    folder = make_adapter(tmp_path / "a", model, seed=5, keys=["mlp.switch_mlp.up_proj", "mlp.gate"])
    engine = open_tiny("qwen3", model=str(model), adapters={"a": str(folder)})
    drive = Driver(engine)
    for adapter in ("base", "a"):
        drive.add(adapter, PROMPTS[0], 16, adapter=adapter)
    drive.run()
    for adapter, path in (("base", None), ("a", str(folder))):
        network, tokenizer = load(str(model), adapter_path=path)[:2]
        tokens = [r.token for r in stream_generate(network, tokenizer, PROMPTS[0], max_tokens=16)]
        assert drive.tokens[adapter] == tokens
    assert drive.tokens["base"] != drive.tokens["a"]
    engine.close()


def make_experts(folder: Path) -> Path:
    """The tiny qwen3 with two layers of four experts, and random weights."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models.qwen3_moe import Model, ModelArgs

    shutil.copytree(model_directory("qwen3"), folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config |= {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    }
    file.write_text(json.dumps(config))
    flat: Any = tree_flatten(Model(ModelArgs.from_dict(config)).parameters())
    keys = mx.random.split(mx.random.key(7), len(flat))
    values = {
        name: value if "norm" in name else 0.3 * mx.random.normal(value.shape, key=key)
        for (name, value), key in zip(flat, keys, strict=True)
    }
    mx.save_safetensors(str(folder / "model.safetensors"), values)
    return folder


def test_the_default_and_unknown_names() -> None:
    engine = open_adapted(adapter="B")
    assert [(info.name, info.kind, info.rank, info.default) for info in engine.info.adapters] == [
        ("A", "lora", 4, False),
        ("B", "dora", 4, True),
    ]
    drive = Driver(engine)
    drive.add("none named", PROMPTS[0], 12)
    drive.add("base", PROMPTS[0], 12, adapter="base")
    drive.run()
    assert drive.tokens["none named"] == wanted("qwen3", "B", PROMPTS[0], 12)
    assert drive.tokens["base"] == expected("qwen3", PROMPTS[0], 12)
    with pytest.raises(Refused) as caught:
        drive.add("bad", PROMPTS[0], 12, adapter="C")
    assert caught.value.code is ErrorCode.BAD_REQUEST
    assert "adapter is 'C', and the adapters of this model are A, B; base is the model without one" in (
        caught.value.message
    )
    engine.close()


def test_a_model_without_adapters_refuses_a_name() -> None:
    engine = open_tiny()
    drive = Driver(engine)
    drive.add("base", PROMPTS[1], 4, adapter="base")
    drive.run()
    assert drive.tokens["base"] == expected("qwen3", PROMPTS[1], 4)
    with pytest.raises(Refused, match="adapters of this model are none"):
        drive.add("bad", PROMPTS[0], 12, adapter="A")
    engine.close()
