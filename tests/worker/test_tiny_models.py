"""Owns the checks of the tiny test models: they load, vary, repeat themselves exactly and break as asked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_models import ARCHITECTURES, BREAKAGES, SPECIAL_TOKENS, break_model, make_tiny

TEXTS = (
    "Hello 1234",
    "Příliš žluťoučký kůň",
    "今天 日本 한국",
    "👩‍🚀🇨🇿 e\u0301",
    "\tx = 1\r\n\n",
    "a<|im_end|>b</think>",
)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "qwen3")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_text_is_varied_and_printable(tmp_path: Path, architecture: str) -> None:
    from mlx_lm import load, stream_generate

    model, tokenizer = load(str(make_tiny(tmp_path / "model", architecture=architecture)))
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], add_generation_prompt=True)
    text, ids, reason = "", [], None
    # 100 tokens go past the sliding window of 64, so the windowed caches wrap.
    for response in stream_generate(model, tokenizer, prompt, max_tokens=100):
        text, reason = text + response.text, response.finish_reason
        ids.append(response.token)
    assert reason == "length"
    assert len(set(ids)) > 30
    assert "\ufffd" not in text


def test_tokenizer_round_trips(qwen3: Path) -> None:
    from mlx_lm.utils import load_tokenizer

    tokenizer = load_tokenizer(qwen3)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    for token in SPECIAL_TOKENS:
        assert len(tokenizer.encode(token, add_special_tokens=False)) == 1
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.bos_token is None
    assert tokenizer.has_thinking
    assert tokenizer.has_tool_calling


def test_chat_template_options(qwen3: Path) -> None:
    from mlx_lm.utils import load_tokenizer

    tokenizer = load_tokenizer(qwen3)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]

    def render(**options: object) -> str:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)

    plain = render()
    assert plain.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n")
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n' in plain
    assert plain.endswith("<tool_response>\n2\n</tool_response><|im_end|>\n")
    assert render(add_generation_prompt=True) == plain + "<|im_start|>assistant\n"
    quick = render(add_generation_prompt=True, enable_thinking=False)
    assert quick == plain + "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    tools = render(tools=[{"type": "function", "function": {"name": "add"}}])
    assert tools.startswith("<|im_start|>system\nBe brief.\n\nTools")
    assert '"name": "add"' in tools.split("<|im_end|>")[0]


def test_same_seed_gives_same_files_in_another_process(qwen3: Path, tmp_path: Path) -> None:
    script = "import sys; from tests.support.tiny_models import make_tiny; make_tiny(sys.argv[1])"
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "again")], cwd=root, check=True, timeout=60)
    other = make_tiny(tmp_path / "other", seed=1)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (qwen3 / name).read_bytes()
    assert (other / "model.safetensors").read_bytes() != (qwen3 / "model.safetensors").read_bytes()


def test_options_are_checked(tmp_path: Path, qwen3: Path) -> None:
    with pytest.raises(ValueError, match="architecture"):
        make_tiny(tmp_path / "x", architecture="nope")
    with pytest.raises(ValueError, match="vocab_size"):
        make_tiny(tmp_path / "x", vocab_size=10)
    with pytest.raises(ValueError, match="kind"):
        break_model(qwen3, "nope")


@pytest.mark.parametrize("kind", [kind for kind in BREAKAGES if kind != "no_tokenizer"])
def test_broken_copies_do_not_load(qwen3: Path, tmp_path: Path, kind: str) -> None:
    from mlx_lm import load

    broken = break_model(qwen3, kind, tmp_path / kind)
    with pytest.raises(Exception):  # noqa: B017, PT011 - each loader has errors of its own; any will do
        load(str(broken))
    load(str(qwen3))  # the original is untouched


def test_a_missing_tokenizer_is_not_always_an_error_of_the_loader(qwen3: Path, tmp_path: Path) -> None:
    """Why a worker has to look for the files: transformers makes up an empty tokenizer for this model."""
    from mlx_lm import load

    broken = break_model(qwen3, "no_tokenizer", tmp_path / "broken")
    assert not list(broken.glob("tokenizer*"))
    try:
        _, tokenizer = load(str(broken))
    except Exception:  # another version of transformers may well refuse it
        return
    assert len(tokenizer.get_vocab()) < 10
