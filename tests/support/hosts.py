"""Orchestrators for tests: embedded, over the worker that misbehaves on request."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
from mlx_bulkhead.orchestrator.config import Config, LimitsConfig
from mlx_bulkhead.orchestrator.embedded import Orchestrator
from mlx_bulkhead.orchestrator.policy.restart import RestartPolicy
from mlx_bulkhead.protocol.values import ModelStatus

MISBEHAVING = (sys.executable, "-P", str(Path(__file__).with_name("misbehaving_worker.py")))

QUICK = LimitsConfig(polite_s=0.5, term_s=0.5, hello_s=10.0, load_silence_s=10.0, keepalive_s=0.2)
EAGER = RestartPolicy(base_delay_s=0.05, max_restarts=3)


@asynccontextmanager
async def fake_host(
    run_dir: Path,
    *,
    limits: LimitsConfig = QUICK,
    restart: RestartPolicy = EAGER,
    config: Config | None = None,
    front_door: bool = False,
) -> AsyncIterator[Orchestrator]:
    """An orchestrator whose workers are `misbehaving_worker.py`; `misbehave` tells a load's worker what to do."""
    config = msgspec.structs.replace(config or Config.default(), limits=limits, restart=restart)
    async with Orchestrator(config, run_dir=run_dir, worker_command=MISBEHAVING, front_door=front_door) as host:
        yield host


def misbehave(mode: str, *, once: Path | None = None, rate: float | None = None, **more: str) -> dict[str, str]:
    """The environment of a worker that misbehaves: at every incarnation, or only at the first (`once`: a path)."""
    env = {"BULKHEAD_MISBEHAVE": mode} if mode else {}
    if once is not None:
        env["BULKHEAD_MISBEHAVE_ONCE"] = str(once)
    if rate is not None:
        env["BULKHEAD_FAKE_RATE"] = str(rate)
    return {**env, **more}


async def until(holds: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait for something that has no event of its own to await. Raises `TimeoutError`."""
    async with asyncio.timeout(timeout_s):
        while not holds():
            await asyncio.sleep(0.005)


def status(host: Orchestrator, name: str) -> ModelStatus:
    """The line of one model."""
    return next(s for s in host.model_statuses() if s.name == name)


def workers() -> list[psutil.Process]:
    """The fake workers that are children of this process."""
    found: list[psutil.Process] = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if MISBEHAVING[-1] in child.cmdline():
                found.append(child)
    return found
