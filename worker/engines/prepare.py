"""Turns a `Generate` into a checked row and its text side: everything that needs the tokenizer."""

from __future__ import annotations

import json
import os
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from ...protocol import limits
from ...protocol.commands import Generate
from ...protocol.errors import ErrorCode
from ...protocol.values import ChatMessage, Part
from ..text.constraints import Constraints
from ..text.detokenize import Detokenizers
from ..text.markup import Markup
from ..text.output import Channels, TextStream
from ..text.sampling import check_sampling
from ..text.templates import encode_messages, encode_prompt
from ..text.tools import parse_calls
from .base import Prepared, Refused, Row, Sampling


class Preparer:
    """Holds the tokenizer of a loaded model and the bounds of its requests."""

    def __init__(self, tokenizer: Any, vocabulary: int, context_limit: int, eos: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._context_limit = context_limit
        self._eos = eos
        self._detokenizers = Detokenizers(tokenizer)
        self._bound = LengthBound(tokenizer, context_limit or limits.MAX_PROMPT_TOKENS)
        self._markup = Markup(tokenizer)
        self._constraints = Constraints(tokenizer, vocabulary, eos)

    def prepare(self, request_id: bytes, request: Generate) -> Prepared:
        """Render, tokenise, check. Raises `Refused`."""
        sampling = _sampling(request)
        check_sampling(sampling, self._vocabulary)
        prompt = self._prompt(request)
        max_tokens = self._fit(len(prompt), request.max_tokens or limits.DEFAULT_MAX_TOKENS)
        emitted = self._emitted(request.resume_tokens, max_tokens)
        stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
        channels = self._split(request_id, request, prompt)
        seeks = bool(request.tools) and request.channels
        blind = self._markup.blind(continued=request.continue_final) if seeks else ""
        text = TextStream(self._detokenizers.make(), stops, self._eos, channels, blind)
        if request.resume_tokens:
            text.replay(emitted, request.resume_chars, request.resume_reasoning_chars, request.resume_tool_chars)
        row = Row(
            request_id,
            prompt,
            max_tokens,
            sampling,
            emitted,
            salt=request.tenant,
            caching=request.cache,
            logprobs=request.logprobs,
            top_logprobs=request.top_logprobs,
            constrain=self._constrain(request, prompt),
            speculative=request.speculative,
        )
        return Prepared(row, text)

    def _split(self, request_id: bytes, request: Generate, prompt: list[int]) -> Channels | None:
        """What splits the answer into channels, if there is anything to split."""
        if request.messages is None or not request.channels:
            return None
        splitter = self._markup.splitter(prompt, bool(request.tools), continued=request.continue_final)
        if splitter is None:
            return None
        parser = getattr(self._tokenizer, "tool_parser", None)
        parse = partial(parse_calls, parser=parser, tools=request.tools or [], prefix=f"call_{request_id.hex()}_")
        return Channels(splitter, parse)

    def _constrain(self, request: Generate, prompt: list[int]) -> Callable[[Sequence[int]], Any] | None:
        """What keeps the answer in its form, if it must have one."""
        if request.response_format is None:
            return None
        arguments = request.template_args or {}
        wanted = all(arguments.get(name) is not False for name in ("enable_thinking", "thinking"))
        return self._constraints.make(
            request.response_format,
            prompt,
            may_think=request.messages is not None and wanted,
            partial=request.messages is None,
        )

    def _prompt(self, request: Generate) -> list[int]:
        if request.messages is not None:
            self._bound.check_messages(request.messages, request.tools, request.template_args)
            prompt = encode_messages(
                self._tokenizer,
                request.messages,
                request.tools,
                request.template_args,
                self._bound.check,
                continue_final=request.continue_final,
            )
        elif request.tokens is not None:
            prompt = list(request.tokens)
        else:
            text = request.prompt or ""
            self._bound.check(text)
            prompt = encode_prompt(self._tokenizer, text)
        if not prompt:
            raise Refused(ErrorCode.BAD_REQUEST, "the prompt encodes to no tokens")
        largest, smallest = max(prompt), min(prompt)
        if largest >= self._vocabulary or smallest < 0:
            bad = largest if largest >= self._vocabulary else smallest
            raise Refused(
                ErrorCode.BAD_REQUEST,
                f"the prompt has token id {bad}; this vocabulary has ids 0 to {self._vocabulary - 1}",
            )
        return prompt

    def _fit(self, prompt: int, max_tokens: int) -> int:
        """`max_tokens`, cut to what the context leaves."""
        limit = self._context_limit
        if not limit:
            if prompt > limits.MAX_PROMPT_TOKENS:
                raise Refused(
                    ErrorCode.CONTEXT_OVERFLOW,
                    f"the prompt has {prompt} tokens; at most {limits.MAX_PROMPT_TOKENS} are taken",
                )
            return max_tokens
        if prompt + 1 > limit:
            raise Refused(
                ErrorCode.CONTEXT_OVERFLOW,
                f"the prompt has {prompt} tokens and the context limit is {limit}, which leaves no room for "
                "an answer; shorten the prompt, or load the model with a larger context_limit if it has one",
            )
        return min(max_tokens, limit - prompt)

    def _emitted(self, resumed: list[int], max_tokens: int) -> list[int]:
        """Tokens of an earlier incarnation, without those that end the row.

        The last token of a row carries its finish. If only that was lost, it is generated once more.
        """
        for index, token in enumerate(resumed[: max_tokens - 1]):
            if token in self._eos or not 0 <= token < self._vocabulary:
                return resumed[:index]
        return resumed[: max_tokens - 1]


_UNPROVEN_BYTES = 64
"""Bytes of text that a token stands for at most, on average, where nothing is known for sure."""

_SPARE = 4
"""Templates drop some of what they are given, such as earlier reasoning. So much more of it is taken."""

_ALNUM = (string.ascii_letters + string.digits).encode()
_ASCII = bytes(range(128))
_BECOME_ASCII = "\u037e\u1fef\u212a"
"""Characters outside ASCII that NFC turns into ASCII."""

_MAX_CHAR_BYTES = 4
_MAX_COMPOSED = 4
"""Characters that Unicode composes into one, at most."""


class Count(NamedTuple):
    """Bytes of a text: all, ASCII letters and digits, and those of characters outside ASCII."""

    total: int
    alnum: int
    high: int


class LengthBound:
    """Refuses text that is certainly too long, from its length alone: tokenising it would take seconds.

    If a token stands for at most L bytes of some class, a text with more than n * L of them has more than n
    tokens. Three classes are counted, as the longest tokens are mere blanks or dashes. This is a proof for
    byte-level BPE and for vocabularies with a fallback to bytes. Normalisers that may join characters are
    allowed for. For other tokenizers a token is taken to stand for no more than 64 bytes.
    """

    def __init__(self, tokenizer: Any, limit: int) -> None:
        self._limit = limit
        self._swallows_blanks = False
        self._forms: frozenset[str] | None = None
        self._longest = Count(_UNPROVEN_BYTES, _UNPROVEN_BYTES, _UNPROVEN_BYTES)
        try:
            self._read(tokenizer, tokenizer.backend_tokenizer)
        except Exception:  # not one of the `tokenizers` library, or one with other parts
            self._forms = None

    def _read(self, tokenizer: Any, backend: Any) -> None:
        added = tokenizer.added_tokens_decoder
        texts = [str(token.content) for token in added.values()]
        if backend.normalizer is not None:
            texts += [backend.normalizer.normalize_str(text) for text in texts]
        special = set(texts)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        byte_level, forms = _pipeline(backend, vocabulary)
        count = _count_letters if byte_level else _count_text
        longest = Count(1, 1, 1)
        for text in special:
            longest = Count(*map(max, longest, _count_text(text)))
        # Long ones first: the rest of a large vocabulary is too short to matter.
        for token in sorted(vocabulary.keys() - set(special), key=len, reverse=True):
            if len(token) * (1 if byte_level else _MAX_CHAR_BYTES) <= min(longest):
                break
            longest = Count(*map(max, longest, count(token)))
        if forms is None:
            self._longest = Count(*(max(_UNPROVEN_BYTES, size) for size in longest))
            return
        self._longest, self._forms = longest, forms
        self._swallows_blanks = any(token.lstrip or token.rstrip for token in added.values())

    def check(self, text: str, spare: int = 1) -> None:
        """Raises `Refused` if the text has more tokens than the limit."""
        room = self._limit * spare
        if len(text) * 4 <= room:
            return
        least = self._tokens(text, room)
        if least > room and self._swallows_blanks:
            least = self._tokens("".join(text.split()), room)
        if least > room:
            raise Refused(
                ErrorCode.CONTEXT_OVERFLOW,
                f"the prompt has {len(text)} characters, so at least about {least // spare} tokens, and the context "
                f"limit is {self._limit}; shorten the prompt, or load the model with a larger context_limit if it "
                "has one",
            )

    def check_messages(
        self, messages: list[ChatMessage], tools: list[dict[str, Any]] | None, arguments: dict[str, Any] | None
    ) -> None:
        """The same for a chat that is not rendered yet. Raises `Refused`."""
        if len(messages) > self._limit:
            raise Refused(
                ErrorCode.CONTEXT_OVERFLOW,
                f"the chat has {len(messages)} messages of at least a token each, and the context limit is "
                f"{self._limit}; leave out messages, or load the model with a larger context_limit if it has one",
            )
        # Templates show what others said, without blanks at its ends.
        said = (message.content for message in messages if message.role != "assistant")
        self.check("".join(map(str.strip, _texts(said))))
        # Of the rest they may leave out a lot.
        room = self._limit * _SPARE
        extras = list(islice(_texts((tools, arguments, [m.tool_calls for m in messages if m.tool_calls])), room + 1))
        if len(extras) > room:
            raise Refused(
                ErrorCode.CONTEXT_OVERFLOW,
                f"tools, template_args and tool_calls have over {room} values, and the context limit is "
                f"{self._limit} tokens",
            )
        texts = _texts((message.content, message.reasoning_content) for message in messages)
        self.check("".join((*texts, *extras)), _SPARE)

    def _tokens(self, text: str, enough: int) -> int:
        """How many tokens the text has at least. Looks no closer once that is more than `enough`."""
        data = text.encode("utf-8", "replace")
        least = -(-len(data) // self._longest.total)
        if self._forms is None or (least > enough and (not self._forms or text.isascii())):
            return least
        count = _count(data)
        if self._forms and not text.isascii():
            # A character outside ASCII may join one letter before it; up to four become one, of two bytes or more.
            others = len(text) - (count.total - count.high)
            stay = others - sum(map(text.count, _BECOME_ASCII)) if self._forms == {"NFC"} else 0
            total, alnum, high = -(-len(text) // _MAX_COMPOSED), count.alnum - others, 2 * (stay // _MAX_COMPOSED)
            count = Count(total, max(alnum, 0), max(high, 0))
        return max(-(-have // most) for have, most in zip(count, self._longest, strict=True))


def _count(data: bytes) -> Count:
    total = len(data)
    return Count(total, total - len(data.translate(None, _ALNUM)), len(data.translate(None, _ASCII)))


def _count_text(token: str) -> Count:
    return _count(token.encode("utf-8", "replace"))


def _count_letters(token: str) -> Count:
    """Of a token in the alphabet of byte-level BPE, where one character is one byte."""
    plain = sum(char.isascii() for char in token)
    alnum = sum(char.isascii() and char.isalnum() for char in token)
    return Count(len(token), alnum, len(token) - plain)


def _pipeline(backend: Any, vocabulary: dict[str, int]) -> tuple[bool, frozenset[str] | None]:
    """Whether tokens are byte-level, and how text is normalised. None if text may vanish, or nobody knows."""
    normalizers = list(_steps(backend.normalizer, "normalizers"))
    splitters = list(_steps(backend.pre_tokenizer, "pretokenizers"))
    byte_level = any(step["type"] == "ByteLevel" for step in normalizers + splitters)
    if byte_level:
        whole = type(backend.model).__name__ == "BPE" and all(char in vocabulary for char in _alphabet())
    else:
        whole = bool(getattr(backend.model, "byte_fallback", False))
        whole = whole and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    if not whole or not all(map(_keeps, splitters)):
        return byte_level, None
    forms: set[str] = set()
    for step in normalizers:
        kind = step["type"]
        if kind in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase"):
            forms.add(kind)
        elif kind == "Replace":
            pattern = step["pattern"].get("String", "")
            leaves_letters = pattern.isascii() and not any(map(str.isalnum, pattern))
            if not leaves_letters or not 0 < len(pattern) <= len(step["content"]):
                return byte_level, None
        elif kind not in ("Prepend", "ByteLevel"):
            return byte_level, None
    return byte_level, frozenset(forms)


def _alphabet() -> Iterator[str]:
    """The characters that stand for the 256 bytes: those that can be seen, then more from U+0100 on."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    yield from map(chr, plain)
    yield from map(chr, range(256, 512 - len(plain)))


def _keeps(splitter: dict[str, Any]) -> bool:
    """Splits text and drops none of it."""
    if splitter["type"] in ("Split", "Punctuation"):
        return splitter["behavior"] != "Removed"
    return splitter["type"] in ("ByteLevel", "Metaspace", "Digits")


def _steps(part: Any, nested: str) -> Iterator[dict[str, Any]]:
    """The steps of a normaliser or splitter, as its file has them."""
    waiting = [] if part is None else [json.loads(part.__getstate__())]
    while waiting:
        step = waiting.pop()
        if step["type"] == "Sequence":
            waiting += reversed(step[nested])
        else:
            yield step


def _texts(value: Any) -> Iterator[str]:
    """All text in a value, at any depth. Anything else counts as an empty one."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        yield item if isinstance(item, str) else (item.text or "") if isinstance(item, Part) else ""
        if isinstance(item, dict):
            waiting += item.keys()
            waiting += item.values()
        elif isinstance(item, Iterable) and not isinstance(item, (str, bytes)):
            waiting += item


def _sampling(request: Generate) -> Sampling:
    temperature = request.temperature
    seed = request.seed
    return Sampling(
        temperature=limits.DEFAULT_TEMPERATURE if temperature is None else temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        seed=int.from_bytes(os.urandom(8), "little") & limits.MAX_SEED if seed is None else seed,
        logit_bias=dict(request.logit_bias or {}),
        repetition_penalty=request.repetition_penalty,
        repetition_window=request.repetition_window,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        xtc_probability=request.xtc_probability,
        xtc_threshold=request.xtc_threshold,
    )
