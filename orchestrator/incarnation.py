"""One incarnation of a worker: its process, its endpoint, its token, and the last it told of itself.

Knows nothing of states and requests. Whoever owns it (a supervisor, or the pool of spares) hears what it says.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from ..protocol import codec
from ..protocol.codec import PROTOCOL_VERSION, Message
from ..protocol.events import AdaptersReply, Exiting, Heartbeat, Hello
from ..protocol.values import WorkerStats
from .channel import Context, WorkerChannel
from .log_ring import LogRing
from .policy import health
from .run_dir import RunDir
from .spawn import SpawnSpec, WorkerProcess
from .streams import DONE, FAILED, PROGRESS, SNAPSHOT

DRAIN_FRAMES_S = 0.015
"""After a process is gone its last frames may still be on their way through the socket."""

LAST_LINES = 2
LAST_LINE_CHARS = 160
"""Of a dead worker's log, in the error that its callers get. Prompts and answers are not logged."""

_STREAM_KINDS = frozenset({DONE, FAILED, PROGRESS, SNAPSHOT, codec.kind_of(AdaptersReply)})
"""What answers one request or command."""


class Plant(NamedTuple):
    """What is needed to start a worker, the same for all models of one orchestrator."""

    context: Context
    run_dir: RunDir
    command: Sequence[str]
    on_frame: Callable[[str, str, int, bytes, bytes], None]
    """For `tap`: direction, model, kind, request id, body."""


class Owner(Protocol):
    """Who hears what an incarnation says."""

    def heard(self, message: Message) -> None:
        """A message that belongs to no request."""
        ...

    def stream(self, kind: int, request_id: bytes, body: bytes) -> None:
        """A frame of a request's stream, or the answer to a command, undecoded."""
        ...

    def exited(self, returncode: int) -> None:
        """The process is reaped and its last frames are in. Said once; nothing follows."""
        ...


class Incarnation:
    """A worker process that was started. Raises `OSError` if it could not be.

    `prewarm` makes the worker import its libraries before it is told what to load.
    """

    def __init__(
        self,
        plant: Plant,
        owner: Owner,
        *,
        name: str,
        model: str,
        number: int,
        env: Mapping[str, str],
        log: LogRing,
        prewarm: bool = False,
    ) -> None:
        self.owner = owner
        self.name = name
        self.started_at = time.monotonic()
        self.pulse = health.Pulse(self.started_at, None)
        self.stats: WorkerStats | None = None
        self.exiting = ""
        """What the worker said of its own end, empty if it did not."""
        self.frames_refused = 0
        self.greeted = False
        """It has said an acceptable `Hello`."""
        self.token = secrets.token_hex(8)
        self._plant = plant
        self._loop = asyncio.get_running_loop()
        path = plant.run_dir.worker_socket(name, number)
        self._channel = WorkerChannel(plant.context, path, self._receive, self._junk)
        try:
            spec = SpawnSpec(
                name=name,
                model=model,
                endpoint=self._channel.endpoint,
                token=self.token,
                run_dir=plant.run_dir.path,
                env=env,
                command=plant.command,
                prewarm=prewarm,
            )
            self.process = WorkerProcess(spec, log, self._reaped)
        except OSError:
            self._channel.close()
            raise
        plant.run_dir.note_worker(self.process.pid, self.token)

    def adopt(self, name: str, log: LogRing) -> None:
        """A spare gets the name and the log of a model. Its owner is set by who takes it."""
        self.name = name
        self.process.log = log

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, message: Message, request_id: bytes = codec.NO_REQUEST) -> None:
        """Send a command. After the process's end it goes nowhere."""
        kind, body = codec.kind_of(type(message)), codec.encode_body(message)
        self._plant.on_frame("to", self.name, kind, request_id, body)
        self._channel.send(kind, request_id, body)

    def refusal_of(self, hello: Hello) -> str | None:
        """Why this `Hello` is not acceptable; None, and noted, if it is."""
        if hello.protocol != PROTOCOL_VERSION:
            return (
                f"the worker speaks protocol version {hello.protocol}, this orchestrator {PROTOCOL_VERSION}; "
                "install the same mlx-bulkhead for both"
            )
        if hello.incarnation != self.token or hello.pid != self.pid:
            return "a process that is not this worker said Hello on its endpoint"
        self.greeted = True
        return None

    def health(self, budget_s: float, forgiven_until: float, now: float) -> health.Health:
        """What the health policy thinks of this worker."""
        silent = now - self.pulse.at > min(1.0, budget_s / 2)  # else it is not worth asking the system
        return health.judge(
            self.pulse,
            budget_s=budget_s,
            suspended=silent and self.process.suspended,
            forgiven_until=forgiven_until,
            now=now,
        )

    def last_words(self) -> str:
        """What was known of the worker just before its end, for the error that its callers get."""
        words: list[str] = []
        if self.exiting:
            words.append(f"it said: {self.exiting}")
        if (sample := self.stats) is not None:
            words.append(
                f"last sample {time.monotonic() - self.pulse.at:.1f} s before: {sample.phase}, "
                f"{sample.running} running, {sample.memory.footprint / 2**20:.0f} MiB footprint, "
                f"{sample.memory.mlx_active / 2**20:.0f} MiB active in MLX"
            )
        if lines := [line[:LAST_LINE_CHARS] for line in self.process.log.tail(LAST_LINES) if line.strip()]:
            words.append("last lines of its log: " + " / ".join(lines))
        return "".join(f"; {part}" for part in words)

    def _junk(self) -> None:
        self.frames_refused += 1

    def _receive(self, kind: int, request_id: bytes, body: bytes) -> None:
        self._plant.on_frame("from", self.name, kind, request_id, body)
        if kind in _STREAM_KINDS:
            self.owner.stream(kind, request_id, body)
            return
        try:
            message = codec.decode_body(kind, request_id, body)
        except codec.FrameError:
            self._junk()
            return
        if isinstance(message, Heartbeat):
            self.pulse = health.Pulse(time.monotonic(), message.busy_since_s)
            self.stats = message.stats
        elif isinstance(message, Exiting):
            self.exiting = message.reason or "no reason"
        self.owner.heard(message)

    def _reaped(self, returncode: int) -> None:
        """The process is gone. Its last frames get a moment to arrive, unless it said that there are none."""
        self._plant.run_dir.forget_worker(self.pid)
        self._loop.call_later(0.0 if self.exiting else DRAIN_FRAMES_S, self._settle, returncode)

    def _settle(self, returncode: int) -> None:
        self._channel.close()
        self.owner.exited(returncode)
