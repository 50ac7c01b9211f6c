"""Changes a row's logits: bias and bans, then repetition, presence and frequency penalties.

All that a row asks for is one compiled call a token, and so is all that rows of a batch ask for that want penalties
of one kind: the number of calls is what penalties cost, not the arithmetic. Repetition looks up the few tokens of
its window, which does not grow with the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import mlx.core as mx
import numpy as np

from ..engines.base import Sampling


class Penalties:
    """One row's processor.

    Repetition divides positive and multiplies negative logits of the last `window` tokens, prompt included (Keskar
    et al. 2019, arXiv:1909.05858). Presence is subtracted once and frequency for each occurrence from all that was
    generated, as the OpenAI API means them; the prompt does not count. `longest`: tokens that prompt and answer can
    have; no window can hold more.
    """

    def __init__(
        self,
        sampling: Sampling,
        banned: Sequence[int],
        prompt: Sequence[int],
        emitted: Sequence[int],
        vocabulary: int,
        longest: int,
    ) -> None:
        repeats = sampling.repetition_penalty != 1.0 and sampling.repetition_window > 0
        occurs = bool(sampling.presence_penalty or sampling.frequency_penalty)
        bias = {**sampling.logit_bias, **dict.fromkeys(banned, -math.inf)}
        window = min(sampling.repetition_window, longest) if repeats else 0
        self.kind = bool(bias), window, occurs
        """Rows of which it is equal can share a call."""
        self.numbers = mx.array(
            [[sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty]], dtype=mx.float32
        )
        unused = self.numbers
        self.bias = _dense(bias, vocabulary) if bias else unused
        self.recent = _recent([*prompt, *emitted], window) if repeats else unused
        self.counts = _dense(_counted(emitted), vocabulary) if occurs else unused
        self._first = True

    @staticmethod
    def needed(sampling: Sampling, banned: Sequence[int]) -> bool:
        """Whether a row asks for any of it."""
        repeats = sampling.repetition_penalty != 1.0 and sampling.repetition_window > 0
        return bool(
            repeats or banned or sampling.logit_bias or sampling.presence_penalty or sampling.frequency_penalty
        )

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        newest = tokens[None, :0] if self._first else tokens[None, -1:]
        self._first = False
        change = _changer(*map(bool, self.kind))
        logits, self.recent, self.counts = change(logits, newest, self.numbers, self.bias, self.recent, self.counts)
        return logits


class PenaltyGroup:
    """The penalties of several rows of one kind, each with its first token behind it, as one call.

    It has the state of its members until it is disbanded.
    """

    def __init__(self, members: Sequence[Penalties]) -> None:
        self._members = members
        self._change = _changer(*map(bool, members[0].kind))
        self._numbers = mx.concatenate([one.numbers for one in members])
        self._bias = mx.concatenate([one.bias for one in members])
        self._recent = mx.concatenate([one.recent for one in members])
        self._counts = mx.concatenate([one.counts for one in members])

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Tokens [rows], the newest of each, and logits [rows, vocabulary] → logits."""
        logits, self._recent, self._counts = self._change(
            logits, tokens[:, None], self._numbers, self._bias, self._recent, self._counts
        )
        return logits

    def disband(self) -> None:
        """Give its members their state back."""
        for index, one in enumerate(self._members):
            one.recent, one.counts = self._recent[index : index + 1], self._counts[index : index + 1]


@lru_cache(maxsize=8)
def _changer(use_bias: bool, use_repetition: bool, use_occurrence: bool) -> Callable[..., tuple[mx.array, ...]]:
    """The compiled change for what is asked, shared by all rows that ask for it."""

    def change(
        logits: mx.array,
        newest: mx.array,
        numbers: mx.array,
        bias: mx.array,
        recent: mx.array,
        counts: mx.array,
    ) -> tuple[mx.array, ...]:
        """All have a row for each row; `newest` has one token or, at the start, none."""
        kind, rows = logits.dtype, logits.shape[0]
        repetition, presence, frequency = (numbers[:, index : index + 1] for index in range(3))
        if use_bias:
            logits = logits + bias.astype(kind)
        if use_repetition:
            recent = mx.concatenate([recent[:, newest.shape[1] :], newest.astype(mx.int32)], axis=1)
            chosen = mx.take_along_axis(logits, recent, axis=-1)
            changed = mx.where(chosen < 0, chosen * repetition, chosen / repetition).astype(kind)
            logits = mx.put_along_axis(logits, recent, changed, axis=-1)
        if use_occurrence:
            counts = counts.at[mx.arange(rows)[:, None], newest].add(1.0)
            penalty = frequency * counts + mx.where(counts > 0, presence, 0.0)
            logits = logits - penalty.astype(kind)
        return logits, recent, counts

    return mx.compile(change)


def _counted(tokens: Sequence[int]) -> dict[int, float]:
    counts: dict[int, float] = {}
    for token in tokens:
        counts[token] = counts.get(token, 0.0) + 1.0
    return counts


def _dense(values: dict[int, float], vocabulary: int) -> mx.array:
    dense = np.zeros((1, vocabulary), dtype=np.float32)
    for token, value in values.items():
        dense[0, token] = value
    return mx.array(dense)


def _recent(context: Sequence[int], window: int) -> mx.array:
    """The tokens of the window, in a fixed shape: the oldest one fills it, and leaves only after its copies."""
    recent = list(context[-window:])
    return mx.array([[recent[0]] * (window - len(recent)) + recent], dtype=mx.int32)
