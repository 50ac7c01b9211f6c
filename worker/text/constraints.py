"""Keeps an answer in its form: a schema, a pattern, a choice or a grammar, as masks over the vocabulary.

llguidance reads the form and says after each token which tokens may follow; it works on the CPU, whatever the
backend. A form costs at most so much:

- building it: about 20 ms of regular expressions and 100,000 symbols of grammar;
- each mask: about 15 ms of lexing and 50,000 parser items;
- memory: 50,000 lexer states, 1 to 2 kB each.

One that needs more to build is refused; one that needs more later fails its row.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from llguidance import LLMatcher, LLParserLimits
from llguidance.hf import from_tokenizer

from ...protocol.errors import ErrorCode
from ...protocol.values import ResponseFormat
from ..engines.base import Refused
from .masks import Masked, Thinking
from .thinking import is_closed, is_open, thinks

_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
_REMEMBERED = 32
"""Forms kept ready, the last used ones."""

_BLANKS = r"[ \t\n\r]{1,40}"
"""White space between the parts of JSON. Bounded, or a model could write blanks for ever."""

_MESSAGE_CHARS = 500


class Constraints:
    """Makes constraints for the rows of one loaded model. Holds its vocabulary, and the last forms."""

    def __init__(self, tokenizer: Any, vocabulary: int, eos: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._eos = tuple(sorted(token for token in eos if 0 <= token < vocabulary))
        self._words: Any = None
        self._ready: OrderedDict[bytes, Any] = OrderedDict()

    def make(
        self, form: ResponseFormat, prompt: Sequence[int], *, may_think: bool, partial: bool
    ) -> Callable[[Sequence[int]], Masked]:
        """What makes a row's processor, given the tokens that are generated already. Raises `Refused`.

        may_think: whether the model may open a reasoning block itself; the form starts after it.
        partial: as in `thinking.is_open`.
        """
        matcher, words = self._matcher(form), self._words.vocab_size
        thinking = self._thinking(prompt, may_think, partial)

        def start(emitted: Sequence[int]) -> Masked:
            return Masked(matcher.deep_copy(), words, self._vocabulary, self._eos, thinking, emitted)

        return start

    def _matcher(self, form: ResponseFormat) -> Any:
        key = msgspec.msgpack.encode(form)
        matcher = self._ready.get(key)
        if matcher is None:
            matcher = LLMatcher(
                self._vocabulary_words(), _source(form), log_level=0, limits=LLParserLimits(**_LIMITS)
            )
            if matcher.is_error():
                raise Refused(ErrorCode.BAD_REQUEST, f"response_format: {matcher.get_error()[:_MESSAGE_CHARS]}")
            self._ready[key] = matcher
            while len(self._ready) > _REMEMBERED:
                self._ready.popitem(last=False)
        self._ready.move_to_end(key)
        return matcher

    def _vocabulary_words(self) -> Any:
        """The text of each token. Made with the first form: it takes a while for a large vocabulary."""
        if self._words is not None:
            return self._words
        if not self._eos:
            raise Refused(ErrorCode.UNSUPPORTED, "response_format: this model has no token that ends an answer")
        inner = getattr(self._tokenizer, "_tokenizer", self._tokenizer)
        try:
            size = max(self._vocabulary, len(inner))
            self._words = from_tokenizer(inner, n_vocab=size, eos_token=list(self._eos))
        except Exception as error:
            raise Refused(
                ErrorCode.UNSUPPORTED, f"response_format: this model's tokenizer cannot be used for it: {error}"
            ) from error
        return self._words

    def _thinking(self, prompt: Sequence[int], may_think: bool, partial: bool) -> Thinking | None:
        """How reasoning is marked, if some is open or may be opened."""
        tokenizer = self._tokenizer
        if not thinks(tokenizer):
            return None
        opened = is_open(tokenizer, prompt, partial=partial)
        if not opened and (not may_think or is_closed(tokenizer, prompt)):
            return None
        return Thinking(tuple(tokenizer.think_start_tokens), tuple(tokenizer.think_end_tokens), opened)


def _source(form: ResponseFormat) -> str:
    """A form in llguidance's own notation. Whether it makes sense is seen when it is built."""
    if form.type == "regex":
        return LLMatcher.grammar_from_regex(form.pattern or "")
    if form.type == "grammar":
        return LLMatcher.grammar_from_lark(form.grammar or "")
    if form.type == "choice":
        words = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in form.choices or ())
        return LLMatcher.grammar_from_lark(f"start: {words}")
    schema = {"type": "object"} if form.type == "json_object" else form.schema or {}
    return LLMatcher.grammar_from_json_schema(msgspec.json.encode(schema).decode(), {"whitespace_pattern": _BLANKS})
