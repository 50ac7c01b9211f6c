"""First token of a short request while another stream decodes."""

from __future__ import annotations

import time

from .. import streams
from ..bench import Bench
from ..measure import Figure, at_most, percentile, spread
from ..work import text_prompt


def probe(bench: Bench) -> list[Figure]:
    samples = 3 if bench.quick else 6
    firsts: list[float] = []
    idle: list[float] = []
    for _ in range(bench.rounds):
        idle.append(streams.stream(bench.client, text_prompt(bench.seed()), 4).first * 1e3)
        reader = streams.Reader(streams.of_text(bench.client, text_prompt(bench.seed()), 20_000))
        reader.wait_text()
        for _ in range(samples):
            time.sleep(0.1)
            firsts.append(streams.stream(bench.client, text_prompt(bench.seed()), 4).first * 1e3)
        reader.cancel()
        reader.join()
    beside = f"p95 {percentile(firsts, 0.95):.1f} ms; idle {spread(idle, 1)} ms"
    return [at_most("first token of a short prompt while one decodes", firsts, 20.0, digits=1, beside=beside)]
