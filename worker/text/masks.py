"""A logits processor that lets only those tokens through which a constraint allows.

It needs the value of the newest token, which is still being computed when the next step is put together. So it
sends the forward pass of that step off first and makes its mask meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from llguidance.numpy import fill_next_token_bitmask


@dataclass(frozen=True, slots=True)
class Thinking:
    """The marks around reasoning, and whether the prompt ends within some."""

    start: tuple[int, ...]
    end: tuple[int, ...]
    is_open: bool


class Masked:
    """One row's processor. A constraint that meets an impossible token, or a limit, raises `ValueError`.

    `words` counts the tokens that the matcher knows; the logits have `vocabulary` of them, more or less.
    """

    def __init__(
        self,
        matcher: Any,
        words: int,
        vocabulary: int,
        eos: Sequence[int],
        thinking: Thinking | None,
        emitted: Sequence[int],
    ) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._eos = eos
        self._thinking = thinking
        self._inside = thinking is not None and thinking.is_open
        self._opening = 0  # tokens of the start mark that are here
        self._closing: tuple[int, ...] = ()  # the last tokens of reasoning, as many as the end mark has
        self._ended = False
        self._bits = np.zeros((1, (words + 31) // 32), dtype=np.int32)
        for token in emitted:
            self._take(token)
        self._first = True

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        newest = None
        if not self._first:
            mx.async_eval(tokens)
            mx.async_eval(logits)
            newest = int(np.asarray(tokens)[-1])
        allowed = self.allow(newest)
        if allowed is None:
            return logits
        return mx.where(mx.array(allowed), logits, mx.array(-math.inf, dtype=logits.dtype))

    def allow(self, newest: int | None) -> Any:
        """One bool for each token of the vocabulary, or None: all are allowed. `newest` None: there is none yet."""
        self._first = False
        if newest is not None:
            self._take(newest)
        return None if self._ended else self._allowed()  # ended: this is a step ahead of what will be seen

    def _take(self, token: int) -> None:
        """Note the newest token."""
        if self._ended:
            return
        if token in self._eos:
            self._ended = True
        elif self._inside:
            self._think(token)
        elif self._thinking is not None and self._may_open(self._thinking, token):
            self._opening += 1
            if self._opening == len(self._thinking.start):
                self._inside = True
        else:
            self._thinking = None  # the answer has begun
            if not self._matcher.consume_token(token):
                raise ValueError(self._problem(f"token {token} does not fit"))

    def _think(self, token: int) -> None:
        assert self._thinking is not None  # inside of what it describes
        end = self._thinking.end
        self._closing = (*self._closing, token)[-len(end) :]
        if self._closing == end:
            self._inside, self._thinking = False, None

    def _may_open(self, thinking: Thinking, token: int) -> bool:
        return token == thinking.start[self._opening]

    def _allowed(self) -> Any:
        """One bool for each token of the vocabulary."""
        if self._inside:
            return self._all_but_eos()
        if self._opening and self._thinking is not None:
            return self._only([self._thinking.start[self._opening]])
        matcher = self._matcher
        if matcher.is_error():
            raise ValueError(self._problem("no mask"))
        if matcher.is_stopped():
            return self._only(self._eos)
        fill_next_token_bitmask(matcher, self._bits)
        if matcher.is_error():
            raise ValueError(self._problem("no mask"))
        count = min(self._vocabulary, self._bits.size * 32)
        allowed = np.zeros(self._vocabulary, dtype=np.bool_)
        allowed[:count] = np.unpackbits(self._bits.view(np.uint8), bitorder="little", count=count)
        if self._thinking is not None:
            allowed[self._thinking.start[0]] = True
        return allowed

    def _only(self, tokens: Sequence[int]) -> Any:
        allowed = np.zeros(self._vocabulary, dtype=np.bool_)
        allowed[list(tokens)] = True
        return allowed

    def _all_but_eos(self) -> Any:
        """Reasoning is free, but an answer that has not begun cannot end."""
        allowed = np.ones(self._vocabulary, dtype=np.bool_)
        allowed[list(self._eos)] = False
        return allowed

    def _problem(self, what: str) -> str:
        return f"response_format: {what}: {self._matcher.get_error()[:500] or 'the form is complete'}"
