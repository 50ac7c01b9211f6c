"""Greedy answers of the daemon on all its paths, token by token against mlx-lm's alone."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator

from mlx_bulkhead import Client, Result

from ..bench import Bench
from ..daemon import Daemon
from ..measure import Figure
from ..work import token_prompt

PROMPTS = 200
TOGETHER = 16
TOKENS = 48
MODEL = "equal"
CONFIG = """
[restart]
max_restarts = 1000
stable_steps = 1
"""


def equal(bench: Bench) -> list[Figure]:
    choose = random.Random(200)
    count = PROMPTS // 5 if bench.quick else PROMPTS
    prompts = [token_prompt(bench.seed(), choose.randrange(2, 400)) for _ in range(count)]
    wanted = [bench.library.stream(prompt, TOKENS).tokens for prompt in prompts]
    config = bench.folder / "equal.toml"
    config.write_text(CONFIG)
    daemon = Daemon(bench.folder / "equal", "--config", str(config))
    try:
        client = daemon.client
        client.load(MODEL, bench.folder / "model", cache_entries=2 * PROMPTS)
        alone = [_ask(client, prompt, cache=False).result() for prompt in prompts]
        batch = [answer for group in _groups(prompts) for answer in _together(client, group)]
        for prompt in prompts:
            _ask(client, prompt, cache=True).result()
        cached = [_ask(client, prompt, cache=True).result() for prompt in prompts]
        resumed = [answer for group in _groups(prompts) for answer in _through_a_death(client, group)]
    finally:
        daemon.close()
    engines = ", ".join(sorted({answer.engine for answer in batch}))
    reused = sum(answer.usage.cached_tokens for answer in cached)
    outlived = sum(answer.restarts > 0 for answer in resumed)
    return [
        _figure("alone", wanted, alone, ""),
        _figure(f"{TOGETHER} at a time", wanted, batch, f"engines: {engines}"),
        _figure("from the prompt cache", wanted, cached, f"{reused:,} prompt tokens reused"),
        _figure("through the death of the worker", wanted, resumed, f"{outlived} of them resumed"),
    ]


def _figure(path: str, wanted: list[list[int]], answers: list[Result], beside: str) -> Figure:
    same = sum(tokens == answer.tokens for tokens, answer in zip(wanted, answers, strict=True))
    goal = f"all {len(wanted)}"
    return Figure(f"greedy answers equal to mlx-lm's: {path}", [same], goal, same == len(wanted), "", 0, beside)


def _groups(prompts: list[list[int]]) -> Iterator[list[list[int]]]:
    for start in range(0, len(prompts), TOGETHER):
        yield prompts[start : start + TOGETHER]


def _ask(client: Client, prompt: list[int], *, cache: bool):
    return client.generate(MODEL, tokens=prompt, max_tokens=TOKENS, cache=cache)


def _together(client: Client, prompts: list[list[int]]) -> list[Result]:
    streams = [_ask(client, prompt, cache=False) for prompt in prompts]
    return [stream.result() for stream in streams]


def _through_a_death(client: Client, prompts: list[list[int]]) -> list[Result]:
    """All at once; the worker is killed as soon as the last of them has its first tokens."""
    streams = [_ask(client, prompt, cache=False) for prompt in prompts]
    for snap in streams[-1]:
        if snap.tokens:
            break
    pid = next(model.pid for model in client.models() if model.name == MODEL)
    if pid is None:
        raise RuntimeError("the worker is gone already")
    os.kill(pid, signal.SIGKILL)
    return [stream.result() for stream in streams]
