"""The life of one model's worker: named states, legal edges, and what has to be done on each. Pure.

`advance(state, event, now)` gives the next state and the effects, in order. It is the only place that knows the
edges; `docs/lifecycle.md` shows them as a table, and a test holds the two together.
"""

from __future__ import annotations

import msgspec

from ...protocol.errors import ErrorCode
from ...protocol.exit_codes import describe_exit
from .lifecycle_values import (
    After,
    Budgets,
    Effect,
    Event,
    Exited,
    HelloBad,
    HelloGood,
    Idle,
    LoadEnded,
    LoadMoved,
    LoadRefused,
    Model,
    NoPlace,
    NoRoom,
    PlaceGiven,
    PlaceRefused,
    Problem,
    Replaced,
    RestartAsked,
    Spawned,
    SpawnFailed,
    Stalled,
    State,
    Stepped,
    Tick,
    Unwanted,
    Wanted,
)
from .restart import GiveUp, RestartHistory, RestartPolicy, decide

__all__ = [
    "After",
    "Budgets",
    "Effect",
    "Event",
    "Exited",
    "HelloBad",
    "HelloGood",
    "Idle",
    "IllegalEdge",
    "LoadEnded",
    "LoadMoved",
    "LoadRefused",
    "Model",
    "NoPlace",
    "NoRoom",
    "PlaceGiven",
    "PlaceRefused",
    "Problem",
    "Replaced",
    "RestartAsked",
    "RestartHistory",
    "SpawnFailed",
    "Spawned",
    "Stalled",
    "State",
    "Stepped",
    "Tick",
    "Unwanted",
    "Wanted",
    "advance",
]

Decision = tuple[Model, tuple[Effect, ...]]

_ALIVE = (State.HANDSHAKING, State.LOADING, State.READY, State.DRAINING)
_UNLOADED = Problem(ErrorCode.UNLOADED, "the model was unloaded")


class IllegalEdge(Exception):
    """An event that cannot happen in this state: a fault of ours."""


def advance(model: Model, event: Event, now: float, budgets: Budgets, policy: RestartPolicy) -> Decision:
    """The next state and what to do. Raises `IllegalEdge`.

    Late news of a process that is already being stopped (`HelloGood`, `LoadMoved`, …) change nothing.
    """
    after, effects = _advance(model, event, now, budgets, policy)
    if after.state is State.FAILED and model.state is not State.FAILED:
        after = msgspec.structs.replace(after, failed_at=now)
    return after, effects


def _advance(model: Model, event: Event, now: float, budgets: Budgets, policy: RestartPolicy) -> Decision:
    match event:
        case Wanted():
            return _wanted(model, event, now, policy)
        case Unwanted():
            return _unwanted(model, event, now, budgets)
        case RestartAsked():
            return _restart_asked(model, now, budgets)
        case Exited():
            return _exited(model, event, now, policy)
        case Tick():
            return _tick(model, now, budgets)
        case Stalled():
            return _stalled(model, event, now, budgets)
        case SpawnFailed():
            return _spawn_failed(model, event, now, policy)
        case NoRoom():
            return _no_room(model, event, now, budgets)
        case NoPlace() | PlaceGiven() | PlaceRefused():
            return _placed(model, event)
        case _:
            return _news(model, event, now, budgets)


def _to(model: Model, state: State, **changes: object) -> Model:
    values: dict[str, object] = {"state": state, "deadline": None, **changes}
    return msgspec.structs.replace(model, **values)


def _spawning(model: Model, **changes: object) -> Decision:
    values: dict[str, object] = {"incarnation": model.incarnation + 1, "stable": False, **changes}
    return _to(model, State.SPAWNING, problem=None, **values), (Effect.SPAWN,)


def _stopping(model: Model, now: float, wait_s: float, rung: int, **changes: object) -> Model:
    return _to(model, State.STOPPING, deadline=now + wait_s, rung=rung, **changes)


def _wanted(model: Model, event: Wanted, now: float, policy: RestartPolicy) -> Decision:
    rested = policy.retry_failed_s > 0 and now >= model.failed_at + policy.retry_failed_s
    match model.state:
        case State.STOPPED:
            return _spawning(model)
        case State.BACKOFF if event.explicit:
            return _spawning(model, history=RestartHistory())
        case State.FAILED if event.explicit or rested:
            return _spawning(model, history=RestartHistory())
        case State.FAILED:
            return model, (Effect.FAIL_REQUESTS,)
        case State.STOPPING if model.after in ("stopped", "failed") and (event.explicit or model.after == "stopped"):
            return msgspec.structs.replace(model, after="spawn"), ()
        case State.DRAINING:
            return msgspec.structs.replace(model, after="spawn"), ()
        case State.READY:
            return model, (Effect.TELL_LOADED, Effect.DISPATCH)
        case _:
            return model, ()


def _unwanted(model: Model, event: Unwanted, now: float, budgets: Budgets) -> Decision:
    problem = Problem(ErrorCode.UNLOADED, event.why) if event.why else _UNLOADED
    match model.state:
        case State.STOPPED | State.QUEUED | State.BACKOFF | State.FAILED:
            after = _to(model, State.STOPPED, problem=problem, history=RestartHistory())
            return after, (Effect.FAIL_REQUESTS, Effect.TELL_LOAD_FAILED, Effect.TELL_UNLOADED)
        case State.READY if event.drain:
            after = _to(model, State.DRAINING, deadline=now + budgets.drain_s, after="stopped")
            return after, (Effect.ASK_TO_DRAIN,)
        case State.READY | State.DRAINING:
            after = _stopping(model, now, budgets.polite_s, 0, after="stopped", problem=problem)
            return after, (Effect.FAIL_REQUESTS, Effect.ASK_TO_END)
        case State.SPAWNING | State.HANDSHAKING | State.LOADING:
            after = _stopping(model, now, budgets.term_s, 2, after="stopped", problem=problem)
            return after, (Effect.FAIL_REQUESTS, Effect.KILL)
        case State.STOPPING:
            after = msgspec.structs.replace(model, after="stopped", problem=problem)
            return after, (Effect.FAIL_REQUESTS,)


def _restart_asked(model: Model, now: float, budgets: Budgets) -> Decision:
    match model.state:
        case State.STOPPED | State.BACKOFF | State.FAILED:
            return _spawning(model, history=RestartHistory())
        case State.READY | State.DRAINING:
            return _stopping(model, now, budgets.polite_s, 0, after="spawn"), (Effect.ASK_TO_END,)
        case State.SPAWNING | State.HANDSHAKING | State.LOADING:
            return _stopping(model, now, budgets.term_s, 2, after="spawn"), (Effect.KILL,)
        case State.QUEUED:
            return model, ()
        case State.STOPPING:
            return msgspec.structs.replace(model, after="spawn"), ()


def _stalled(model: Model, event: Stalled, now: float, budgets: Budgets) -> Decision:
    if model.state not in _ALIVE:
        return model, ()
    problem = Problem(event.code, event.message)
    again = model.state is State.LOADING and event.code is ErrorCode.OUT_OF_MEMORY  # so would the next one be
    then: After = "failed" if again else "crash"
    return _stopping(model, now, budgets.term_s, 2, after=then, problem=problem), (Effect.KILL,)


def _tick(model: Model, now: float, budgets: Budgets) -> Decision:
    if model.deadline is None or now < model.deadline:
        return model, ()
    match model.state:
        case State.BACKOFF if model.room_until is not None:
            return _spawning(model)
        case State.BACKOFF:
            return _spawning(model, restarts=model.restarts + 1)
        case State.HANDSHAKING:
            problem = Problem(ErrorCode.LOAD_FAILED, f"the worker did not say Hello within {budgets.hello_s:g} s")
            return _stopping(model, now, budgets.term_s, 2, after="crash", problem=problem), (Effect.KILL,)
        case State.LOADING:
            problem = Problem(ErrorCode.LOAD_FAILED, f"the load made no progress for {budgets.load_silence_s:g} s")
            return _stopping(model, now, budgets.term_s, 2, after="failed", problem=problem), (Effect.KILL,)
        case State.DRAINING:
            return _drained(model, now, budgets)
        case State.STOPPING if model.rung == 0:
            return _stopping(model, now, budgets.term_s, 1), (Effect.TERMINATE,)
        case State.STOPPING:
            return _stopping(model, now, budgets.term_s, 2), (Effect.KILL,)
        case _:
            raise IllegalEdge(f"a deadline in state {model.state}")


def _drained(model: Model, now: float, budgets: Budgets) -> Decision:
    """The last request has ended, or time is up. If the model is wanted again, its next worker gets the rest."""
    if model.after == "spawn":
        return _stopping(model, now, budgets.polite_s, 0), (Effect.ASK_TO_END,)
    after = _stopping(model, now, budgets.polite_s, 0, after="stopped", problem=_UNLOADED)
    return after, (Effect.FAIL_REQUESTS, Effect.ASK_TO_END)


def _spawn_failed(model: Model, event: SpawnFailed, now: float, policy: RestartPolicy) -> Decision:
    if model.state is not State.SPAWNING:
        raise IllegalEdge(f"SpawnFailed in state {model.state}")
    problem = Problem(ErrorCode.LOAD_FAILED, f"the worker process could not be started: {event.message}")
    return _ended(model, None, problem, now, 0.5, policy)


def _no_room(model: Model, event: NoRoom, now: float, budgets: Budgets) -> Decision:
    """Wait for memory, but not for ever: then everybody gets an answer with the numbers."""
    if model.state is not State.SPAWNING:
        raise IllegalEdge(f"NoRoom in state {model.state}")
    problem = Problem(ErrorCode.OUT_OF_MEMORY, event.message)
    until = model.room_until if model.room_until is not None else now + budgets.room_s
    if now >= until:
        after = _to(model, State.FAILED, problem=problem, room_until=None)
        return after, (Effect.FAIL_REQUESTS, Effect.TELL_LOAD_FAILED)
    after = _to(model, State.BACKOFF, problem=problem, room_until=until, deadline=now + budgets.room_check_s)
    return after, ()


def _placed(model: Model, event: NoPlace | PlaceGiven | PlaceRefused) -> Decision:
    """News of the model's place in the memory budget. A late one changes nothing."""
    match (model.state, event):
        case (State.SPAWNING, NoPlace(message)):
            problem = Problem(ErrorCode.OUT_OF_MEMORY, message)
            return _to(model, State.QUEUED, problem=problem, incarnation=model.incarnation - 1), ()
        case (State.QUEUED, PlaceGiven()):
            return _spawning(model)
        case (State.QUEUED, PlaceRefused(message)):
            problem = Problem(ErrorCode.OUT_OF_MEMORY, message)
            after = _to(model, State.STOPPED, problem=problem, history=RestartHistory())
            return after, (Effect.FAIL_REQUESTS, Effect.TELL_LOAD_FAILED, Effect.TELL_UNLOADED)
        case (_, NoPlace()):
            raise IllegalEdge(f"NoPlace in state {model.state}")
        case _:
            return model, ()


def _exited(model: Model, event: Exited, now: float, policy: RestartPolicy) -> Decision:
    words = "SIGKILL by the orchestrator" if event.killed else describe_exit(event.returncode)
    model = msgspec.structs.replace(model, last_exit=words)
    if model.state is State.STOPPING and model.after != "crash":
        return _stopped(model)
    if model.state in (State.STOPPED, State.QUEUED, State.SPAWNING, State.BACKOFF, State.FAILED):
        raise IllegalEdge(f"a process ended in state {model.state}")
    doing = {State.READY: "", State.DRAINING: "", State.STOPPING: ""}.get(
        model.state, f" while {model.state.lower()}"
    )
    if model.state is State.STOPPING and model.problem is not None:
        problem = Problem(model.problem.code, f"{model.problem.message}; it was killed{event.detail}")
    else:
        problem = Problem(ErrorCode.WORKER_CRASHED, f"the worker died{doing} ({words}){event.detail}")
    then: After = "spawn" if model.after == "spawn" else "stopped"
    if model.state is State.DRAINING and event.returncode == 0:
        return _stopped(msgspec.structs.replace(model, after=then, problem=_UNLOADED))
    model = msgspec.structs.replace(model, crashes=model.crashes + 1)
    if model.state is State.DRAINING:
        return _stopped(msgspec.structs.replace(model, after=then, problem=problem))
    return _ended(model, event.returncode, problem, now, event.dice, policy, victim=event.victim)


def _stopped(model: Model) -> Decision:
    """A process that was asked to end is gone."""
    match model.after:
        case "spawn":
            after, effects = _spawning(model, restarts=model.restarts + 1)
            return after, (Effect.TELL_UNLOADED, Effect.SAVE_REQUESTS, *effects)
        case "failed":
            after = _to(model, State.FAILED)
            return after, (Effect.FAIL_REQUESTS, Effect.TELL_LOAD_FAILED, Effect.TELL_UNLOADED)
        case _:
            after = _to(model, State.STOPPED, history=RestartHistory())
            return after, (Effect.FAIL_REQUESTS, Effect.TELL_LOAD_FAILED, Effect.TELL_UNLOADED)


def _ended(
    model: Model,
    returncode: int | None,
    problem: Problem,
    now: float,
    dice: float,
    policy: RestartPolicy,
    *,
    victim: bool = False,
) -> Decision:
    """A process ended, or could not start, without being asked to."""
    verdict = decide(
        policy, model.history, returncode=returncode, was_stable=model.stable, now=now, dice=dice, victim=victim
    )
    model = msgspec.structs.replace(model, history=verdict.history)
    if isinstance(verdict, GiveUp):
        problem = Problem(problem.code, f"{problem.message}. Not restarted: {verdict.reason}")
        after = _to(model, State.FAILED, problem=problem)
        return after, (Effect.FAIL_REQUESTS, Effect.TELL_LOAD_FAILED)
    if verdict.at <= now:
        after, effects = _spawning(model, restarts=model.restarts + 1)
        return msgspec.structs.replace(after, problem=problem), (Effect.SAVE_REQUESTS, *effects)
    after = _to(model, State.BACKOFF, problem=problem, deadline=verdict.at)
    return after, (Effect.SAVE_REQUESTS,)


def _news(model: Model, event: Event, now: float, budgets: Budgets) -> Decision:
    """What a worker tells of itself."""
    match (model.state, event):
        case (State.STOPPING, _):
            return model, ()
        case (State.SPAWNING, Spawned()):
            return _to(model, State.HANDSHAKING, deadline=now + budgets.hello_s, room_until=None), ()
        case (State.HANDSHAKING, HelloGood()):
            return _to(model, State.LOADING, deadline=now + budgets.load_silence_s), (Effect.SEND_LOAD,)
        case (State.HANDSHAKING, HelloBad(message)):
            problem = Problem(ErrorCode.PROTOCOL, message)
            return _stopping(model, now, budgets.term_s, 2, after="failed", problem=problem), (Effect.KILL,)
        case (State.LOADING, LoadMoved()):
            return msgspec.structs.replace(model, deadline=now + budgets.load_silence_s), ()
        case (State.LOADING, LoadEnded()):
            return _to(model, State.READY, problem=None), (Effect.TELL_LOADED, Effect.DISPATCH)
        case (State.LOADING, LoadRefused(problem)):
            after = _stopping(model, now, budgets.polite_s, 0, after="failed", problem=problem)
            return after, ()
        case (State.READY, Replaced()):
            after = msgspec.structs.replace(model, incarnation=model.incarnation + 1, stable=False)
            return after, (Effect.DISPATCH,)
        case (State.READY | State.DRAINING, Stepped()):
            return msgspec.structs.replace(model, stable=True), ()
        case (State.DRAINING, Idle()):
            return _drained(model, now, budgets)
        case (_, Idle() | Stepped()):
            return model, ()
        case _:
            raise IllegalEdge(f"{type(event).__name__} in state {model.state}")
