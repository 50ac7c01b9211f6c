"""Changes a row's logits: bias and bans, then repetition, presence and frequency penalties.

All that a row asks for is one compiled call a token over the whole vocabulary, with the history kept beside it:
in a batch the number of calls is what penalties cost, not the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import mlx.core as mx
import numpy as np

from ..engines.base import Sampling

_NEVER = -(2**31) + 1
"""The place of a token that was not seen."""


class Penalties:
    """One row's processor.

    Repetition divides positive and multiplies negative logits of the last `window` tokens, prompt included (Keskar
    et al. 2019, arXiv:1909.05858). Presence is subtracted once and frequency for each occurrence from all that was
    generated, as the OpenAI API means them; the prompt does not count.
    """

    def __init__(
        self,
        sampling: Sampling,
        banned: Sequence[int],
        prompt: Sequence[int],
        emitted: Sequence[int],
        vocabulary: int,
    ) -> None:
        repeats = sampling.repetition_penalty != 1.0 and sampling.repetition_window > 0
        occurs = bool(sampling.presence_penalty or sampling.frequency_penalty)
        bias = {**sampling.logit_bias, **dict.fromkeys(banned, -math.inf)}
        self._change = _changer(bool(bias), repeats, occurs)
        context = [*prompt, *emitted]
        window = min(sampling.repetition_window, 2**30)
        self._numbers = mx.array(
            [sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty], dtype=mx.float32
        )
        self._window = mx.array(window, dtype=mx.int32)
        self._bias = _dense(bias, vocabulary)
        self._newest = mx.array(len(context) - 1, dtype=mx.int32)
        self._places = _places(context, vocabulary) if repeats else self._newest
        self._counts = _dense(_counted(emitted), vocabulary) if occurs else self._numbers
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
        logits, self._newest, self._places, self._counts = self._change(
            logits, token, self._numbers, self._window, self._bias, self._newest, self._places, self._counts
        )
        return logits


@lru_cache(maxsize=8)
def _changer(use_bias: bool, use_repetition: bool, use_occurrence: bool) -> Callable[..., tuple[mx.array, ...]]:
    """The compiled change for what is asked, shared by all rows that ask for it."""

    def change(
        logits: mx.array,
        token: mx.array,
        numbers: mx.array,
        window: mx.array,
        bias: mx.array,
        newest: mx.array,
        places: mx.array,
        counts: mx.array,
    ) -> tuple[mx.array, ...]:
        kind = logits.dtype
        if use_bias:
            logits = logits + bias.astype(kind)
        if use_repetition:
            newest = newest + token.size
            places = places.at[token].maximum(newest)
            penalised = mx.where(logits < 0, logits * numbers[0], logits / numbers[0]).astype(kind)
            logits = mx.where(places > newest - window, penalised, logits)
        if use_occurrence:
            counts = counts.at[token].add(1.0)
            penalty = numbers[2] * counts + mx.where(counts > 0, numbers[1], 0.0)
            logits = logits - penalty.astype(kind)
        return logits, newest, places, counts

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


def _places(context: Sequence[int], vocabulary: int) -> mx.array:
    """Where each token was seen last."""
    places = np.full(vocabulary, _NEVER, dtype=np.int32)
    places[np.array(context, dtype=np.int64)] = np.arange(len(context), dtype=np.int32)  # the last write stays
    return mx.array(places)
