"""An orchestrator for the life of one command, in a thread of its own, with a socket for a client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..client import Client
from ..config import Config
from ..embedded import Orchestrator

ENDING_S = 15.0


class _Host:
    """Runs the loop; `ready` is set when the socket listens or the start failed."""

    def __init__(self, config: Config | None) -> None:
        self.ready = threading.Event()
        self.run_dir: Path | None = None
        self.error: BaseException | None = None
        self._config = config
        self._loop: asyncio.AbstractEventLoop | None = None
        self._orchestrator: Orchestrator | None = None
        self.thread = threading.Thread(target=self._run, name="bulkhead-local")
        self.thread.start()

    def end(self) -> None:
        if self._loop is not None and self._orchestrator is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._orchestrator.request_shutdown)
        self.thread.join(ENDING_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # told to the command, which is another thread
            self.error = error
        finally:
            self.ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with Orchestrator(self._config, front_door=True) as host:
            self._orchestrator = host
            self.run_dir = host.run_dir
            self.ready.set()
            await host.wait_shutdown()


@contextmanager
def local_client(config: Config | None = None) -> Iterator[Client]:
    """A client of an orchestrator that lives as long as the block, in a temporary run directory."""
    host = _Host(config)
    try:
        host.ready.wait()
        if host.error is not None:
            raise host.error
        with Client(host.run_dir) as client:
            yield client
    finally:
        host.end()
