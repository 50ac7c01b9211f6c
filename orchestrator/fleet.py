"""The models of one orchestrator, by name: those that are configured, and those that have a supervisor.

Finds the supervisor that a verb or a request is about, and takes the verbs that change what is loaded. Sockets, the
run directory and the table of requests are `embedded.py`'s.
"""

from __future__ import annotations

from ..protocol.commands import AddAdapter, DropAdapter, Load
from ..protocol.errors import BadRequest, UnknownModel
from ..protocol.values import AdapterInfo, CancelReason, ModelStatus, Phase, WorkerInfo
from .crew import Host
from .options import differing_options
from .policy.lifecycle import State
from .requests import LiveRequest
from .supervisor import Supervisor
from .waiters import OnProgress


class Fleet:
    """One supervisor a model. To be opened before anything is loaded."""

    def __init__(self, configured: dict[str, Load]) -> None:
        self._configured = configured
        self._supervisors: dict[str, Supervisor] = {}
        self._host: Host

    def open(self, host: Host) -> None:
        """What all supervisors will share."""
        self._host = host

    # ---- what is loaded ----------------------------------------------------------------------------------

    async def load(self, load: Load, on_progress: OnProgress | None) -> WorkerInfo:
        """Load a model and wait until it is ready. What is loaded already with these options stays."""
        known = self._supervisors.get(load.name)
        if known is not None and known.leaving and known.state is not State.STOPPED:
            await known.wait_gone()  # then load afresh
            known = self._supervisors.get(load.name)
        if known is not None and load not in (known.load, known.adapters.load):
            if known.state not in (State.STOPPED, State.FAILED):
                raise BadRequest(
                    f"model {load.name!r} is {known.state.value} with other options "
                    f"({differing_options(known.load, load)}); unload it first"
                )
            known.load = load
            known.adapters.forget()
        supervisor = known or self._add(load)
        return await supervisor.wait_loaded(on_progress=on_progress)

    async def unload(self, name: str, *, drain: bool) -> bool:
        """Unload a model, and return once its process is gone. False if it was not loaded."""
        supervisor = self._supervisors.get(name)
        if supervisor is None:
            if name not in self._configured:
                raise self.unknown(name)
            return False
        was = supervisor.state is not State.STOPPED
        await supervisor.unload(drain=drain)
        if name not in self._configured and supervisor.leaving and self._supervisors.get(name) is supervisor:
            supervisor.close()
            del self._supervisors[name]
        return was

    async def change_adapters(self, change: AddAdapter | DropAdapter) -> list[AdapterInfo]:
        """Add or drop an adapter of a model; gives those that it has then."""
        supervisor = self.serving(change.model)
        if supervisor.leaving and supervisor.state is not State.STOPPED:
            await supervisor.wait_gone()
        return await supervisor.adapters.change(change)

    # ---- finding -----------------------------------------------------------------------------------------

    def all(self) -> list[Supervisor]:
        return list(self._supervisors.values())

    def of(self, name: str) -> Supervisor:
        """The supervisor of a model; a configured one gets its own here. Raises `UnknownModel`."""
        known = self._supervisors.get(name)
        if known is not None:
            return known
        load = self._configured.get(name)
        if load is None:
            raise self.unknown(name)
        return self._add(load)

    def serving(self, name: str) -> Supervisor:
        """`of`, but a model that leaves for good is none. Raises `UnknownModel`."""
        supervisor = self.of(name)
        if supervisor.leaving and name not in self._configured:
            raise self.unknown(name)
        return supervisor

    def unknown(self, name: str) -> UnknownModel:
        """What to raise for a name that is none, with those that are."""
        known = sorted({*(n for n, s in self._supervisors.items() if not s.leaving), *self._configured})
        have = f"known are {', '.join(known[:10])}" if known else "no model is loaded or configured"
        return UnknownModel(f"no model {name[:80]!r}; {have}")

    # ---- telling -----------------------------------------------------------------------------------------

    def statuses(self) -> list[ModelStatus]:
        """All models, loaded or configured."""
        idle = [
            ModelStatus(name=name, state=State.STOPPED.value, model=load.model)
            for name, load in self._configured.items()
            if name not in self._supervisors
        ]
        return [s.status() for s in self._supervisors.values()] + idle

    def gave_up(self) -> list[str]:
        """Names of the models in state FAILED that are configured, or were READY once: not of a mistyped load."""
        return [
            name
            for name, s in self._supervisors.items()
            if s.state is State.FAILED and (s.was_ready or name in self._configured)
        ]

    @property
    def loading(self) -> bool:
        """Whether a worker is being started for any of them."""
        return any(s.loading for s in self._supervisors.values())

    @property
    def frames_refused(self) -> int:
        return sum(s.frames_refused for s in self._supervisors.values())

    # ---- a request and its model -------------------------------------------------------------------------

    def cancel(self, request: LiveRequest, reason: CancelReason) -> None:
        """Cancel a request in any phase. Idempotent."""
        if request.closed:
            return
        if (supervisor := self._supervisors.get(request.model)) is not None:
            supervisor.cancel(request, reason)
        else:
            self._host.table.end_here(request, reason)

    def request_closed(self, request: LiveRequest) -> None:
        if (supervisor := self._supervisors.get(request.model)) is not None:
            supervisor.request_closed(request)

    def request_proven(self, request: LiveRequest) -> None:
        if (supervisor := self._supervisors.get(request.model)) is not None:
            supervisor.request_proven()

    def deadline(self, request: LiveRequest) -> None:
        self.cancel(request, "deadline")

    def phase_of(self, request: LiveRequest) -> Phase | None:
        """What a silent request is doing, as far as is known here."""
        if request.sent:
            return "decode" if request.log.has_text else None if request.log.has_progress else "queued"
        supervisor = self._supervisors.get(request.model)
        return supervisor.phase_of_waiting() if supervisor is not None else None

    def _add(self, load: Load) -> Supervisor:
        supervisor = Supervisor(self._host, load)
        self._supervisors[load.name] = supervisor
        return supervisor
