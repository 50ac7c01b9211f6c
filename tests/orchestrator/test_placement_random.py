"""Clients, kills and unloads at random under a budget: never more workers than there is room for, and every request
ends once, with the right text or a typed error."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest
from mlx_bulkhead.orchestrator import host_memory
from mlx_bulkhead.orchestrator.config import Config, ModelConfig
from mlx_bulkhead.orchestrator.embedded import Orchestrator
from mlx_bulkhead.orchestrator.memory_config import MemoryConfig
from mlx_bulkhead.orchestrator.policy.placement_values import Pressure
from mlx_bulkhead.orchestrator.policy.restart import RestartPolicy
from mlx_bulkhead.protocol.errors import BulkheadError

from tests.support.hosts import fake_host, until, workers
from tests.support.misbehaving_worker import expected_text

GIB = 2**30
NAMES = ("a", "b", "c")
CLIENTS, REQUESTS = 6, 10
ENDLESS = RestartPolicy(base_delay_s=0.02, max_restarts=1000)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", [1, 2])
async def test_a_random_life(short_tmp: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(host_memory, "total", lambda: 64 * GIB)
    monkeypatch.setattr(host_memory, "pressure", lambda: Pressure.NORMAL)
    dice = random.Random(seed)
    config = Config(
        models={name: ModelConfig("fake", memory_limit=4 * GIB) for name in NAMES},
        memory=MemoryConfig(budget=10 * GIB, min_residency_s=0.0, ttl_s=0.5, enforce=False),
    )
    async with fake_host(short_tmp / "r", config=config, restart=ENDLESS) as host:
        ended: list[str] = []
        clients = [asyncio.ensure_future(_client(host, random.Random(dice.random()), ended)) for _ in range(CLIENTS)]
        trouble = asyncio.ensure_future(_trouble(host, dice))
        while not all(client.done() for client in clients):
            assert len(workers()) <= 2
            _held(host)
            await asyncio.sleep(0.005)
        trouble.cancel()
        await asyncio.gather(*clients)
        assert len(ended) == CLIENTS * REQUESTS
        assert ended.count("text") > len(ended) // 2
        for name in NAMES:
            assert (await host.complete(name, prompt="x", max_tokens=3)).text == expected_text("x", 3)
        await until(lambda: _held(host) == 0, 30.0)  # all idle, and their time is up
        assert not workers()


def _held(host: Orchestrator) -> int:
    """Bytes of the budget that are held; never more than there are."""
    view = host.stats_reply(None).placement
    assert view is not None
    assert view.held <= view.budget
    return view.held


async def _client(host: Orchestrator, dice: random.Random, ended: list[str]) -> None:
    for _ in range(REQUESTS):
        name, tokens = dice.choice(NAMES), dice.randint(1, 40)
        prompt = f"{name}{dice.random()}"  # one that two workers died of would be refused
        stream = host.generate(name, prompt=prompt, max_tokens=tokens)
        if dice.random() < 0.1:
            stream.cancel()
        try:
            result = await stream.result()
        except BulkheadError as error:
            ended.append(error.code.value)
            continue
        if result.finish_reason != "cancelled":
            assert result.text == expected_text(prompt, tokens)
        ended.append("text")


async def _trouble(host: Orchestrator, dice: random.Random) -> None:
    while True:
        await asyncio.sleep(dice.uniform(0.1, 0.4))
        pids = [model.pid for model in host.model_statuses() if model.pid is not None]
        if pids and dice.random() < 0.5:
            os.kill(dice.choice(pids), signal.SIGKILL)
        else:
            await host.unload(dice.choice(NAMES))
