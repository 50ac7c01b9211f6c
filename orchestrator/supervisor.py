"""One model's worker: runs the pure lifecycle, carries out its effects, and is the only writer of its state.

Everyone else posts events and awaits. Deciding is in `policy/`; processes are `spawn.py`'s, sockets `channel.py`'s,
requests `requests.py`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import zmq

from ..protocol import codec
from ..protocol.codec import PROTOCOL_VERSION
from ..protocol.commands import Cancel, Generate, Load, Shutdown
from ..protocol.errors import ErrorCode, QueueFull, error_for
from ..protocol.events import Exiting, Heartbeat, Hello, Loaded, LoadFailed, LoadProgress
from ..protocol.exit_codes import describe_exit
from ..protocol.values import CancelReason, ModelStatus, Phase, WorkerInfo, WorkerStats
from .channel import WorkerChannel
from .log_ring import LogRing
from .policy import health, lifecycle
from .policy.lifecycle import Budgets, Effect, Model, State
from .policy.restart import RestartPolicy
from .requests import LiveRequest, RequestTable
from .run_dir import RunDir, log_path
from .spawn import SpawnSpec, WorkerProcess
from .streams import DONE, FAILED, PROGRESS, SNAPSHOT

log = logging.getLogger(__name__)

DRAIN_FRAMES_S = 0.015
"""After a process is gone its last frames may still be on their way through the socket."""

HEALTH_TICK_S = 0.25

_T = TypeVar("_T")
OnProgress = Callable[[LoadProgress], None]
_STREAM_KINDS = frozenset({DONE, FAILED, PROGRESS, SNAPSHOT})
_CANCEL, _GENERATE, _LOAD = codec.kind_of(Cancel), codec.kind_of(Generate), codec.kind_of(Load)


class Host(NamedTuple):
    """What all supervisors of one orchestrator share."""

    context: zmq.Context[zmq.Socket[bytes]]
    run_dir: RunDir
    table: RequestTable
    budgets: Budgets
    restart: RestartPolicy
    command: Sequence[str]
    on_frame: Callable[[str, str, int, bytes, bytes], None]
    """For `tap`: direction, model, kind, request id, body."""


class Supervisor:
    """Owns one model: its state, its worker incarnation, and who waits for it."""

    def __init__(self, host: Host, load: Load) -> None:
        self.name = load.name
        self.load = load
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._model = Model()
        self._events: deque[lifecycle.Event] = deque()
        self._busy = False
        self._timer: asyncio.TimerHandle | None = None
        self._process: WorkerProcess | None = None
        self._channel: WorkerChannel | None = None
        self._token = ""
        self._exiting = ""
        self._log = LogRing(log_path(host.run_dir.path, self.name))
        self._load_waiters: list[asyncio.Future[WorkerInfo]] = []
        self._unload_waiters: list[asyncio.Future[None]] = []
        self._watchers: list[OnProgress] = []
        self.info: WorkerInfo | None = None
        self.stats: WorkerStats | None = None
        self._pulse = health.Pulse(time.monotonic(), None)
        self._health = health.Health.FINE
        self._forgiven_until = 0.0
        self._last_tick = time.monotonic()
        self._started_at = 0.0
        self.requests_total = 0
        self.requests_resumed = 0
        self.frames_refused = 0
        self._health_timer = self._loop.call_later(HEALTH_TICK_S, self._check_health)

    # ---- what others ask -------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        return self._model.state

    @property
    def leaving(self) -> bool:
        """Whether the model is gone, or going without coming back."""
        model = self._model
        return model.state is State.STOPPED or (model.state is State.STOPPING and model.after == "stopped")

    async def wait_loaded(self, *, explicit: bool, on_progress: OnProgress | None = None) -> WorkerInfo:
        """Ask for the model and wait until it is READY. Raises the typed error of a failed load."""
        waiter: asyncio.Future[WorkerInfo] = self._loop.create_future()
        self._load_waiters.append(waiter)
        if on_progress is not None:
            self._watchers.append(on_progress)
        try:
            self._post(lifecycle.Wanted(explicit=explicit))
            return await waiter
        finally:
            if waiter in self._load_waiters:
                self._load_waiters.remove(waiter)
            if on_progress is not None:
                self._watchers.remove(on_progress)

    async def unload(self, *, drain: bool = False) -> None:
        """Unload, and return once the process is reaped."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._unload_waiters.append(waiter)
        self._post(lifecycle.Unwanted(drain=drain))
        if drain and not self._host.table.of_model(self.name):
            self._post(lifecycle.Idle())
        await waiter

    async def restart(self, on_progress: OnProgress | None = None) -> WorkerInfo:
        """Replace the worker, and return once the new one is READY. Running requests are resumed."""
        waiter: asyncio.Future[WorkerInfo] = self._loop.create_future()
        self._post(lifecycle.RestartAsked())
        self._load_waiters.append(waiter)
        if on_progress is not None:
            self._watchers.append(on_progress)
        try:
            return await waiter
        finally:
            if on_progress is not None:
                self._watchers.remove(on_progress)

    def preload(self) -> None:
        """Ask for the model without waiting for it."""
        self._post(lifecycle.Wanted(explicit=True))

    def check_room(self) -> None:
        """Raise `QueueFull` if the model has all the requests that its options allow."""
        limit = self.load.max_running + self.load.max_queued
        if len(self._host.table.of_model(self.name)) >= limit:
            raise QueueFull(
                f"model {self.name!r} has {limit} requests (max_running {self.load.max_running} and max_queued "
                f"{self.load.max_queued}); try again when one has ended"
            )

    def admit(self, request: LiveRequest) -> None:
        """Take a request: send it now if the worker is READY, else it waits for the load that this starts."""
        self.requests_total += 1
        if self.state is State.READY:
            self._dispatch()
        else:
            self._host.table.progress(request, self.phase_of_waiting())
            self._post(lifecycle.Wanted(explicit=False))

    def cancel(self, request: LiveRequest, reason: CancelReason) -> None:
        """Cancel a request wherever it is."""
        if request.sent and self._channel is not None and self.state in (State.READY, State.DRAINING):
            self._channel.send(_CANCEL, request.id, codec.encode_body(Cancel(reason=reason)))
        else:
            self._host.table.end_here(request, reason)

    def request_proven(self) -> None:
        """A request that had been with a dead worker got a token out of this one; the next such one may follow."""
        if self.state is State.READY:
            self._dispatch()

    def request_closed(self, request: LiveRequest) -> None:
        """A request of this model has ended."""
        if request.suspect and self.state is State.READY:
            self._dispatch()
        if self.state is State.DRAINING and not self._host.table.of_model(self.name):
            self._post(lifecycle.Idle())

    def phase_of_waiting(self) -> Phase:
        """What a request that no worker has is waiting for."""
        if self.state is State.READY:
            return "queued"
        return "restarting" if self._model.restarts or self._model.crashes else "loading"

    def kill(self) -> None:
        """The last rung of the daemon's own shutdown."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Stop the timers. The process must be gone."""
        for timer in (self._timer, self._health_timer):
            if timer is not None:
                timer.cancel()

    def status(self) -> ModelStatus:
        """One line of `ps`."""
        now = time.monotonic()
        model, process = self._model, self._process
        retry = max(0.0, model.deadline - now) if model.state is State.BACKOFF and model.deadline else None
        return ModelStatus(
            name=self.name,
            state=model.state.value,
            model=self.load.model,
            pid=process.pid if process is not None else None,
            incarnation=model.incarnation,
            engine=self.info.engine if self.info is not None else "",
            in_flight=len(self._host.table.of_model(self.name)),
            restarts=model.restarts,
            crashes=model.crashes,
            uptime_s=now - self._started_at if process is not None else 0.0,
            footprint=process.footprint if process is not None else 0,
            last_exit=model.last_exit,
            problem=model.problem.message if model.problem is not None else "",
            health=self._health.value if process is not None else "",
            next_retry_s=retry,
            info=self.info,
            stats=self.stats,
            stats_age_s=now - self._pulse.at if self.stats is not None else None,
            requests_total=self.requests_total,
            requests_resumed=self.requests_resumed,
            log_tail=self._log.tail(5) if model.state in (State.BACKOFF, State.FAILED) else [],
        )

    # ---- the single writer -----------------------------------------------------------------------------

    def _post(self, event: lifecycle.Event) -> None:
        """Queue an event. Events posted while one is carried out wait for their turn."""
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
            log.info("%s: %s -> %s (%s)", self.name, before.state, self._model.state, type(event).__name__)
        for effect in effects:
            self._carry_out(effect)
        self._arm()

    def _arm(self) -> None:
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
                self._send(_LOAD, codec.encode_body(msgspec.structs.replace(self.load, env={})))
            case Effect.DISPATCH:
                self._dispatch()
            case Effect.SAVE_REQUESTS:
                self._save_requests()
            case Effect.FAIL_REQUESTS:
                self._fail_requests()
            case Effect.ASK_TO_END:
                self._ask_to_end(drain=False)
            case Effect.ASK_TO_DRAIN:
                if not self._host.table.of_model(self.name):
                    self._events.append(lifecycle.Idle())
            case Effect.TERMINATE:
                if self._process is not None:
                    self._process.terminate()
            case Effect.KILL:
                self.kill()
            case Effect.TELL_LOADED:
                assert self.info is not None
                for waiter in _drain(self._load_waiters):
                    waiter.set_result(self.info)
            case Effect.TELL_LOAD_FAILED:
                problem = self._problem()
                for waiter in _drain(self._load_waiters):
                    waiter.set_exception(error_for(problem.code.value, problem.message))
            case Effect.TELL_UNLOADED:
                for waiter in _drain(self._unload_waiters):
                    waiter.set_result(None)

    def _dispatch(self) -> None:
        """Send what waits. Requests that were with a worker when it died are on trial, one at a time and first,
        until they get a token: so the next death has one cause, and the others are spared."""
        requests = self._host.table.of_model(self.name)
        if any(r.on_trial for r in requests):
            return
        for request in requests:
            if not request.sent:
                self._send_request(request)
                if request.on_trial:
                    return

    def _problem(self) -> lifecycle.Problem:
        return self._model.problem or lifecycle.Problem(ErrorCode.UNLOADED, "the model was unloaded")

    def _spawn(self) -> None:
        self._token = secrets.token_hex(8)
        self._exiting = ""
        self.info = self.stats = None
        self._pulse = health.Pulse(time.monotonic(), None)
        try:
            path = self._host.run_dir.worker_socket(self.name, self._model.incarnation)
            channel = WorkerChannel(self._host.context, path, self._receive, self._junk)
            self._channel = channel
            spec = SpawnSpec(
                name=self.name,
                model=self.load.model,
                endpoint=channel.endpoint,
                token=self._token,
                run_dir=self._host.run_dir.path,
                env=self.load.env,
                command=self._host.command,
            )
            self._process = WorkerProcess(spec, self._log, self._exited)
        except (OSError, zmq.ZMQError) as error:
            self._close_channel()
            self._events.append(lifecycle.SpawnFailed(str(error)))
            return
        self._started_at = time.monotonic()
        self._host.run_dir.note_worker(self._process.pid, self._token)
        self._events.append(lifecycle.Spawned())

    def _exited(self, returncode: int) -> None:
        """The process is reaped. Its last frames get a moment to arrive, unless it said that there are none."""
        process, self._process = self._process, None
        assert process is not None
        self._host.run_dir.forget_worker(process.pid)
        wait = 0.0 if self._exiting else DRAIN_FRAMES_S
        self._loop.call_later(wait, self._settle_exit, returncode)

    def _settle_exit(self, returncode: int) -> None:
        detail = self._last_words()
        self._close_channel()
        log.info("%s: worker ended: %s", self.name, describe_exit(returncode))
        self._post(lifecycle.Exited(returncode, detail, random.random()))

    def _last_words(self) -> str:
        """What was known of a worker just before its end, for the error that its callers get."""
        words: list[str] = []
        if self._exiting:
            words.append(f"it said: {self._exiting}")
        if self.stats is not None:
            sample = self.stats
            words.append(
                f"last sample {time.monotonic() - self._pulse.at:.1f} s before: {sample.phase}, "
                f"{sample.running} running, {sample.memory.footprint / 2**20:.0f} MiB footprint, "
                f"{sample.memory.mlx_active / 2**20:.0f} MiB active in MLX"
            )
        return "".join(f"; {part}" for part in words)

    def _close_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _ask_to_end(self, *, drain: bool) -> None:
        self._send(codec.kind_of(Shutdown), codec.encode_body(Shutdown(drain=drain)))

    def _send(self, kind: int, body: bytes, request_id: bytes = codec.NO_REQUEST) -> None:
        if self._channel is not None:
            self._host.on_frame("to", self.name, kind, request_id, body)
            self._channel.send(kind, request_id, body)

    def _send_request(self, request: LiveRequest) -> None:
        self._host.table.sent(request)
        message = self._host.table.resumable(request) if request.restarts else request.message
        self._send(_GENERATE, codec.encode_body(message), request.id)

    def _fail_requests(self) -> None:
        problem = self._problem()
        for request in self._host.table.of_model(self.name):
            self._host.table.fail(request, problem.code, self._told(request, problem))

    def _save_requests(self) -> None:
        """The worker is gone. Nothing that a client has seen is repeated, and nothing is dropped."""
        problem = self._problem()
        crashed = self._model.problem is not None
        before = self._host.table.resumed
        if crashed:
            self._host.table.charge(self.name)
        for request in self._host.table.of_model(self.name):
            self._host.table.save(request, problem.code, self._told(request, problem), crashed=crashed)
        self.requests_resumed += self._host.table.resumed - before

    def _told(self, request: LiveRequest, problem: lifecycle.Problem) -> str:
        """A problem in the words for one request: after a crash with the sizes of its prompt and answer so far."""
        if not request.started or problem.code not in (ErrorCode.WORKER_CRASHED, ErrorCode.WORKER_STALLED):
            return problem.message
        return f"{problem.message}; this request had {self._host.table.describe(request)}"

    # ---- what the worker says --------------------------------------------------------------------------

    def _junk(self) -> None:
        self.frames_refused += 1

    def _receive(self, kind: int, request_id: bytes, body: bytes) -> None:
        self._host.on_frame("from", self.name, kind, request_id, body)
        if kind in _STREAM_KINDS:
            self._host.table.worker_event(self.name, kind, request_id, body)
            return
        try:
            message = codec.decode_body(kind, request_id, body)
        except codec.FrameError:
            self._junk()
            return
        self._hear(message)

    def _hear(self, message: Any) -> None:
        match (message, self.state):
            case (Hello(), State.HANDSHAKING):
                self._post(self._judge_hello(message))
            case (Heartbeat(), _):
                self._heartbeat(message)
            case (LoadProgress(), State.LOADING):
                self._post(lifecycle.LoadMoved())
                for watcher in tuple(self._watchers):
                    watcher(message)
            case (Loaded(), State.LOADING):
                self.info = message.info
                self._post(lifecycle.LoadEnded())
            case (LoadFailed(), State.LOADING):
                with contextlib.suppress(ValueError):
                    self._post(lifecycle.LoadRefused(lifecycle.Problem(ErrorCode(message.code), message.message)))
            case (Exiting(), _):
                self._exiting = message.reason or "no reason"
            case _:
                self._junk()

    def _judge_hello(self, hello: Hello) -> lifecycle.Event:
        if hello.protocol != PROTOCOL_VERSION:
            return lifecycle.HelloBad(
                f"the worker speaks protocol version {hello.protocol}, this orchestrator {PROTOCOL_VERSION}; "
                "install the same mlx-bulkhead for both"
            )
        if hello.incarnation != self._token or (self._process is not None and hello.pid != self._process.pid):
            return lifecycle.HelloBad("a process that is not this worker said Hello on its endpoint")
        return lifecycle.HelloGood()

    def _heartbeat(self, beat: Heartbeat) -> None:
        self._pulse = health.Pulse(time.monotonic(), beat.busy_since_s)
        self.stats = beat.stats
        if not self._model.stable and self.state is State.READY and beat.stats.requests_done > 0:
            self._post(lifecycle.Stepped())

    def _check_health(self) -> None:
        now = time.monotonic()
        if health.slept(self._last_tick, HEALTH_TICK_S, now):
            self._forgiven_until = now + 5.0
        self._last_tick = now
        self._health_timer = self._loop.call_later(HEALTH_TICK_S, self._check_health)
        process = self._process
        if process is None or self.state not in (State.READY, State.DRAINING):
            return
        silent = now - self._pulse.at > min(1.0, self.load.stall_budget_s / 2)  # else it is not worth the look
        self._health = health.judge(
            self._pulse,
            budget_s=self.load.stall_budget_s,
            suspended=silent and process.suspended,
            forgiven_until=self._forgiven_until,
            now=now,
        )
        if self._health is health.Health.SUSPENDED:
            self._forgiven_until = now + 5.0
        if self._health is health.Health.STALLED:
            words = f"the worker made no step for more than {self.load.stall_budget_s:g} s while it had work"
            self._post(lifecycle.Stalled(words + self._last_words()))


def _drain(waiters: list[asyncio.Future[_T]]) -> list[asyncio.Future[_T]]:
    """Take all waiters that still wait."""
    waiting = [w for w in waiters if not w.done()]
    waiters.clear()
    return waiting
