"""The other side of the comparison for speculation: dflash-mlx called directly, in a process of its own.

Run as a program it is that process: `python -m benchmarks.dflash_library MODEL DRAFT`, commands in as lines of JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from .library import Streamed, per_second


class DFlashLibrary:
    """Drives the process."""

    def __init__(self, model: Path, draft: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.dflash_library", str(model), str(draft)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def stream(self, prompt: list[int], max_tokens: int) -> Streamed:
        """`stream_dflash_generate`, with the options that a worker uses by default."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"prompt": prompt, "max_tokens": max_tokens}) + "\n")
        self._process.stdin.flush()
        return Streamed(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


def _serve() -> None:
    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever the library prints
    from dflash_mlx.runtime import VerifyConfig, stream_dflash_generate
    from dflash_mlx.runtime.bundle import load_runtime_bundle
    from dflash_mlx.runtime.context import build_offline_runtime_context

    bundle = load_runtime_bundle(
        model_ref=sys.argv[1], draft_ref=sys.argv[2], verify_config=VerifyConfig.from_mode("adaptive"), lazy=False
    )
    context = build_offline_runtime_context(verify_mode="adaptive")
    stops = sorted(bundle.tokenizer.eos_token_ids)
    for line in sys.stdin:
        command = json.loads(line)
        tokens: list[int] = []
        began = first = last = time.perf_counter()
        events: Any = stream_dflash_generate(
            target_model=bundle.target_model,
            target_ops=bundle.target_ops,
            tokenizer=bundle.tokenizer,
            draft_model=bundle.draft_model,
            draft_backend=bundle.draft_backend,
            prompt_tokens_override=command["prompt"],
            max_new_tokens=command["max_tokens"],
            stop_token_ids=stops,
            runtime_context=context,
        )
        for event in events:
            if type(event).__name__ != "TokenEvent":
                continue
            last = time.perf_counter()
            if not tokens:
                first = last
            tokens.append(event.token_id)
        rate = per_second(len(tokens) - 1, last - first)
        print(json.dumps({"tokens": tokens, "first": first - began, "rate": rate}), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
