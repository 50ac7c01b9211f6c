"""Speculation: what a draft costs those who do not use it, what a switch costs, and what a real pair gains."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from mlx_bulkhead import Client, Result

from .. import streams, tiny
from ..bench import Bench
from ..dflash_library import DFlashLibrary
from ..measure import Figure, Pairs, at_least, at_most, spread
from ..work import text_prompt, token_prompt

ARCHITECTURES = ("qwen3", "qwen3_5", "gemma4_text")
MODES = ("adaptive", "dflash", "ddtree", "off")
PROMPTS = 200
TOKENS = 32
SWITCHES = 100
QUESTIONS = (
    "Explain why the sky is blue.",
    "Write a short story about a lighthouse keeper.",
    "List five fruits and the colour of each.",
    "What is a mutex, and when do you need one?",
    "Give me a recipe for bread.",
    "How does a bicycle stay upright?",
    "Translate 'good morning, my friend' into French and Spanish.",
    "Write a Python function that reverses a list.",
    "Who was Marie Curie?",
    "What should I pack for a week in the mountains?",
    "Describe the water cycle in three sentences.",
    "What is the difference between a virus and a bacterium?",
    "Write a polite e-mail that declines an invitation.",
    "Count from one to thirty in words.",
    "Why do cats purr?",
    "Explain recursion to a child.",
    "Name the planets of the solar system in order.",
    "Write a poem about autumn leaves.",
    "How do I remove a coffee stain from a shirt?",
    "Summarise the story of Romeo and Juliet.",
)


def speculation(bench: Bench) -> list[Figure]:
    """With a tiny pair: its draft is random, so only costs show."""
    draft = tiny.make_draft(bench.folder / "draft", bench.folder / "model")
    bench.client.load("pair", bench.folder / "model", draft=str(draft))
    return [_batch(bench), *_switch(bench), _in_process(bench, draft)]


def speculation_equal(bench: Bench) -> list[Figure]:
    """Greedy answers of three architectures in four modes, token by token."""
    choose = random.Random(5)
    count = PROMPTS // 10 if bench.quick else PROMPTS
    prompts = [_prompt(bench, choose) for _ in range(count)]
    same = total = accepted = 0
    for architecture in ARCHITECTURES:
        model = tiny.make(bench.folder / architecture, architecture)
        draft = tiny.make_draft(bench.folder / f"{architecture}-draft", model)
        bench.client.load("equal", model)
        wanted = [_ask(bench.client, "equal", prompt, "off").tokens for prompt in prompts]
        bench.client.unload("equal")
        for mode in MODES:
            bench.client.load("equal", model, draft={"model": draft, "verify_mode": mode, "required": True})
            for prompt, tokens in zip(prompts, wanted, strict=True):
                answer = _ask(bench.client, "equal", prompt, "on")
                assert answer.engine == "dflash", answer
                assert answer.speculation is not None
                same += answer.tokens == tokens
                total += 1
                accepted += answer.speculation.accepted
            bench.client.unload("equal")
    beside = f"{len(ARCHITECTURES)} architectures, {len(MODES)} verify modes, {accepted:,} tokens accepted"
    what = "greedy answers of DFlash equal to the text engine's"
    return [Figure(what, [same], f"all {total}", same == total, "", 0, beside)]


def real_pair(bench: Bench) -> list[Figure]:
    """The demo model with a draft that was trained for it; needs `--draft`."""
    if bench.draft is None:
        raise SystemExit("the figure real-pair needs --draft DIR: a DFlash draft for SmolLM2-135M")
    command = [sys.executable, "-m", "mlx_bulkhead.worker.demo_model", "--architecture", "qwen2"]
    made = subprocess.run(command, check=True, capture_output=True, text=True)
    bench.client.load("real", Path(made.stdout.strip().splitlines()[-1]), draft=str(bench.draft), cache_entries=0)
    questions = QUESTIONS[:4] if bench.quick else QUESTIONS
    tokens = 48 if bench.quick else 128
    forced, automatic = Pairs(), Pairs()
    equal = 0
    plain_rates: list[float] = []
    _chat(bench.client, QUESTIONS[0], 16, "on")
    for number, question in enumerate(questions):
        order = ["off", "on", "auto"] if number % 2 else ["auto", "on", "off"]
        rates, texts = {}, {}
        for mode in order:
            rates[mode], texts[mode] = _chat(bench.client, question, tokens, mode)
        plain_rates.append(rates["off"])
        forced.ours.append(rates["on"])
        automatic.ours.append(rates["auto"])
        equal += texts["on"] == texts["off"] == texts["auto"]
    forced.theirs, automatic.theirs = plain_rates, plain_rates
    stats = next(model.stats for model in bench.client.models() if model.name == "real")
    assert stats is not None
    assert stats.speculation is not None
    told = stats.speculation
    beside = (
        f"tok/s: {spread(forced.ours, 1)}; plain {spread(plain_rates, 1)}; "
        f"{told.tokens / max(1, told.cycles):.2f} tokens a cycle"
    )
    total = sum(1 / rate for rate in plain_rates) / sum(1 / rate for rate in automatic.ours)
    return [
        at_least("real pair, decode: DFlash over plain", forced.ratios, 1.5, beside),
        at_least("real pair, decode: the automatic policy over plain, worst prompt", [min(automatic.ratios)], 0.95),
        Figure("real pair: the automatic policy over plain, all prompts", [total], "", None),
        Figure(
            "real pair: answers equal on and off", [equal], f"all {len(questions)}", equal == len(questions), "", 0
        ),
    ]


def _batch(bench: Bench) -> Figure:
    """Eight streams of a model with a draft and of the same without, in turns; before that, a hundred switches."""
    _switch_often(bench, SWITCHES // 5 if bench.quick else SWITCHES)
    tokens = 60 if bench.quick else 200
    pairs = Pairs()
    for number in range(bench.rounds):
        prompts = [text_prompt(bench.seed()) for _ in range(8)]
        rates, texts = {}, {}
        for model in ("pair", "tiny") if number % 2 else ("tiny", "pair"):
            rates[model], texts[model] = _together(bench.client, model, prompts, tokens)
        if texts["pair"] != texts["tiny"]:
            raise RuntimeError("a loaded draft changes the text of a batch")
        pairs.ours.append(rates["pair"])
        pairs.theirs.append(rates["tiny"])
    beside = f"tok/s: {spread(pairs.ours)}; without {spread(pairs.theirs)}"
    return at_least("8 streams with a draft loaded over without, after 100 switches", pairs.ratios, 0.98, beside)


def _switch(bench: Bench) -> list[Figure]:
    before = _status(bench)
    _switch_often(bench, SWITCHES // 5 if bench.quick else SWITCHES)
    after = _status(bench)
    switches = after[0] - before[0]
    milliseconds = 1e3 * (after[1] - before[1]) / max(1, switches)
    grown = (after[2] - before[2]) / 2**20
    return [
        at_most("a switch from DFlash to the batch", [milliseconds], 50.0, beside=f"mean of {switches}"),
        at_most("growth of a worker over 100 switches", [grown], 8.0, "MiB", digits=1, goal_text="flat (8 MiB)"),
    ]


def _in_process(bench: Bench, draft: Path) -> Figure:
    library = DFlashLibrary(bench.folder / "model", draft)
    pairs = Pairs()
    tokens = 100 if bench.quick else 300
    try:
        for number in range(-1, bench.rounds):
            prompt = token_prompt(bench.seed(), 40)
            if number % 2:
                theirs = library.stream(prompt, tokens)
                ours = _stream(bench.client, prompt, tokens)
            else:
                ours = _stream(bench.client, prompt, tokens)
                theirs = library.stream(prompt, tokens)
            if number < 0:
                continue  # the first run of each side pays for much that later ones do not
            pairs.ours.append(ours)
            pairs.theirs.append(theirs.rate)
    finally:
        library.close()
    beside = f"tok/s: {spread(pairs.ours)}; library {spread(pairs.theirs)}"
    return at_least("1 stream, DFlash decode, over dflash-mlx in process", pairs.ratios, 0.97, beside)


def _switch_often(bench: Bench, times: int) -> None:
    """Each time an answer begins in DFlash and moves when the second one comes."""
    for _ in range(times):
        first = bench.client.generate(
            "pair", tokens=token_prompt(bench.seed(), 20), max_tokens=40, speculative="on", temperature=0.0
        )
        next(snap for snap in first if snap.tokens)
        second = bench.client.generate("pair", tokens=token_prompt(bench.seed(), 20), max_tokens=4, temperature=0.0)
        second.result()
        first.result()


def _status(bench: Bench) -> tuple[int, float, int]:
    """Switches so far, the seconds that they took, and the footprint; of a sample taken after now."""
    before = bench.client.stats("pair").models[0].stats
    assert before is not None
    while True:
        time.sleep(0.3)  # the worker takes a sample when it is idle, and a heartbeat carries it
        stats = bench.client.stats("pair").models[0].stats
        assert stats is not None
        assert stats.speculation is not None
        if stats.running == 0:
            return stats.speculation.switches, stats.speculation.switch_seconds, stats.memory.footprint


def _together(client: Client, model: str, prompts: list[str], tokens: int) -> tuple[float, list[str]]:
    began = time.perf_counter()
    sent = [client.generate(model, prompt=prompt, max_tokens=tokens, temperature=0.0) for prompt in prompts]
    results = [stream.result() for stream in sent]
    seconds = time.perf_counter() - began
    return sum(len(result.tokens) for result in results) / seconds, [result.text for result in results]


def _stream(client: Client, prompt: list[int], tokens: int) -> float:
    ask = partial(client.generate, "pair", tokens=prompt, max_tokens=tokens, temperature=0.0, speculative="on")
    return streams.read(ask).rate


def _chat(client: Client, question: str, tokens: int, mode: Any) -> tuple[float, str]:
    """Decoded tokens a second, by the worker's own clock, and the text."""
    result = client.complete(
        "real",
        messages=[{"role": "user", "content": question}],
        max_tokens=tokens,
        temperature=0.0,
        speculative=mode,
    )
    return result.timings.predicted_per_second, result.text


def _ask(client: Client, model: str, prompt: list[int], mode: Any) -> Result:
    return client.complete(model, tokens=prompt, max_tokens=TOKENS, temperature=0.0, cache=False, speculative=mode)


def _prompt(bench: Bench, choose: random.Random) -> list[int]:
    """Half of them repeat themselves, so that the library has something to copy and accepts it."""
    prompt = token_prompt(bench.seed(), choose.randrange(2, 120))
    if choose.random() < 0.5:
        prompt = list(itertools.chain.from_iterable([prompt[:20]] * 5))
    return prompt
