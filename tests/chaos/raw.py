"""A client of nothing but zmq, that sees every frame: for slow reading, junk, and a strict look at the grammar."""

from __future__ import annotations

import time
from pathlib import Path

import zmq
from mlx_bulkhead.orchestrator.run_dir import socket_path
from mlx_bulkhead.orchestrator.views import Assembler
from mlx_bulkhead.protocol import codec
from mlx_bulkhead.protocol.codec import Message
from mlx_bulkhead.protocol.commands import Generate

from .bank import Case

SILENCE_S = 6.0
"""By the protocol a live request is never silent for five."""


class Raw:
    """One DEALER socket. What comes for a request that has ended is noted in `late`."""

    def __init__(self, run_dir: Path, *, queue: int = 1000) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 200
        self.socket.rcvhwm = queue
        self.socket.connect(f"ipc://{socket_path(run_dir, 'daemon.sock')}")
        self.late: list[str] = []
        self._ended: set[bytes] = set()

    def close(self) -> None:
        self.socket.close()
        self._context.term()

    def send(self, message: Message, request_id: bytes) -> None:
        self.socket.send_multipart(codec.encode(message, request_id))

    def follow(self, case: Case, sleep_s: float = 0.0) -> Assembler | None:
        """One request to its end, which is read only after a while. None: the server fell silent."""
        request_id = codec.new_request_id()
        self.send(Generate(case.model, prompt=case.prompt, max_tokens=case.length), request_id)
        time.sleep(sleep_s)
        assembler = Assembler(request_id)
        while not assembler.closed:
            if not self.socket.poll(int(SILENCE_S * 1000)):
                return None
            self._feed(assembler, codec.decode(self.socket.recv_multipart()))
        self._ended.add(request_id)
        return assembler

    def _feed(self, assembler: Assembler, frame: codec.Frame) -> None:
        if frame.request_id == assembler.request_id:
            assembler.feed(frame.message)  # pyright: ignore[reportArgumentType]
        elif frame.request_id in self._ended:
            self.late.append(f"{type(frame.message).__name__} after the end of request {frame.request_id.hex()}")

    def drain(self, wait_s: float) -> None:
        """Look for frames that nobody should have sent."""
        nobody = Assembler(codec.new_request_id())
        while self.socket.poll(int(wait_s * 1000)):
            self._feed(nobody, codec.decode(self.socket.recv_multipart()))
