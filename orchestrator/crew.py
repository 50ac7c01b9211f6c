"""The workers of one model: the one in charge and, while it is replaced, its successor or the one that retires.

Starts them and knows who holds which request. What a worker says and what state the model is in is the supervisor's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple, Protocol

from ..protocol.commands import Load
from ..protocol.errors import ErrorCode
from ..protocol.exit_codes import describe_exit
from ..protocol.values import WorkerInfo, WorkerStats
from .dispatch import Dispatcher
from .handover import Handover
from .incarnation import Incarnation, Owner, Plant
from .log_ring import LogRing
from .placement import Placement
from .policy import recycle
from .policy.lifecycle import Budgets, Problem
from .policy.restart import RestartPolicy
from .requests import LiveRequest, RequestTable
from .spares import SparePool

log = logging.getLogger(__name__)


class Host(NamedTuple):
    """What all supervisors of one orchestrator share."""

    plant: Plant
    spares: SparePool
    table: RequestTable
    budgets: Budgets
    restart: RestartPolicy
    aborts: dict[str, float]
    """Model → when its worker last aborted by its own fault (monotonic seconds)."""
    free_memory: Callable[[], int]
    """Bytes that the host can give away now."""
    placement: Placement


class Chief(Owner, Protocol):
    """The supervisor, as the crew sees it: the owner of the worker in charge."""

    def promoted(self, info: WorkerInfo) -> None:
        """A successor is in charge now."""
        ...

    def saved(self) -> None:
        """Requests of a retiring worker wait for the one in charge."""
        ...


class Crew:
    """Implements `handover.Charge`."""

    def __init__(self, host: Host, name: str, requests: Dispatcher, ring: LogRing, chief: Chief) -> None:
        self.worker: Incarnation | None = None
        """The one in charge."""
        self.dead = ""
        """Token of the one in charge that ended last."""
        self._host = host
        self._name = name
        self._requests = requests
        self._log = ring
        self._chief = chief
        self._handover = Handover(self, host.budgets)
        self._hired = 0
        self._footprint = 0

    def start(self, load: Load) -> Incarnation:
        """Start a worker and put it in charge. Raises `OSError`."""
        self.worker = self.hire(load)
        self.worker.owner = self._chief
        return self.worker

    def bury(self) -> Incarnation:
        """The worker in charge is gone; nobody is."""
        worker, self.worker = self.worker, None
        assert worker is not None
        self.dead = worker.token
        return worker

    def note(self, stats: WorkerStats) -> None:
        """Remember what the worker in charge takes; a restart needs as much."""
        self._footprint = max(stats.memory.footprint, stats.memory.mlx_active)

    def lacks_room(self) -> str | None:
        """Why the host has no room for another worker now, with the numbers; None if it has."""
        free = self._host.free_memory()
        if free >= self._footprint:
            return None
        return (
            f"{free / 2**20:.0f} MiB of memory are free on this host; the last worker of {self._name!r} took "
            f"{self._footprint / 2**20:.0f} MiB. Unload another model or end another program"
        )

    def holder(self, request: LiveRequest) -> Incarnation | None:
        """Who has a request."""
        if self.worker is not None and self.worker.token == request.holder:
            return self.worker
        return self._handover.retiring(request.holder)

    # ---- replacing on purpose ----------------------------------------------------------------------------

    @property
    def recycles(self) -> int:
        """Times that a successor took over."""
        return self._handover.count

    @property
    def replacing(self) -> bool:
        """Whether a successor is being started."""
        return self._handover.loading

    def consider_recycling(self, load: Load, now: float) -> bool:
        """Begin what is due. True: there is no room for two and nothing runs, so restart now."""
        worker = self.worker
        if worker is None or worker.stats is None or self._requests.held:
            return False
        stats = worker.stats
        reason = recycle.due(
            load,
            requests=stats.requests_done + stats.requests_failed + stats.requests_cancelled,
            age_s=now - worker.started_at,
            footprint=stats.memory.footprint,
        )
        if reason is None or not self._handover.possible:
            return False
        if self.lacks_room() is None and not self._host.placement.counts(self._name):
            self._handover.begin(load, reason)
            return False
        return self.drain(reason)

    def drain(self, reason: str) -> bool:
        """Replace the worker once its requests have ended; new ones wait. True: nothing runs, so restart now."""
        if self._requests.held:
            return False
        log.info("%s: to be recycled, without room for two: %s", self._name, reason)
        self._requests.held = self._requests.busy()
        return not self._requests.held

    def request_closed(self) -> None:
        """A request has ended; perhaps it was the retiring worker's last."""
        self._handover.request_closed()

    def call_off(self) -> None:
        """What a successor loads is out of date; it is begun anew."""
        self._handover.call_off()

    def abandon(self) -> None:
        """The worker in charge has crashed or is being stopped: end what a handover has."""
        self._handover.abandon()

    def check_health(self, forgiven_until: float, load: Load, now: float) -> None:
        """Judge those beside the worker in charge."""
        self._handover.check_health(load.stall_budget_s, forgiven_until, now)

    def when_gone(self, tell: Callable[[], None]) -> None:
        """Call `tell` once no process is left beside the one in charge."""
        self._handover.when_gone(tell)

    # ---- what a handover asks (Charge) -------------------------------------------------------------------

    def hire(self, load: Load) -> Incarnation:
        """A warm spare, or a new process. Raises `OSError`."""
        spare = self._host.spares.take(load)
        if spare is not None:
            spare.adopt(self._name, self._log)
            return spare
        self._hired += 1
        return Incarnation(
            self._host.plant,
            self._chief,
            name=self._name,
            model=load.model,
            number=self._hired,
            env=load.env,
            log=self._log,
        )

    def promote(self, incarnation: Incarnation, info: WorkerInfo) -> Incarnation:
        """Put a loaded successor in charge; gives the worker that was."""
        old = self.worker
        assert old is not None
        self.worker = incarnation
        incarnation.owner = self._chief
        self._chief.promoted(info)
        return old

    def frame(self, kind: int, request_id: bytes, body: bytes) -> None:
        """A frame of a request that a retiring worker still serves."""
        self._host.table.worker_event(self._name, kind, request_id, body)

    def holds(self, incarnation: Incarnation) -> bool:
        """Whether it still has requests."""
        return bool(self._requests.of(incarnation.token))

    def lost(self, incarnation: Incarnation, returncode: int) -> None:
        """A retiring worker is gone; the one in charge takes what it still had."""
        words = f"the worker died while retiring ({describe_exit(returncode)}){incarnation.last_words()}"
        self._requests.save(Problem(ErrorCode.WORKER_CRASHED, words), incarnation.token, crashed=returncode != 0)
        self._chief.saved()
