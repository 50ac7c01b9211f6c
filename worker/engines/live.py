"""A row while it is decoded: where it stands and what chooses its tokens. Plain state, no decisions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..text.chooser import Chooser, make_chooser
from ..text.logprobs import read_logprobs
from .base import Row, RowFailed, TokenOut


@dataclass(frozen=True, slots=True)
class Facts:
    """What is fixed for a loaded model."""

    model: Any
    vocabulary: int
    eos: frozenset[int]
    make_cache: Callable[[], list[Any]]
    """Empty caches for a row, one a layer."""
    banned: tuple[int, ...] = ()
    """Never generated."""
    spared: tuple[int, ...] = ()
    """Never left out by XTC: ends of an answer and of a line."""


class Live:
    """One row, from `insert` to its last token.

    `ids` holds prompt, emitted and generated tokens. The first `cached` of them are in the row's cache.
    """

    __slots__ = (
        *("cache", "cached", "caching", "chooser", "facts", "hit"),
        *("ids", "left", "marks", "row", "sought", "start"),
    )

    def __init__(self, row: Row, facts: Facts) -> None:
        self.row = row
        self.facts = facts
        self.ids = [*row.prompt, *row.emitted]
        self.start = len(self.ids)
        self.left = row.max_tokens - len(row.emitted)
        self.cache: list[Any] | None = None
        self.cached = 0
        self.caching = False
        """Whether it takes part in the prompt cache, and there is one."""
        self.sought = False
        """Whether the prompt cache was asked for a prefix of it."""
        self.hit = 0
        """Tokens that came from the prompt cache."""
        self.marks: list[tuple[int, bool]] = []
        """Where its prefill stops for a copy of its cache, and whether that goes to disk."""
        self.chooser: Chooser = self._choose(row.emitted)

    @property
    def prefilling(self) -> bool:
        """Whether no token was generated yet."""
        return len(self.ids) == self.start

    @property
    def unread(self) -> int:
        """Tokens of its prompt that are not in its cache yet."""
        return len(self.ids) - self.cached

    def reached(self) -> bool | None:
        """None: its prefill is not at a mark. Else whether what is there goes to disk; the mark is gone then."""
        found = None
        while self.marks and self.marks[0][0] <= self.cached:
            position, durable = self.marks.pop(0)
            found = durable if position == self.cached else None
        return found

    def take(self, token: int, logprobs: mx.array | None = None) -> TokenOut:
        """Note a generated token and say whether it is the last.

        `logprobs`: the distribution that it comes from; needed if the row asks for log probabilities.
        """
        self.ids.append(token)
        self.left -= 1
        if token in self.facts.eos:
            finish = "stop"
        else:
            finish = "length" if self.left <= 0 else None
        if self.row.logprobs and logprobs is not None:
            own, top = read_logprobs(logprobs, token, self.row.top_logprobs)
            return TokenOut(self.row.request_id, token, finish, own, top)
        return TokenOut(self.row.request_id, token, finish)

    def failed(self) -> RowFailed | None:
        """Whether choosing the row's next token failed, and why."""
        message = self.chooser.fault.message
        return None if message is None else RowFailed(self.row.request_id, message)

    def restart(self) -> None:
        """Forget cache and chooser; a new chooser goes on at the same position."""
        self.cache, self.cached, self.hit, self.marks, self.sought = None, 0, 0, [], False
        self.rechoose()

    def rechoose(self) -> None:
        """A fresh chooser for the position after the last token of `ids`."""
        self.chooser = self._choose(self.ids[len(self.row.prompt) :])

    def _choose(self, emitted: list[int]) -> Chooser:
        facts = self.facts
        return make_chooser(self.row, emitted, facts.vocabulary, facts.banned, facts.spared)


Keep = Callable[[Live, Sequence[Any] | None, int, bool, bool], None]
"""`keep(live, cache, tokens, copy, durable)`: a cache over the first `tokens` of a row's ids."""
