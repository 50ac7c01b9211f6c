"""Owns the checks of adapters that cannot be used: refused at load, with the name, the file and the numbers."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlx_bulkhead.protocol.checks import check_load
from mlx_bulkhead.protocol.commands import Load
from mlx_bulkhead.worker.engines.base import LoadProblem

from tests.support.tiny_adapters import make_adapter

from .test_adapters import adapters
from .test_engine import Driver, expected, model_directory, open_tiny

Damage = Callable[[Path], None]


def refused(folder: Path, **options: Any) -> LoadProblem:
    with pytest.raises(LoadProblem) as caught:
        open_tiny("qwen3", adapters={"bad": str(folder)}, **options)
    assert "adapter 'bad'" in caught.value.message
    return caught.value


def config(**changes: Any) -> Damage:
    """Change the configuration; None leaves a key out."""

    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        values = {**json.loads(file.read_text()), **changes}
        file.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))

    return change


def parameters(**changes: Any) -> Damage:
    base = {"rank": 4, "scale": 8.0, "dropout": 0.05}
    return config(lora_parameters={**base, **changes})


def weights(change: Callable[[dict[str, Any]], None]) -> Damage:
    def damage(folder: Path) -> None:
        import mlx.core as mx

        file = str(folder / "adapters.safetensors")
        values: Any = mx.load(file)
        mx.eval(values)
        change(values)
        mx.save_safetensors(file, values)

    return damage


def remove(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def instead(name: str) -> Damage:
    """Another file in place of the weights."""

    def damage(folder: Path) -> None:
        (folder / "adapters.safetensors").unlink()
        (folder / name).write_bytes(pickle.dumps({"a": 1}))

    return damage


def cut(folder: Path) -> None:
    file = folder / "adapters.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def legacy(values: dict[str, Any]) -> None:
    for name in list(values):
        values[name.replace("lora_a", "A").replace("lora_b", "B")] = values.pop(name)


def reshape(values: dict[str, Any]) -> None:
    name = "model.layers.0.self_attn.q_proj.lora_a"
    values[name] = values[name][:, :3]


def not_a_number(values: dict[str, Any]) -> None:
    name = "model.layers.0.self_attn.q_proj.lora_b"
    values[name] = values[name] / 0.0


def rename(values: dict[str, Any]) -> None:
    values["model.layers.0.block_sparse_moe.gate.lora_a"] = values.pop("model.layers.0.self_attn.q_proj.lora_a")


def drop(values: dict[str, Any]) -> None:
    del values["model.layers.1.mlp.up_proj.lora_b"]


def whole_numbers(values: dict[str, Any]) -> None:
    import mlx.core as mx

    name = "model.layers.1.mlp.up_proj.lora_b"
    values[name] = values[name].astype(mx.int32)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (shutil.rmtree, ["cannot read", "No such file"]),
        (remove("adapter_config.json"), ["adapter_config.json is missing"]),
        (remove("adapters.safetensors"), ["adapters.safetensors is missing"]),
        (cut, ["adapters.safetensors is incomplete", "found"]),
        (lambda folder: (folder / "adapter_config.json").write_text("[1"), ["adapter_config.json", "not valid JSON"]),
        (config(fine_tune_type="ia3"), ["fine_tune_type 'ia3'", "lora or dora"]),
        (config(fine_tune_type=["lora"]), ["fine_tune_type ['lora']"]),
        (config(num_layers=None), ["num_layers None"]),
        (config(lora_parameters=None), ["lora_parameters None", "rank and scale"]),
        (parameters(rank=0), ["lora_parameters.rank 0", "1 to 65536"]),
        (parameters(rank=True), ["lora_parameters.rank True"]),
        (parameters(scale="8"), ["lora_parameters.scale '8'"]),
        (parameters(dropout=2), ["lora_parameters.dropout 2"]),
        (parameters(alpha=16), ["lora_parameters.alpha", "takes scale instead"]),
        (parameters(use_rslora=True), ["lora_parameters.use_rslora", "rank, scale, dropout, keys"]),
        (parameters(keys=["self_attn.qkv_proj"]), ["'self_attn.qkv_proj'", "no module in the layers of this model"]),
        (parameters(keys="q_proj"), ["lora_parameters.keys 'q_proj'", "a list"]),
        (parameters(rank=8), ["lora_a has the shape (", ", 4)", ", 8)"]),
        (weights(reshape), ["model.layers.0.self_attn.q_proj.lora_a has the shape (", ", 3)", ", 4)"]),
        (weights(rename), ["1 of", "no module for model.layers.0.block_sparse_moe.gate.lora_a"]),
        (weights(drop), ["lacks 1 of", "model.layers.1.mlp.up_proj.lora_b"]),
        (weights(not_a_number), ["not finite", "model.layers.0.self_attn.q_proj.lora_b"]),
        (weights(whole_numbers), ["model.layers.1.mlp.up_proj.lora_b is I32", "F16, BF16, F32"]),
        (weights(dict.clear), ["holds no tensors"]),
    ],
)
def test_damage_is_refused_with_the_numbers(tmp_path: Path, damage: Damage, words: list[str]) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(adapters()["A"], folder)
    damage(folder)
    problem = refused(folder)
    assert problem.code.value == "load_failed"
    for word in words:
        assert word in problem.message
    assert len(problem.message) < 1000


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (instead("adapters.npz"), ["adapters.npz is a pickle or an archive, which is never opened"]),
        (instead("adapters.pkl"), ["adapters.pkl is a pickle or an archive"]),
        (instead("adapter_model.bin"), ["adapter of PEFT"]),
        (config(peft_type="LORA"), ["adapter_config.json is PEFT's"]),
        (config(fine_tune_type="full"), ["fine_tune_type full"]),
        (config(lora_parameters=None, rank=8, alpha=16), ["mlx-vlm's LoRaLayer format (rank and alpha"]),
        (weights(legacy), ["mlx-vlm's LoRaLayer format", "down_proj.A"]),
    ],
)
def test_other_formats_are_refused_by_name(tmp_path: Path, damage: Damage, words: list[str]) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(adapters()["A"], folder)
    damage(folder)
    problem = refused(folder)
    assert problem.code.value == "unsupported"
    for word in [*words, "only LoRA and DoRA adapters of mlx-lm are loaded"]:
        assert word in problem.message


def test_an_adapter_of_another_model(tmp_path: Path) -> None:
    problem = refused(make_adapter(tmp_path / "a", model_directory("qwen3_5"), keys=["linear_attn.out_proj"]))
    assert problem.code.value == "load_failed"
    assert "'linear_attn.out_proj'" in problem.message


def test_dora_of_a_quantised_embedding(tmp_path: Path) -> None:
    from mlx_lm.convert import convert

    model = tmp_path / "quantised"
    convert(str(model_directory("qwen3")), str(model), quantize=True, q_bits=8, q_group_size=32)
    folder = make_adapter(tmp_path / "a", model_directory("qwen3"), kind="dora", keys=["model.embed_tokens"])
    problem = refused(folder, model=str(model))
    assert problem.code.value == "unsupported"
    assert "model.embed_tokens is a quantised embedding" in problem.message


def test_a_layer_that_cannot_be_adapted(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(adapters()["A"], folder)
    parameters(keys=["self_attn.q_norm"])(folder)
    assert "lora cannot be had of this model" in refused(folder).message


def test_of_two_that_share_a_model_the_bad_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadProblem, match="adapter 'gone'"):
        open_tiny("qwen3", adapters={"fine": adapters()["A"], "gone": str(tmp_path / "gone")})


def test_the_model_is_whole_after_building_adapters() -> None:
    engine = open_tiny("qwen3", adapters=adapters())
    drive = Driver(engine)
    drive.add("base", "total", 10)
    drive.run()
    assert drive.tokens["base"] == expected("qwen3", "total", 10)
    engine.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"adapters": {"base": "/a"}}, "adapters must not have 'base'"),
        ({"adapters": {"": "/a"}}, "a name in adapters must be 1 to 256"),
        ({"adapters": {"a": " "}}, "adapters['a'] must be a path of 1 to 4096 characters"),
        ({"adapters": {"a": "x\0"}}, "without NUL"),
        ({"adapters": {str(n): "/a" for n in range(65)}}, "adapters holds at most 64, got 65"),
        ({"adapters": {"a": "/a"}, "adapter": "b"}, "adapter is 'b', and the adapters of this model are a"),
        ({"adapter": "b"}, "adapters of this model are none"),
    ],
)
def test_names_and_paths_are_checked(options: dict[str, Any], words: str) -> None:
    problem = check_load(Load("m", "/models/m", **options))
    assert problem is not None
    assert words in problem.message
    assert check_load(Load("m", "/models/m", adapters={"a": "/a"}, adapter="base")) is None
