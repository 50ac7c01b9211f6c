"""The other side for vision models: mlx-vlm called directly, in a process of its own.

Run as a program it is that process: commands in as lines of JSON, measurements out the same way.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .library import Batched, Streamed, per_second


class VlmLibrary:
    """Drives the process."""

    def __init__(self, model: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.vlm_library", str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def stream(self, text: str, pictures: Sequence[Path], max_tokens: int) -> Streamed:
        """`mlx_vlm.stream_generate`, greedy, of a chat with pictures before its text."""
        return Streamed(**self._ask("stream", [(text, pictures)], max_tokens))

    def batch(self, asked: Sequence[tuple[str, Sequence[Path]]], max_tokens: int) -> Batched:
        """mlx-vlm's `BatchGenerator` with all chats from the start, greedy; a chat is a text and its pictures."""
        return Batched(**self._ask("batch", asked, max_tokens))

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()

    def _ask(self, do: str, asked: Sequence[tuple[str, Sequence[Path]]], max_tokens: int) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        chats = [(text, list(map(str, pictures))) for text, pictures in asked]
        self._process.stdin.write(json.dumps({"do": do, "chats": chats, "max_tokens": max_tokens}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the process with the library ended; its error is above")
        return json.loads(answer)


class _Server:
    """The process's side."""

    def __init__(self, model: str) -> None:
        from mlx_vlm import load
        from mlx_vlm.generate.ar import BatchGenerator

        self._model: Any
        self._processor: Any
        self._model, self._processor = load(model)
        self._generator: Any = BatchGenerator(self._model.language_model, self._processor, compute_logprobs=False)

    def stream(self, chats: list[tuple[str, list[str]]], max_tokens: int) -> dict[str, Any]:
        from mlx_vlm import stream_generate

        [(text, pictures)] = chats
        tokens: list[int] = []
        began = first = last = time.perf_counter()
        prompt = self._render(text, pictures)
        for result in stream_generate(
            self._model, self._processor, prompt, pictures, max_tokens=max_tokens, temperature=0.0
        ):
            if len(tokens) == max_tokens:
                break  # the library repeats the last token with the rest of the text
            last = time.perf_counter()
            if not tokens:
                first = last
            tokens.append(int(result.token or 0))
        return {"tokens": tokens, "first": first - began, "rate": per_second(len(tokens) - 1, last - first)}

    def batch(self, chats: list[tuple[str, list[str]]], max_tokens: int) -> dict[str, Any]:
        began = first = time.perf_counter()
        rows: dict[int, list[int]] = {}
        for text, pictures in chats:
            ids, kwargs = self._embed(text, pictures)
            [uid] = self._generator.insert([ids], max_tokens=max_tokens, prompt_kwargs=[kwargs])
            rows[uid] = []
        waiting = set(rows)
        done = early = 0
        while self._generator.has_work:
            for response in self._generator.next()[1]:
                rows[response.uid].append(response.token)
                done += 1
                if response.uid in waiting:
                    waiting.discard(response.uid)
                    first, early = time.perf_counter(), done
        last = time.perf_counter()
        return {
            "tokens": list(rows.values()),
            "seconds": last - began,
            "first": first - began,
            "steady": per_second(done - early, last - first),
        }

    def _render(self, text: str, pictures: list[str]) -> str:
        parts = [*({"type": "image"} for _ in pictures), {"type": "text", "text": text}]
        return self._processor.apply_chat_template(
            [{"role": "user", "content": parts}], add_generation_prompt=True, tokenize=False
        )

    def _embed(self, text: str, pictures: list[str]) -> tuple[list[int], dict[str, Any]]:
        """As mlx-vlm's own server feeds its batch: ids, and their embeddings with what goes with them."""
        from mlx_vlm.utils import prepare_inputs

        made: Any = prepare_inputs(
            self._processor, images=pictures or None, prompts=self._render(text, pictures), add_special_tokens=False
        )
        ids, pixels = made.pop("input_ids"), made.pop("pixel_values", None)
        mask = made.pop("attention_mask", None)
        embedded = self._model.get_input_embeddings(ids, pixels, mask=mask, **made).to_dict()
        return ids.squeeze(0).tolist(), {**made, **{k: v for k, v in embedded.items() if v is not None}}


def _serve() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever the library prints
    server = _Server(sys.argv[1])
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(server, command.pop("do"))(**command)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
