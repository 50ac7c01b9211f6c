"""What the lifecycle speaks of: states, what can happen to a model, and all that can be asked of its supervisor."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from ...protocol.errors import ErrorCode
from .restart import RestartHistory


class State(StrEnum):
    """Where a model is."""

    STOPPED = "STOPPED"
    QUEUED = "QUEUED"
    SPAWNING = "SPAWNING"
    HANDSHAKING = "HANDSHAKING"
    LOADING = "LOADING"
    READY = "READY"
    DRAINING = "DRAINING"
    STOPPING = "STOPPING"
    BACKOFF = "BACKOFF"
    FAILED = "FAILED"


class Budgets(msgspec.Struct, frozen=True):
    """Seconds that each wait may take."""

    hello_s: float = 60.0
    load_silence_s: float = 600.0
    """Longest silence of a load; every progress starts it anew."""
    polite_s: float = 2.0
    """From the Shutdown message to SIGTERM."""
    term_s: float = 2.0
    """From SIGTERM to SIGKILL."""
    drain_s: float = 30.0
    room_s: float = 60.0
    """How long a restart waits for the host to have the memory that the last worker took."""
    room_check_s: float = 1.0


class Problem(msgspec.Struct, frozen=True):
    """Why a model is not there, for those who wait for it."""

    code: ErrorCode
    message: str


After = Literal["stopped", "failed", "spawn", "crash"]
"""What follows once a STOPPING process is gone."""


class Model(msgspec.Struct, frozen=True):
    """Everything that decisions depend on."""

    state: State = State.STOPPED
    incarnation: int = 0
    history: RestartHistory = RestartHistory()
    deadline: float | None = None
    """When `Tick` has something to do in this state; None: never."""
    after: After = "stopped"
    rung: int = 0
    """In STOPPING: 0 asked, 1 SIGTERM sent, 2 SIGKILL sent."""
    problem: Problem | None = None
    """The cause of FAILED, BACKOFF or of a STOPPING that ends there."""
    stable: bool = False
    """This incarnation has completed as many steps as the restart policy asks for."""
    room_until: float | None = None
    """While there is no room for a restart: when to give up waiting for it."""
    failed_at: float = 0.0
    """When it became FAILED."""
    last_exit: str = ""
    crashes: int = 0
    restarts: int = 0


class Event(msgspec.Struct, frozen=True):
    """Base of what can happen to a model."""


class Wanted(Event, frozen=True):
    """Somebody asks for the model: an explicit load, or (`explicit` False) a request for it."""

    explicit: bool = True


class Unwanted(Event, frozen=True):
    """Unload. With `drain`, running requests may finish first. `why`: in words, if nobody has asked for it."""

    drain: bool = False
    why: str = ""


class RestartAsked(Event, frozen=True):
    """Replace the worker on purpose. Not counted as a crash."""


class Spawned(Event, frozen=True):
    """The process runs."""


class SpawnFailed(Event, frozen=True):
    """The process could not be started."""

    message: str


class NoRoom(Event, frozen=True):
    """The host has not the memory for another worker of this model now."""

    message: str


class NoPlace(Event, frozen=True):
    """The model has no place in the memory budget yet, and waits for one."""

    message: str


class PlaceGiven(Event, frozen=True):
    """It has one now."""


class PlaceRefused(Event, frozen=True):
    """It cannot have one, or not in time."""

    message: str


class HelloGood(Event, frozen=True):
    """The right worker, with the right protocol version, said Hello."""


class HelloBad(Event, frozen=True):
    """Wrong protocol version or somebody else's incarnation: starting again would not help."""

    message: str


class LoadMoved(Event, frozen=True):
    """The load made progress."""


class LoadEnded(Event, frozen=True):
    """The model is loaded."""


class LoadRefused(Event, frozen=True):
    """The worker says that the model cannot be loaded; the process ends next."""

    problem: Problem


class Stepped(Event, frozen=True):
    """The worker has completed enough steps to be stable (`restart.is_stable`)."""


class Replaced(Event, frozen=True):
    """A new incarnation took over while the old one goes on with what it has."""


class Stalled(Event, frozen=True):
    """The health policy says so; or, with `out_of_memory`, that it is over its cap."""

    message: str
    code: ErrorCode = ErrorCode.WORKER_STALLED


class Idle(Event, frozen=True):
    """No request is running any more."""


class Exited(Event, frozen=True):
    """The process is gone and reaped. `detail` is what else is known: last stats, last lines."""

    returncode: int
    detail: str
    dice: float
    victim: bool = False
    """Another worker's fault, or a request on trial, is to blame; it does not count against the model."""
    killed: bool = False
    """It was sent SIGKILL by us."""


class Tick(Event, frozen=True):
    """Time passed; deadlines may be due."""


class Effect(StrEnum):
    """All that can be asked of the supervisor. The complete list of side effects."""

    SPAWN = "spawn"
    SEND_LOAD = "send_load"
    DISPATCH = "dispatch"
    """Send the waiting requests to the READY worker."""
    SAVE_REQUESTS = "save_requests"
    """The worker is gone: resume, keep or fail each request that it had."""
    FAIL_REQUESTS = "fail_requests"
    """End every request of the model with `problem`."""
    ASK_TO_END = "ask_to_end"
    ASK_TO_DRAIN = "ask_to_drain"
    TERMINATE = "terminate"
    KILL = "kill"
    TELL_LOADED = "tell_loaded"
    TELL_LOAD_FAILED = "tell_load_failed"
    TELL_UNLOADED = "tell_unloaded"
