"""First token of a request to an idle worker: what the way there and back adds to the library's own time."""

from __future__ import annotations

import statistics
import time

from .. import streams
from ..bench import Bench
from ..measure import Figure, Pairs, at_most, spread
from ..work import text_prompt

PAUSE_S = 0.03
"""Between two requests, so that both sides start from rest."""


def first_token(bench: Bench) -> list[Figure]:
    samples = 5 if bench.quick else 15
    pairs = Pairs()
    for _ in range(bench.rounds):
        ours: list[float] = []
        theirs: list[float] = []
        for _ in range(samples):
            prompt = text_prompt(bench.seed())
            time.sleep(PAUSE_S)
            ours.append(streams.stream(bench.client, prompt, 4).first * 1e3)
            time.sleep(PAUSE_S)
            theirs.append(bench.library.stream(prompt, 4).first * 1e3)
        pairs.ours.append(statistics.median(ours))
        pairs.theirs.append(statistics.median(theirs))
    beside = f"ms: {spread(pairs.ours, 1)}; library {spread(pairs.theirs, 1)}"
    what = f"first token, idle worker, added to the library's, p50 of {samples}"
    return [at_most(what, pairs.differences, 1.0, beside=beside)]
