"""The lifecycle: every edge of `docs/lifecycle.md`, and a random walk that must always reach a rest."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from mlx_bulkhead.orchestrator.policy import lifecycle as lc
from mlx_bulkhead.orchestrator.policy.lifecycle import Effect, Model, State
from mlx_bulkhead.orchestrator.policy.restart import RestartPolicy
from mlx_bulkhead.protocol.errors import ErrorCode

BUDGETS = lc.Budgets()
POLICY = RestartPolicy()
PROBLEM = lc.Problem(ErrorCode.LOAD_FAILED, "no such file")


def walk(*events: lc.Event, now: float = 0.0) -> tuple[Model, tuple[Effect, ...]]:
    model, effects = Model(), ()
    for event in events:
        model, effects = lc.advance(model, event, now, BUDGETS, POLICY)
    return model, effects


UP = (lc.Wanted(), lc.Spawned(), lc.HelloGood(), lc.LoadEnded())
DEAD = lc.Exited(-9, "", 0.5)


@pytest.mark.parametrize(
    ("events", "state", "effects"),
    [
        ((lc.Wanted(),), State.SPAWNING, {Effect.SPAWN}),
        (UP[:2], State.HANDSHAKING, set()),
        (UP[:3], State.LOADING, {Effect.SEND_LOAD}),
        (UP, State.READY, {Effect.TELL_LOADED, Effect.DISPATCH}),
        ((lc.Wanted(), lc.NoPlace("full")), State.QUEUED, set()),
        ((lc.Wanted(), lc.NoPlace("full"), lc.PlaceGiven()), State.SPAWNING, {Effect.SPAWN}),
        ((lc.Wanted(), lc.NoPlace("full"), lc.RestartAsked()), State.QUEUED, set()),
        (
            (lc.Wanted(), lc.NoPlace("full"), lc.PlaceRefused("full")),
            State.STOPPED,
            {Effect.FAIL_REQUESTS, Effect.TELL_LOAD_FAILED},
        ),
        ((*UP[:3], lc.Stalled("over", ErrorCode.OUT_OF_MEMORY), DEAD), State.FAILED, {Effect.TELL_LOAD_FAILED}),
        ((*UP, lc.Unwanted()), State.STOPPING, {Effect.FAIL_REQUESTS, Effect.ASK_TO_END}),
        ((*UP, lc.Unwanted(), lc.Exited(0, "", 0.5)), State.STOPPED, {Effect.TELL_UNLOADED}),
        ((*UP, lc.Unwanted(drain=True)), State.DRAINING, {Effect.ASK_TO_DRAIN}),
        ((*UP, lc.Unwanted(drain=True), lc.Idle()), State.STOPPING, {Effect.ASK_TO_END}),
        ((*UP, DEAD), State.SPAWNING, {Effect.SAVE_REQUESTS, Effect.SPAWN}),
        ((*UP, DEAD, lc.Spawned(), DEAD), State.BACKOFF, {Effect.SAVE_REQUESTS}),
        ((*UP, lc.Stalled("stuck")), State.STOPPING, {Effect.KILL}),
        ((*UP, lc.Stalled("stuck"), DEAD), State.SPAWNING, {Effect.SAVE_REQUESTS, Effect.SPAWN}),
        ((*UP[:2], lc.HelloBad("version 2")), State.STOPPING, {Effect.KILL}),
        ((*UP[:2], lc.HelloBad("version 2"), DEAD), State.FAILED, {Effect.TELL_LOAD_FAILED}),
        ((*UP[:3], lc.LoadRefused(PROBLEM)), State.STOPPING, set()),
        ((*UP[:3], lc.LoadRefused(PROBLEM), lc.Exited(42, "", 0.5)), State.FAILED, {Effect.TELL_LOAD_FAILED}),
        ((*UP[:3], lc.Unwanted()), State.STOPPING, {Effect.KILL}),
        ((*UP, lc.RestartAsked()), State.STOPPING, {Effect.ASK_TO_END}),
        ((*UP, lc.RestartAsked(), lc.Exited(0, "", 0.5)), State.SPAWNING, {Effect.SPAWN, Effect.SAVE_REQUESTS}),
        (
            (*UP, lc.Unwanted(), lc.Wanted(), lc.Exited(0, "", 0.5)),
            State.SPAWNING,
            {Effect.TELL_UNLOADED, Effect.SPAWN},
        ),
    ],
)
def test_edges(events: tuple[lc.Event, ...], state: State, effects: set[Effect]) -> None:
    model, got = walk(*events)
    assert model.state is state
    assert effects <= set(got)


def test_the_ladder_escalates() -> None:
    model, _ = walk(*UP, lc.Unwanted())
    seen: list[Effect] = []
    now = 0.0
    for _ in range(4):
        assert model.deadline is not None
        now = model.deadline
        model, effects = lc.advance(model, lc.Tick(), now, BUDGETS, POLICY)
        seen += effects
    assert seen == [Effect.TERMINATE, Effect.KILL, Effect.KILL, Effect.KILL]
    assert model.state is State.STOPPING  # the handle is kept until the process is reaped


def test_a_load_that_never_says_hello_is_killed() -> None:
    model, _ = walk(*UP[:2])
    model, effects = lc.advance(model, lc.Tick(), BUDGETS.hello_s, BUDGETS, POLICY)
    assert model.state is State.STOPPING
    assert effects == (Effect.KILL,)


def test_progress_extends_the_deadline_of_a_load() -> None:
    model, _ = walk(*UP[:3])
    model, _ = lc.advance(model, lc.LoadMoved(), BUDGETS.load_silence_s - 1, BUDGETS, POLICY)
    model, effects = lc.advance(model, lc.Tick(), BUDGETS.load_silence_s + 1, BUDGETS, POLICY)
    assert model.state is State.LOADING
    assert effects == ()


def test_crash_loop_ends_in_failed_with_words() -> None:
    model, effects = walk(*UP)
    now = 0.0
    while model.state is not State.FAILED:
        model, effects = lc.advance(model, DEAD, now, BUDGETS, POLICY)
        if model.state is State.BACKOFF:
            assert model.deadline is not None
            now = model.deadline
            model, effects = lc.advance(model, lc.Tick(), now, BUDGETS, POLICY)
        if model.state is State.SPAWNING:
            model, effects = lc.advance(model, lc.Spawned(), now, BUDGETS, POLICY)
    assert model.problem is not None
    assert "Not restarted: 3 restarts within 60 s" in model.problem.message
    assert "SIGKILL" in model.problem.message
    assert model.crashes == 4
    assert Effect.TELL_LOAD_FAILED in effects


def test_a_restart_waits_for_memory_but_not_for_ever() -> None:
    model, _ = walk(*UP, DEAD)
    assert model.state is State.SPAWNING
    model, effects = lc.advance(model, lc.NoRoom("1 MiB free"), 0.0, BUDGETS, POLICY)
    assert model.state is State.BACKOFF
    now = 0.0
    while model.state is not State.FAILED:
        assert model.deadline is not None
        now = model.deadline
        model, _ = lc.advance(model, lc.Tick(), now, BUDGETS, POLICY)
        assert model.state is State.SPAWNING
        model, effects = lc.advance(model, lc.NoRoom("1 MiB free"), now, BUDGETS, POLICY)
    assert now == pytest.approx(BUDGETS.room_s)
    assert model.problem == lc.Problem(ErrorCode.OUT_OF_MEMORY, "1 MiB free")
    assert Effect.FAIL_REQUESTS in effects


def test_failed_is_left_by_an_explicit_load_only() -> None:
    failed = Model(state=State.FAILED, problem=PROBLEM)
    after, effects = lc.advance(failed, lc.Wanted(explicit=False), 0.0, BUDGETS, POLICY)
    assert after.state is State.FAILED
    assert effects == (Effect.FAIL_REQUESTS,)
    after, effects = lc.advance(failed, lc.Wanted(explicit=True), 0.0, BUDGETS, POLICY)
    assert after.state is State.SPAWNING


def test_failed_can_be_left_by_a_request_after_a_rest() -> None:
    """E08, where the configuration says so."""
    policy = RestartPolicy(retry_failed_s=60.0)
    model, _ = walk(*UP[:3], lc.LoadRefused(PROBLEM))
    model, _ = lc.advance(model, lc.Exited(42, "", 0.5), 100.0, BUDGETS, policy)
    for now, state in ((159.0, State.FAILED), (160.0, State.SPAWNING)):
        after, _ = lc.advance(model, lc.Wanted(explicit=False), now, BUDGETS, policy)
        assert after.state is state


@pytest.mark.parametrize("state", [s for s in State if s not in (State.SPAWNING, State.STOPPING)])
def test_an_illegal_edge_raises(state: State) -> None:
    illegal = (
        lc.Exited(0, "", 0.5) if state in (State.STOPPED, State.QUEUED, State.BACKOFF, State.FAILED) else lc.Spawned()
    )
    with pytest.raises(lc.IllegalEdge):
        lc.advance(Model(state=state), illegal, 0.0, BUDGETS, POLICY)


def test_the_document_names_every_edge() -> None:
    text = (Path(__file__).parents[2] / "docs" / "lifecycle.md").read_text(encoding="utf-8")
    written = {tuple(m) for m in re.findall(r"^\| `?([A-Z]+)`? \| .*? \| `?([A-Z]+)`? \|", text, re.MULTILINE)}
    real = _reachable_edges()
    assert {e for e in real if e[0] != e[1]} == {e for e in written if e[0] != e[1]}


def _reachable_edges() -> set[tuple[str, str]]:
    """Every change of state that any event can cause, from every state and every `after`."""
    events: list[lc.Event] = [
        lc.Wanted(), lc.Wanted(explicit=False), lc.Unwanted(), lc.Unwanted(drain=True), lc.RestartAsked(),
        lc.Spawned(), lc.SpawnFailed("no"), lc.HelloGood(), lc.HelloBad("no"), lc.LoadMoved(), lc.LoadEnded(),
        lc.NoRoom("no room"), lc.LoadRefused(PROBLEM), lc.Stepped(), lc.Stalled("s"), lc.Idle(), DEAD,
        lc.NoPlace("full"), lc.PlaceGiven(), lc.PlaceRefused("full"), lc.Stalled("s", ErrorCode.OUT_OF_MEMORY),
        lc.Exited(0, "", 0.5), lc.Exited(42, "", 0.5), lc.Tick(),
    ]  # fmt: skip
    histories = (lc.RestartHistory(), lc.RestartHistory((0.0,), 1), lc.RestartHistory((0.0, 0.0, 0.0), 3))
    edges: set[tuple[str, str]] = set()
    for state in State:
        waits = state not in (State.STOPPED, State.QUEUED, State.READY, State.FAILED, State.SPAWNING)
        for after in ("stopped", "failed", "spawn", "crash"):
            for history in histories:
                model = Model(state=state, after=after, history=history, deadline=0.0 if waits else None)
                for event in events:
                    try:
                        reached, _ = lc.advance(model, event, 1.0, BUDGETS, POLICY)
                    except lc.IllegalEdge:
                        continue
                    edges.add((state.value, reached.state.value))
    return edges


class RandomWalk(RuleBasedStateMachine):
    """Asks and accidents in any order; a model of the process obeys the effects."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.now = 0.0
        self.alive = False
        self.unload_waits = 0
        self.load_waits = 0
        self.full = False

    def post(self, event: lc.Event) -> None:
        queue = [event]
        while queue:
            self.model, effects = lc.advance(self.model, queue.pop(0), self.now, BUDGETS, POLICY)
            for effect in effects:
                if effect is Effect.SPAWN:
                    assert not self.alive, "two processes of one model"
                    if self.full:
                        queue.append(lc.NoPlace("full"))
                        continue
                    self.alive = True
                    queue.append(lc.Spawned())
                elif effect is Effect.TELL_UNLOADED:
                    assert not self.alive, "unloaded was said of a live process"
                    self.unload_waits = 0
                elif effect is Effect.TELL_LOADED:
                    assert self.alive
                    self.load_waits = 0
                elif effect is Effect.TELL_LOAD_FAILED:
                    self.load_waits = 0

    @rule(explicit=st.booleans())
    def wanted(self, explicit: bool) -> None:
        self.load_waits += explicit
        self.post(lc.Wanted(explicit=explicit))

    @rule(drain=st.booleans())
    def unwanted(self, drain: bool) -> None:
        self.unload_waits += 1
        self.post(lc.Unwanted(drain=drain))

    @rule(full=st.booleans())
    def the_budget_changes(self, full: bool) -> None:
        self.full = full
        self.post(lc.PlaceRefused("full") if full else lc.PlaceGiven())

    @rule()
    def restart(self) -> None:
        self.post(lc.RestartAsked())

    @rule(seconds=st.floats(0.0, 100.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.post(lc.Tick())

    @precondition(lambda self: self.alive)
    @rule(code=st.sampled_from([-9, -6, -11, 0, 1, 42, 43, 45]))
    def dies(self, code: int) -> None:
        self.alive = False
        self.post(lc.Exited(code, "", 0.5))

    @precondition(lambda self: self.model.state is State.HANDSHAKING)
    @rule(good=st.booleans())
    def hello(self, good: bool) -> None:
        self.post(lc.HelloGood() if good else lc.HelloBad("no"))

    @precondition(lambda self: self.model.state is State.LOADING)
    @rule(how=st.sampled_from([lc.LoadMoved(), lc.LoadEnded(), lc.LoadRefused(PROBLEM)]))
    def load_ends(self, how: lc.Event) -> None:
        self.post(how)

    @precondition(lambda self: self.model.state in (State.READY, State.DRAINING))
    @rule(what=st.sampled_from([lc.Stepped(), lc.Stalled("s"), lc.Idle()]))
    def works(self, what: lc.Event) -> None:
        self.post(what)

    @invariant()
    def process_and_state_agree(self) -> None:
        at_rest = self.model.state in (State.STOPPED, State.QUEUED, State.BACKOFF, State.FAILED)
        assert self.alive != at_rest

    @invariant()
    def every_wait_has_a_deadline(self) -> None:
        if self.model.state in (State.HANDSHAKING, State.LOADING, State.DRAINING, State.STOPPING, State.BACKOFF):
            assert self.model.deadline is not None

    def teardown(self) -> None:
        """Whatever happened: an unload and an obedient process end in STOPPED, with all waiters told."""
        self.unload_waits += 1
        self.post(lc.Unwanted())
        if self.alive:
            self.alive = False
            self.post(lc.Exited(0, "", 0.5))
        assert self.model.state is State.STOPPED
        assert self.unload_waits == 0
        assert self.load_waits == 0


TestRandomWalk = RandomWalk.TestCase
TestRandomWalk.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
