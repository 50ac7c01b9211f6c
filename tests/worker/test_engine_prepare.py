"""Owns the checks that text too long for the context is refused from its length, soon and never wrongly."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from mlx_bulkhead.protocol import limits
from mlx_bulkhead.protocol.commands import Generate
from mlx_bulkhead.protocol.errors import ErrorCode
from mlx_bulkhead.protocol.values import ChatMessage, Part
from mlx_bulkhead.worker.engines.base import Refused
from mlx_bulkhead.worker.engines.prepare import LengthBound, Preparer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from .test_engine import library, shared_engine

SIZE = 8 * limits.MIB
LONG = {
    "prose": " ".join(f"word{i}" for i in range(900_000))[:SIZE],
    "one word": "a" * SIZE,
    "blanks between": "a" + " " * SIZE + "b",
    "Chinese": "今天下午我们去河边散步" * (SIZE // 33),
    "marks": "e\u0301" * (SIZE // 3),
}


class Hugging:
    """As much of a tokenizer of transformers as the bound looks at."""

    def __init__(self, backend: Tokenizer) -> None:
        self.backend_tokenizer = backend
        self.added_tokens_decoder = backend.get_added_tokens_decoder()


def tokens(text: str, bound: LengthBound) -> int:
    return bound._tokens(text, 2**40)


def make(model: Any, normalizer: Any, splitter: Any, specials: list[AddedToken], **train: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if splitter is not None:
        tokenizer.pre_tokenizer = splitter
    corpus = [
        "the lamp on the harbour wall " * 3,
        "aaaa bbbb    cccc\u00e9\u00e9\u00e9",
        "今天下午我们",
        "------ ======",
    ]
    tokenizer.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=700, show_progress=False, **train))
    tokenizer.add_special_tokens(specials)
    return tokenizer


def byte_level(normalizer: Any = None, specials: list[AddedToken] | None = None) -> Tokenizer:
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made = make(models.BPE(), normalizer, splitter, specials or [], initial_alphabet=alphabet)
    made.decoder = decoders.ByteLevel()
    return made


def with_bytes() -> Tokenizer:
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {name: index for index, name in enumerate(["<unk>", *names, "\u2581", "a", "b", "\u2581a", "ab"])}
    model = models.BPE(
        vocabulary, [("\u2581", "a"), ("a", "b")], unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return tokenizer


MARK = AddedToken("<|end|>", special=True)
GREEDY = AddedToken("<|end|>", special=True, lstrip=True, rstrip=True)
PROVEN = {
    "byte-level": lambda: byte_level(None, [MARK]),
    "composing": lambda: byte_level(normalizers.NFC(), [MARK]),
    "compatible": lambda: byte_level(normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    "swallowing": lambda: byte_level(None, [GREEDY]),
    "bytes as a fallback": with_bytes,
}
PIECES = (
    *("a", "the lamp", " ", "        ", "\n", "<|end|>", "\u2581", "--", "e\u0301", "\u212a", "K\u0327", "\u037e"),
    *("\u03b1\u0313\u0300\u0345", "\u0344", "u\u0344", "\u1100\u1161\u11a8", "\uff21", "\U0001d400", "\ufdfa"),
    *("今天", "é", "\u3000", "\U0001f600", "\x00", "\u1fef", "\u00b4", "9"),
)


@pytest.mark.parametrize("kind", list(PROVEN))
def test_no_text_has_fewer_tokens_than_the_bound_says(kind: str) -> None:
    backend = PROVEN[kind]()
    bound = LengthBound(Hugging(backend), 4)
    assert bound._forms is not None, "the bound is proven for this kind"
    chosen = random.Random(7)
    some = 0
    for _ in range(800):
        few = chosen.sample(PIECES, chosen.randint(1, 4))
        text = "".join(chosen.choices(few, k=chosen.randint(1, 300)))
        have = len(backend.encode(text, add_special_tokens=False).ids)
        if not bound._swallows_blanks:
            assert tokens(text, bound) <= have, text
        try:
            bound.check(text)
        except Refused:
            some += 1
            assert have > 4, text
    assert some, "the bound refuses something"


@pytest.mark.parametrize(
    "backend",
    [
        Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")),
        make(models.BPE(), None, pre_tokenizers.Whitespace(), []),
        byte_level(normalizers.Replace("a", "")),
        byte_level(normalizers.BertNormalizer()),
    ],
)
def test_a_tokenizer_of_another_kind_gets_a_generous_bound(backend: Tokenizer) -> None:
    bound = LengthBound(Hugging(backend), 100)
    longest = max(64, *map(len, backend.get_vocab()))
    bound.check("x" * 100 * longest)
    with pytest.raises(Refused):
        bound.check("x" * 100 * longest + "x")
    LengthBound(object(), 100).check("x" * 6400)
    with pytest.raises(Refused):
        LengthBound(object(), 100).check("x" * 6401)


@pytest.mark.parametrize("kind", list(LONG))
@pytest.mark.parametrize("chat", [False, True])
def test_a_very_long_prompt_is_refused_at_once(kind: str, chat: bool) -> None:
    engine, text = shared_engine(), LONG[kind]
    given: dict[str, Any] = {"messages": [ChatMessage(role="user", content=text)]} if chat else {"prompt": text}
    best = 9.0
    for _ in range(3):  # a busy machine must not fail this
        began = time.perf_counter()
        with pytest.raises(Refused) as refused:
            engine.prepare(b"1", Generate(model="tiny", **given))
        best = min(best, time.perf_counter() - began)
    assert best < 0.1
    assert refused.value.code is ErrorCode.CONTEXT_OVERFLOW
    assert f"{len(text)} characters" in refused.value.message
    assert f"limit is {engine.info.limits.context_tokens}" in refused.value.message


def preparer(limit: int) -> Preparer:
    return Preparer(library()[1], 2048, limit, frozenset())


def chat(*messages: ChatMessage, **more: Any) -> Generate:
    return Generate(model="tiny", messages=list(messages), **more)


def say(role: str, content: Any, **more: Any) -> ChatMessage:
    return ChatMessage(role=role, content=content, **more)


DEEP: dict[str, Any] = {"a": [[{"b": "x" * 100_000}]]}
TOO_MUCH = {
    "a part": chat(say("user", [Part(type="text", text="x" * 100_000)])),
    "own earlier turns": chat(say("user", "x"), say("assistant", "y" * 100_000), say("user", "z")),
    "reasoning": chat(say("user", "x"), say("assistant", "y", reasoning_content="y" * 100_000)),
    "tool calls": chat(say("user", "x"), say("assistant", None, tool_calls=[DEEP])),
    "tools": chat(say("user", "x"), tools=[DEEP]),
    "many values": chat(say("user", "x"), tools=[{"a": [0] * 1000}]),
    "template_args": chat(say("user", "x"), template_args={"a": DEEP}),
    "many turns": chat(*[say("user", "x")] * 101),
}


@pytest.mark.parametrize("name", list(TOO_MUCH))
def test_a_chat_is_bounded_before_it_is_rendered(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = preparer(100)

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("rendered")

    monkeypatch.setattr("mlx_bulkhead.worker.text.templates.render", never)
    with pytest.raises(Refused) as refused:
        made.prepare(b"1", TOO_MUCH[name])
    assert refused.value.code is ErrorCode.CONTEXT_OVERFLOW


def test_a_template_that_makes_much_of_little_is_refused_before_it_is_tokenised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = preparer(100)
    monkeypatch.setattr("mlx_bulkhead.worker.text.templates.render", lambda *_, **__: "x" * 100_000)
    with pytest.raises(Refused, match="100000 characters"):
        made.prepare(b"1", chat(say("user", "x")))


def test_blanks_around_a_message_count_for_nothing() -> None:
    LengthBound(library()[1], 100).check_messages([say("user", "x" + " " * 1000)], None, None)


def test_without_a_context_limit_there_still_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PROMPT_TOKENS", 50)
    made = preparer(0)
    assert made.prepare(b"1", Generate(model="tiny", prompt="Hi")).row.max_tokens == limits.DEFAULT_MAX_TOKENS
    with pytest.raises(Refused, match="limit is 50"):
        made.prepare(b"2", Generate(model="tiny", prompt="x" * 10_000))
    with pytest.raises(Refused, match="at most 50"):
        made.prepare(b"3", Generate(model="tiny", tokens=[5] * 51))


def test_the_token_count_decides_what_the_length_does_not() -> None:
    made, text = preparer(64), "The lamp on the harbour wall goes out at seven. "
    have = len(library()[1].encode(text))
    assert 1 < have < 64
    assert len(made.prepare(b"1", Generate(model="tiny", prompt=text)).row.prompt) == have
    with pytest.raises(Refused, match=r"has \d+ tokens and the context limit is 64"):
        made.prepare(b"2", Generate(model="tiny", tokens=[5] * 64))
