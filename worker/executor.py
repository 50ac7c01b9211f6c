"""Owns the MLX thread: waits for the load, opens the engine, lets `service` work, and says how it ended.

The only thread that runs anything of MLX, from the first import to the last release. It meets the rest of the
process in the mailbox alone.
"""

from __future__ import annotations

import gc
import logging
import time
import traceback
from typing import Final, cast

from ..protocol.checks import check_load
from ..protocol.codec import NO_REQUEST
from ..protocol.commands import Load, Shutdown
from ..protocol.errors import RETRYABLE, ErrorCode
from ..protocol.events import Exiting, Loaded, LoadFailed, LoadProgress
from ..protocol.exit_codes import WorkerExit
from .engines.base import Engine, LoadProblem
from .faults import is_out_of_memory, say
from .mailbox import Mailbox, Order
from .progress import WorkerProgress
from .service import Service
from .warmup import import_libraries, settle_network

LOAD_REPORT_PAUSE_S: Final = 0.1
"""Least time between two load reports of one phase; its first and last always leave."""

log = logging.getLogger(__name__)


class _Stopped(BaseException):
    """The process is asked to end while a load runs. Passes through handlers that turn errors into `LoadProblem`."""


class Executor:
    """The executor thread's body. `exit_code` and `reason` are valid once `run` has returned."""

    def __init__(self, mailbox: Mailbox, progress: WorkerProgress, *, prewarm: bool = False) -> None:
        self._mailbox = mailbox
        self._progress = progress
        self._prewarm = prewarm
        self.exit_code: WorkerExit = WorkerExit.EXECUTOR_DIED
        self.reason = ""
        self._answer_to = NO_REQUEST

    def run(self) -> None:
        """Work until told to end, or until something raises. Never raises itself."""
        try:
            self.reason, self.exit_code = self._live()
        except BaseException as error:  # the outermost frame: whatever came, the process ends and says why
            traceback.print_exc()
            self.exit_code = WorkerExit.OUT_OF_MEMORY if is_out_of_memory(error) else WorkerExit.EXECUTOR_DIED
            self.reason = say(error)
        self._progress.phase = "closing"
        self._mailbox.post(self._answer_to, Exiting(self.reason, self.exit_code))
        self._mailbox.finish()

    def _live(self) -> tuple[str, WorkerExit]:
        if self._prewarm:
            self._progress.phase = "importing"
            import_libraries()
            self._progress.phase = "idle"
        order = self._await_load()
        if order is None:
            return self._why_ending()
        load = cast(Load, order.command)
        loader = Loader(self._mailbox, self._progress, order.request_id, load)
        try:
            engine = loader.open()
        except _Stopped:
            return self._why_ending()
        if engine is None:
            return f"the load of {load.name} failed", WorkerExit.LOAD_FAILED
        self._progress.phase = "idle"
        self._mailbox.post(order.request_id, Loaded(load.name, engine.info))
        self._mailbox.kick()
        service = Service(engine, load, self._mailbox, self._progress)
        self._answer_to, reason, code = service.serve()
        self._progress.phase = "closing"
        engine.close()
        return reason, code

    def _await_load(self) -> Order | None:
        """The first `Load`; None when the process is to end. Other commands before it mean nothing."""
        while True:
            for order in self._mailbox.take():
                match order.command:
                    case Load():
                        return order
                    case Shutdown():
                        self._answer_to = order.request_id
                        return None
                    case command:
                        log.warning("%s came before the load and was ignored", type(command).__name__)
            if self._mailbox.terminating:
                return None
            self._mailbox.wait()

    def _why_ending(self) -> tuple[str, WorkerExit]:
        if self._mailbox.terminating:
            return "terminated (SIGTERM)", WorkerExit.TERMINATED
        return "shut down", WorkerExit.CLEAN


class Loader:
    """One load: reports, and its good or bad end as messages."""

    def __init__(self, mailbox: Mailbox, progress: WorkerProgress, request_id: bytes, load: Load) -> None:
        self._mailbox = mailbox
        self._progress = progress
        self._request_id = request_id
        self._load = load
        self._phase = ""
        self._reported_at = 0.0

    def open(self) -> Engine | None:
        """The engine; None after a failure, which has been sent. Raises `_Stopped`."""
        if problem := check_load(self._load):
            return self._fail(problem.code, problem.message)
        log.info("loading %s from %s", self._load.name, self._load.model)
        started = time.monotonic()
        self._progress.phase = "importing"
        settle_network(self._load.model)
        try:
            from .engines.loader import (
                open_engine,
            )  # here, so that MLX is imported on this thread, after Hello

            engine = open_engine(self._load, self._report)
        except _Stopped:
            raise
        except LoadProblem as error:
            return self._fail(error.code, error.message)
        except Exception as error:
            traceback.print_exc()
            if is_out_of_memory(error):
                return self._fail(ErrorCode.OUT_OF_MEMORY, f"no memory for {self._load.model}: {say(error)}")
            return self._fail(ErrorCode.LOAD_FAILED, f"cannot load {self._load.model}: {say(error)}")
        self._progress.engine = engine.info.engine
        self._progress.memory = engine.keeper.look()
        gc.freeze()  # what the imports and the model made stays: collections need not walk over it
        log.info("loaded %s in %.2f s", self._load.name, time.monotonic() - started)
        return engine

    def _report(self, phase: str, done: int, total: int) -> None:
        if self._mailbox.terminating or self._mailbox.shutdown_seen:
            raise _Stopped
        now = time.monotonic()
        is_edge = phase != self._phase or (total > 0 and done >= total)
        if not is_edge and now - self._reported_at < LOAD_REPORT_PAUSE_S:
            return
        self._phase, self._reported_at = phase, now
        self._progress.phase = "importing" if phase == "importing" else "loading"
        self._mailbox.post(self._request_id, LoadProgress(phase, done, total))
        self._mailbox.kick()

    def _fail(self, code: ErrorCode, message: str) -> None:
        log.error("the load failed: %s", message)
        self._mailbox.post(self._request_id, LoadFailed(code, message, code in RETRYABLE))
        self._mailbox.kick()
