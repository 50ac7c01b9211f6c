"""Changes a row's logits: bias and bans, then repetition, presence and frequency penalties.

All that a row asks for is one compiled call a token: in a batch the number of calls is what penalties cost, not
the arithmetic. Repetition looks up the few tokens of its window, which does not grow with the vocabulary.
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
        self._change = _changer(bool(bias), repeats, occurs)
        self._numbers = mx.array(
            [sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty], dtype=mx.float32
        )
        unused = self._numbers
        self._bias = _dense(bias, vocabulary) if bias else unused
        self._recent = _recent([*prompt, *emitted], min(sampling.repetition_window, longest)) if repeats else unused
        self._counts = _dense(_counted(emitted), vocabulary) if occurs else unused
        self._nothing = mx.array([], dtype=mx.int32)
        self._first = True

    @staticmethod
    def needed(sampling: Sampling, banned: Sequence[int]) -> bool:
        """Whether a row asks for any of it."""
        repeats = sampling.repetition_penalty != 1.0 and sampling.repetition_window > 0
        return bool(
            repeats or banned or sampling.logit_bias or sampling.presence_penalty or sampling.frequency_penalty
        )

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        token = self._nothing if self._first else tokens[-1:]
        self._first = False
        logits, self._recent, self._counts = self._change(
            logits, token, self._numbers, self._bias, self._recent, self._counts
        )
        return logits


@lru_cache(maxsize=8)
def _changer(use_bias: bool, use_repetition: bool, use_occurrence: bool) -> Callable[..., tuple[mx.array, ...]]:
    """The compiled change for what is asked, shared by all rows that ask for it."""

    def change(
        logits: mx.array,
        token: mx.array,
        numbers: mx.array,
        bias: mx.array,
        recent: mx.array,
        counts: mx.array,
    ) -> tuple[mx.array, ...]:
        kind = logits.dtype
        if use_bias:
            logits = logits + bias.astype(kind)
        if use_repetition:
            recent = mx.concatenate([recent[token.size :], token.astype(mx.int32)])
            chosen = logits[:, recent]
            changed = mx.where(chosen < 0, chosen * numbers[0], chosen / numbers[0]).astype(kind)
            logits = mx.put_along_axis(logits, recent[None], changed, axis=-1)
        if use_occurrence:
            counts = counts.at[token].add(1.0)
            penalty = numbers[2] * counts + mx.where(counts > 0, numbers[1], 0.0)
            logits = logits - penalty.astype(kind)
        return logits, recent, counts

    return mx.compile(change)


def _counted(tokens: Sequence[int]) -> dict[int, float]:
    counts: dict[int, float] = {}
    for token in tokens:
        counts[token] = counts.get(token, 0.0) + 1.0
    return counts


def _dense(values: dict[int, float], vocabulary: int) -> mx.array:
    dense = np.zeros(vocabulary, dtype=np.float32)
    for token, value in values.items():
        dense[token] = value
    return mx.array(dense)


def _recent(context: Sequence[int], window: int) -> mx.array:
    """The tokens of the window, in a fixed shape: the oldest one fills it, and leaves only after its copies."""
    recent = list(context[-window:])
    return mx.array([recent[0]] * (window - len(recent)) + recent, dtype=mx.int32)
