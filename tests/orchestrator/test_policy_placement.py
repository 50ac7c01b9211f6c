"""Placement as a table of situations, and a random walk in which its promises must hold after every event."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from mlx_bulkhead.orchestrator.policy import placement as p
from mlx_bulkhead.orchestrator.policy import placement_values as v
from mlx_bulkhead.orchestrator.policy.placement_values import Evict, Grant, Ledger, Phase, Place, Pressure, Refuse

GIB = 2**30
RULES = v.Rules(budget=10 * GIB, min_residency_s=10.0, queue_s=60.0)


class Room:
    """A ledger with its clock; remembers what was asked for."""

    def __init__(self, rules: v.Rules = RULES) -> None:
        self.ledger = Ledger()
        self.rules = rules
        self.now = 100.0

    def post(self, *events: v.Event) -> list[v.Effect]:
        effects: list[v.Effect] = []
        for event in events:
            self.ledger, more = p.advance(self.ledger, event, self.now, self.rules)
            effects += more
        return effects

    def ask(self, name: str, gib: float, *, busy: bool = True, **more: object) -> list[v.Effect]:
        share = int(gib * GIB)
        return self.post(v.Asked(Place(name, share, share, busy=busy, **more)))  # pyright: ignore[reportArgumentType]

    def resident(self, name: str, gib: float, **more: object) -> None:
        """Loaded and idle, long enough to leave."""
        assert self.ask(name, gib, busy=False, **more) == [Grant(name)]
        self.post(v.Loaded(name))
        self.now += 20.0

    def phase(self, name: str) -> Phase | None:
        place = self.ledger.place(name)
        return place.phase if place is not None else None


def test_who_fits_is_granted_at_once_and_holds_its_share_while_it_loads() -> None:
    room = Room()
    assert room.ask("a", 6) == [Grant("a")]
    assert room.ledger.held == 6 * GIB
    assert room.ask("b", 6) == []  # D19: a load in flight counts
    assert room.phase("b") is Phase.WAITING


def test_what_was_asked_for_ahead_of_need_makes_nobody_leave() -> None:
    room = Room()
    room.resident("a", 6)
    assert room.ask("b", 6, busy=False) == []
    assert room.post(v.Busy("b")) == [Evict("a", "b needs its room")]


def test_the_least_recently_used_idle_model_makes_room_and_only_its_end_frees_it() -> None:
    room = Room()
    room.resident("old", 5)
    room.resident("new", 5)
    room.post(v.Busy("old"), v.Idle("old"))  # used again: now `new` is the older one
    assert room.ask("c", 5) == [Evict("new", "c needs its room")]
    assert room.phase("c") is Phase.WAITING  # D08: not before the process is gone
    assert room.post(v.Gone("new")) == [Grant("c")]


def test_a_busy_model_is_waited_for() -> None:
    room = Room()
    room.resident("a", 10)
    room.post(v.Busy("a"))
    assert room.ask("b", 10) == []  # E02
    room.now += 30
    assert room.post(v.Tick()) == []
    assert room.post(v.Idle("a")) == [Evict("a", "b needs its room")]


def test_a_model_whose_worker_is_being_replaced_is_not_made_to_leave() -> None:
    room = Room()
    room.resident("a", 10)
    room.post(v.Starts("a"))
    assert room.ask("b", 10) == []
    room.post(v.Loaded("a"))
    room.now += 10.0
    assert room.post(v.Tick()) == [Evict("a", "b needs its room")]


def test_a_pinned_model_never_leaves() -> None:
    room = Room()
    room.resident("a", 5, pinned=True, ttl_s=1.0)
    room.resident("b", 5)
    assert room.ask("c", 5) == [Evict("b", "c needs its room")]


def test_two_clients_that_alternate_do_not_thrash() -> None:
    room = Room()
    assert room.ask("a", 10) == [Grant("a")]
    room.post(v.Loaded("a"), v.Idle("a"))
    assert room.ask("b", 10) == []  # E11: `a` has only just been loaded
    at = p.next_at(room.ledger, room.now, room.rules)
    assert at == room.now + RULES.min_residency_s
    room.now = at
    assert room.post(v.Tick()) == [Evict("a", "b needs its room")]


def test_who_waits_too_long_is_refused_with_the_numbers_and_can_ask_again() -> None:
    room = Room()
    room.resident("a", 6)
    room.post(v.Busy("a"))
    room.ask("b", 6)
    room.now += RULES.queue_s
    (refusal,) = room.post(v.Tick())
    assert isinstance(refusal, Refuse)
    for words in ("'b' waited 60 s for 6.00 GiB", "memory.budget is 10.00 GiB", "a with 6.00 GiB (busy)", "unload"):
        assert words in refusal.message
    room.post(v.Idle("a"))
    assert room.ask("b", 6) == [Evict("a", "b needs its room")]  # D11: no refusal latches


def test_what_can_never_fit_is_refused_at_once() -> None:
    room = Room()
    (refusal,) = room.ask("a", 11)
    assert isinstance(refusal, Refuse)
    assert "needs 11.00 GiB, and memory.budget is 10.00 GiB" in refusal.message
    room.resident("pin", 4, pinned=True)
    (refusal,) = room.ask("b", 7)
    assert isinstance(refusal, Refuse)
    assert "pinned models hold 4.00 GiB of it (pin 4.00 GiB)" in refusal.message


def test_no_more_models_leave_than_must() -> None:
    room = Room()
    room.resident("small", 1)
    room.resident("large", 6)
    room.resident("middle", 3)
    assert room.ask("c", 6) == [Evict("large", "c needs its room")]  # `small` is older, but would not help


def test_who_needs_no_room_made_may_pass_one_that_waits_for_a_busy_model() -> None:
    room = Room()
    room.resident("a", 8)
    room.post(v.Busy("a"))
    assert room.ask("b", 8) == []
    assert room.ask("c", 2) == [Grant("c")]


def test_what_is_being_freed_for_one_is_not_given_to_the_next() -> None:
    room = Room()
    room.resident("a", 5)
    room.resident("b", 5)
    assert room.ask("c", 10) == [Evict("a", "c needs its room"), Evict("b", "c needs its room")]
    assert room.ask("d", 5) == []
    assert room.post(v.Gone("a")) == []
    assert room.post(v.Gone("b")) == [Grant("c")]


def test_a_count_bounds_too() -> None:
    room = Room(v.Rules(max_loaded=2))
    room.resident("a", 0)
    room.resident("b", 0)
    assert room.ask("c", 0) == [Evict("a", "c needs its room")]


def test_the_idle_time_starts_when_the_last_request_ends() -> None:
    room = Room()
    room.ask("a", 5, ttl_s=5.0)
    room.post(v.Loaded("a"))
    room.now += 20.0  # E01: one request of 20 s
    assert room.post(v.Tick()) == []
    room.post(v.Idle("a"))
    room.now += 4.9
    assert room.post(v.Tick()) == []
    assert p.next_at(room.ledger, room.now, room.rules) == pytest.approx(room.now + 0.1)
    room.now += 0.1
    assert room.post(v.Tick()) == [Evict("a", "idle for 5 s")]


def test_the_host_must_have_the_memory_too() -> None:
    room = Room()
    room.post(v.Sampled(4 * GIB))
    assert room.ask("a", 3) == [Grant("a")]
    assert room.ask("b", 3) == []  # 4 GiB are free, but 3 of them are promised to `a`
    room.post(v.Sampled(GIB), v.Loaded("a"))
    assert room.phase("b") is Phase.WAITING
    assert room.post(v.Sampled(3 * GIB)) == [Grant("b")]


def test_under_pressure_no_more_is_held_than_when_it_began() -> None:
    room = Room()
    room.resident("a", 5)
    room.post(v.Sampled(None, Pressure.WARN))
    assert room.ask("b", 3) == [Evict("a", "b needs its room")]  # though 5 GiB of the budget are free
    assert room.post(v.Gone("a")) == [Grant("b")]
    room.post(v.Busy("b"))
    assert room.ask("c", 3) == []
    room.post(v.Sampled(None, Pressure.NORMAL))
    room.now += RULES.calm_s
    assert room.post(v.Tick()) == [Grant("c")]


def test_under_critical_pressure_nothing_is_loaded_and_idle_models_leave_one_by_one() -> None:
    room = Room()
    room.resident("a", 2)
    room.resident("b", 2)
    room.resident("pin", 2, pinned=True)
    (first,) = room.post(v.Sampled(None, Pressure.CRITICAL))
    assert first == Evict("a", "the host is critically short of memory")
    assert room.ask("c", 1) == []
    (second,) = room.post(v.Gone("a"))
    assert second == Evict("b", "the host is critically short of memory")
    assert room.post(v.Gone("b")) == []
    room.post(v.Sampled(None, Pressure.NORMAL))
    room.now += RULES.calm_s
    assert room.post(v.Tick()) == [Grant("c")]
    assert room.ledger.pressure is Pressure.WARN  # a level at a time
    room.now += RULES.calm_s
    room.post(v.Tick())
    assert room.ledger.pressure is Pressure.NORMAL


def in_group(**more: object) -> dict[str, object]:
    return {"group": "big", **more}


def test_room_within_a_group_is_made_within_it() -> None:
    room = Room(v.Rules(budget=100 * GIB, min_residency_s=10.0, groups={"big": 2}))
    room.resident("outside", 1)
    room.resident("old", 1, **in_group())
    room.resident("new", 1, **in_group())
    assert room.ask("third", 1, **in_group()) == [Evict("old", "third needs its room")]
    assert room.ask("beside", 1) == [Grant("beside")]
    assert room.ask("fourth", 1, **in_group()) == [Evict("new", "fourth needs its room")]
    assert room.post(v.Gone("old")) == [Grant("third")]
    assert room.phase("fourth") is Phase.WAITING  # what is freed for one is not given to the next
    assert room.post(v.Gone("new")) == [Grant("fourth")]


def test_one_eviction_may_serve_group_and_budget() -> None:
    room = Room(v.Rules(budget=10 * GIB, groups={"big": 1}))
    room.resident("outside", 5)
    room.resident("inside", 5, **in_group())
    assert room.ask("next", 5, **in_group()) == [Evict("inside", "next needs its room")]


def test_a_group_waits_for_its_busy_model_and_lets_others_pass() -> None:
    room = Room(v.Rules(groups={"big": 1}, min_residency_s=10.0, queue_s=60.0))
    room.resident("a", 0, **in_group())
    room.post(v.Busy("a"))
    assert room.ask("b", 0, **in_group()) == []
    assert room.ask("c", 0) == [Grant("c")]
    room.now += 60.0
    refusal = room.post(v.Tick())[0]
    assert isinstance(refusal, Refuse)
    assert "memory.groups.big.max_loaded is 1" in refusal.message
    assert "a with 0 MiB (busy)" in refusal.message


def test_pins_that_hold_a_whole_group_or_every_place_are_told_at_once() -> None:
    for rules, key in (
        (v.Rules(groups={"big": 1}), "memory.groups.big.max_loaded"),
        (v.Rules(max_loaded=1), "memory.max_loaded"),
    ):
        room = Room(rules)
        room.resident("pin", 0, **in_group(pinned=True))
        refusal = room.ask("b", 0, **in_group())[0]
        assert isinstance(refusal, Refuse)
        assert f"{key} is 1, and pinned models hold all of it (pin)" in refusal.message


NAMES = ("a", "b", "c", "d", "e")
GROUP = ("a", "b", "c")


class Walk(RuleBasedStateMachine):
    """Models ask, load, work and end in any order; the processes obey."""

    def __init__(self) -> None:
        super().__init__()
        self.room = Room(
            v.Rules(budget=10, max_loaded=3, min_residency_s=4.0, queue_s=30.0, calm_s=3.0, groups={"big": 2})
        )
        self.alive: dict[str, int] = {}
        """Name → bytes of each process that runs."""
        self.asked: dict[str, float] = {}
        self.busy: set[str] = set()
        self.pinned: set[str] = set()

    def post(self, event: v.Event) -> None:
        for effect in self.room.post(event):
            match effect:
                case Grant(name):
                    assert name in self.asked, "granted to nobody"
                    del self.asked[name]
                    place = self.room.ledger.place(name)
                    assert place is not None
                    self.alive[name] = place.share
                case Refuse(name):
                    assert name in self.asked
                    del self.asked[name]
                    self.busy.discard(name)
                case Evict(name):
                    assert name in self.alive
                    assert name not in self.busy, "a busy model was evicted"
                    assert name not in self.pinned, "a pinned model was evicted"
                case _:
                    raise AssertionError(effect)

    @rule(
        name=st.sampled_from(NAMES), share=st.integers(0, 12), pinned=st.booleans(), ttl=st.sampled_from([None, 3.0])
    )
    def ask(self, name: str, share: int, pinned: bool, ttl: float | None) -> None:
        if name in self.alive or name in self.asked:
            return
        self.asked[name] = self.room.now
        self.busy.add(name)
        (self.pinned.add if pinned else self.pinned.discard)(name)
        group = "big" if name in GROUP else ""
        self.post(v.Asked(Place(name, share, share, pinned=pinned, ttl_s=ttl, busy=True, group=group)))

    @rule(name=st.sampled_from(NAMES))
    def loaded(self, name: str) -> None:
        if self.room.phase(name) is Phase.LOADING:
            self.post(v.Loaded(name))

    @rule(name=st.sampled_from(NAMES))
    def starts_again(self, name: str) -> None:
        self.post(v.Starts(name))

    @rule(name=st.sampled_from(NAMES), busy=st.booleans())
    def works(self, name: str, busy: bool) -> None:
        if name in self.alive:
            (self.busy.add if busy else self.busy.discard)(name)
            self.post(v.Busy(name) if busy else v.Idle(name))

    @rule(name=st.sampled_from(NAMES), asked=st.booleans())
    def ends(self, name: str, asked: bool) -> None:
        if name in self.alive and (not asked or self.room.phase(name) is Phase.LEAVING):
            del self.alive[name]
            self.busy.discard(name)
            self.post(v.Gone(name))

    @rule(name=st.sampled_from(NAMES))
    def withdrawn(self, name: str) -> None:
        if self.asked.pop(name, None) is not None:
            self.busy.discard(name)
            self.post(v.Gone(name))

    @rule(free=st.one_of(st.none(), st.integers(0, 20)), pressure=st.sampled_from(list(Pressure)))
    def host(self, free: int | None, pressure: Pressure) -> None:
        self.post(v.Sampled(free, pressure))

    @rule(seconds=st.floats(0.0, 40.0))
    def time_passes(self, seconds: float) -> None:
        self.room.now += seconds
        self.post(v.Tick())

    @invariant()
    def the_budget_holds(self) -> None:
        assert sum(self.alive.values()) <= 10
        assert len(self.alive) <= 3
        assert len(self.alive.keys() & set(GROUP)) <= 2
        assert {place.name for place in self.room.ledger.holding} == set(self.alive)

    @invariant()
    def nobody_waits_beyond_its_deadline(self) -> None:
        assert all(self.room.now - since < 30.0 for since in self.asked.values())

    def teardown(self) -> None:
        """In an idle host whose models have ended, whoever still waits is served or has been refused."""
        self.post(v.Sampled(None, Pressure.NORMAL))
        for name in list(self.alive):
            self.ends(name, False)
        for _ in range(4):
            self.room.now += 3.0
            self.post(v.Tick())
            for name in list(self.alive):
                self.ends(name, False)
        assert not self.asked


TestWalk = Walk.TestCase
TestWalk.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
