"""A live copy of all frames between orchestrator and workers, for `bulkhead tap`. Free while nobody looks."""

from __future__ import annotations

from pathlib import Path

import zmq

from ..protocol import codec
from .channel import Context, Pump, bind, open_socket
from .run_dir import TAP_SOCKET, socket_path


class Tap:
    """An XPUB socket in the run directory. Each frame goes out as `[direction, model, head, body]`.

    It carries prompts and answers; the directory and the socket are their owner's only.
    """

    def __init__(self, context: Context, run_dir: Path) -> None:
        self._path = socket_path(run_dir, TAP_SOCKET)
        self._socket = open_socket(context, zmq.XPUB)
        bind(self._socket, self._path)
        self._watchers = 0
        self._pump = Pump(self._socket, self._subscription)

    def _subscription(self, parts: list[bytes]) -> None:
        """XPUB tells of subscriptions: the first of a topic, and the end of the last."""
        if parts and parts[0][:1] in (b"\x00", b"\x01"):
            self._watchers = max(0, self._watchers + (1 if parts[0][:1] == b"\x01" else -1))

    def show(self, direction: str, model: str, kind: int, request_id: bytes, body: bytes) -> None:
        """Publish one frame. Drops it for a watcher that is too slow."""
        if not self._watchers:
            return
        parts = [direction.encode(), model.encode(), codec.head_of(kind, request_id), body]
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            pass
        self._pump.check()

    def close(self) -> None:
        self._pump.close()
        self._path.unlink(missing_ok=True)
