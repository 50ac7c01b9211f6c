"""Owns the loop over a loaded engine: commands in, one unit of work after the other, requests admitted and ended.

Runs on the executor thread. Looks into the mailbox between units of work, so that a cancel waits for one at most.
"""

from __future__ import annotations

import logging
import time
import traceback
from pathlib import Path
from typing import Final, assert_never, cast

from ..protocol.checks import check, check_generate
from ..protocol.checks_names import in_use
from ..protocol.codec import NO_REQUEST
from ..protocol.commands import AddAdapter, Cancel, DropAdapter, Generate, Load, Shutdown
from ..protocol.errors import RETRYABLE, ErrorCode
from ..protocol.events import AdaptersReply, Failed, Loaded, LoadFailed
from ..protocol.exit_codes import WorkerExit
from ..protocol.problem import Problem
from ..protocol.values import FinishReason
from .emitter import Emitter
from .engines.base import Engine, LoadProblem, PrefillOut, Refused, RowFailed, Served, StepOut, TokenOut
from .faults import is_out_of_memory, say
from .mailbox import Mailbox, Order
from .progress import WorkerProgress
from .requests import Request, RequestTable

PREPARE_BUDGET_S: Final = 0.005
"""Time for preparing waiting requests between two steps while others decode."""

log = logging.getLogger(__name__)


class Service:
    """Serves requests with a loaded engine, until told to end."""

    def __init__(self, engine: Engine, load: Load, mailbox: Mailbox, progress: WorkerProgress) -> None:
        self._engine = engine
        self._keeper = engine.keeper
        self._load = load
        self._mailbox = mailbox
        self._progress = progress
        self._emitter = Emitter(mailbox, progress)
        places = engine.info.limits.max_running or load.max_running
        self._table = RequestTable(1 if load.deterministic else places, load.max_queued)
        self._shutdown: Order | None = None
        self._drain_until = 0.0
        self._next_sample = 0.0

    def serve(self) -> tuple[bytes, str, WorkerExit]:
        """One unit of work after the other.

        Returns:
            The id of the command that ended it, the reason in words, and the exit code.
        """
        table = self._table
        while True:
            if orders := self._mailbox.take():
                for order in orders:
                    self._obey(order)
                self._mailbox.kick()  # an end or a refusal does not wait for the step
            if self._mailbox.terminating:
                self._end_all()
                return NO_REQUEST, "terminated (SIGTERM)", WorkerExit.TERMINATED
            if self._shutdown is not None and (not table or time.monotonic() >= self._drain_until):
                self._end_all()
                return self._shutdown.request_id, "shut down", WorkerExit.CLEAN
            if table.waiting:
                self._prepare()
                self._admit()
                self._mailbox.kick()
            if table.running:
                self._step()
            elif not table.waiting and not self._tend():
                self._idle()

    # Commands.

    def _obey(self, order: Order) -> None:
        match order.command:
            case Generate() as message:
                self._receive(order.request_id, message, order.received)
            case Cancel(reason=reason):
                if order.request_id in self._table:
                    self._end(order.request_id, reason, time.monotonic())
            case Shutdown(grace_s=grace_s, drain=drain):
                self._shutdown = order
                self._drain_until = time.monotonic() + (max(0.0, grace_s) if drain else 0.0)
            case Load() as load:
                self._reload(order.request_id, load)
            case AddAdapter() | DropAdapter() as change:
                self._mailbox.post(order.request_id, self._change_adapters(change))
            case command:
                log.warning("%s means nothing to a loaded worker", type(command).__name__)
        self._note_table()

    def _receive(self, request_id: bytes, message: Generate, received: float) -> None:
        """Give a new request its place, or refuse it."""
        if request_id in self._table:
            self._progress.requests_ignored += 1
            log.warning("request %s is live already; its repetition is ignored", request_id.hex()[:8])
            return
        refuse = self._emitter.failed
        if self._shutdown is not None:
            refuse(request_id, ErrorCode.SHUTTING_DOWN, "the worker is shutting down")
        elif message.model != self._load.name:
            refuse(
                request_id,
                ErrorCode.UNKNOWN_MODEL,
                f"this worker holds {self._load.name}, not {message.model!r}",
            )
        elif problem := check_generate(message, resumed=True):
            refuse(request_id, problem.code, problem.message)
        elif self._table.is_full:
            table = self._table
            refuse(
                request_id,
                ErrorCode.QUEUE_FULL,
                f"{len(table.running)} requests run and {len(table.waiting)} wait; "
                f"the limits are {table.max_running} and {table.max_queued}",
            )
        else:
            self._table.add(Request(request_id, message, received))

    def _reload(self, request_id: bytes, load: Load) -> None:
        if load.name == self._load.name and load.model == self._load.model:
            self._mailbox.post(request_id, Loaded(load.name, self._engine.info))
            return
        text = f"this worker holds {self._load.name} ({self._load.model}); one process, one model"
        self._mailbox.post(request_id, LoadFailed(ErrorCode.UNSUPPORTED, text))

    def _change_adapters(self, change: AddAdapter | DropAdapter) -> AdaptersReply | Failed:
        """Between two steps. Streams stand still meanwhile, so what is held of them leaves first."""
        if problem := self._hinders(change):
            return Failed(problem.code, problem.message, problem.code in RETRYABLE)
        self._flush_running()
        self._progress.phase, self._progress.busy_since = "loading", time.monotonic()
        try:
            if isinstance(change, AddAdapter):
                size = sum(file.stat().st_size for file in Path(change.path).glob("*.safetensors"))
                if why := self._keeper.lacks(f"adapter {change.name!r}", size):
                    return Failed(ErrorCode.OUT_OF_MEMORY, why, True)
                self._engine.add_adapter(change.name, Path(change.path))
            else:
                self._engine.drop_adapter(change.name)
        except (LoadProblem, Refused) as problem:
            return Failed(problem.code, problem.message, problem.code in RETRYABLE)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            traceback.print_exc()
            return Failed(ErrorCode.INTERNAL, f"adapter {change.name!r}: {say(error)}")
        log.info("adapter %r: %s", change.name, "added" if isinstance(change, AddAdapter) else "dropped")
        return AdaptersReply(self._load.name, self._engine.info.adapters)

    def _hinders(self, change: AddAdapter | DropAdapter) -> Problem | None:
        """Why the adapters cannot be changed now, whatever the adapter."""
        if self._shutdown is not None:
            return Problem(ErrorCode.SHUTTING_DOWN, "the worker is shutting down")
        if change.model != self._load.name:
            text = f"this worker holds {self._load.name}, not {change.model!r}"
            return Problem(ErrorCode.UNKNOWN_MODEL, text)
        if isinstance(change, DropAdapter) and (users := sum(r.adapter == change.name for r in self._table)):
            return in_use(change.name, users)
        return check(change)

    # Before a step.

    def _prepare(self) -> None:
        """Let the engine check and tokenise what waits: all of it when idle, a little between two steps."""
        request = self._table.next_unprepared()
        if request is None:
            return
        started = time.monotonic()
        if self._table.running:
            self._flush_running()  # a long prompt takes its time to render and tokenise
        else:
            self._progress.phase, self._progress.busy_since = "prefill", started
        while request is not None:
            self._prepare_one(request)
            if self._table.running and time.monotonic() - started > PREPARE_BUDGET_S:
                break
            request = self._table.next_unprepared()

    def _prepare_one(self, request: Request) -> None:
        assert request.message is not None  # dropped by `adopt`, which is called once
        try:
            finish = request.adopt(self._engine.prepare(request.request_id, request.message))
        except Refused as refusal:
            self._fail(request, refusal.code, refusal.message)
        except Exception as error:
            traceback.print_exc()
            self._fail(request, ErrorCode.INTERNAL, f"the request could not be prepared: {say(error)}")
        else:
            if finish is not None:
                self._finish(request, finish, time.monotonic())

    def _admit(self) -> None:
        while (request := self._table.next_admissible()) is not None:
            verdict, why = self._keeper.admit(request.total, self._table.held(), self._engine.prefill_chunk)
            if verdict == "wait":
                break
            if verdict == "refuse":
                self._fail(request, ErrorCode.OUT_OF_MEMORY, why)
                continue
            now = time.monotonic()
            self._table.start(request, now)
            self._progress.requests_started += 1
            assert request.row is not None
            try:
                self._engine.insert(request.row)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                traceback.print_exc()
                self._engine.remove(request.request_id)
                self._fail(request, ErrorCode.INTERNAL, f"the engine refused the request: {say(error)}")
        self._note_table()

    # A step.

    def _step(self) -> None:
        engine, table, progress = self._engine, self._table, self._progress
        if table.prefilling:
            self._recheck()
            if not table.running:
                return
            progress.phase = "prefill"
            if len(table.running) > 1 and engine.next_is_prefill():
                self._flush_running()
        else:
            progress.phase = "decode"
        outs = engine.step()
        now = time.monotonic()
        progress.steps += 1
        progress.busy_since = now
        running, offer = table.running, self._emitter.offer
        for out in outs:
            request = running.get(out.request_id)
            if request is None:
                continue  # the rest of a step in which the request ended by a stop string
            if isinstance(out, TokenOut):
                if request.first_token_at is None:
                    table.prefilling -= 1
                progress.completion_tokens += 1
                progress.last_token_at = now
                try:
                    finish = request.take(out, now)
                except Exception as error:
                    traceback.print_exc()
                    self._engine.remove(request.request_id)
                    text = f"token {out.token} could not be turned into text: {say(error)}"
                    self._fail(request, ErrorCode.INTERNAL, text)
                    continue
                if finish is None:
                    offer(request, now)
                else:
                    if out.finish is None:
                        engine.remove(request.request_id)
                    self._finish(request, finish, now)
            elif isinstance(out, PrefillOut):
                self._emitter.prefill(request, out, now)
            elif isinstance(out, RowFailed):
                self._fail(request, ErrorCode.INTERNAL, out.message)
            else:
                assert_never(out)
        if running and not engine.busy:
            self._fail_lost()
        if not (outs and all(map(_tells_only_the_end_of_prefill, outs))):
            self._mailbox.kick()
        if now >= self._next_sample:
            self._sample(now)

    def _recheck(self) -> None:
        """Between chunks: prompts that no longer fit give way, so that the others go on."""
        chunk = self._engine.prefill_chunk
        while (found := self._keeper.recheck(self._table.held(), chunk)) is not None:
            self._give_up(*found)

    def _give_up(self, request_id: bytes, why: str) -> None:
        """A running request must go for lack of memory. What it has computed is not kept either.

        One that has no token yet waits until another has ended, if there is such, and starts anew.
        """
        self._engine.remove(request_id, keep=False)
        request = self._table.running[request_id]
        if request.first_token_at is None and self._keeper.may_wait(len(self._table.running) - 1):
            log.info("request %s waits again: %s", request_id.hex(), why)
            self._table.put_back(request)
            self._note_table()
            return
        self._fail(request, ErrorCode.OUT_OF_MEMORY, why)

    def _flush_running(self) -> None:
        now = time.monotonic()
        for request in self._table.running.values():
            self._emitter.flush(request, now)
        self._mailbox.kick()

    def _fail_lost(self) -> None:
        """Rows that the engine dropped without a word must not hang."""
        for request in list(self._table.running.values()):
            self._fail(request, ErrorCode.INTERNAL, "the engine lost the request without an answer")

    def _tend(self) -> bool:
        """Let the engine do a little of what can wait; gives whether there is more. Nothing is late meanwhile."""
        self._progress.busy_since = None
        return self._engine.tend()

    def _idle(self) -> None:
        """Nothing to do: take a last sample, say so, and block."""
        self._progress.busy_since = None
        self._sample(time.monotonic())
        self._progress.phase = "idle"
        self._mailbox.kick()
        self._mailbox.wait()

    def _sample(self, now: float) -> None:
        if (found := self._keeper.relieve(self._table.held())) is not None:
            self._give_up(*found)
        self._next_sample = now + self._keeper.pause
        self._progress.memory, self._progress.ladder = self._keeper.memory, self._keeper.stats()
        self._progress.cache = self._engine.cache_stats()
        self._progress.speculation = self._engine.speculation_stats()

    # Ends.

    def _finish(self, request: Request, finish: str, now: float) -> None:
        """The engine or a stop string ended a request."""
        served = self._served(request)
        self._drop(request)
        if request.completion_tokens == 0:
            text, timings = "the engine ended without generating", request.timings(now)
            self._emitter.failed(request.request_id, ErrorCode.INTERNAL, text, request.usage(), timings)
            return
        self._emitter.done(request, cast(FinishReason, finish), served, now)

    def _end(self, request_id: bytes, reason: FinishReason, now: float) -> None:
        """A request is to end from outside, in whatever phase it is."""
        request = self._table.running.get(request_id) or self._table.waiting[request_id]
        served = self._served(request)
        if request_id in self._table.running:
            self._engine.remove(request_id)
        self._drop(request)
        request.end_text()
        self._emitter.done(request, reason, served, now)

    def _end_all(self) -> None:
        """Every request ends as cancelled: the worker goes away."""
        now = time.monotonic()
        for request in self._table:
            self._end(request.request_id, "cancelled", now)
        self._mailbox.kick()

    def _fail(self, request: Request, code: ErrorCode, message: str) -> None:
        self._drop(request)
        now = time.monotonic()
        self._emitter.flush(request, now)
        self._emitter.failed(request.request_id, code, message, request.usage(), request.timings(now))

    def _drop(self, request: Request) -> None:
        self._table.drop(request.request_id)
        self._note_table()

    def _served(self, request: Request) -> Served:
        if request.inserted_at is None:
            return Served(self._engine.info.engine)
        return self._engine.served(request.request_id)

    def _note_table(self) -> None:
        progress, table = self._progress, self._table
        progress.running, progress.queued = len(table.running), len(table.waiting)
        progress.oldest_request_at = table.oldest_received_at


def _tells_only_the_end_of_prefill(out: StepOut) -> bool:
    """Such news leaves with the first token, which is next: a wake-up now would only delay that."""
    return isinstance(out, PrefillOut) and out.processed >= out.total
