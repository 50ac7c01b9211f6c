"""One stream: decode speed from its first to its last token, over the library's own stream."""

from __future__ import annotations

from .. import streams
from ..bench import Bench
from ..library import Streamed
from ..measure import Figure, Pairs, at_least, spread
from ..work import text_prompt

TRIES = 5
"""For a round that counts. One in which a client woke so late that its first snap held many tokens tells nothing."""

MAX_EARLY = 0.05
"""Share of all tokens that may come with the first snap."""


def single(bench: Bench) -> list[Figure]:
    tokens = 150 if bench.quick else 400
    pairs = Pairs()
    for number in range(bench.rounds):
        prompt = text_prompt(bench.seed())
        if number % 2:
            theirs = bench.library.stream(prompt, tokens)
            ours = _ours(bench, prompt, tokens)
        else:
            ours = _ours(bench, prompt, tokens)
            theirs = bench.library.stream(prompt, tokens)
        if ours.tokens != theirs.tokens:
            raise RuntimeError("the daemon and the library answer the same prompt differently")
        pairs.ours.append(ours.rate)
        pairs.theirs.append(theirs.rate)
    beside = f"tok/s: {spread(pairs.ours)}; library {spread(pairs.theirs)}"
    return [at_least("1 stream, decode, over `stream_generate`", pairs.ratios, 0.97, beside)]


def _ours(bench: Bench, prompt: str, tokens: int) -> Streamed:
    for _ in range(TRIES):
        streamed = streams.stream(bench.client, prompt, tokens)
        if streamed.early <= max(1, MAX_EARLY * tokens):
            return streamed
    raise RuntimeError("this machine is too busy: the first tokens of a stream come late and all at once")
