"""Owns the checks of detokenising and of the text of a request: equal to the library's, never U+FFFD, linear."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_bulkhead.worker.engines.base import TextOut
from mlx_bulkhead.worker.text.channels import Piece

from .test_engine import library, model_directory

KINDS = ("byte level", "sentencepiece", "other")
SAMPLES = (
    "Hello, world",
    " leading blank",
    "👩‍🚀🇨🇿 ❤️ 🙂🙂",
    "Příliš žluťoučký kůň",
    "今天下午我们去河边散步 오늘은 비가",
    "a\n b\n\n c , d",
    "tab\t end ",
)


def spm_tokenizer(directory: Path) -> None:
    """A SentencePiece-like tokenizer with byte fallback, as Llama 2 and Mistral have."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["▁", *"abcdefghijklmnoprstuvwxyzHPěščřžýáíůú,.", "▁a", "▁H", "el", "lo"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("▁", "H"), ("e", "l"), ("l", "o")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    write_tokenizer(tokenizer, directory)


def other_tokenizer(directory: Path) -> None:
    """A byte-level vocabulary behind a decoder that the library has no streaming class for."""
    from tokenizers import Tokenizer, decoders

    tokenizer = Tokenizer.from_file(str(model_directory("qwen3") / "tokenizer.json"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel()])
    write_tokenizer(tokenizer, directory)


def write_tokenizer(tokenizer: Any, directory: Path) -> None:
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from mlx_lm.tokenizer_utils import load

    made = {"byte level": library()[1]}
    for kind, make in (("sentencepiece", spm_tokenizer), ("other", other_tokenizer)):
        directory = tmp_path_factory.mktemp("tokenizer")
        make(directory)
        made[kind] = load(directory)
    from mlx_lm import tokenizer_utils as library_classes

    assert isinstance(made["byte level"].detokenizer, library_classes.BPEStreamingDetokenizer)
    assert isinstance(made["sentencepiece"].detokenizer, library_classes.SPMStreamingDetokenizer)
    assert isinstance(made["other"].detokenizer, library_classes.NaiveStreamingDetokenizer)
    _holder["made"] = made
    return made


_holder: dict[str, dict[str, Any]] = {}


@cache
def detokenizers(kind: str) -> Any:
    from mlx_bulkhead.worker.text.detokenize import Detokenizers

    return Detokenizers(_holder["made"][kind])


def library_text(tokenizer: Any, tokens: list[int]) -> str:
    detokenizer, text = tokenizer.detokenizer, ""
    for token in tokens:
        detokenizer.add_token(token)
        text += detokenizer.last_segment
    detokenizer.finalize()
    return (text + detokenizer.last_segment).replace("\ufffd", "")


def pieces_of(kind: str, tokens: list[int]) -> list[str]:
    detokenizer = detokenizers(kind).make()
    return [detokenizer.push(token) for token in tokens] + [detokenizer.finish()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sample", SAMPLES)
def test_text_is_whole_and_in_order(tokenizers: dict[str, Any], kind: str, sample: str) -> None:
    tokens = tokenizers[kind].encode(sample, add_special_tokens=False)
    pieces = pieces_of(kind, tokens)
    assert "".join(pieces) == library_text(tokenizers[kind], tokens)
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("kind", KINDS)
def test_any_tokens_give_the_library_s_text_without_replacement_marks(tokenizers: dict[str, Any], kind: str) -> None:
    tokenizer = tokenizers[kind]

    @settings(max_examples=150)
    @given(st.lists(st.integers(0, len(tokenizer) - 1), max_size=40))
    def check(tokens: list[int]) -> None:
        pieces = pieces_of(kind, tokens)
        assert "".join(pieces) == library_text(tokenizer, tokens)
        assert not any("\ufffd" in piece for piece in pieces)

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_in_any_order_give_the_library_s_text(tokenizers: dict[str, Any], kind: str) -> None:
    """Only single bytes: mostly broken sequences."""
    tokenizer = tokenizers[kind]
    if kind == "sentencepiece":
        byte_tokens = list(range(3, 259))
    else:
        byte_tokens = [i for i in range(len(tokenizer)) if len(tokenizer.convert_ids_to_tokens(i)) == 1]
    chooser = random.Random(4)
    for _ in range(150):
        tokens = chooser.choices(byte_tokens, k=chooser.randrange(1, 12))
        pieces = pieces_of(kind, tokens)
        assert "".join(pieces) == library_text(tokenizer, tokens)
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("kind", KINDS)
def test_time_is_linear_even_for_one_endless_line(tokenizers: dict[str, Any], kind: str) -> None:
    ids = [index for index in range(len(tokenizers[kind])) if index > 300 or kind == "sentencepiece"]
    decode = tokenizers[kind].decode
    words = [index for index in ids if (text := decode([index])) and "\n" not in text and "\ufffd" not in text]
    chooser = random.Random(2)

    def seconds(count: int) -> float:
        tokens = chooser.choices(words, k=count)
        detokenizer = detokenizers(kind).make()
        began = time.perf_counter()
        for token in tokens:
            detokenizer.push(token)
        return time.perf_counter() - began

    seconds(100)
    small, large = seconds(1000), seconds(4000)
    assert large < 12 * small + 0.05, f"{small:.4f} s for 1000 tokens, {large:.4f} s for 4000"


# A request's text.


def stream(stop: list[str] | None = None, silent: tuple[int, ...] = ()) -> Any:
    from mlx_bulkhead.worker.text.output import TextStream

    return TextStream(detokenizers("byte level").make(), stop or [], frozenset(silent))


def shown(pieces: Sequence[Piece]) -> str:
    """The text of some pieces of content."""
    assert all(channel == "content" for channel, _ in pieces)
    return "".join(text for _, text in pieces)


def push_all(text: TextOut, tokens: list[int]) -> str:
    return "".join(shown(text.push(token)) for token in tokens)


def rest(text: TextOut) -> str:
    return shown(text.finish())


@pytest.fixture
def tokens(tokenizers: dict[str, Any]) -> list[int]:
    return tokenizers["byte level"].encode("one 🚢 two, the lamp goes out", add_special_tokens=False)


@pytest.mark.parametrize("stop", ["🚢", " t", "two, the l", "out", "ne 🚢 tw"])
def test_a_stop_string_cuts_exactly_across_tokens(tokens: list[int], stop: str) -> None:
    text = stream([stop])
    whole = "one 🚢 two, the lamp goes out"
    cut = ""
    for token in tokens:
        if text.stopped:
            assert not text.push(token)
        else:
            cut += shown(text.push(token))
    assert text.stopped
    assert cut == whole[: whole.index(stop)]
    assert rest(text) == ""


def test_what_is_held_back_comes_at_the_end(tokens: list[int]) -> None:
    text = stream(["out of the way"])
    assert push_all(text, tokens) == "one 🚢 two, the lamp goes "
    assert rest(text) == "out"
    assert not text.stopped
    assert rest(text) == ""


def test_a_stop_string_that_only_the_tail_completes(tokenizers: dict[str, Any]) -> None:
    text = stream(["p "])
    ids = tokenizers["byte level"].encode("lamp ", add_special_tokens=False)
    assert push_all(text, ids) + rest(text) == "lam"
    assert text.stopped


def test_end_tokens_have_no_text(tokenizers: dict[str, Any], tokens: list[int]) -> None:
    end = tokenizers["byte level"].eos_token_id
    assert shown(stream().push(end)) == "<|im_end|>"
    assert not stream(silent=(end,)).push(end)


@pytest.mark.parametrize("stop", [None, ["zzz", "goes out!"]])
def test_a_resumed_text_goes_on_where_it_was_sent(tokens: list[int], stop: list[str] | None) -> None:
    whole = push_all(text := stream(stop), tokens) + rest(text)
    for cut in range(len(tokens) + 1):
        before = push_all(stream(stop), tokens[:cut])
        for sent in {0, len(before) // 2, len(before)}:
            text = stream(stop)
            text.replay(tokens[:cut], sent)
            assert whole[:sent] + push_all(text, tokens[cut:]) + rest(text) == whole


def test_a_stop_string_in_the_replay_ends_the_text(tokens: list[int]) -> None:
    text = stream(["two"])
    text.replay(tokens, 2)
    assert text.stopped
    assert rest(text) == "e 🚢 "
    assert not text.push(tokens[0])
