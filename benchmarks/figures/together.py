"""Several streams at once: all their tokens a second, over the library's batch of the same prompts."""

from __future__ import annotations

from .. import streams
from ..bench import Bench
from ..measure import Figure, Pairs, at_least, spread
from ..work import text_prompt


def eight(bench: Bench) -> list[Figure]:
    return _together(bench, 8)


def sixteen(bench: Bench) -> list[Figure]:
    return _together(bench, 16)


def _together(bench: Bench, count: int) -> list[Figure]:
    tokens = 60 if bench.quick else 256
    pairs, firsts, steady = Pairs(), Pairs(), Pairs()
    for number in range(bench.rounds):
        prompts = [text_prompt(bench.seed()) for _ in range(count)]
        if number % 2:
            theirs = bench.library.batch(prompts, tokens)
            ours = streams.batch(bench.client, prompts, tokens)
        else:
            ours = streams.batch(bench.client, prompts, tokens)
            theirs = bench.library.batch(prompts, tokens)
        pairs.ours.append(count * tokens / ours.seconds)
        pairs.theirs.append(count * tokens / theirs.seconds)
        firsts.ours.append(ours.first * 1e3)
        firsts.theirs.append(theirs.first * 1e3)
        steady.ours.append(ours.steady)
        steady.theirs.append(theirs.steady)
    beside = (
        f"tok/s: {spread(pairs.ours)}; library {spread(pairs.theirs)}. "
        f"All have a token after {spread(firsts.ours)} ms; library {spread(firsts.theirs)} ms. "
        f"From there on the ratio is {spread(steady.ratios, 2)}"
    )
    return [at_least(f"{count} streams, all tokens a second, over `BatchGenerator`", pairs.ratios, 0.97, beside)]
