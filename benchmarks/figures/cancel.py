"""Cancel: how soon the client has the end, and how soon the worker serves somebody else."""

from __future__ import annotations

import itertools
import statistics
import time

from mlx_bulkhead.orchestrator.client_streams import Stream

from .. import streams
from ..bench import Bench
from ..measure import Figure, at_most, spread
from ..work import text_prompt, token_prompt

STEP_MARGIN_MS = 5.0


def in_decode(bench: Bench) -> list[Figure]:
    samples = 3 if bench.quick else 6
    ended: list[float] = []
    freed: list[float] = []
    steps: list[float] = []
    for _ in range(bench.rounds):
        idle = _idle(bench)
        for number in range(2 * samples):
            stream = _start(bench, text_prompt(bench.seed()))
            times: list[float] = []
            count = 0
            for snap in stream:
                times.append(streams.now())
                count += len(snap.tokens)
                if count > 60:
                    break
            steps.append((times[-1] - times[0]) / count * 1e3)
            if number % 2:
                ended.append(_cancel(stream))
            else:
                freed.append(_cancel_and_ask(bench, stream) - idle)
    goal = statistics.median(steps) + STEP_MARGIN_MS
    text = f"one step + {STEP_MARGIN_MS:g} ms ({goal:.1f} ms)"
    return [
        at_most("cancel in decode, until its end is here", ended, goal, digits=1, goal_text=text),
        at_most(
            "cancel in decode, delay of the next request's first token",
            freed,
            goal,
            digits=1,
            goal_text=text,
            beside=f"a step takes {spread(steps, 1)} ms",
        ),
    ]


def in_prefill(bench: Bench) -> list[Figure]:
    samples = 1 if bench.quick else 2
    ended: list[float] = []
    freed: list[float] = []
    chunks: list[float] = []
    for _ in range(bench.rounds):
        chunks += _chunks(bench, token_prompt(bench.seed(), 4096))
        idle = _idle(bench)
        for number in range(2 * samples):
            stream = _start(bench, token_prompt(bench.seed(), 4096))
            snaps = stream.snapshots(progress=True)
            while next(snaps).phase != "prefill":
                pass
            time.sleep(0.3 + 0.037 * (number % 7))
            if number % 2:
                ended.append(_cancel(stream))
            else:
                freed.append(_cancel_and_ask(bench, stream) - idle)
    goal = statistics.median(chunks)
    text = f"one chunk ({goal:.0f} ms)"
    return [
        at_most("cancel in prefill, until its end is here", ended, goal, digits=0, goal_text=text),
        at_most(
            "cancel in prefill, delay of the next request's first token",
            freed,
            goal,
            digits=0,
            goal_text=text,
            beside=f"a chunk takes {spread(chunks)} ms",
        ),
    ]


def _start(bench: Bench, prompt: str | list[int]) -> Stream:
    if isinstance(prompt, str):
        return bench.client.generate(streams.MODEL, prompt=prompt, max_tokens=20_000, temperature=0.0)
    return bench.client.generate(streams.MODEL, tokens=prompt, max_tokens=20_000, temperature=0.0)


def _idle(bench: Bench) -> float:
    return statistics.median(streams.stream(bench.client, text_prompt(bench.seed()), 4).first for _ in range(5)) * 1e3


def _cancel(stream: Stream) -> float:
    """Milliseconds from the cancel to its terminal event."""
    began = streams.now()
    stream.cancel()
    result = stream.result()
    took = (streams.now() - began) * 1e3
    if result.finish_reason != "cancelled":
        raise RuntimeError(f"a cancelled request ended with {result.finish_reason}")
    return took


def _cancel_and_ask(bench: Bench, stream: Stream) -> float:
    """Milliseconds from the cancel to the first token of a request made right after it."""
    prompt = text_prompt(bench.seed())
    began = streams.now()
    stream.cancel()
    start = streams.now()
    first = streams.stream(bench.client, prompt, 4).first
    stream.result()
    return (start - began + first) * 1e3


def _chunks(bench: Bench, prompt: list[int]) -> list[float]:
    """Times between the prefill reports of an undisturbed prompt. Reports are rarer than short chunks."""
    times: list[float] = []
    with _start(bench, prompt) as stream:
        for snap in stream.snapshots(progress=True):
            if snap.tokens:
                break
            if snap.phase == "prefill":
                times.append(streams.now())
    gaps = [(b - a) * 1e3 for a, b in itertools.pairwise(times)]
    return gaps[1:-1] or gaps
