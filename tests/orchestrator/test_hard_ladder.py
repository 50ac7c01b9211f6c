"""Caps held from outside: the pure ladder, and workers that swell past their cap, deaf or not."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from mlx_bulkhead.orchestrator import host_memory
from mlx_bulkhead.orchestrator.config import Config, ModelConfig
from mlx_bulkhead.orchestrator.memory_config import MemoryConfig
from mlx_bulkhead.orchestrator.policy.ladder import Lines, Step, Watch, judge
from mlx_bulkhead.protocol.errors import OutOfMemory
from mlx_bulkhead.protocol.limits import MIB

from tests.support.hosts import fake_host, misbehave, status, until
from tests.support.misbehaving_worker import expected_text

pytestmark = pytest.mark.timeout(60)

CAP = 192 * MIB
ENFORCED = MemoryConfig(enforce=True)


@pytest.mark.parametrize(
    ("armed", "used", "answers", "step"),
    [
        (True, 800, True, None),
        (True, 949, True, None),
        (True, 950, True, Step.DRAIN),
        (False, 950, True, None),  # it has never been below the line: a replacement would not help
        (False, 999, False, Step.KILL),
        (True, 1000, True, Step.DRAIN),
        (False, 1001, True, None),  # at the next look
        (False, 1001, False, Step.KILL),
        (False, 1251, True, Step.KILL),
        (True, 10_000, False, Step.KILL),
        (True, 0, False, None),  # nobody can tell
    ],
)
def test_the_ladder(armed: bool, used: int, answers: bool, step: Step | None) -> None:
    watch = Watch(armed, over_since=0.0)
    assert judge(watch, used=used, cap=1000, answers=answers, lines=Lines(), now=1.0)[1] is step


def test_over_the_cap_for_a_moment_is_no_death() -> None:
    """A buffer that is copied takes twice its room until the worker's next own step."""
    looks = [(1001, None), (940, None), (1100, None), (1001, Step.KILL)]
    watch = Watch()
    for number, (used, expected) in enumerate(looks):
        watch, step = judge(watch, used=used, cap=1000, answers=True, lines=Lines(), now=number / 4)
        assert step is expected


def run(*samples: tuple[float, int]) -> list[float]:
    """When a worker with such samples, seconds and bytes of 1000, is drained."""
    watch, drained = Watch(), list[float]()
    for now, used in samples:
        watch, step = judge(watch, used=used, cap=1000, answers=True, lines=Lines(), now=now)
        if step is Step.DRAIN:
            drained.append(now)
    return drained


def test_a_worker_has_a_moment_to_help_itself() -> None:
    assert run((0.0, 500), (0.25, 960), (0.5, 960), (1.0, 940), (1.25, 960), (2.0, 960)) == []
    assert run((0.0, 500), (0.25, 960), (0.5, 970), (1.25, 960)) == [1.25]


def test_a_drained_worker_is_drained_again_only_after_it_was_well_below() -> None:
    assert run((0, 500), (1, 960), (2, 960), (3, 960), (9, 960), (10, 930), (11, 960), (12, 960)) == [2]
    assert run((0, 500), (1, 960), (2, 960), (3, 890), (4, 960), (5, 960)) == [2, 5]


def test_each_step_can_be_turned_off_and_without_a_cap_there_is_none() -> None:
    def step(used: int, cap: int, answers: bool, lines: Lines) -> Step | None:
        return judge(Watch(True, 0.0), used=used, cap=cap, answers=answers, lines=lines, now=9.0)[1]

    assert step(2000, 1000, True, Lines(kill=0)) is Step.DRAIN
    assert step(990, 1000, True, Lines(drain=0)) is None
    assert step(2000, 1000, False, Lines(drain=0, kill=0)) is None
    assert step(2000, 0, True, Lines()) is None


def test_the_system_tells_what_a_process_takes() -> None:
    assert 5 * MIB < host_memory.footprint(os.getpid()) < 4096 * MIB
    assert host_memory.footprint(2**22 + 1) == 0


def config(
    mode: str, memory: MemoryConfig = ENFORCED, *, once: Path | None = None, cap: int = CAP, **env: str
) -> Config:
    return Config(
        models={
            "big": ModelConfig("fake", memory_limit=cap, stall_budget_s=30.0, env=misbehave(mode, once=once, **env)),
            "small": ModelConfig("fake"),
        },
        memory=memory,
    )


async def test_a_worker_that_swells_and_answers_nobody_is_killed_and_others_lose_nothing(short_tmp: Path) -> None:
    """D05, D07: what the worker says of itself plays no part."""
    async with fake_host(short_tmp / "r", config=config("swell:10", once=short_tmp / "once")) as host:
        other = asyncio.ensure_future(host.complete("small", prompt="s", max_tokens=300))
        result = await host.complete("big", prompt="b", max_tokens=60)
        assert result.text == expected_text("b", 60)  # as after any crash: resumed once
        assert result.restarts == 1
        assert (await other).text == expected_text("s", 300)
        assert status(host, "small").crashes == 0
        assert "by the orchestrator" in status(host, "big").last_exit


async def test_its_requests_end_once_with_the_cause_and_the_numbers(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r", config=config("swell:10", once=short_tmp / "once")) as host:
        with pytest.raises(OutOfMemory, match=r"the worker took \d+ MiB, and its cap is 192 MiB") as caught:
            await host.complete("big", prompt="b", max_tokens=60, on_crash="fail")
        assert "Raise memory_limit" in caught.value.message
        assert "tokens generated" in caught.value.message
        assert (await host.complete("big", prompt="c", max_tokens=5)).text == expected_text("c", 5)


async def test_a_model_that_is_over_its_cap_whenever_it_is_loaded_ends_with_the_cause(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r", config=config("balloon:400")) as host:
        with pytest.raises(OutOfMemory, match="its cap is 192 MiB"):
            await host.complete("big", prompt="b", max_tokens=100_000)
        await host.unload("big")


async def test_near_its_cap_a_worker_is_drained_and_replaced_without_a_lost_stream(short_tmp: Path) -> None:
    fill = "455"  # and the 20 to 50 MiB of the fake itself
    memory = MemoryConfig(enforce=True, drain_at=0.9)
    wanted = config("fill:400", memory, once=short_tmp / "once", cap=512 * MIB, BULKHEAD_FAKE_FILL=fill)
    async with fake_host(short_tmp / "r", config=wanted) as host:
        results = await asyncio.gather(*(host.complete("big", prompt=str(i), max_tokens=600) for i in range(3)))
        assert [r.text for r in results] == [expected_text(str(i), 600) for i in range(3)]
        assert [r.restarts for r in results] == [0, 0, 0]
        await until(lambda: status(host, "big").incarnation == 2 and status(host, "big").state == "READY")
        assert status(host, "big").crashes == 0


async def test_without_settings_a_balloon_is_left_alone(short_tmp: Path) -> None:
    async with fake_host(short_tmp / "r", config=config("balloon:256", MemoryConfig())) as host:
        await host.complete("big", prompt="b", max_tokens=200)  # a second: four looks
        assert status(host, "big").crashes == 0
