"""Turns token ids into text, one at a time, in linear time, and never shows U+FFFD.

Incomplete bytes are held back until their character is whole; bytes that can never become a character are
left out. So the text equals that of mlx-lm's detokenizer with U+FFFD removed.

mlx-lm knows two kinds of vocabularies whose tokens stand for fixed bytes. For these the bytes go through an
incremental decoder here, since the library decodes again all that is held back for each new token. All
others go through the tokenizer's own decoder, over a window of the current line.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, SPMStreamingDetokenizer

REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """Text of one growing list of tokens."""

    def push(self, token: int) -> str:
        """Text that became certain with this token."""
        ...

    def finish(self) -> str:
        """The rest."""
        ...


class Detokenizers:
    """Makes a detokenizer for each request; holds what they share. One for each loaded tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        library = tokenizer.detokenizer
        self._tokenizer = tokenizer
        self._tokens: list[Any] | None = None
        self._to_bytes: Callable[[Any], bytes] = bytes
        self._trim = False
        self._marker = ""
        self._joins_marks = False
        if isinstance(library, BPEStreamingDetokenizer):
            self._tokens, self._to_bytes, self._trim = library.tokenmap, _byte_level, True
        elif isinstance(library, SPMStreamingDetokenizer):
            self._tokens, self._trim, self._marker = library.tokenmap, library.trim_space, "\u2581"
        else:
            probe = tokenizer.encode("a ,b", add_special_tokens=False)
            self._joins_marks = " ," not in tokenizer.decode(probe)
        self._bytes: dict[int, bytes] = {}

    def make(self) -> Detokenizer:
        """A fresh one."""
        if self._tokens is not None:
            return _ByBytes(self.bytes_of, self._trim, self._marker)
        return _ByWindow(self._tokenizer.decode, self._joins_marks)

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token stands for."""
        known = self._bytes.get(token)
        if known is None:
            tokens = self._tokens or []
            # The library shows "!" for ids beyond the tokenizer, which a padded embedding can produce.
            entry = tokens[token] if token < len(tokens) else "!"
            known = self._bytes[token] = self._to_bytes(entry) if entry is not None else b""
        return known


class _ByBytes:
    def __init__(self, bytes_of: Callable[[int], bytes], trim: bool, marker: str) -> None:
        self._bytes_of = bytes_of
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._trim = trim  # the first blank of the whole text is not shown
        self._marker = marker  # what stands for a blank, if anything does

    def push(self, token: int) -> str:
        return self._show(self._decode(self._bytes_of(token)))

    def finish(self) -> str:
        return self._show(self._decode(b"", True))

    def _show(self, text: str) -> str:
        if not text:
            return ""
        if self._marker:
            text = text.replace(self._marker, " ")
        if self._trim:
            rest = text[1:] if text[0] == " " else text
            # SentencePiece drops a blank of each piece for as long as nothing is shown.
            self._trim = bool(self._marker) and not rest
            text = rest
        return text.replace(REPLACEMENT, "") if REPLACEMENT in text else text


_WINDOW = 128
"""Tokens of one line after which the window moves, keeping half of them as context."""


class _ByWindow:
    """Decodes the current line anew for each token, but never more than a window of it."""

    def __init__(self, decode: Callable[[list[int]], str], joins_marks: bool) -> None:
        self._decode = decode
        self._joins_marks = joins_marks  # the tokenizer drops a blank before a comma that follows
        self._window: list[int] = []
        self._shown = 0
        self._limit = _WINDOW

    def push(self, token: int) -> str:
        self._window.append(token)
        whole = self._decode(self._window)
        text = whole.rstrip(REPLACEMENT)
        if self._joins_marks and text == whole and text.endswith(" "):
            text = text[:-1]
        fresh = self._take(text)
        if text.endswith("\n"):
            self._window, self._shown, self._limit = [], 0, _WINDOW
        elif len(self._window) >= self._limit and text == whole:
            self._move(text)
        return fresh

    def finish(self) -> str:
        fresh = self._take(self._decode(self._window)) if self._window else ""
        self._window, self._shown = [], 0
        return fresh

    def _take(self, text: str) -> str:
        fresh = text[self._shown :]
        self._shown = max(self._shown, len(text))
        return fresh.replace(REPLACEMENT, "") if REPLACEMENT in fresh else fresh

    def _move(self, text: str) -> None:
        recent = self._window[-(_WINDOW // 2) :]
        context = self._decode(recent)
        if text.endswith(context):
            self._window, self._shown, self._limit = recent, len(context), _WINDOW
        else:
            # The border splits something; try again later. Doubling keeps the whole linear enough.
            self._limit *= 2


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """The alphabet of byte-level BPE (Radford et al. 2019): printable bytes stand for themselves, the others
    follow from U+0100 on, in order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    odd = sorted(set(range(256)) - set(plain))
    table = {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(odd)}
    # The library does not map the zero byte; its text is the reference.
    del table[chr(256)]
    return table


def _byte_level(token: str) -> bytes:
    """Bytes of a token; characters outside the alphabet, as in special tokens, are text."""
    table = _byte_of_char()
    return b"".join(bytes((table[char],)) if char in table else char.encode("utf-8", "replace") for char in token)
