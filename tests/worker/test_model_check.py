"""Owns the checks of broken model directories: each is named before a weight is read."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlx_bulkhead.protocol.commands import Load
from mlx_bulkhead.protocol.errors import ErrorCode
from mlx_bulkhead.worker.engines.base import LoadProblem
from mlx_bulkhead.worker.model_check import check_model, read_header, resolve_model, weight_bytes

from tests.support.tiny_models import break_model

from .test_engine import model_directory


def header_file(file: Path, header: Any, data: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return file


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A complete directory as far as the check can see, without the cost of a real one."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    tensor = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    header_file(tmp_path / "model.safetensors", {"__metadata__": {"format": "mlx"}, "w": tensor}, bytes(24))
    return tmp_path


def problem(path: Path) -> str:
    with pytest.raises(LoadProblem) as raised:
        check_model(path)
    assert raised.value.code is ErrorCode.LOAD_FAILED
    return raised.value.message


def test_complete_models_pass(model: Path) -> None:
    check_model(model)
    assert weight_bytes(model) == 24
    check_model(model_directory("qwen3"))
    assert weight_bytes(model_directory("qwen3")) > 4_000_000


def test_no_such_path(tmp_path: Path) -> None:
    assert str(tmp_path / "none") in problem(tmp_path / "none")


def test_a_file_instead_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"")
    assert "is a file" in problem(tmp_path / "x.safetensors")
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert "GGUF" in problem(tmp_path / "x.gguf")


def test_gguf_only(tmp_path: Path) -> None:
    (tmp_path / "model-q4.gguf").write_bytes(b"GGUF")
    message = problem(tmp_path)
    assert "model-q4.gguf" in message
    assert "safetensors" in message


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', "\xff", "[" * 100_000])
def test_a_config_that_is_none(model: Path, text: str) -> None:
    (model / "config.json").write_text(text, encoding="latin-1")
    assert "config.json" in problem(model)


@pytest.mark.parametrize("config", [{}, {"model_type": None}, {"model_type": ""}, {"model_type": 3}])
def test_a_config_without_a_type(model: Path, config: dict[str, Any]) -> None:
    (model / "config.json").write_text(json.dumps(config))
    assert "model_type" in problem(model)


def test_no_config(model: Path) -> None:
    (model / "config.json").unlink()
    assert "config.json is missing" in problem(model)


def test_a_truncated_file_says_how_much_is_missing(model: Path) -> None:
    file = model / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    assert f"{file} is incomplete: expected {len(whole)} bytes, found {len(whole) - 5}" in problem(model)
    file.write_bytes(whole[:30])
    assert "is incomplete" in problem(model)
    file.write_bytes(whole[:4])
    assert "is incomplete" in problem(model)


def test_a_file_of_zero_bytes(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"")
    assert "model.safetensors is empty" in problem(model)


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * 100,
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        struct.pack("<Q", 4) + b"{{{{" + bytes(10),
        struct.pack("<Q", 2) + b"[]" + bytes(10),
        struct.pack("<Q", 8) + b'{"a": 1}',
    ],
)
def test_a_junk_header(model: Path, content: bytes) -> None:
    (model / "model.safetensors").write_bytes(content)
    assert "model.safetensors is not a safetensors file" in problem(model)


@pytest.mark.parametrize(
    "tensor",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0]},
        {"dtype": "F32", "shape": "x", "data_offsets": [0, 8]},
        {"shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": ["0", "8"]},
    ],
)
def test_a_junk_tensor(tmp_path: Path, tensor: dict[str, Any]) -> None:
    with pytest.raises(LoadProblem):
        read_header(header_file(tmp_path / "model.safetensors", {"w": tensor}, bytes(8)))


def test_a_tensor_that_does_not_fit_its_shape(tmp_path: Path) -> None:
    tensor = {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}
    with pytest.raises(LoadProblem, match="does not fit its shape"):
        read_header(header_file(tmp_path / "model.safetensors", {"w": tensor}, bytes(8)))


def test_missing_shards_are_counted_and_named(model: Path) -> None:
    names = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    (model / "model.safetensors").rename(model / names[0])
    index = {"weight_map": {f"w{n}": name for n, name in enumerate(names)}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    message = problem(model)
    assert f"{model / names[1]} is missing; 2 of 3 shards" in message
    (model / "model.safetensors.index.json").write_text("{}")
    assert "weight_map" in problem(model)


def test_no_weights_and_pytorch_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()
    assert "has no weights" in problem(model)
    (model / "pytorch_model.bin").write_bytes(b"x")
    message = problem(model)
    assert "PyTorch" in message
    assert "pytorch_model.bin" in message


def test_no_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert "has no tokenizer" in problem(model)
    for name in ("tokenizer.model", "vocab.json", "qwen.tiktoken"):
        (model / name).write_text("x")
        check_model(model)
        (model / name).unlink()


@pytest.mark.parametrize(
    ("model", "local"),
    [
        ("/models/x", True),
        ("./x", True),
        ("../x", True),
        ("~/x", True),
        ("C:\\models\\x", True),
        ("a/b/c", True),
        ("mlx-community/Qwen3-4B-4bit", False),
        ("gpt2", False),
    ],
)
def test_what_looks_like_a_path_is_local(model: str, local: bool) -> None:
    assert (resolve_model(model) is not None) == local


@pytest.mark.parametrize("model", ["~nobody-has-this-name/x", "/" + "x" * 4000, "./" + "y/" * 200])
def test_odd_paths_are_local_and_not_there(model: str) -> None:
    path = resolve_model(model)
    assert path is not None
    assert "there is nothing at" in problem(path)


def test_what_exists_is_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/model") == Path("org/model")


def test_the_check_needs_no_mlx() -> None:
    code = (
        "import sys, mlx_bulkhead.worker.model_check, mlx_bulkhead.worker.engines.base;"
        "sys.exit(any(name.split('.')[0] in ('mlx', 'mlx_lm', 'transformers') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0


# What only the loader can see.


def load_problem(path: Path | str, **options: Any) -> str:
    from mlx_bulkhead.worker.engines.loader import open_engine

    with pytest.raises(LoadProblem) as raised:
        open_engine(Load(name="x", model=str(path), **options), lambda phase, done, total: None)
    return raised.value.message


def broken(tmp_path: Path, kind: str) -> Path:
    return break_model(model_directory("qwen3"), kind, tmp_path / kind)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("truncated", ("model.safetensors is incomplete", "expected")),
        ("zero_bytes", ("model.safetensors is empty",)),
        ("missing_shard", ("model-00002-of-00002.safetensors is missing", "1 of 2")),
        ("unknown_architecture", ("config.json", "'no_such_architecture'")),
        ("gguf_only", ("model.gguf", "GGUF")),
        ("no_tokenizer", ("has no tokenizer",)),
        ("bad_config_json", ("config.json", "not valid JSON")),
        ("wrong_shape", ("cannot load the weights", "mlp.up_proj.weight")),
    ],
)
def test_broken_models_are_named_by_the_loader(tmp_path: Path, kind: str, words: tuple[str, ...]) -> None:
    message = load_problem(broken(tmp_path, kind))
    assert all(word in message for word in words), message


def rewrite_weights(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    import mlx.core as mx

    file = directory / "model.safetensors"
    tensors: Any = dict(mx.load(str(file)))
    change(tensors)
    mx.save_safetensors(str(file.with_name("new.safetensors")), tensors)
    file.with_name("new.safetensors").replace(file)


def test_a_long_list_of_parameters_is_shortened(tmp_path: Path) -> None:
    import shutil

    copy = Path(shutil.copytree(model_directory("qwen3"), tmp_path / "model"))

    def drop(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if "layers.1." in name]:
            del tensors[name]

    rewrite_weights(copy, drop)
    message = load_problem(copy)
    assert "Missing 11 parameters: model.layers.1." in message
    assert message.endswith(" and 8 more")


def test_code_in_a_checkpoint_needs_trust(tmp_path: Path) -> None:
    import shutil

    copy = Path(shutil.copytree(model_directory("qwen3"), tmp_path / "model"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "model_file": "code.py"}))
    message = load_problem(copy)
    assert "code.py" in message
    assert "trust_remote_code" in message


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    import shutil

    copy = Path(shutil.copytree(model_directory("qwen3"), tmp_path / "model"))
    (copy / "tokenizer.json").write_text("{}")
    message = load_problem(copy)
    assert "cannot load the tokenizer" in message
    assert "added_tokens" in message


def test_a_chat_template_that_cannot_be_read() -> None:
    message = load_problem(model_directory("qwen3"), chat_template="a\n{% for x in %}")
    assert message.startswith("chat_template, line 2")


@pytest.mark.leaks_ok("the hub's client keeps a pool")
def test_an_id_that_cannot_be_fetched() -> None:
    """The tests run without the hub."""
    message = load_problem("nobody/no-such-model")
    assert "nobody/no-such-model" in message
    assert "Hugging Face" in message
