"""A model's seat at the memory budget: what its supervisor tells the ledger, and what the ledger makes of it.

Implements `placement.Tenant`. Also measures the model's worker, and says when it is over its cap.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from ..protocol.commands import Load
from ..protocol.errors import ErrorCode
from ..protocol.values import WorkerInfo
from . import host_memory
from .incarnation import Incarnation
from .placement import Placement
from .policy import ladder, lifecycle
from .policy.ladder import Step
from .policy.lifecycle import State
from .policy.placement import size
from .policy.placement_values import Busy, Gone, Idle, Leaves, Loaded, Refuse, Starts

SILENT_S = 1.0
"""Without a heartbeat for so long a worker cannot be asked to drain. They come two to four times a second."""


class Seat:
    """One model's. `post` gives its supervisor an event; `drain` holds its requests back and tells whether none runs;
    `needed` tells whether somebody waits for the model or is served by it."""

    def __init__(
        self,
        placement: Placement,
        load: Load,
        post: Callable[[lifecycle.Event], None],
        drain: Callable[[str], bool],
        needed: Callable[[], bool],
    ) -> None:
        self.name = load.name
        self.asleep = False
        """It was made to leave, and comes back when it is asked for."""
        self._placement = placement
        self._post = post
        self._drain = drain
        self._needed = needed
        self._watch = ladder.Watch()
        self._watched = ""

    # ---- what the supervisor says -----------------------------------------------------------------------

    def enter(self, load: Load) -> list[lifecycle.Event]:
        """A worker is to be started. What has to happen first; nothing: it has a place."""
        answer = self._placement.enter(self, load, busy=self._needed())
        if answer is None:
            return []
        if isinstance(answer, Refuse):
            return [lifecycle.NoPlace(answer.message), lifecycle.PlaceRefused(answer.message)]
        return [lifecycle.NoPlace(answer)]

    def entered(self, state: State, *, leaving: bool, load: Load, info: WorkerInfo | None) -> None:
        """The model has changed its state."""
        match state:
            case State.READY:
                self.asleep = False
                if info is not None:
                    self._placement.learn(load, info)
                self._placement.post(Loaded(self.name))
            case State.SPAWNING:
                self._placement.post(Starts(self.name))
            case State.STOPPED | State.FAILED:
                self._placement.post(Gone(self.name))
            case State.STOPPING | State.DRAINING if leaving or self.asleep:
                self._placement.post(Leaves(self.name))
            case _:
                pass

    def busy(self) -> None:
        """Somebody needs it."""
        self._placement.post(Busy(self.name))

    def rest(self, state: State) -> None:
        """Perhaps nobody needs it any more; then it does not go on waiting for a place either."""
        if self._placement.active and not self._needed():
            self._placement.post(Idle(self.name))
            if state is State.QUEUED:
                self._post(lifecycle.Unwanted())

    def capped(self, load: Load) -> Load:
        """The load as its worker is told it: with its share as the cap."""
        cap = self._placement.cap(load)
        return load if cap == load.memory_limit else msgspec.structs.replace(load, memory_limit=cap)

    def hold_cap(self, worker: Incarnation, load: Load, state: State) -> None:
        """Look at its worker, and take the hard step that is due: by its own sample, or by what the system says."""
        if state not in (State.LOADING, State.READY, State.DRAINING):
            return
        lines, cap = self._placement.lines, self._placement.cap(load)
        if not self._placement.active and (lines is None or cap is None):
            return
        if worker.token != self._watched:
            self._watch, self._watched = ladder.Watch(), worker.token
        now = time.monotonic()
        answers = now - worker.pulse.at < SILENT_S
        used = host_memory.footprint(worker.pid)
        if answers and worker.stats is not None:
            memory = worker.stats.memory
            used = max(used, memory.footprint, memory.mlx_active + memory.mlx_cache)
        self._placement.saw(load, used)
        if lines is None or cap is None:
            return
        self._watch, step = ladder.judge(self._watch, used=used, cap=cap, answers=answers, lines=lines, now=now)
        if step is None or (step is Step.DRAIN and state is not State.READY):
            return
        words = f"the worker took {size(used)}, and its cap is {size(cap)}"
        if not answers:
            words += f"; it had not answered for {now - worker.pulse.at:.1f} s"
        self._placement.tell(f"{'killed' if step is Step.KILL else 'draining'} {self.name}: {words}")
        words += ". Raise memory_limit, or lower context_limit or max_running"
        if step is Step.KILL:
            self._post(lifecycle.Stalled(words + worker.last_words(), ErrorCode.OUT_OF_MEMORY))
        elif self._drain(words):
            self._post(lifecycle.RestartAsked())

    # ---- what the ledger says (Tenant) ------------------------------------------------------------------

    def place_given(self) -> None:
        self._post(lifecycle.PlaceGiven())

    def place_refused(self, message: str) -> None:
        self._post(lifecycle.PlaceRefused(message))

    def evict(self, why: str) -> None:
        self.asleep = True
        self._post(lifecycle.Unwanted(why=f"the model was unloaded: {why}"))
