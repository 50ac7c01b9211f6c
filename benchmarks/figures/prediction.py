"""What a load is predicted to take, over the most that its worker was seen to take, for configurations unlike."""

from __future__ import annotations

import threading
import time

import psutil
from mlx_bulkhead.orchestrator.options import LoadOptions, make_load
from mlx_bulkhead.orchestrator.sizes import predict_load

from .. import tiny
from ..bench import Bench
from ..measure import Figure
from ..work import token_prompt

NAME = "predicted"
CONTEXT = 8192
LOW, HIGH = 0.8, 1.25
PROMPT, ROWS = 2000, 4
"""Together they fill the context that is predicted for."""

CONFIGURATIONS: tuple[tuple[str, LoadOptions], ...] = (
    ("qwen3", {"context_limit": CONTEXT}),
    ("qwen3", {"context_limit": CONTEXT, "kv_bits": 8, "kv_group_size": 32}),
    ("llama", {"context_limit": CONTEXT}),
    ("gemma3_text", {"context_limit": CONTEXT}),
    ("qwen3_5", {"context_limit": CONTEXT}),
    ("gemma4_text", {"context_limit": CONTEXT}),
)


def prediction(bench: Bench) -> list[Figure]:
    ratios: list[float] = []
    words: list[str] = []
    for architecture, options in CONFIGURATIONS:
        folder = bench.folder / architecture
        if not folder.exists():
            tiny.make(folder, architecture)
        expected = predict_load(make_load(NAME, str(folder), options), CONTEXT).total
        peak = _peak(bench, architecture, options)
        ratios.append(expected / peak)
        words.append(f"{architecture} {expected / 2**20:.0f} of {peak / 2**20:.0f} MiB")
    met = all(LOW <= ratio <= HIGH for ratio in ratios)
    what = f"prediction of a load over its measured peak, {len(ratios)} tiny configurations"
    return [Figure(what, ratios, f"{LOW:g} to {HIGH:g}, each", met, beside=", ".join(words))]


def _peak(bench: Bench, architecture: str, options: LoadOptions) -> int:
    """Bytes, with a full context of running requests."""
    bench.client.load(NAME, bench.folder / architecture, **options)
    try:
        pid = next(model.pid for model in bench.client.models() if model.name == NAME)
        assert pid is not None
        watch = _Watch(psutil.Process(pid))
        streams = [
            bench.client.generate(NAME, tokens=token_prompt(bench.seed(), PROMPT), max_tokens=40) for _ in range(ROWS)
        ]
        for stream in streams:
            stream.result()
        return watch.end()
    finally:
        bench.client.unload(NAME)


class _Watch(threading.Thread):
    """Looks at a process a hundred times a second."""

    def __init__(self, process: psutil.Process) -> None:
        super().__init__(name="peak")
        self._process = process
        self._most = 0
        self._ended = False
        self.start()

    def run(self) -> None:
        while not self._ended:
            self._most = max(self._most, self._process.memory_info().rss)
            time.sleep(0.01)

    def end(self) -> int:
        self._ended = True
        self.join()
        return self._most
