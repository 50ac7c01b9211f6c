"""Second turn of a chat of 2,000 tokens: its first token with the prompt cache, over the same without."""

from __future__ import annotations

import base64
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from mlx_bulkhead.protocol.values import ModelStatus

from .. import streams
from ..bench import Bench
from ..measure import Figure, Pairs, at_most, spread
from ..work import text_prompt, token_prompt

CHAT = 2000
QUESTION = 30
ANSWER = 48
KEPT = "kept"
CRASHES = 3
"""More within a minute, and the model would be given up."""

WITHIN_S = 60.0


def cache(bench: Bench) -> list[Figure]:
    warm = Pairs()
    for _ in range(bench.rounds):
        second = _first_turn(bench, streams.MODEL)
        warm.theirs.append(_first_token(bench, streams.MODEL, second, cache=False))
        warm.ours.append(_first_token(bench, streams.MODEL, second))
    what = f"second turn of a {CHAT:,}-token chat: first token with cache over without"
    return [_figure(what, warm, 0.1)]


def cache_after_crash(bench: Bench) -> list[Figure]:
    """The same with a new worker in between, which has only what is on disk. Both sides run in the new worker."""
    pairs = Pairs()
    folder = bench.folder / "prompts"
    bench.client.load(KEPT, bench.folder / "model", cache_disk_bytes=2**30, cache_dir=folder)
    try:
        for _ in range(min(bench.rounds, CRASHES)):
            second = _first_turn(bench, KEPT)
            _wait_written(bench, len(second) - QUESTION)
            pid = _status(bench).pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            _wait(bench, lambda model, old=pid: model.state == "READY" and model.pid not in (None, old))
            for _ in range(2):  # the first request of a process pays for what is not the cache's
                bench.client.complete(KEPT, prompt=text_prompt(bench.seed()), max_tokens=8)
            pairs.theirs.append(_first_token(bench, KEPT, second, cache=False))
            pairs.ours.append(_first_token(bench, KEPT, second))
    finally:
        bench.client.unload(KEPT)
    return [_figure("the same after a crash of the worker (disk tier)", pairs, 0.25)]


def _figure(what: str, pairs: Pairs, goal: float) -> Figure:
    beside = f"ms: {spread(pairs.ours, 1)}; without {spread(pairs.theirs, 1)}"
    return at_most(what, pairs.ratios, goal, "", digits=3, beside=beside)


def _first_turn(bench: Bench, model: str) -> list[int]:
    """Run a first turn; gives the prompt of the second."""
    prompt = token_prompt(bench.seed(), CHAT)
    answer = bench.client.complete(model, tokens=prompt, max_tokens=ANSWER).tokens
    return [*prompt, *answer, *token_prompt(bench.seed(), QUESTION)]


def _first_token(bench: Bench, model: str, prompt: list[int], *, cache: bool = True) -> float:
    """Milliseconds to the first token. Raises when the cache did not do what is to be measured."""
    time.sleep(0.05)
    began = streams.now()
    first: float | None = None
    stream = bench.client.generate(model, tokens=prompt, max_tokens=4, cache=cache)
    for snap in stream:
        if first is None and snap.tokens:
            first = streams.now() - began
    cached = stream.result().usage.cached_tokens
    if first is None or (cached >= CHAT) is not cache:
        raise RuntimeError(f"{cached} tokens came from the cache, which was {'on' if cache else 'off'}")
    return first * 1e3


def _status(bench: Bench) -> ModelStatus:
    return next(model for model in bench.client.models() if model.name == KEPT)


def _wait_written(bench: Bench, tokens: int) -> None:
    """Until the first turn is on disk: a file with so many tokens, or one less for the last, which was not fed."""
    folder = bench.folder / "prompts"

    def written(_: ModelStatus) -> bool:
        newest = max(folder.glob("*/*.safetensors"), key=lambda path: path.stat().st_mtime_ns, default=None)
        return newest is not None and _tokens_in(newest) in (tokens - 1, tokens)

    _wait(bench, written)


def _tokens_in(path: Path) -> int:
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return len(base64.b64decode(header["__metadata__"]["tokens"])) // 4


def _wait(bench: Bench, condition: Callable[[ModelStatus], bool]) -> None:
    until = time.monotonic() + WITHIN_S
    while not condition(_status(bench)):
        if time.monotonic() > until:
            raise RuntimeError("the worker did not come so far in time")
        time.sleep(0.02)
