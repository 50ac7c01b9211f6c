"""Reads the log probabilities of a token out of a row's distribution.

The distribution is the one that mlx-lm calls logprobs: log softmax of the logits after bias, penalties and
constraints, before filters and temperature, in the precision in which the model computes its logits.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np


def read_logprobs(logprobs: mx.array, token: int, top: int) -> tuple[float, dict[int, float] | None]:
    """The log probability of a token and, unless `top` is 0, the `top` likeliest tokens with theirs.

    `logprobs` has been evaluated. Nothing is queued on its stream, where the next step is being computed by now.
    """
    values = _as_numpy(logprobs)
    own = float(values[token])
    if not top:
        return own, None
    count = min(top, values.size)
    ids = np.argpartition(values, values.size - count)[-count:]
    ids = ids[np.lexsort((ids, -values[ids]))]  # of equal ones the smaller id first
    return own, {int(index): float(values[index]) for index in ids if np.isfinite(values[index])}


def _as_numpy(array: mx.array) -> Any:
    if array.dtype != mx.float32:
        with mx.stream(mx.cpu):
            array = array.astype(mx.float32)
    return np.asarray(array).reshape(-1)
