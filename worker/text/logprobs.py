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


def read_logprobs(logprobs: mx.array, token: int, top: int) -> tuple[float, dict[int, float] | None]:
    """The log probability of a token and, unless `top` is 0, the `top` likeliest tokens with theirs.

    `logprobs` has been evaluated. Nothing is queued on its stream, where the next step is being computed by now.
    """
    values = _as_numpy(logprobs)
    own = float(values[token])
    if not top:
        return own, None
    ids = _candidates(values, min(top, values.size))
    ids = ids[np.argsort(-values[ids], kind="stable")[:top]]
    return own, dict(zip(ids.tolist(), values[ids].tolist(), strict=True))


def _candidates(values: Any, count: int) -> Any:
    """Ids of the possible tokens among which the `count` largest are, in rising order.

    As many blocks as are asked for have a maximum of the floor or more, so the largest values have too; and few
    others do. So most of a large vocabulary is looked at twice and never moved.
    """
    blocks = values.size // _BLOCK
    if blocks < count:
        return np.flatnonzero(values > -math.inf)
    maxima = values[: blocks * _BLOCK].reshape(blocks, _BLOCK).max(axis=1)
    floor = np.partition(maxima, blocks - count)[blocks - count]
    return np.flatnonzero(values >= floor if floor > -math.inf else values > floor)


def _as_numpy(array: mx.array) -> Any:
    if array.dtype != mx.float32:
        with mx.stream(mx.cpu):
            array = array.astype(mx.float32)
    return np.asarray(array).reshape(-1)
