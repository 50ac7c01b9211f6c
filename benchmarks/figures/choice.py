"""What a choice of tokens costs: structured output, and penalties with log probabilities and stop strings.

Both sides are ours, so that only the choice differs. Several streams at once, since there each row pays.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from ..bench import Bench
from ..measure import Figure, Pairs, at_least, at_most, spread
from ..streams import MODEL
from ..work import text_prompt

STREAMS = 8

FORM = {"type": "regex", "pattern": "[a-z ]{4000}"}
"""Long enough that no answer ends before its tokens do."""

EXTRAS: dict[str, Any] = {
    "repetition_penalty": 1.1,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.1,
    "logprobs": True,
    "top_logprobs": 5,
    "stop": ["\x00never", "\x00in\x00a\x00text"],
}


def structured(bench: Bench) -> list[Figure]:
    alone = _compare(bench, 1, {"response_format": FORM})
    together = _compare(bench, STREAMS, {"response_format": FORM})
    return [
        at_least("structured output: decode over unconstrained, 1 stream", alone.ratios, 0.85, _beside(alone)),
        at_least(
            f"structured output: decode over unconstrained, {STREAMS} streams",
            together.ratios,
            0.85,
            _beside(together),
        ),
    ]


def extras(bench: Bench) -> list[Figure]:
    figures = []
    for count in (1, STREAMS):
        pairs = _compare(bench, count, EXTRAS)
        costs = [100.0 * (1.0 - ratio) for ratio in pairs.ratios]
        what = f"cost of penalties, logprobs and stops on decode, {count} stream{'s' if count > 1 else ''}"
        figures.append(at_most(what, costs, 10.0, "%", digits=1, beside=_beside(pairs)))
    return figures


def _compare(bench: Bench, count: int, options: dict[str, Any]) -> Pairs:
    pairs = Pairs()
    _rate(bench, count, options)  # what is compiled once is compiled here
    for number in range(bench.rounds):
        if number % 2:
            pairs.theirs.append(_rate(bench, count, {}))
            pairs.ours.append(_rate(bench, count, options))
        else:
            pairs.ours.append(_rate(bench, count, options))
            pairs.theirs.append(_rate(bench, count, {}))
    return pairs


def _rate(bench: Bench, count: int, options: dict[str, Any]) -> float:
    """Tokens a second of all streams together, from when the last of them has its first token."""
    tokens = 100 if bench.quick else 300
    times: list[list[tuple[float, int]]] = [[] for _ in range(count)]

    def read(index: int, prompt: str) -> None:
        for snap in bench.client.generate(MODEL, prompt=prompt, max_tokens=tokens, temperature=0.0, **options):
            times[index].append((time.perf_counter(), len(snap.tokens)))

    prompts = [text_prompt(bench.seed()) for _ in range(count)]
    threads = [threading.Thread(target=read, args=item) for item in enumerate(prompts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    start = max(line[0][0] for line in times)
    end = min(line[-1][0] for line in times)
    late = sum(number for line in times for at, number in line if start < at <= end)
    return late / (end - start)


def _beside(pairs: Pairs) -> str:
    return f"tok/s: {spread(pairs.ours)}; without {spread(pairs.theirs)}"
