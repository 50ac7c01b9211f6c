"""Reads the log probabilities of a token out of a row's distribution.

The distribution is the one that mlx-lm calls logprobs: log softmax of the logits after bias, penalties and
constraints, before filters and temperature, in the precision in which the model computes its logits.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np

_BLOCK = 64
_SMALL = 16_384
"""Below this one pass over all is quicker."""
_OFFSETS = np.arange(_BLOCK)


def read_logprobs(logprobs: mx.array, token: int, top: int) -> tuple[float, dict[int, float] | None]:
    """The log probability of a token and, unless `top` is 0, the `top` likeliest tokens with theirs.

    `logprobs` has been evaluated. Nothing is queued on its stream, where the next step is being computed by now.
    """
    values = _as_numpy(logprobs)
    own = float(values[token])
    if not top:
        return own, None
    ids = _largest(values, min(top, values.size))
    ids = ids[np.argsort(-values[ids], kind="stable")]
    pairs = zip(ids.tolist(), values[ids].tolist(), strict=True)
    return own, {token: value for token, value in pairs if value > -math.inf}


def _largest(values: Any, count: int) -> Any:
    """Indices of the largest values, in rising order.

    They lie in the blocks with the largest maxima, so that most of a large vocabulary is only looked at once.
    """
    blocks = values.size // _BLOCK
    if values.size < _SMALL:
        return np.sort(np.argpartition(values, values.size - count)[-count:])
    maxima = values[: blocks * _BLOCK].reshape(blocks, _BLOCK).max(axis=1)
    chosen = np.sort(np.argpartition(maxima, blocks - count)[-count:])
    near = (chosen[:, None] * _BLOCK + _OFFSETS).ravel()
    if values.size > blocks * _BLOCK:
        near = np.concatenate([near, np.arange(blocks * _BLOCK, values.size)])
    return near[np.sort(np.argpartition(values[near], near.size - count)[-count:])]


def _as_numpy(array: mx.array) -> Any:
    if array.dtype != mx.float32:
        with mx.stream(mx.cpu):
            array = array.astype(mx.float32)
    return np.asarray(array).reshape(-1)
