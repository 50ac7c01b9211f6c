"""`Client`, the blocking client of a daemon. Thread-safe: one background thread of its own has the socket."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
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
from .client_io import ThreadDriver
from .client_live import ClientSettings, Live
from .client_streams import Inbox, Stream
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


class Client:
    """A connection to the daemon of a run directory. Raises `Disconnected` if none answers within `timeout`.

    Args:
        run_dir: where the daemon runs; None: `$BULKHEAD_RUN_DIR`, else the user's default.
        timeout: seconds for a short answer, and for a lost daemon to come back.
        silence: seconds without a word for a live request after which the daemon is probed.
    """

    def __init__(self, run_dir: Path | str | None = None, *, timeout: float = 10.0, silence: float = 5.0) -> None:
        self.run_dir = Path(run_dir).expanduser().absolute() if run_dir is not None else default_run_dir()
        self._timeout = timeout
        core = ClientCore(ClientSettings(timeout=timeout, silence=silence), remedy(self.run_dir))
        self._driver = ThreadDriver(core, socket_path(self.run_dir, DAEMON_SOCKET))
        try:
            self.models()
        except BaseException:
            self._driver.close()
            raise

    def load(
        self,
        name: str,
        model: str | os.PathLike[str],
        *,
        on_progress: OnProgress | None = None,
        **options: Unpack[LoadOptions],
    ) -> WorkerInfo:
        """Load a model under a name and wait until it is ready. `on_progress` is called in this thread."""
        return self._call(make_load(name, model, options), Loaded, None, on_progress).info

    def unload(self, name: str) -> bool:
        """Unload a model and wait until its process is gone. False: it was not loaded."""
        return self._call(Unload(model=name), Unloaded, None).was_loaded

    def restart(self, name: str, *, on_progress: OnProgress | None = None) -> WorkerInfo:
        """Replace a model's worker by a fresh one and wait until it is ready."""
        return self._call(Restart(model=name), Loaded, None, on_progress).info

    def add_adapter(self, model: str, name: str, path: str | os.PathLike[str]) -> AdapterInfo:
        """Add a LoRA or DoRA adapter to a loaded model, beside its running requests. It stays until an unload."""
        reply = self._call(make_add_adapter(model, name, path), AdaptersReply, None)
        return added(reply.adapters, name)

    def drop_adapter(self, model: str, name: str) -> None:
        """Drop an adapter that no live request names."""
        self._call(make_drop_adapter(model, name), AdaptersReply, None)

    def generate(self, model: str, **options: Unpack[GenerateOptions]) -> Stream:
        """Start a generation. Returns at once; errors of the daemon come from the stream."""
        command = make_generate(model, options)
        inbox = Inbox(self._driver)
        own = not command.detached
        live = Live(Generate, new_request_id(), inbox, cancel_on_close=own)
        return Stream(self._driver, live, encode_command(command), inbox, own=own)

    def complete(self, model: str, **options: Unpack[GenerateOptions]) -> Result:
        """Generate and wait for the whole."""
        with self.generate(model, **options) as stream:
            return stream.result()

    def attach(self, request_id: str | bytes) -> Stream:
        """Follow a live or lately finished request from its start."""
        target = request_id_bytes(request_id)
        inbox = Inbox(self._driver)
        body = encode_command(Attach(request=target))
        return Stream(self._driver, Live(Attach, target, inbox), body, inbox, own=False)

    def stats(self, name: str | None = None) -> StatsReply:
        """Figures of one model, or of all and the daemon."""
        return self._call(Stats(model=name), StatsReply, self._timeout)

    def models(self) -> list[ModelStatus]:
        """The models that are loaded or configured."""
        return self._call(Models(), ModelsReply, self._timeout).models

    def shutdown(self, grace_s: float = 5.0, *, drain: bool = False) -> None:
        """End the daemon. With `drain`, running requests may finish within the grace."""
        self._call(Shutdown(grace_s=grace_s, drain=drain), Exiting, grace_s + self._timeout)

    def close(self) -> None:
        """Cancel what runs, end the background thread, close the socket: within a second. Idempotent."""
        self._driver.close()

    def _call(
        self, command: Command, wanted: type[E], limit: float | None, on_progress: OnProgress | None = None
    ) -> E:
        body = encode_command(command)
        inbox = Inbox(self._driver)
        live = Live(type(command), new_request_id(), inbox, limit)
        self._driver.post(lambda core, now: core.submit(live, body, now))
        answer: E | None = None
        try:
            while True:
                answer = read_answer(inbox.pop(), wanted, on_progress)
                if answer is not None:
                    return answer
        finally:
            if answer is None:
                self._forget(live)

    def _forget(self, live: Live) -> None:
        try:
            self._driver.post(lambda core, _: core.abandon(live, cancel=False))
        except Disconnected:
            pass

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if ending():
            return  # the threads were ended before
        if driver := getattr(self, "_driver", None):
            driver.stop()  # waiting for a thread has no place in a collector
