"""Which requests of a model go to its worker, and when; and what becomes of them when the worker is gone."""

from __future__ import annotations

from collections.abc import Callable

from ..protocol.codec import FrameError
from ..protocol.commands import Generate, Load
from ..protocol.errors import ErrorCode, QueueFull
from .policy.lifecycle import Problem
from .requests import LiveRequest, RequestTable

_DEATHS = (ErrorCode.WORKER_CRASHED, ErrorCode.WORKER_STALLED, ErrorCode.OUT_OF_MEMORY)


class Dispatcher:
    """The requests of one model, between the table and the worker."""

    def __init__(self, table: RequestTable, name: str, send: Callable[[Generate, bytes], str]) -> None:
        """`send` gives the token of the incarnation that it sent to."""
        self._table = table
        self._name = name
        self._send = send
        self.resumed = 0
        self.held = False
        """Nothing is sent: the worker is being drained."""

    def all(self) -> list[LiveRequest]:
        """The live requests of the model, oldest first."""
        return self._table.of_model(self._name)

    def check_room(self, load: Load) -> None:
        """Raise `QueueFull` if the model has all the requests that its options allow."""
        limit = load.max_running + load.max_queued
        if len(self.all()) >= limit:
            raise QueueFull(
                f"model {self._name!r} has {limit} requests (max_running {load.max_running} and max_queued "
                f"{load.max_queued}); try again when one has ended"
            )

    def dispatch(self) -> None:
        """Send what waits. Requests that were with a worker when it died are on trial, one at a time and first,
        until they get a token: so the next death has one cause, and the others are spared."""
        requests = self.all()
        if self.held or any(r.on_trial for r in requests):
            return
        for request in requests:
            if not request.sent:
                message = self._table.resumable(request) if request.restarts else request.message
                try:
                    self._table.sent(request, self._send(message, request.id))
                except FrameError as error:  # defaults or what was said so far made it too large
                    self._table.fail(request, error.code, str(error))
                    continue
                if request.on_trial:
                    return

    def busy(self) -> bool:
        """Whether any worker has a request of this model."""
        return any(r.sent for r in self.all())

    def of(self, holder: str) -> list[LiveRequest]:
        """Those that one incarnation has."""
        return [r for r in self.all() if r.holder == holder]

    def save(self, problem: Problem, holder: str, *, crashed: bool) -> None:
        """The worker is gone. Nothing that a client has seen is repeated, and nothing is dropped."""
        before = self._table.resumed
        if crashed:
            self._table.charge(self._name, holder)
        for request in self.of(holder):
            self._table.save(request, problem.code, self._told(request, problem), crashed=crashed)
        self.resumed += self._table.resumed - before

    def fail_all(self, problem: Problem) -> None:
        """End every request of the model."""
        for request in self.all():
            self._table.fail(request, problem.code, self._told(request, problem))

    def _told(self, request: LiveRequest, problem: Problem) -> str:
        """A problem in the words for one request: after a death with the sizes of its prompt and answer so far."""
        if not request.started or problem.code not in _DEATHS:
            return problem.message
        return f"{problem.message}; this request had {self._table.describe(request)}"
