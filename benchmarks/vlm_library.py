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

from .library import Streamed, per_second


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
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        command = {"text": text, "pictures": list(map(str, pictures)), "max_tokens": max_tokens}
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the process with the library ended; its error is above")
        return Streamed(**json.loads(answer))

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


def _serve() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever the library prints
    from mlx_vlm import load, stream_generate

    model, processor = load(sys.argv[1])
    renderer: Any = processor
    for line in sys.stdin:
        command = json.loads(line)
        parts = [*({"type": "image"} for _ in command["pictures"]), {"type": "text", "text": command["text"]}]
        tokens: list[int] = []
        began = first = last = time.perf_counter()
        prompt = renderer.apply_chat_template(
            [{"role": "user", "content": parts}], add_generation_prompt=True, tokenize=False
        )
        for result in stream_generate(
            model, processor, prompt, command["pictures"], max_tokens=command["max_tokens"], temperature=0.0
        ):
            if len(tokens) == command["max_tokens"]:
                break  # the library repeats the last token with the rest of the text
            last = time.perf_counter()
            if not tokens:
                first = last
            tokens.append(int(result.token or 0))
        rate = per_second(len(tokens) - 1, last - first)
        print(json.dumps({"tokens": tokens, "first": first - began, "rate": rate}), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
