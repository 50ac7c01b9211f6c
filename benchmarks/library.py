"""The other side of the comparison: mlx-lm called directly, in a process of its own.

Run as a program it is that process: commands in as lines of JSON, measurements out the same way. It takes the
time where a caller in the same process would, right at the library's calls.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Streamed(NamedTuple):
    """One request, as its caller saw it. Seconds."""

    tokens: list[int]
    first: float
    """From the call to the first token."""
    rate: float
    """Tokens a second after the first ones."""
    early: int = 1
    """Tokens that came together as the first."""


class Batched(NamedTuple):
    """Several requests at once, as their caller saw them. Seconds."""

    tokens: list[list[int]]
    seconds: float
    """From the call to the last token of all."""
    first: float
    """From the call until each has a token."""
    steady: float
    """Tokens a second of all together, after that."""


def per_second(count: int, seconds: float) -> float:
    """A rate; 0 where there was no time."""
    return count / seconds if seconds > 0 else 0.0


class Library:
    """Drives the process."""

    def __init__(self, model: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.library", str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        self.versions: dict[str, str] = self._ask({"do": "versions"})

    def stream(self, prompt: str | list[int], max_tokens: int) -> Streamed:
        """`stream_generate`, greedy."""
        return Streamed(**self._ask({"do": "stream", "prompt": prompt, "max_tokens": max_tokens}))

    def batch(self, prompts: Sequence[str], max_tokens: int) -> Batched:
        """`BatchGenerator` with all prompts from the start, greedy."""
        return Batched(**self._ask({"do": "batch", "prompts": list(prompts), "max_tokens": max_tokens}))

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()

    def _ask(self, command: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the process with the library ended; its error is above")
        return json.loads(answer)


class _Server:
    """The process's side."""

    def __init__(self, model: str) -> None:
        from mlx_lm import load
        from mlx_lm.generate import BatchGenerator

        self._model, self._tokenizer = load(model)[:2]
        stops = [[token] for token in sorted(self._tokenizer.eos_token_ids)]
        self._generator = BatchGenerator(self._model, stop_tokens=stops)

    def versions(self) -> dict[str, str]:
        return {name: importlib.metadata.version(name) for name in ("mlx", "mlx-lm")}

    def stream(self, prompt: str | list[int], max_tokens: int) -> dict[str, Any]:
        from mlx_lm import stream_generate

        tokens: list[int] = []
        began = first = last = time.perf_counter()
        for response in stream_generate(self._model, self._tokenizer, prompt, max_tokens=max_tokens):
            last = time.perf_counter()
            if not tokens:
                first = last
            tokens.append(response.token)
        rate = per_second(len(tokens) - 1, last - first)
        return {"tokens": tokens, "first": first - began, "rate": rate}

    def batch(self, prompts: list[str], max_tokens: int) -> dict[str, Any]:
        began = first = time.perf_counter()
        ids = [self._tokenizer.encode(prompt) for prompt in prompts]
        rows: dict[int, list[int]] = {
            uid: [] for uid in self._generator.insert(ids, max_tokens=[max_tokens] * len(ids))
        }
        waiting, running = set(rows), set(rows)
        done = early = 0
        while running:
            for response in self._generator.next_generated():
                rows[response.uid].append(response.token)
                done += 1
                if response.uid in waiting:
                    waiting.discard(response.uid)
                    first, early = time.perf_counter(), done
                if response.finish_reason is not None:
                    running.discard(response.uid)
        last = time.perf_counter()
        return {
            "tokens": list(rows.values()),
            "seconds": last - began,
            "first": first - began,
            "steady": per_second(done - early, last - first),
        }


def _serve() -> None:
    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever the library prints
    server = _Server(sys.argv[1])
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(server, command.pop("do"))(**command)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
