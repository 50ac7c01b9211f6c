"""Owns the checks of the prompt cache in the engine: the same greedy text with it, and what it saves."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache as once
from typing import Any

import pytest
from mlx_bulkhead.worker.engines.base import Engine

from .test_engine import CACHES, PROMPTS, Driver, open_tiny, shared_engine

WINDOWED = "gemma3_text"
LONG = [300 + (7 * number) % 450 for number in range(700)]
"""More than two checkpoints, and many times the window of the windowed model."""


@pytest.fixture(params=CACHES)
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def engine(architecture: str) -> Iterator[Engine]:
    engine = open_tiny(architecture, cache_entries=64)
    yield engine
    assert not engine.busy
    engine.close()


@pytest.fixture
def drive(engine: Engine) -> Driver:
    return Driver(engine)


def cold(architecture: str, prompt: list[int], max_tokens: int) -> list[int]:
    """The tokens of an engine without a cache."""
    return list(_cold(architecture, tuple(prompt), max_tokens))


@once
def _cold(architecture: str, prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    driver = Driver(shared_engine(architecture))
    driver.add("cold", list(prompt), max_tokens)
    driver.run()
    return tuple(driver.tokens["cold"])


def ask(drive: Driver, name: str, prompt: list[int], max_tokens: int = 12, **options: Any) -> int:
    """Serve one request alone; gives the tokens that were reused."""
    drive.add(name, prompt, max_tokens, **options)
    drive.run()
    return drive.cached[name]


def check(
    drive: Driver, architecture: str, name: str, prompt: list[int], max_tokens: int = 12, **options: Any
) -> int:
    saved = ask(drive, name, prompt, max_tokens, **options)
    assert drive.tokens[name] == cold(architecture, prompt, max_tokens)
    assert drive.prefill[name][-1] == (len(prompt), len(prompt))
    assert 0 <= saved < len(prompt)
    return saved


def test_the_next_turn_computes_only_what_is_new(drive: Driver, architecture: str) -> None:
    assert check(drive, architecture, "first", LONG) == 0
    second = [*LONG, *drive.tokens["first"], 5, 6, 7]
    assert check(drive, architecture, "second", second) >= len(LONG) + 11
    third = [*second, *drive.tokens["second"], 8]
    assert check(drive, architecture, "third", third) >= len(second) + 11
    stats = drive.engine.cache_stats()
    assert (stats.hits, stats.misses) == (2, 1)
    assert stats.tokens_reused == drive.cached["second"] + drive.cached["third"]


def test_the_same_prompt_again_leaves_one_token(drive: Driver, architecture: str) -> None:
    ask(drive, "first", LONG)
    for name in ("second", "third"):
        assert check(drive, architecture, name, LONG) == len(LONG) - 1


def test_an_answer_that_is_rendered_in_another_way(drive: Driver, architecture: str) -> None:
    """The header of the answer differs in the next turn: what came before it is there."""
    ask(drive, "first", LONG)
    edited = [*LONG[:-5], 9, 9, 9, *LONG[:30]]
    assert check(drive, architecture, "edited", edited) >= len(LONG) - 17


def test_an_edited_last_turn_after_the_window_was_exceeded(drive: Driver, architecture: str) -> None:
    """I01: text as cold, and something is still reused."""
    ask(drive, "first", LONG)
    edited = [*LONG[:600], 9, 9, 9, *LONG[:40]]
    assert check(drive, architecture, "edited", edited) >= 512
    early = [*LONG[:100], 9, 9, 9, *LONG[:40]]
    assert check(drive, architecture, "early", early) in (0, 100)


def test_conversations_with_a_common_beginning_do_not_mix(drive: Driver, architecture: str) -> None:
    """I02: two chats, one system prompt, window exceeded, turn by turn."""
    chats = {"a": [*LONG[:300], *[411] * 20], "b": [*LONG[:300], *[522] * 20]}
    for turn in range(3):
        for name, ids in chats.items():
            label = f"{name}{turn}"
            saved = check(drive, architecture, label, ids, 20)
            assert saved >= (256 if label != "a0" else 0)
            chats[name] = [*ids, *drive.tokens[label], 600 + turn, *LONG[: 30 + turn]]


def test_tenants_share_nothing(drive: Driver, architecture: str) -> None:
    assert check(drive, architecture, "alice", LONG, tenant="alice") == 0
    assert check(drive, architecture, "bob", LONG, tenant="bob") == 0
    assert check(drive, architecture, "nobody", LONG) == 0
    assert check(drive, architecture, "again", LONG, tenant="alice") == len(LONG) - 1


def test_a_request_may_stay_out_of_it(drive: Driver, architecture: str) -> None:
    ask(drive, "private", LONG, cache=False)
    assert drive.engine.cache_stats().entries == 0
    ask(drive, "public", LONG)
    assert check(drive, architecture, "private", LONG, cache=False) == 0
    assert drive.engine.cache_stats().hits == 0


@pytest.mark.parametrize("company", [False, True])
def test_a_cancelled_prefill_is_not_lost(drive: Driver, architecture: str, company: bool) -> None:
    """F05: cancelled at 80 %, sent again."""
    prompt = LONG * 2
    if company:
        drive.add("other", PROMPTS[0], 400)
        drive.until(drive.generated("other", 3))
    drive.add("slow", prompt, 8)
    drive.until(lambda: bool(drive.prefill["slow"]) and drive.prefill["slow"][-1][0] >= 0.8 * len(prompt))
    done = drive.prefill["slow"][-1][0]
    assert drive.drop("slow")
    drive.add("again", prompt, 8)
    drive.until(lambda: "again" in drive.cached)
    assert drive.cached["again"] >= min(done, len(prompt) - 1) or drive.cached["again"] == len(prompt) - 1
    drive.until(lambda: drive.finish["again"] is not None)
    drive.drop("other")
    assert drive.tokens["again"] == cold(architecture, prompt, 8)


def test_a_cancelled_answer_is_kept(drive: Driver, architecture: str) -> None:
    drive.add("a", LONG, 60)
    drive.until(drive.generated("a", 20))
    drive.drop("a")
    longer = [*LONG, *drive.tokens["a"], 7]
    assert check(drive, architecture, "b", longer) >= len(LONG) + 19


def test_rows_of_a_batch_join_with_their_caches(drive: Driver, architecture: str) -> None:
    ask(drive, "first", LONG)
    beginnings = {"a": 700, "b": 640, "c": 300, "d": 20}
    prompts = {name: [*LONG[:length], *[440 + length % 7] * 9] for name, length in beginnings.items()}
    prompts["e"] = LONG
    for name, prompt in prompts.items():
        drive.add(name, prompt, 25)
    drive.run()
    for name, prompt in prompts.items():
        assert drive.tokens[name] == cold(architecture, prompt, 25)
        assert drive.engine.served(name.encode()).engine == "batch"
    assert drive.cached["e"] == len(LONG) - 1
    assert drive.cached["a"] >= 683
    assert drive.cached["c"] >= 256
    for name, prompt in prompts.items():  # and what the batch leaves is as good
        assert check(drive, architecture, f"{name}2", [*prompt, *drive.tokens[name], 5]) >= len(prompt) + 24


def test_a_resumed_row_uses_the_cache(drive: Driver, architecture: str) -> None:
    whole = cold(architecture, LONG, 40)
    ask(drive, "first", LONG, 30)
    drive.add("resumed", LONG, 40, resume_tokens=whole[:25])
    drive.run()
    assert drive.tokens["resumed"] == whole
    assert drive.cached["resumed"] >= len(LONG) - 1


def test_a_seed_gives_the_same_tokens_with_a_cache(drive: Driver, architecture: str) -> None:
    options: dict[str, Any] = {"temperature": 0.9, "seed": 5, "repetition_penalty": 1.2, "frequency_penalty": 0.3}
    ask(drive, "cold", LONG, 30, cache=False, **options)
    ask(drive, "first", LONG, 30, **options)
    ask(drive, "second", LONG, 30, **options)
    assert drive.cached["second"] == len(LONG) - 1
    assert drive.tokens["cold"] == drive.tokens["first"] == drive.tokens["second"]


def test_many_prompts_with_common_beginnings(architecture: str) -> None:
    """Greedy text with a small cache is that without one, alone and in company, edited, repeated and cancelled."""
    choose = random.Random(3)
    engine = open_tiny(architecture, cache_entries=12)
    drive = Driver(engine)
    known: list[list[int]] = [[choose.randrange(300, 900) for _ in range(40)] for _ in range(3)]
    served = 0
    while served < 40:  # for each of three models
        wave: dict[str, list[int]] = {}
        for _ in range(choose.choice([1, 1, 2, 4])):
            base = choose.choice(known[-20:])
            cut = choose.choice([len(base), len(base), choose.randrange(9, len(base))])
            prompt = [*base[:cut], *[choose.randrange(300, 900) for _ in range(choose.choice([0, 1, 5, 60]))]]
            name = str(served + len(wave))
            wave[name] = prompt
            drive.add(name, prompt, 6)
        victim = choose.choice([*wave, "", "", ""])
        for _ in range(choose.randrange(1, 4) if victim else 0):
            drive.step()
        if victim:
            drive.drop(victim)
        drive.run()
        for name, prompt in wave.items():
            if name != victim:
                assert drive.tokens[name] == cold(architecture, prompt, 6), (name, drive.cached[name])
                known.append([*prompt, *drive.tokens[name]][:400])
        served += len(wave)
    stats = engine.cache_stats()
    assert stats.hits > 10
    assert stats.evictions > 0
    engine.close()


def test_bytes_are_bounded_by_the_load() -> None:
    limit = 4 * 1024 * 1024
    engine = open_tiny("qwen3", cache_entries=64, cache_bytes=limit)
    drive = Driver(engine)
    for number in range(12):
        ask(drive, str(number), [400 + number, *LONG], 3)
        assert engine.cache_stats().bytes <= limit
    stats = engine.cache_stats()
    assert stats.evictions > 0
    assert 0 < stats.entries < 12
    assert ask(drive, "last", [411, *LONG], 3) == len(LONG)
    engine.close()


@pytest.mark.parametrize("off", [{"cache_entries": 0}, {"cache_entries": 64, "cache_bytes": 0}])
def test_it_can_be_switched_off(off: dict[str, int]) -> None:
    engine = open_tiny("qwen3", **off)
    drive = Driver(engine)
    assert [ask(drive, name, LONG) for name in ("a", "b")] == [0, 0]
    assert not engine.tend()
    assert engine.cache_stats().misses == 0
    engine.close()
