"""Tries a pair at load: is its target's text the model's, does it work, and what does a cycle cost?"""

from __future__ import annotations

import time
from statistics import median
from typing import Any, Final

import mlx.core as mx

from ...faults import is_out_of_memory
from ..base import Row, Sampling, StepOut
from ..live import Facts, Live
from ..reasons import short
from ..solo import Solo
from .gain import Gain
from .gate import Unfit
from .pair import Pair
from .run import Run

_PROMPT: Final = 16
_PLAIN: Final = 5
_CYCLES: Final = 3
"""The first of each is not counted: it compiles."""
_TOLERANCE: Final = 0.05
"""Of the span of the logits; rounding in half precision is a tenth of that."""
_STEPS: Final = 24
"""At most, prefill included."""


def try_pair(pair: Pair) -> Gain:
    """What the pair costs. Raises `Unfit` when it does not work."""
    gain = Gain(pair.block_tokens)
    pair.hooks.set(True)
    try:
        _compare(pair)
        cycle = _cycle_seconds(pair)
    except Unfit:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise Unfit(f"DFlash fails with this pair: {short(error)}") from error
    finally:
        pair.hooks.set(False)
    plain = _plain_seconds(pair.facts)
    if cycle is not None and plain is not None:
        gain.calibrate(plain, cycle)
    return gain


def _compare(pair: Pair) -> None:
    """The library runs the target's layers itself; what comes of it must be what the model says.

    A prompt at once, a token, and a block of tokens: what a kept cache does wrong shows in the last two only.
    """
    ids = _row(pair.facts).ids
    own_cache = pair.facts.make_cache()
    cache = pair.ops.make_cache(pair.target, enable_speculative_linear_cache=True)
    for part in (ids[:-5], ids[-5:-4], ids[-4:]):
        tokens = mx.array([part])
        own = pair.facts.model(tokens, cache=own_cache)[0, -1].astype(mx.float32)
        theirs, _ = pair.ops.forward_with_hidden_capture(
            pair.target, input_ids=tokens, cache=cache, capture_layer_ids={1}, logits_last_only=True
        )
        difference: Any = mx.abs(own - theirs[0, -1].astype(mx.float32)).max().item()
        span: Any = (own.max() - own.min()).item()
        if not difference <= _TOLERANCE * span:
            raise Unfit(
                "dflash-mlx computes this model otherwise than the worker does without it: "
                f"logits differ by {difference:.3g} of {span:.3g}"
            )


def _row(facts: Facts) -> Live:
    """A prompt of any tokens; what comes of it does not matter."""
    prompt = [(7 * index + 3) % facts.vocabulary for index in range(_PROMPT)]
    return Live(Row(b"trial", prompt, 16 * _STEPS, Sampling()), facts)


def _cycle_seconds(pair: Pair) -> float | None:
    run = Run(pair, _row(pair.facts), _PROMPT, None)
    outs: list[StepOut] = []
    seconds: list[float] = []
    try:
        for _ in range(_STEPS):
            if run.live is None or run.cycles.count > _CYCLES:
                break
            before = run.cycles.count, run.cycles.seconds
            run.step(outs)
            if run.cycles.count > before[0]:
                seconds.append(run.cycles.seconds - before[1])
    finally:
        run.close()
    return median(seconds[1:]) if len(seconds) > 1 else None


def _plain_seconds(facts: Facts) -> float | None:
    solo = Solo(lambda *_: None)
    solo.start(_row(facts))
    while solo.prefilling:
        solo.prefill(_PROMPT)
    seconds: list[float] = []
    while solo.live is not None and len(seconds) < _PLAIN:
        began = time.perf_counter()
        solo.decode()
        seconds.append(time.perf_counter() - began)
    solo.drop()
    return median(seconds[1:]) if len(seconds) > 1 else None
