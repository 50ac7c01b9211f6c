"""Owns the checks of the keeper over a memory that is made up, alone and with the service around it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from mlx_bulkhead.protocol.codec import Message
from mlx_bulkhead.protocol.commands import Generate, Load, Shutdown
from mlx_bulkhead.protocol.events import Done, Failed
from mlx_bulkhead.protocol.values import LadderStats, Memory
from mlx_bulkhead.worker.engines.base import PrefillOut, StepOut, TokenOut
from mlx_bulkhead.worker.memory.keeper import CLOSE_LOOK_S, LOOK_S, RETRY_S, Held, Keeper, Means
from mlx_bulkhead.worker.memory.prefill_guard import LEAST_CHUNK, Dims, Group, Prefill, demand

from .test_worker_service import A, B, Bench, Scripted, serve, text_of

MIB = 2**20
LIMIT = 1000 * MIB
HARD = 950 * MIB
CHUNK = 2048
# A token takes a MiB, and attention next to nothing.
DIMS = Dims(heads=1, kv_heads=1, head_dim=64, act_bytes=2, groups=(Group(1, 0, MIB),))
ATTENTION = 64 * 4
"""A token of it."""


@dataclass
class World:
    """Memory as a keeper sees it."""

    base: int = 0
    cache: int = 0
    slack: int = 0
    """Of the footprint: freed, and kept by the C library."""
    entries: list[int] = field(default_factory=list[int])
    log: list[str] = field(default_factory=list[str])
    now: float = 0.0

    def sample(self) -> Memory:
        self.log.append("look")
        active = self.base + sum(self.entries)
        return Memory(mlx_active=active, mlx_cache=self.cache, footprint=active + self.cache + self.slack)

    def clear(self) -> None:
        self.log.append("clear")
        self.cache = self.slack = 0

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def nbytes(self) -> int:
        return sum(self.entries)

    def drop_oldest(self) -> None:
        self.log.append("drop")
        self.entries.pop(0)

    def keeper(self, limit: int = LIMIT, dims: Dims | None = DIMS, **load: Any) -> Keeper:
        return Keeper(limit, Load("m", "p", **load), Means(self.sample, self.clear), dims, [self], lambda: self.now)

    @property
    def deeds(self) -> list[str]:
        return [entry for entry in self.log if entry != "look"]


def decoding(request_id: bytes, tokens: int) -> Held:
    return Held(request_id, tokens, 0, tokens)


def prefilling(request_id: bytes, done: int, left: int) -> Held:
    return Held(request_id, done + left, left, done)


def test_a_prompt_may_reach_the_hard_line_and_no_byte_more() -> None:
    need = 100 * (MIB + ATTENTION)
    keeper = World(base=HARD - need).keeper()
    assert keeper.admit(100, [], CHUNK) == ("admit", "")
    keeper = World(base=HARD - need + 1).keeper()
    verdict, why = keeper.admit(100, [], CHUNK)
    assert verdict == "refuse"
    for words in ("100 tokens", "950.0 MiB in all", "100.0 MiB for KV", "850.0 MiB in use", "95% of", "1,000.0 MiB"):
        assert words in why, why
    assert "memory_limit" in why


def test_a_refusal_is_not_remembered() -> None:
    world = World(base=900 * MIB)
    keeper = world.keeper()
    assert keeper.admit(100, [], CHUNK)[0] == "refuse"
    assert keeper.admit(10, [], CHUNK)[0] == "admit"
    world.base = 100 * MIB
    assert keeper.admit(100, [], CHUNK)[0] == "admit"
    assert keeper.stats().refusals == 1


def test_what_is_free_already_is_given_back_before_a_refusal() -> None:
    world = World(base=800 * MIB, cache=50 * MIB, slack=50 * MIB)
    assert world.keeper().admit(100, [], CHUNK)[0] == "admit"
    assert world.deeds == ["clear"]


def test_kept_prefixes_go_only_as_far_as_that_makes_room() -> None:
    world = World(base=700 * MIB, entries=[60 * MIB, 60 * MIB, 60 * MIB])
    assert world.keeper().admit(100, [], CHUNK)[0] == "admit"
    assert len(world.entries) == 2
    assert world.keeper().admit(1000, [], CHUNK)[0] == "refuse"
    assert len(world.entries) == 2, "a prompt that can never fit must not cost others their prefixes"


def test_beside_others_a_prompt_waits_for_what_they_hold() -> None:
    world = World(base=600 * MIB)
    rows = [decoding(A, 200), decoding(B, 300)]
    assert world.keeper().admit(400, rows, CHUNK)[0] == "wait"
    assert world.keeper().admit(851, rows, CHUNK)[0] == "refuse", "not even alone"
    assert world.keeper().admit(400, [], CHUNK)[0] == "refuse", "nobody to wait for"
    assert world.keeper(memory_off=["wait"]).admit(400, rows, CHUNK)[0] == "refuse"


def test_a_prompt_that_waits_is_not_tried_at_every_step() -> None:
    world = World(base=600 * MIB)
    keeper, rows = world.keeper(), [decoding(A, 200), decoding(B, 300)]
    assert keeper.admit(400, rows, CHUNK)[0] == "wait"
    looks = len(world.log)
    world.base = 300 * MIB
    assert keeper.admit(400, rows, CHUNK)[0] == "wait"
    assert len(world.log) == looks
    assert keeper.admit(400, rows[:1], CHUNK)[0] == "admit", "one has ended"
    world.base = 600 * MIB
    keeper.admit(400, rows, CHUNK)
    world.base, world.now = 300 * MIB, world.now + RETRY_S
    assert keeper.admit(400, rows, CHUNK)[0] == "admit"


def test_prompts_on_their_way_are_charged_too() -> None:
    """Else a burst of them would be admitted before the first has taken anything."""
    world = World(base=100 * MIB)
    keeper = world.keeper()
    assert keeper.admit(400, [prefilling(A, 0, 400)], CHUNK)[0] == "admit"
    assert keeper.admit(400, [prefilling(A, 0, 400), prefilling(B, 0, 400)], CHUNK)[0] == "wait"
    assert keeper.admit(400, [prefilling(A, 400, 0), decoding(B, 400)], CHUNK)[0] == "wait"


@pytest.mark.parametrize(
    "keeper",
    [
        World(base=2 * LIMIT).keeper(0),
        World(base=2 * LIMIT).keeper(dims=None),
        World(base=2 * LIMIT).keeper(memory_off=["guard"]),
    ],
)
def test_without_limit_dims_or_guard_everything_starts(keeper: Keeper) -> None:
    assert keeper.admit(10**6, [], CHUNK) == ("admit", "")
    assert keeper.recheck([prefilling(A, 10, 10**6)], CHUNK) is None


def test_other_things_need_room_too() -> None:
    world = World(base=900 * MIB, slack=20 * MIB)
    keeper = world.keeper()
    assert keeper.lacks("adapter 'legal'", 50 * MIB) == ""
    why = keeper.lacks("adapter 'legal'", 50 * MIB + 1)
    assert "adapter 'legal' takes 50.0 MiB on top of 900.0 MiB in use" in why
    assert "memory_limit" in why
    assert world.keeper(0).lacks("x", 10 * LIMIT) == world.keeper(memory_off=["guard"]).lacks("x", LIMIT) == ""


def test_between_chunks_a_prompt_fails_for_the_others() -> None:
    world = World(base=500 * MIB)
    keeper = world.keeper()
    rows = [prefilling(A, 100, 200), prefilling(B, 50, 200), decoding(b"c" * 16, 9)]
    assert keeper.recheck(rows, CHUNK) is None
    world.base = 700 * MIB
    found = keeper.recheck(rows, CHUNK)
    assert found is not None
    assert found[0] == B
    assert "a prompt of 250 tokens, 200 of them to process" in found[1]
    assert keeper.recheck([rows[0], rows[2]], CHUNK) is None


def test_prompts_that_have_not_begun_are_not_checked_again() -> None:
    world = World(base=900 * MIB)
    keeper = world.keeper()
    assert keeper.recheck([prefilling(A, 0, 200)], CHUNK) is None
    assert not world.log


def test_the_rungs_in_their_order() -> None:
    world = World(base=930 * MIB, cache=30 * MIB, entries=[5 * MIB, 5 * MIB])
    keeper = world.keeper()
    rows = [decoding(A, 500), decoding(B, 100)]
    found = keeper.relieve(rows)
    assert world.deeds == ["clear", "drop", "clear", "drop", "clear"]
    assert found is None
    assert keeper.stats() == LadderStats("soft", True, clears=1, drops=2, waits=1)
    assert keeper.admit(1, rows, CHUNK)[0] == "wait"
    assert keeper.pause == CLOSE_LOOK_S

    world.base = 955 * MIB
    found = keeper.relieve(rows)
    assert found is not None
    assert found[0] == A
    for words in ("955.0 MiB are in use", "950.0 MiB, 95%", "500 tokens", "biggest of 2", "memory_limit"):
        assert words in found[1], found[1]

    world.base = 810 * MIB
    assert keeper.relieve(rows[1:]) is None
    assert keeper.stats().holding, "not far enough below the soft line"
    world.base = 700 * MIB
    assert keeper.relieve(rows[1:]) is None
    assert keeper.stats() == LadderStats("calm", False, clears=1, drops=2, waits=1, fails=1)
    assert keeper.admit(1, rows[1:], CHUNK)[0] == "admit"
    assert keeper.pause == LOOK_S


def test_a_worker_under_pressure_still_serves_one_at_a_time() -> None:
    world = World(base=900 * MIB)
    keeper = world.keeper()
    keeper.relieve([decoding(A, 5)])
    assert keeper.admit(5, [decoding(A, 5)], CHUNK)[0] == "wait"
    assert keeper.admit(5, [], CHUNK)[0] == "admit"


def test_rungs_that_are_off() -> None:
    world = World(base=990 * MIB, cache=5 * MIB, entries=[5 * MIB])
    assert world.keeper(memory_off=["clear", "drop", "wait", "fail"]).relieve([decoding(A, 5)]) is None
    assert not world.deeds
    assert world.keeper(memory_off=["clear", "drop", "wait"]).relieve([decoding(A, 5)]) is not None


def test_without_a_limit_it_only_looks() -> None:
    world = World(base=LIMIT)
    keeper = world.keeper(0)
    assert keeper.relieve([decoding(A, 5)]) is None
    assert keeper.memory.mlx_active == LIMIT
    assert keeper.stats() == LadderStats()
    assert keeper.pause == LOOK_S


# With the service.


class Falling(World):
    """Its base changes with each look, as written down."""

    def __init__(self, *bases: int) -> None:
        super().__init__()
        self.bases = list(bases)

    def sample(self) -> Memory:
        if self.bases:
            self.base = self.bases.pop(0)
        return super().sample()


def failure(messages: list[Message]) -> Failed:
    assert isinstance(messages[-1], Failed)
    assert (messages[-1].code, messages[-1].retryable) == ("out_of_memory", True)
    return messages[-1]


def test_a_refused_request_starts_nothing_and_the_next_one_works() -> None:
    full = 949 * MIB
    engine = Scripted([TokenOut(B, 1, "length")])
    engine.keeper = Falling(full, full, 0).keeper()  # a prompt there has two tokens, which take two MiB
    sent = serve(engine, A, B)
    assert "a prompt of 2 tokens" in failure(sent[A]).message
    assert engine.removed == []
    assert isinstance(sent[B][-1], Done)


@pytest.mark.parametrize("waits", [True, False])
def test_a_prompt_that_no_longer_fits_gives_way_between_chunks_and_others_go_on(waits: bool) -> None:
    world = World()

    def fill() -> list[StepOut]:
        world.base = 950 * MIB - 1
        return [PrefillOut(A, 1, 2), TokenOut(B, 1, None)]

    def empty() -> list[StepOut]:
        assert A not in engine.rows, "it waits for the other to end"
        world.base = 0
        return [TokenOut(B, 2, "length")]

    engine = Scripted(fill, empty, [PrefillOut(A, 2, 2), TokenOut(A, 7, "length")])
    engine.keeper = world.keeper(memory_off=["fail"] if waits else ["fail", "wait"])
    sent = serve(engine, A, B)
    assert engine.removed == [A]
    assert text_of(sent[B]) == "1 2 "
    if waits:
        assert text_of(sent[A]) == "7 "
    else:
        assert "1 of them to process" in failure(sent[A]).message


def test_a_prompt_that_nobody_runs_beside_fails_between_chunks() -> None:
    world = World()

    def fill() -> list[StepOut]:
        world.base = 950 * MIB - 1
        return [PrefillOut(A, 1, 2)]

    engine = Scripted(fill)
    engine.keeper = world.keeper(memory_off=["fail"])
    assert "1 of them to process" in failure(serve(engine, A)[A]).message


def test_who_gave_way_waits_for_another_to_end_and_holds_nobody_back_later() -> None:
    world = World(base=100 * MIB)
    keeper, rows = world.keeper(), [decoding(A, 20), decoding(B, 30)]
    assert keeper.may_wait(len(rows))
    world.now += 1000
    assert keeper.admit(10, rows, CHUNK)[0] == "wait"
    assert keeper.admit(10, rows[:1], CHUNK)[0] == "admit"
    assert keeper.admit(10, rows, CHUNK)[0] == "admit"
    assert not keeper.may_wait(0)
    assert not world.keeper(memory_off=["wait"]).may_wait(2)


def test_chunks_are_short_rather_than_a_prompt_refused() -> None:
    """Attention over a whole chunk would not fit; over a short one it does, also beside others and once begun."""
    plain = replace(DIMS, fused=False, act_bytes=4)
    whole, least = (demand(plain, [Prefill(400)], chunk) for chunk in (2048, LEAST_CHUNK))
    world = World(base=HARD - least)
    keeper = world.keeper(dims=plain)
    assert keeper.admit(400, [], 2048) == ("admit", "")
    assert keeper.chunk == LEAST_CHUNK
    world.base = HARD - whole
    assert keeper.recheck([prefilling(A, 1, 399)], 2048) is None
    assert keeper.chunk == 2048
    world.base = HARD - least + 1
    assert keeper.admit(400, [], 2048)[0] == "refuse"


def test_the_biggest_request_fails_with_what_it_has_and_others_go_on() -> None:
    world = World()

    def fill() -> list[StepOut]:
        world.base = 960 * MIB
        return [TokenOut(A, 1, None), TokenOut(B, 1, None), TokenOut(A, 2, None)]

    def empty() -> list[StepOut]:
        world.base = 0
        return [TokenOut(B, 2, "length")]

    engine = Scripted(fill, empty)
    engine.keeper = world.keeper()
    sent = serve(engine, A, B)
    failed = failure(sent[A])
    assert "4 tokens" in failed.message
    assert failed.usage.completion_tokens == 2
    assert text_of(sent[A]) == "1 2 "
    assert engine.removed == [A]
    assert text_of(sent[B]) == "1 2 "


def test_a_newcomer_waits_until_the_pressure_is_over_or_nobody_runs() -> None:
    seen: list[bool] = []

    def arrive() -> list[StepOut]:
        bench.order(B, Generate("m", prompt="x"))
        return [TokenOut(A, 1, None)]

    def end(*outs: StepOut) -> list[StepOut]:
        bench.order(bytes(16), Shutdown(grace_s=10, drain=True))
        return look(*outs)

    def look(*outs: StepOut) -> list[StepOut]:
        seen.append(B in engine.rows)
        return list(outs)

    engine = Scripted(
        arrive,
        lambda: look(TokenOut(A, 2, None)),
        lambda: look(TokenOut(A, 3, "length")),
        lambda: look(TokenOut(B, 1, None)),
        lambda: end(TokenOut(B, 2, "length")),
    )
    engine.keeper = World(base=900 * MIB).keeper()
    bench = Bench(engine)
    bench.order(A, Generate("m", prompt="x"))
    bench.service.serve()
    sent = bench.sent()
    assert seen == [False, False, True, True]
    assert isinstance(sent[B][-1], Done)
