"""What can choose a row's tokens: greedy, or a seeded draw from what the filters leave.

The key of a draw comes from (seed, position) alone and the global random state is never touched, so a seeded
row gives the same tokens alone, in company and after a resume. Numbers are checked here against the
vocabulary, because the library fails on them in the middle of a step or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from ...protocol.errors import ErrorCode
from ..engines.base import Refused, Sampling

Sampler = Callable[[mx.array], mx.array]
"""Log-probabilities [n, vocabulary] → token ids [n]."""

Processor = Callable[[mx.array, mx.array], mx.array]
"""(ids of which the last is the newest, logits [1, vocabulary]) → logits."""

_MASK_64 = 2**64 - 1
_LARGEST_SHARPNESS = 1e30
"""Beyond this, 1 / temperature would overflow a float32; a draw is greedy long before."""

_SMALLEST_TOP_P = 1e-6
"""Below this only the likeliest token stays anyhow, and a float32 would make nothing of it."""


def greedy(logprobs: mx.array) -> mx.array:
    """The most likely token. All greedy rows share this one object, so that a batch makes one call for them."""
    return mx.argmax(logprobs, axis=-1)


def check_sampling(sampling: Sampling, vocabulary: int) -> None:
    """Raise `Refused` for numbers that do not fit the vocabulary."""
    if sampling.top_k >= vocabulary:
        raise Refused(
            ErrorCode.BAD_REQUEST,
            f"top_k must be 0 (off) to {vocabulary - 1} for this vocabulary of {vocabulary}, got {sampling.top_k}",
        )
    for token in sampling.logit_bias:
        if not 0 <= token < vocabulary:
            raise Refused(
                ErrorCode.BAD_REQUEST,
                f"logit_bias has token id {token}; this vocabulary has ids 0 to {vocabulary - 1}",
            )


class Draw:
    """A seeded draw from the distribution that top_p, min_p, XTC, top_k and then temperature leave.

    `spared`: one bool for each token of the vocabulary; XTC leaves those in.
    """

    def __init__(self, sampling: Sampling, position: int, spared: mx.array) -> None:
        self._seed = sampling.seed
        self.position = position
        self._probability = sampling.xtc_probability
        self.spared = spared
        self.kind = sampling.top_p < 1.0, sampling.min_p > 0.0, sampling.top_k, sampling.xtc_probability > 0.0
        """Rows of which it is equal can share a call."""
        self.numbers = (
            min(1.0 / sampling.temperature, _LARGEST_SHARPNESS),
            max(sampling.top_p, _SMALLEST_TOP_P),
            math.log(sampling.min_p) if sampling.min_p else 0.0,
            sampling.xtc_threshold,
        )
        self._alone: DrawGroup | None = None

    def __call__(self, logprobs: mx.array) -> mx.array:
        if self._alone is None:
            self._alone = DrawGroup([self])
        return self._alone(logprobs)

    def dice(self) -> tuple[int, bool]:
        """64 bits for the draw at this position, and whether XTC acts there."""
        bits = _mix(self._seed, self.position)
        # Whether XTC acts comes from bits of its own: those of the draw must not decide on both.
        return bits, bool(self._probability) and _mix(bits, 0) < self._probability * (_MASK_64 + 1)


class DrawGroup:
    """The draws of several rows of one kind, as one call. What each gets does not depend on the others."""

    def __init__(self, members: Sequence[Draw]) -> None:
        self._members = members
        self._pick = _picker(*members[0].kind)
        # An array, because a compiled function is compiled anew for each Python number.
        self._numbers = mx.array([one.numbers for one in members], dtype=mx.float32)
        self._spared = members[0].spared

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Log probabilities [rows, vocabulary] → token ids [rows]."""
        dice = [one.dice() for one in self._members]
        keys: Any = np.array([(bits >> 32, bits & 0xFFFFFFFF) for bits, _ in dice], dtype=np.uint32)
        acts: Any = np.array([[xtc] for _, xtc in dice], dtype=np.bool_)
        drawn = self._pick(logprobs, mx.array(keys), self._numbers, mx.array(acts), self._spared)
        for one in self._members:
            one.position += 1
        return drawn


def _mix(seed: int, position: int) -> int:
    """64 well-spread bits of both numbers (the finaliser of SplitMix64, Steele et al. 2014)."""
    bits = (seed + (position + 1) * 0x9E3779B97F4A7C15) & _MASK_64
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return bits ^ (bits >> 31)


@lru_cache(maxsize=256)
def _picker(use_top_p: bool, use_min_p: bool, top_k: int, use_xtc: bool) -> Callable[..., mx.array]:
    """The compiled draw for a choice of filters, shared by all rows that make it."""

    def pick(logprobs: mx.array, keys: mx.array, numbers: mx.array, acts: mx.array, spared: mx.array) -> mx.array:
        """All but `spared` have a row for each row; `acts` says whether XTC does."""
        sharpness, top_p, log_min_p, threshold = (numbers[:, index : index + 1] for index in range(4))
        scores = logprobs.astype(mx.float32)
        if use_top_p:
            rising = mx.sort(scores, axis=-1)
            mass = mx.cumsum(mx.exp(rising), axis=-1)
            total = mass[..., -1:]
            # A token stays while the tokens above it do not yet hold top_p of the mass.
            least = mx.min(mx.where(total - mass < top_p * total, rising, mx.inf), axis=-1, keepdims=True)
            scores = mx.where(scores < least, -mx.inf, scores)
        best = mx.max(scores, axis=-1, keepdims=True)
        if use_min_p:
            scores = mx.where(scores < best + log_min_p, -mx.inf, scores)
        if use_xtc:
            scores = mx.where(acts, _exclude_top(scores, threshold, spared), scores)
            best = mx.max(scores, axis=-1, keepdims=True)
        if top_k:
            # By index, not by threshold: of equal tokens no more than top_k may stay.
            rest = mx.argpartition(scores, kth=-top_k, axis=-1)[..., :-top_k]
            scores = mx.put_along_axis(scores, rest, mx.array(-mx.inf), axis=-1)
        # The largest of scores with Gumbel noise is a draw; the noise of a row comes from its own key.
        noise = mx.vmap(lambda key: mx.random.gumbel(scores.shape[1:], key=key))(keys)
        return mx.argmax((scores - best) * sharpness + noise, axis=-1)

    return mx.compile(pick)


def _exclude_top(scores: mx.array, threshold: mx.array, spared: mx.array) -> mx.array:
    """Leave out all tokens over the threshold but the least likely of these (XTC, by p-e-w, 2024)."""
    mass = mx.softmax(scores, axis=-1)
    least = mx.min(mx.where(mass > threshold, mass, mx.inf), axis=-1, keepdims=True)
    return mx.where((mass > least) & ~spared, -mx.inf, scores)
