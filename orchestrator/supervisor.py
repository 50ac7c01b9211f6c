"""One model's worker: runs the pure lifecycle, carries out its effects, and is the only writer of its state.

Everyone else posts events and awaits. Deciding is in `policy/`; processes are `spawn.py`'s, sockets `channel.py`'s,
requests `requests.py`'s.
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import time
from collections import deque
from collections.abc import Callable

import msgspec

from ..protocol import codec
from ..protocol.codec import Message
from ..protocol.commands import Cancel, Load, Shutdown
from ..protocol.errors import ErrorCode, error_for
from ..protocol.events import Exiting, Heartbeat, Hello, Loaded, LoadFailed, LoadProgress
from ..protocol.exit_codes import describe_exit
from ..protocol.values import CancelReason, ModelStatus, Phase, WorkerInfo
from . import status
from .adapters import AdapterBook
from .crew import Crew, Host
from .dispatch import Dispatcher
from .log_ring import LogRing
from .policy import health, lifecycle
from .policy.lifecycle import Effect, Model, State
from .policy.restart import is_stable, is_victim
from .requests import LiveRequest
from .run_dir import log_path
from .seat import Seat
from .waiters import OnProgress, Waiters

log = logging.getLogger(__name__)

HEALTH_TICK_S = 0.25


class Supervisor:
    """Owns one model: its state, its worker incarnation, and who waits for it."""

    def __init__(self, host: Host, load: Load) -> None:
        self.name = load.name
        self.load = load
        self.info: WorkerInfo | None = None
        self.requests_total = 0
        self.was_ready = False
        self._host = host
        self._log = LogRing(log_path(host.plant.run_dir.path, self.name))
        self._requests = Dispatcher(host.table, load.name, self._send)
        self.adapters = AdapterBook(self, self._requests, self._send)
        self._crew = Crew(host, self.name, self._requests, self._log, self)
        self._loop = asyncio.get_running_loop()
        self._model = Model()
        self._seat = Seat(host.placement, load, self._post, self._crew.drain, self._needed)
        self._events: deque[lifecycle.Event] = deque()
        self._busy = False
        self._timer: asyncio.TimerHandle | None = None
        self._waiters = Waiters()
        self._health = health.Health.FINE
        self._forgiven_until = 0.0
        self._frames_refused = 0
        self._last_tick = time.monotonic()
        self._health_timer = self._loop.call_later(HEALTH_TICK_S, self._check_health)

    # ---- what others ask -------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        return self._model.state

    @property
    def leaving(self) -> bool:
        """Whether the model is gone, or going without coming back."""
        model = self._model
        going = model.state in (State.STOPPING, State.DRAINING) and model.after == "stopped"
        return (going or model.state is State.STOPPED) and not self._seat.asleep

    @property
    def loading(self) -> bool:
        """Whether a worker of the model is being started: in charge, or a successor."""
        return self.state in (State.SPAWNING, State.HANDSHAKING, State.LOADING) or self._crew.replacing

    async def wait_loaded(self, *, on_progress: OnProgress | None = None) -> WorkerInfo:
        """Ask for the model and wait until it is READY. Raises the typed error of a failed load."""
        return await self._loaded(self.preload, on_progress)

    async def restart(self, on_progress: OnProgress | None = None) -> WorkerInfo:
        """Replace the worker, and return once the new one is READY. Running requests are resumed."""
        self._post(lifecycle.RestartAsked())  # first: a READY worker must not answer the waiter
        return await self._loaded(lambda: None, on_progress)

    async def _loaded(self, ask: Callable[[], None], on_progress: OnProgress | None) -> WorkerInfo:
        self._seat.busy()
        try:
            return await self._waiters.loaded(ask, on_progress)
        finally:
            self._seat.rest(self.state)

    async def unload(self, *, drain: bool = False) -> None:
        """Unload, and return once the process is reaped."""
        self._seat.asleep = False
        await self._waiters.ended(lambda: self._post(lifecycle.Unwanted(drain=drain)))
        if self.state is State.STOPPED:
            self.adapters.forget()

    async def wait_gone(self) -> None:
        """Wait for an unload that somebody else asked for."""
        await self._waiters.ended(lambda: None)

    def preload(self) -> None:
        """Ask for the model without waiting for it."""
        self._post(lifecycle.Wanted(explicit=True))

    def check_room(self) -> None:
        """Raise `QueueFull` if the model has all the requests that its options allow."""
        self._requests.check_room(self.load)

    def admit(self, request: LiveRequest) -> None:
        """Take a request: send it now if the worker is READY, else it waits for the load that this starts."""
        self.requests_total += 1
        self._seat.busy()
        if self.state is State.READY:
            self._requests.dispatch()
        else:
            self._host.table.progress(request, self.phase_of_waiting())
            self._post(lifecycle.Wanted(explicit=False))

    def cancel(self, request: LiveRequest, reason: CancelReason) -> None:
        """Cancel a request wherever it is."""
        worker = self._crew.holder(request)
        if worker is not None and self.state in (State.READY, State.DRAINING):
            self._host.table.cancelling(request, reason)
            worker.send(Cancel(reason=reason), request.id)
        else:
            self._host.table.end_here(request, reason)

    def request_proven(self) -> None:
        """A request that had been with a dead worker got a token out of this one; the next such one may follow."""
        if self.state is State.READY:
            self._requests.dispatch()

    def request_closed(self, request: LiveRequest) -> None:
        """A request of this model has ended."""
        self._crew.request_closed()
        self._seat.rest(self.state)
        if self._requests.held and self.state is State.READY and not self._requests.busy():
            self._post(lifecycle.RestartAsked())  # drained, to be recycled
        if request.suspect and self.state is State.READY:
            self._requests.dispatch()
        if self.state is State.DRAINING and not self._requests.all():
            self._post(lifecycle.Idle())

    def _needed(self) -> bool:
        """Whether somebody waits for the model or is served by it."""
        return self._waiters.loading or bool(self._requests.all())

    def phase_of_waiting(self) -> Phase:
        """What a request that no worker has is waiting for."""
        if self.state in (State.READY, State.QUEUED):
            return "queued"
        return "restarting" if self._model.restarts or self._model.crashes else "loading"

    def kill(self) -> None:
        """The last rung of the daemon's own shutdown."""
        if self._crew.worker is not None:
            self._crew.worker.process.kill()

    def close(self) -> None:
        """Stop the timers. The process must be gone."""
        for timer in (self._timer, self._health_timer):
            if timer is not None:
                timer.cancel()

    @property
    def frames_refused(self) -> int:
        """Junk frames of all incarnations so far."""
        worker = self._crew.worker
        return self._frames_refused + (worker.frames_refused if worker is not None else 0)

    def status(self) -> ModelStatus:
        """One line of `ps`."""
        now, model = time.monotonic(), self._model
        line = msgspec.structs.replace(
            status.of_model(self.name, model, now),
            model=self.load.model,
            in_flight=len(self._requests.all()),
            info=self.info,
            engine=self.info.engine if self.info is not None else "",
            recycles=self._crew.recycles,
            requests_total=self.requests_total,
            requests_resumed=self._requests.resumed,
            log_tail=self._log.tail(5) if model.state in (State.BACKOFF, State.FAILED) else [],
        )
        return status.with_worker(line, self._crew.worker, self._health, now)

    # ---- the single writer -----------------------------------------------------------------------------

    def _post(self, event: lifecycle.Event) -> None:
        """Take an event. Events posted while one is carried out wait for their turn."""
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._events:
                self._take(self._events.popleft())
        finally:
            self._busy = False

    def _take(self, event: lifecycle.Event) -> None:
        before = self._model
        self._model, effects = lifecycle.advance(
            before, event, time.monotonic(), self._host.budgets, self._host.restart
        )
        if self._model.state is not before.state:
            if before.state is State.READY:
                self._crew.abandon()
            self._requests.held = False
            if self._model.state is State.FAILED and self._model.problem is not None:
                log.error("%s: %s", self.name, self._model.problem.message)
            self.was_ready = self.was_ready or self._model.state is State.READY
            log.info("%s: %s -> %s (%s)", self.name, before.state, self._model.state, type(event).__name__)
            self._seat.entered(self._model.state, leaving=self.leaving, load=self.adapters.load, info=self.info)
        for effect in effects:
            self._carry_out(effect)
        self._arm()

    def _arm(self) -> None:
        """Come back when the deadline of the state is due."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._model.deadline is not None:
            delay = max(0.0, self._model.deadline - time.monotonic())
            self._timer = self._loop.call_later(delay, self._post, lifecycle.Tick())

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Effect.SPAWN:
                self._spawn()
            case Effect.SEND_LOAD:
                self._send(msgspec.structs.replace(self._seat.capped(self.adapters.load), env={}))
            case Effect.DISPATCH:
                self._requests.dispatch()
            case Effect.SAVE_REQUESTS:
                self._requests.save(self._problem(), self._crew.dead, crashed=self._model.problem is not None)
            case Effect.FAIL_REQUESTS:
                self._requests.fail_all(self._problem())
            case Effect.ASK_TO_END:
                self._send(Shutdown())
            case Effect.ASK_TO_DRAIN:
                if not self._requests.all():
                    self._events.append(lifecycle.Idle())
            case Effect.TERMINATE:
                if self._crew.worker is not None:
                    self._crew.worker.process.terminate()
            case Effect.KILL:
                self.kill()
            case Effect.TELL_LOADED:
                assert self.info is not None
                self._waiters.tell_loaded(self.info)
            case Effect.TELL_LOAD_FAILED:
                problem = self._problem()
                self._waiters.tell_load_failed(lambda: error_for(problem.code.value, problem.message))
            case Effect.TELL_UNLOADED:
                self._crew.when_gone(self._waiters.tell_ended)

    def _problem(self) -> lifecycle.Problem:
        return self._model.problem or lifecycle.Problem(ErrorCode.UNLOADED, "the model was unloaded")

    def _spawn(self) -> None:
        """Start a worker, if it has a place and the host has the memory that the last one took."""
        self.info = None
        if news := self._seat.enter(self.adapters.load):
            self._events.extend(news)
            self._waiters.tell_progress(LoadProgress(phase="queued"))
            return
        if (message := self._crew.lacks_room()) is not None:
            self._events.append(lifecycle.NoRoom(message))
            return
        try:
            worker = self._crew.start(self.adapters.load)
        except OSError as error:
            self._events.append(lifecycle.SpawnFailed(str(error)))
            return
        self._events.append(lifecycle.Spawned())
        if worker.greeted:
            self._events.append(lifecycle.HelloGood())

    def _send(self, message: Message, request_id: bytes = codec.NO_REQUEST) -> str:
        """Send to the worker in charge; gives its token."""
        worker = self._crew.worker
        if worker is None:
            return ""
        worker.send(message, request_id)
        return worker.token

    def promoted(self, info: WorkerInfo) -> None:
        """A successor is in charge now; the old worker goes on with what it has."""
        self.info = info
        self.adapters.ask_again()
        self._post(lifecycle.Replaced())

    def saved(self) -> None:
        """Requests of a retiring worker wait: for this worker if it is loaded, else for the next."""
        if self.state in (State.READY, State.DRAINING):
            self._requests.dispatch()

    # ---- what the worker says (Owner) -------------------------------------------------------------------

    def stream(self, kind: int, request_id: bytes, body: bytes) -> None:
        """A frame of a request. From a worker that is being stopped it no longer counts: its requests are ended or
        will be resumed."""
        if self.adapters.asked(request_id):
            before = self.adapters.load
            if self.adapters.answered(kind, request_id, body):
                self.info = self.adapters.told_of(self.info)
            if self.adapters.load != before:
                self._crew.call_off()
        elif self.state is not State.STOPPING:
            self._host.table.worker_event(self.name, kind, request_id, body)

    def heard(self, message: Message) -> None:
        """News that fits the state becomes an event; what does not is counted as junk."""
        worker = self._crew.worker
        if worker is None:
            return
        match (message, self.state):
            case (Hello(), State.HANDSHAKING):
                refusal = worker.refusal_of(message)
                self._post(lifecycle.HelloGood() if refusal is None else lifecycle.HelloBad(refusal))
            case (Heartbeat(), _):
                self._crew.note(message.stats)
                if not self._model.stable and is_stable(self._host.restart, message.steps):
                    self._post(lifecycle.Stepped())
            case (LoadProgress(), State.LOADING):
                self._post(lifecycle.LoadMoved())
                self._waiters.tell_progress(message)
            case (Loaded(), State.LOADING):
                self.info = message.info
                self._post(lifecycle.LoadEnded())
            case (LoadFailed(), State.LOADING):
                error = error_for(message.code, message.message)
                self._post(lifecycle.LoadRefused(lifecycle.Problem(error.code, error.message)))
            case (Exiting(), _):
                pass
            case (_, State.STOPPING):
                pass
            case _:
                self._frames_refused += 1

    def exited(self, returncode: int) -> None:
        """The process is gone and reaped."""
        worker = self._crew.bury()
        self._frames_refused += worker.frames_refused
        killed = worker.process.killed and returncode == -signal.SIGKILL
        words = "killed by the orchestrator" if killed else describe_exit(returncode)
        log.info("%s: worker %d ended: %s", self.name, worker.pid, words)
        now = time.monotonic()
        victim = is_victim(self._host.aborts, self.name, returncode, now)
        blamed = any(r.on_trial for r in self._requests.of(worker.token))  # on a request, not on the model
        if returncode == -signal.SIGABRT and not victim:
            self._host.aborts[self.name] = now
        self._post(lifecycle.Exited(returncode, worker.last_words(), random.random(), victim or blamed, killed))
        self.adapters.lost(self._problem().code, f"the worker ended ({words})")

    def _check_health(self) -> None:
        now = time.monotonic()
        if health.slept(self._last_tick, HEALTH_TICK_S, now):
            self._forgiven_until = now + 5.0
        self._last_tick = now
        self._health_timer = self._loop.call_later(HEALTH_TICK_S, self._check_health)
        self._crew.check_health(self._forgiven_until, self.load, now)
        worker = self._crew.worker
        if worker is not None:
            self._seat.hold_cap(worker, self.adapters.load, self.state)
        if worker is None or self.state not in (State.READY, State.DRAINING):
            return
        self._health = worker.health(self.load.stall_budget_s, self._forgiven_until, now)
        if self._health is health.Health.SUSPENDED:
            self._forgiven_until = now + 5.0
        elif self._health is health.Health.STALLED:
            words = f"the worker made no step for more than {self.load.stall_budget_s:g} s while it had work"
            self._post(lifecycle.Stalled(words + worker.last_words()))
        else:
            if self.state is State.READY and self._crew.consider_recycling(self.adapters.load, now):
                self._post(lifecycle.RestartAsked())
