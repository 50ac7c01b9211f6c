"""Drives the client's core on an asyncio loop, for `AsyncClient`. Decides nothing."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from ..protocol.errors import Disconnected
from .channel import LINGER_MS, Pump
from .client_core import ClientCore
from .client_io import DROPPED, Home, Input, Wire, is_drop, new_context, why_not_there
from .client_live import ENDED, Connect


class Sockets:
    """What a driver has of zmq. Outlives it: in a collector a context would wait for ever for its open sockets."""

    def __init__(self, home: Home, loop: asyncio.AbstractEventLoop) -> None:
        self._home = home
        self._loop = weakref.ref(loop)
        self.context = new_context()
        self.wire: Wire | None = None

    def abandon(self) -> None:
        """The driver is gone, or the interpreter ends: close without waiting."""
        loop = self._loop()
        if self._home.left or (loop is not None and loop.is_running()):  # at exit, in a thread that still uses them
            return
        if self.wire is not None:
            self.wire.close(0)
        self.context.destroy(0)


class LoopDriver:
    """Drives a core on the running asyncio loop."""

    def __init__(self, core: ClientCore, path: Path) -> None:
        self.home = Home("AsyncClient")
        self._core = core
        self._path = path
        self.loop = asyncio.get_running_loop()
        self._sockets = Sockets(self.home, self.loop)
        self._finalizer = weakref.finalize(self, self._sockets.abandon)
        self._pumps: list[Pump] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self.closed = False
        self._thread = threading.get_ident()

    @property
    def _wire(self) -> Wire | None:
        return self._sockets.wire

    @property
    def gone(self) -> bool:
        """Whether nothing can be posted any more."""
        return self.closed or not self._finalizer.alive or self.loop.is_closed() or self.home.left

    def post(self, wanted: Input) -> None:
        """Do something with the core; on the loop's thread. Raises `Disconnected` once closed, when the loop has
        ended, and after a fork."""
        self.home.check()
        if self.loop.is_closed():
            self.close()
            raise Disconnected(ENDED)
        if self.closed:
            raise Disconnected("the client is closed")
        wanted(self._core, time.monotonic())
        self._perform()

    def call(self, function: Callable[[], None]) -> None:
        """Call now on the loop's own thread, else soon: a collector may run anywhere, and after the loop."""
        if self.gone:
            return
        if threading.get_ident() == self._thread:
            function()
            return
        try:
            self.loop.call_soon_threadsafe(function)
        except RuntimeError:
            pass  # the loop has ended just now

    def close(self) -> None:
        """Close the socket, also when the loop has ended. Takes the socket's linger at most."""
        if self.closed:
            return
        self.closed = True
        if self.home.left:
            return
        self._core.close()
        if threading.get_ident() == self._thread:
            self._perform()
        self._drop_wire()
        if self._timer is not None:
            self._timer.cancel()
        self._finalizer.detach()
        self._sockets.context.destroy(LINGER_MS)

    def _message(self, parts: list[bytes]) -> None:
        self._core.frame(parts, time.monotonic())
        self._perform()

    def _monitored(self, parts: list[bytes]) -> None:
        if is_drop(parts):
            self._drain()
            self._core.lost(DROPPED, time.monotonic())
            self._perform()

    def _drain(self) -> None:
        """Hear what has arrived, before time or a broken connection is judged."""
        while self._wire is not None and (parts := self._wire.receive()) is not None:
            self._core.frame(parts, time.monotonic())

    def _flush(self) -> None:
        if self._wire is not None:
            self._wire.flush()

    def _tick(self) -> None:
        self._timer = None
        self._drain()
        self._core.tick(time.monotonic())
        self._perform()

    def _perform(self) -> None:
        while actions := self._core.actions():
            for action in actions:
                if isinstance(action, list):
                    if self._wire is not None:
                        self._wire.send(action)
                    continue
                self._drop_wire()
                if isinstance(action, Connect):
                    if why := why_not_there(self._path):
                        self._core.lost(why, time.monotonic(), refused=True)
                        break
                    wire = self._sockets.wire = Wire(self._sockets.context, self._path)
                    self._pumps = [
                        Pump(wire.socket, self._message, self._flush),
                        Pump(wire.monitor, self._monitored),
                    ]
            if self._pumps and not self.loop.is_closed():
                self._pumps[0].check()
        self._arm()

    def _arm(self) -> None:
        """Have the timer ring in time. It may ring early: setting it anew at every frame would cost more."""
        if self.closed:
            return
        now = time.monotonic()
        until = self._core.wait_until(now)
        if until is None or (self._timer is not None and self._timer_at <= until):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = until
        self._timer = self.loop.call_later(max(0.0, until - now), self._tick)

    def _drop_wire(self) -> None:
        wire, self._sockets.wire = self._sockets.wire, None
        pumps, self._pumps = self._pumps, []
        if wire is not None and self.loop.is_closed():
            wire.close()
        elif wire is not None:
            wire.socket.disable_monitor()
            for pump in pumps:
                pump.close()
