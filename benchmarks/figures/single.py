"""One stream: decode speed from its first to its last token, over the library's own stream."""

from __future__ import annotations

from .. import streams
from ..bench import Bench
from ..measure import Figure, Pairs, at_least, spread
from ..work import text_prompt


def single(bench: Bench) -> list[Figure]:
    tokens = 150 if bench.quick else 400
    pairs = Pairs()
    for number in range(bench.rounds):
        prompt = text_prompt(bench.seed())
        if number % 2:
            theirs = bench.library.stream(prompt, tokens)
            ours = streams.stream(bench.client, prompt, tokens)
        else:
            ours = streams.stream(bench.client, prompt, tokens)
            theirs = bench.library.stream(prompt, tokens)
        if ours.tokens != theirs.tokens:
            raise RuntimeError("the daemon and the library answer the same prompt differently")
        pairs.ours.append(ours.rate)
        pairs.theirs.append(theirs.rate)
    beside = f"tok/s: {spread(pairs.ours)}; library {spread(pairs.theirs)}"
    return [at_least("1 stream, decode, over `stream_generate`", pairs.ratios, 0.97, beside)]
