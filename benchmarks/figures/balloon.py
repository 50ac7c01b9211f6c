"""A worker that swells without end and answers nobody: how soon after its cap it is gone, and what others feel.

The worker is the one of the tests, which fakes its model: no real one can be told to do this.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from pathlib import Path

import psutil
from mlx_bulkhead.orchestrator.config import Config, ModelConfig
from mlx_bulkhead.orchestrator.embedded import Orchestrator
from mlx_bulkhead.orchestrator.memory_config import MemoryConfig

from mlx_bulkhead import BulkheadError
from tests.support.hosts import MISBEHAVING, misbehave

from ..bench import Bench
from ..measure import Figure, at_most, spread

CAP = 256 * 2**20
SETTLE_S = 1.0


def balloon(bench: Bench) -> list[Figure]:
    killed: list[float] = []
    gaps: list[float] = []
    calm: list[float] = []
    for number in range(2 if bench.quick else 2 * bench.rounds):
        asyncio.run(_round(bench.folder / f"balloon-{number}", killed, gaps, calm))
    return [
        at_most("a worker that swells and is deaf: gone after it crossed its cap", killed, 1000.0),
        at_most(
            "the same: largest gap in another model's stream", gaps, 250.0, beside=f"undisturbed {spread(calm)} ms"
        ),
    ]


async def _round(run_dir: Path, killed: list[float], gaps: list[float], calm: list[float]) -> None:
    config = Config(
        models={
            "big": ModelConfig("fake", memory_limit=CAP, env=misbehave("swell:3")),
            "small": ModelConfig("fake", env=misbehave("", rate=100)),
        },
        memory=MemoryConfig(enforce=True),
    )
    async with Orchestrator(config, run_dir=run_dir, worker_command=MISBEHAVING) as host:
        await host.load("big", "fake", memory_limit=CAP, env=config.models["big"].env)
        other = asyncio.ensure_future(_stamps(host))
        await asyncio.sleep(SETTLE_S)
        swollen = time.perf_counter()
        pid = next(model.pid for model in host.model_statuses() if model.name == "big")
        assert pid is not None
        watch = _Watch(pid)
        with contextlib.suppress(BulkheadError):
            await host.complete("big", prompt="b", max_tokens=100, on_crash="fail")
        await asyncio.to_thread(watch.join)
        killed.append(watch.gone_after_ms)
        other.cancel()
        stamps = await other
        steps = [(b, (b - a) * 1e3) for a, b in itertools.pairwise(stamps)]
        calm.append(max((ms for at, ms in steps if at < swollen), default=0.0))
        gaps.append(max(ms for at, ms in steps if at >= swollen))


async def _stamps(host: Orchestrator) -> list[float]:
    """When each snapshot of the other model came, until cancelled."""
    stamps: list[float] = []
    with contextlib.suppress(asyncio.CancelledError):
        async with host.generate("small", prompt="s", max_tokens=100_000) as stream:
            async for _ in stream:
                stamps.append(time.perf_counter())
    return stamps


class _Watch(threading.Thread):
    """Looks every few milliseconds at a process: when it crossed the cap, and when it was gone."""

    def __init__(self, pid: int) -> None:
        super().__init__(name="watch")
        self.gone_after_ms = 0.0
        self._process = psutil.Process(pid)
        self.start()

    def run(self) -> None:
        crossed: float | None = None
        with contextlib.suppress(psutil.Error):
            while self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE:
                if crossed is None and self._process.memory_info().rss > CAP:
                    crossed = time.perf_counter()
                time.sleep(0.002)
        self.gone_after_ms = (time.perf_counter() - (crossed or time.perf_counter())) * 1e3
