"""`Orchestrator`: the asyncio API in a parent app, and the heart of the daemon.

Holds the run directory, the table of requests and the fleet of models. Knows no sockets of clients: those are
`frontdoor.py`'s, which calls the same verbs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Unpack

import msgspec

from ..protocol.codec import new_request_id
from ..protocol.commands import AddAdapter, DropAdapter, Generate, Load
from ..protocol.errors import BadRequest, ErrorCode, ShuttingDown
from ..protocol.events import StatsReply
from ..protocol.values import AdapterInfo, ModelStatus, WorkerInfo
from .awake import KeepAwake
from .channel import open_context
from .client_answers import added, request_id_bytes
from .config import Config
from .crew import Host
from .fleet import Fleet
from .frontdoor import FrontDoor
from .incarnation import Plant
from .local_stream import LocalStream
from .options import (
    GenerateOptions,
    LoadOptions,
    make_add_adapter,
    make_drop_adapter,
    make_generate,
    make_load,
)
from .placement import Placement
from .requests import LiveRequest, RequestTable
from .run_dir import RunDir
from .spares import SparePool
from .spawn import DEFAULT_COMMAND, free_memory, process_figures
from .tap import Tap
from .views import Result
from .waiters import OnProgress

log = logging.getLogger(__name__)


class Orchestrator:
    """Runs models in worker processes, from inside an asyncio application.

    Args:
        config: models, defaults and limits; None: all defaults and no model.
        run_dir: directory for sockets, logs and notes; None: the config's, or a fresh temporary one.
        front_door: also listen for other processes' clients on `<run dir>/daemon.sock`.
        worker_command: the command that starts a worker; for tests and for frozen applications.

    Use as `async with`. All verbs raise the typed errors of `protocol.errors`.
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        run_dir: Path | str | None = None,
        front_door: bool = False,
        worker_command: Sequence[str] = DEFAULT_COMMAND,
    ) -> None:
        self.config = config or Config.default()
        self._wanted_run_dir = run_dir if run_dir is not None else self.config.run_dir
        self._with_front_door = front_door
        self._command = tuple(worker_command)
        self._placement = Placement(self.config)
        self._fleet = Fleet({name: model.load(name) for name, model in self.config.models.items()})
        self._entered = False
        self._closing = False
        self._ending: asyncio.Future[None] | None = None
        self._lost_run_dir = False
        self._shutdown_asked = asyncio.Event()
        self._front_door: FrontDoor | None = None
        self._keep_alive: asyncio.TimerHandle | None = None
        self._started_at = 0.0

    # ---- life -------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Orchestrator:
        if self._entered:
            raise BadRequest("this Orchestrator was started before; make another one")
        wanted = self._wanted_run_dir
        self._run_dir = RunDir.hold(Path(wanted)) if wanted is not None else RunDir.temporary()
        self._entered = True
        try:
            self._start()
        except OSError as error:
            self._context.destroy(linger=0)
            self._run_dir.close()
            raise BadRequest(str(error)) from None
        return self

    def _start(self) -> None:
        limits = self.config.limits
        self._context = open_context()
        self._table = RequestTable(
            max_requests=limits.max_requests,
            on_closed=self._fleet.request_closed,
            on_proven=self._fleet.request_proven,
            on_deadline=self._fleet.deadline,
        )
        self._tap = Tap(self._context, self._run_dir.path)  # sockets first: they can fail, and nothing runs yet
        if self._with_front_door:
            self._front_door = FrontDoor(self, self._context, self._run_dir.daemon_socket, limits)
        plant = Plant(self._context, self._run_dir, self._command, self._tap.show)
        self._spares = SparePool(plant, limits.spare_workers)
        host = Host(
            plant=plant,
            spares=self._spares,
            table=self._table,
            budgets=limits.budgets(),
            restart=self.config.restart,
            aborts={},
            free_memory=free_memory,
            placement=self._placement,
        )
        self._fleet.open(host)
        self._started_at = time.monotonic()
        self._awake = KeepAwake(self.config.keep_awake)
        self._tick()
        for name, model in self.config.models.items():
            if model.preload:
                self._fleet.of(name).preload()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Tell every request, end every worker within `shutdown_grace_s`, reap them, free the run directory."""
        if not self._entered:
            return
        if self._ending is None:
            self._closing = True
            self._ending = asyncio.ensure_future(self._end())
        await asyncio.shield(self._ending)  # whoever is cancelled here, the end goes on

    async def _end(self) -> None:
        for request in self._table.live():
            self._table.fail(request, ErrorCode.SHUTTING_DOWN, "the orchestrator is ending")
        workers = self._fleet.all()
        ending = [asyncio.ensure_future(worker.unload()) for worker in workers]
        if ending:
            _, late = await asyncio.wait(ending, timeout=self.config.limits.shutdown_grace_s)
            if late:
                for worker in workers:
                    worker.kill()
                await asyncio.wait(late)
        await self._spares.close()
        await self._awake.close()
        for worker in (*workers, self._placement):
            worker.close()
        if self._keep_alive is not None:
            self._keep_alive.cancel()
        if self._front_door is not None:
            self._front_door.close()
        self._tap.close()
        self._context.term()
        self._run_dir.close()

    def request_shutdown(self) -> None:
        """Make `wait_shutdown` return; a client's Shutdown does the same."""
        self._shutdown_asked.set()

    async def wait_shutdown(self) -> None:
        """Wait until somebody asks for the end."""
        await self._shutdown_asked.wait()

    @property
    def run_dir(self) -> Path:
        self._refuse_if_not_started()
        return self._run_dir.path

    @property
    def lost_run_dir(self) -> bool:
        return self._lost_run_dir

    @property
    def gave_up(self) -> list[str]:
        """Names of the models in state FAILED that are configured, or were READY once: not of a mistyped load."""
        return self._fleet.gave_up()

    # ---- verbs ------------------------------------------------------------------------------------------

    async def load(
        self,
        name: str,
        model: str | os.PathLike[str],
        *,
        on_progress: OnProgress | None = None,
        **options: Unpack[LoadOptions],
    ) -> WorkerInfo:
        """Load a model into a worker of its own and wait until it is ready. Loading it again is a no-op."""
        return await self.load_command(make_load(name, model, options), on_progress)

    async def load_command(self, load: Load, on_progress: OnProgress | None = None) -> WorkerInfo:
        """`load`, from a checked command."""
        self._refuse_if_closing()
        return await self._fleet.load(load, on_progress)

    async def unload(self, name: str, *, drain: bool = False) -> bool:
        """Unload a model, and return once its process is gone. False if it was not loaded."""
        return await self._fleet.unload(name, drain=drain)

    async def restart(self, name: str, *, on_progress: OnProgress | None = None) -> WorkerInfo:
        """Replace a model's worker by a fresh one, also out of state FAILED. Running requests are resumed."""
        self._refuse_if_closing()
        return await self._fleet.of(name).restart(on_progress)

    async def add_adapter(self, model: str, name: str, path: str | os.PathLike[str]) -> AdapterInfo:
        """Add a LoRA or DoRA adapter to a loaded model, beside its running requests. It stays until an unload."""
        change = make_add_adapter(model, name, path)
        return added(await self.change_adapters(change), name)

    async def drop_adapter(self, model: str, name: str) -> None:
        """Drop an adapter that no live request names."""
        await self.change_adapters(make_drop_adapter(model, name))

    async def change_adapters(self, change: AddAdapter | DropAdapter) -> list[AdapterInfo]:
        """`add_adapter` or `drop_adapter`, from a checked command; gives all adapters of the model then."""
        self._refuse_if_closing()
        return await self._fleet.change_adapters(change)

    def generate(self, model: str, **options: Unpack[GenerateOptions]) -> LocalStream:
        """Start a request. Bad options raise here; all that comes later is raised by the stream."""
        return self.follow(self.start(new_request_id(), make_generate(model, options)))

    async def complete(self, model: str, **options: Unpack[GenerateOptions]) -> Result:
        """The whole answer."""
        async with self.generate(model, **options) as stream:
            return await stream.result()

    def attach(self, request_id: str | bytes) -> LocalStream:
        """Follow a live or lately finished request from its start."""
        return LocalStream(self.find(request_id_bytes(request_id)), self.cancel, owner=False)

    async def models(self) -> list[ModelStatus]:
        """All models: those configured, and those loaded by name."""
        return self.model_statuses()

    async def stats(self, name: str | None = None) -> StatsReply:
        """Figures of all models, or of one, and of this process."""
        return self.stats_reply(name)

    # ---- what the front door needs, without awaiting ----------------------------------------------------

    def start(self, request_id: bytes, message: Generate) -> LiveRequest:
        """Accept a checked request and set it on its way. Raises typed errors."""
        self._refuse_if_closing()
        message = self._with_defaults(message)
        supervisor = self._fleet.serving(message.model)
        supervisor.check_room()
        request = self._table.open(request_id, message)
        supervisor.admit(request)
        return request

    def find(self, request_id: bytes) -> LiveRequest:
        """A live or lately finished request. Raises `BadRequest`."""
        self._refuse_if_not_started()
        request = self._table.find(request_id)
        if request is None:
            raise BadRequest(f"no request {request_id.hex()}: it never was, or ended some minutes ago")
        return request

    def follow(self, request: LiveRequest) -> LocalStream:
        return LocalStream(request, self.cancel)

    def cancel(self, request: LiveRequest) -> None:
        """Cancel a request in any phase. Idempotent."""
        self._fleet.cancel(request, "cancelled")

    def cancel_id(self, request_id: bytes) -> None:
        """Cancel by id; an unknown id is a no-op."""
        if (request := self._table.find(request_id)) is not None:
            self.cancel(request)

    def model_statuses(self) -> list[ModelStatus]:
        return self._fleet.statuses()

    def stats_reply(self, name: str | None) -> StatsReply:
        self._refuse_if_not_started()
        statuses = self.model_statuses()
        if name is not None:
            statuses = [s for s in statuses if s.name == name]
            if not statuses:
                raise self._fleet.unknown(name)
        daemon = process_figures(self._started_at)
        daemon.update(
            spares=float(self._spares.waiting),
            **self._awake.figures(),
            requests_live=float(len(self._table)),
            requests_total=float(self._table.total),
            requests_resumed=float(self._table.resumed),
            frames_refused=float(self._table.frames_refused + self._fleet.frames_refused),
        )
        if self._front_door is not None:
            daemon.update(self._front_door.figures())
        return StatsReply(models=statuses, daemon=daemon, placement=self._placement.view())

    # ---- inside -----------------------------------------------------------------------------------------

    def _refuse_if_closing(self) -> None:
        self._refuse_if_not_started()
        if self._closing:
            raise ShuttingDown("the orchestrator is ending")

    def _refuse_if_not_started(self) -> None:
        if not self._entered:
            raise BadRequest("the Orchestrator is not started; use `async with Orchestrator(…) as host:`")

    def _with_defaults(self, message: Generate) -> Generate:
        """Fill what the request left open and the config sets."""
        defaults: Mapping[str, object] = self.config.request_defaults()
        missing = {k: v for k, v in defaults.items() if v is not None and getattr(message, k) is None}
        return msgspec.structs.replace(message, **missing) if missing else message

    def _tick(self) -> None:
        """The keep-alive clock of all live requests, and the look at the run directory that all hangs on."""
        silence = self.config.limits.keepalive_s
        self._table.keep_alive(silence, self._fleet.phase_of)
        self._awake.note(busy=len(self._table) > 0 or self._fleet.loading)
        if not self._lost_run_dir and not self._run_dir.path.is_dir():
            self._lost_run_dir = True
            log.error("the run directory %s is gone; nobody can reach this orchestrator any more", self._run_dir.path)
            self._shutdown_asked.set()
        self._keep_alive = asyncio.get_running_loop().call_later(silence / 2, self._tick)
