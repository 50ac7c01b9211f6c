"""The models of a run and what each prompt gives: the real ones by plain mlx-lm, the fake ones by their rule."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.support.misbehaving_worker import expected_text
from tests.support.tiny_models import make_tiny

REAL = {"qwen": "qwen3", "llama": "llama", "gemma": "gemma3_text"}
FAKE = ("fake-a", "fake-b")
SUBJECTS = ("harbour", "river", "lamp", "mlýn", "most", "駅前", "tide", "🚢", "kůň", "def f(x):", "walnut", "key")

_REFERENCE = """
import json, sys
from mlx_lm import load, stream_generate
path, jobs = sys.argv[1], json.loads(sys.stdin.read())
model, tokenizer = load(path)
out = []
for prompt, lengths in jobs:
    ids = [r.token for r in stream_generate(model, tokenizer, prompt, max_tokens=max(lengths))]
    texts = {}
    for length in lengths:
        detokenizer = tokenizer.detokenizer
        detokenizer.reset()
        for token in ids[:length]:
            detokenizer.add_token(token)
        detokenizer.finalize()
        texts[length] = detokenizer.text
    out.append(texts)
print(json.dumps(out))
"""


@dataclass(frozen=True)
class Case:
    """A greedy request and the whole answer to it."""

    model: str
    prompt: str
    length: int
    text: str

    def fits(self, text: str, finish_reason: str | None) -> bool:
        """Whether an answer is right: all of it, or, if the request was cut short, the beginning of it."""
        return text == self.text if finish_reason == "length" else self.text.startswith(text)


Bank = dict[str, list[Case]]
"""Model → its cases."""


def real_bank(folder: Path, prompts: int, lengths: tuple[int, ...]) -> tuple[dict[str, Path], Bank]:
    """Make the tiny models below a folder, and ask mlx-lm itself."""
    paths = {name: make_tiny(folder / name, architecture=architecture) for name, architecture in REAL.items()}
    with ThreadPoolExecutor(2) as pool:
        banks = pool.map(lambda name: (name, _ask(name, paths[name], prompts, lengths)), paths)
    return paths, dict(banks)


def _ask(name: str, path: Path, prompts: int, lengths: tuple[int, ...]) -> list[Case]:
    texts = [f"{SUBJECTS[i % len(SUBJECTS)]} of {name} number {i}" for i in range(prompts)]
    done = subprocess.run(
        [sys.executable, "-c", _REFERENCE, str(path)],
        input=json.dumps([[text, lengths] for text in texts]),
        capture_output=True,
        text=True,
        check=True,
    )
    answers: list[dict[str, str]] = json.loads(done.stdout.splitlines()[-1])
    return [
        Case(name, prompt, int(length), text)
        for prompt, answer in zip(texts, answers, strict=True)
        for length, text in answer.items()
    ]


def fake_bank(lengths: tuple[int, ...]) -> Bank:
    """Cases without end: `fresh` makes a prompt of its own for each request."""
    return {name: [fake_case(name, f"seed of {name}", length) for length in lengths] for name in FAKE}


def fake_case(model: str, prompt: str, length: int) -> Case:
    """A case of the fake worker."""
    return Case(model, prompt, length, expected_text(prompt, length))


def fresh(case: Case, dice: random.Random) -> Case:
    """A case of the same kind; for a fake model with a new prompt, so that no quarantine can empty the bank."""
    if case.model in FAKE:
        return fake_case(case.model, f"prompt {dice.getrandbits(48):x}", case.length)
    return case
