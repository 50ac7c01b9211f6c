"""`AsyncClient`, the asyncio client of a daemon. For one event loop; not thread-safe."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import TypeVar, Unpack

from ..protocol.codec import new_request_id
from ..protocol.commands import Attach, Command, Generate, Models, Restart, Shutdown, Stats, Unload
from ..protocol.errors import Disconnected
from ..protocol.events import AdaptersReply, Event, Exiting, Loaded, ModelsReply, StatsReply, Unloaded
from ..protocol.values import AdapterInfo, ModelStatus, WorkerInfo
from .client_answers import OnProgress, added, read_answer, remedy, request_id_bytes
from .client_core import ClientCore
from .client_live import ClientSettings, Live
from .client_loop import LoopDriver
from .client_streams import AsyncInbox, AsyncStream
from .options import (
    GenerateOptions,
    LoadOptions,
    encode_command,
    make_add_adapter,
    make_drop_adapter,
    make_generate,
    make_load,
)
from .run_dir import DAEMON_SOCKET, default_run_dir, socket_path
from .views import Result

E = TypeVar("E", bound=Event)


class AsyncClient:
    """A connection to the daemon of a run directory, with the verbs of `Client`.

    `async with` connects at once and raises `Disconnected` if no daemon answers; else the first verb does.

    Args:
        run_dir: where the daemon runs; None: `$BULKHEAD_RUN_DIR`, else the user's default.
        timeout: seconds for a short answer, and for a lost daemon to come back.
        silence: seconds without a word for a live request after which the daemon is probed.
    """

    def __init__(self, run_dir: Path | str | None = None, *, timeout: float = 10.0, silence: float = 5.0) -> None:
        self.run_dir = Path(run_dir).expanduser().absolute() if run_dir is not None else default_run_dir()
        self._timeout = timeout
        self._silence = silence
        self._driver_or_none: LoopDriver | None = None
        self._closed = False

    @property
    def _driver(self) -> LoopDriver:
        if self._closed:
            raise Disconnected("the client is closed")
        if self._driver_or_none is None:
            settings = ClientSettings(timeout=self._timeout, silence=self._silence)
            core = ClientCore(settings, remedy(self.run_dir))
            self._driver_or_none = LoopDriver(core, socket_path(self.run_dir, DAEMON_SOCKET))
        return self._driver_or_none

    async def load(
        self,
        name: str,
        model: str | os.PathLike[str],
        *,
        on_progress: OnProgress | None = None,
        **options: Unpack[LoadOptions],
    ) -> WorkerInfo:
        """Load a model under a name and wait until it is ready."""
        return (await self._call(make_load(name, model, options), Loaded, None, on_progress)).info

    async def unload(self, name: str) -> bool:
        """Unload a model and wait until its process is gone. False: it was not loaded."""
        return (await self._call(Unload(model=name), Unloaded, None)).was_loaded

    async def restart(self, name: str, *, on_progress: OnProgress | None = None) -> WorkerInfo:
        """Replace a model's worker by a fresh one and wait until it is ready."""
        return (await self._call(Restart(model=name), Loaded, None, on_progress)).info

    async def add_adapter(self, model: str, name: str, path: str | os.PathLike[str]) -> AdapterInfo:
        """Add a LoRA or DoRA adapter to a loaded model, beside its running requests. It stays until an unload."""
        reply = await self._call(make_add_adapter(model, name, path), AdaptersReply, None)
        return added(reply.adapters, name)

    async def drop_adapter(self, model: str, name: str) -> None:
        """Drop an adapter that no live request names."""
        await self._call(make_drop_adapter(model, name), AdaptersReply, None)

    def generate(self, model: str, **options: Unpack[GenerateOptions]) -> AsyncStream:
        """Start a generation. Returns at once; errors of the daemon come from the stream."""
        command = make_generate(model, options)
        inbox = AsyncInbox(self._driver)
        own = not command.detached
        live = Live(Generate, new_request_id(), inbox, cancel_on_close=own)
        return AsyncStream(self._driver, live, encode_command(command), inbox, own=own)

    async def complete(self, model: str, **options: Unpack[GenerateOptions]) -> Result:
        """Generate and wait for the whole. Cancelling this task cancels the request."""
        async with self.generate(model, **options) as stream:
            return await stream.result()

    def attach(self, request_id: str | bytes) -> AsyncStream:
        """Follow a live or lately finished request from its start."""
        target = request_id_bytes(request_id)
        inbox = AsyncInbox(self._driver)
        body = encode_command(Attach(request=target))
        return AsyncStream(self._driver, Live(Attach, target, inbox), body, inbox, own=False)

    async def stats(self, name: str | None = None) -> StatsReply:
        """Figures of one model, or of all and the daemon."""
        return await self._call(Stats(model=name), StatsReply, self._timeout)

    async def models(self) -> list[ModelStatus]:
        """The models that are loaded or configured."""
        return (await self._call(Models(), ModelsReply, self._timeout)).models

    async def shutdown(self, grace_s: float = 5.0, *, drain: bool = False) -> None:
        """End the daemon. With `drain`, running requests may finish within the grace."""
        await self._call(Shutdown(grace_s=grace_s, drain=drain), Exiting, grace_s + self._timeout)

    async def aclose(self) -> None:
        """Cancel what runs and close the socket. Idempotent."""
        self._closed = True
        if self._driver_or_none is not None:
            self._driver_or_none.close()

    async def _call(
        self, command: Command, wanted: type[E], limit: float | None, on_progress: OnProgress | None = None
    ) -> E:
        body = encode_command(command)
        driver = self._driver
        inbox = AsyncInbox(driver)
        live = Live(type(command), new_request_id(), inbox, limit)
        driver.post(lambda core, now: core.submit(live, body, now))
        answer: E | None = None
        try:
            while True:
                answer = read_answer(await inbox.pop(), wanted, on_progress)
                if answer is not None:
                    return answer
        finally:
            if answer is None and not driver.gone:
                driver.post(lambda core, _: core.abandon(live, cancel=False))

    async def __aenter__(self) -> AsyncClient:
        try:
            await self.models()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
