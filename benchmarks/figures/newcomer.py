"""A long prompt arrives while four streams decode: how long they wait, and what it costs the newcomer."""

from __future__ import annotations

import time

from .. import streams
from ..bench import Bench
from ..measure import Figure, Pairs, at_most, spread
from ..work import text_prompt, token_prompt


def newcomer(bench: Bench) -> list[Figure]:
    length = 1024 if bench.quick else 4096
    largest: list[float] = []
    normal: list[float] = []
    firsts = Pairs()
    for _ in range(bench.rounds):
        prompt = token_prompt(bench.seed(), length)
        firsts.theirs.append(streams.stream(bench.client, prompt, 4).first)
        long = [streams.of_text(bench.client, text_prompt(bench.seed()), 20_000) for _ in range(4)]
        readers = [streams.Reader(ask) for ask in long]
        for reader in readers:
            reader.wait_text()
        time.sleep(0.3)
        calm = streams.now()
        time.sleep(0.5)
        came = streams.now()
        firsts.ours.append(streams.stream(bench.client, token_prompt(bench.seed(), length), 4).first)
        served = came + firsts.ours[-1]
        for reader in readers:
            reader.cancel()
        for reader in readers:
            reader.join()
        largest.append(max(gap for r in readers for gap in r.gaps(came, served)) * 1e3)
        normal.append(max(gap for r in readers for gap in r.gaps(calm, came)) * 1e3)
    ms = [f"{spread([first * 1e3 for first in side])} ms" for side in (firsts.ours, firsts.theirs)]
    return [
        at_most(
            f"largest gap of 4 streams while a prompt of {length} tokens arrives",
            largest,
            60.0,
            digits=0,
            beside=f"largest gap before it came {spread(normal)} ms",
        ),
        at_most(
            "that prompt's first token, over the same on an idle worker",
            firsts.ratios,
            1.1,
            "",
            beside=f"{ms[0]}; idle {ms[1]}",
        ),
    ]
