"""The socket for many clients, `<run dir>/daemon.sock`: frames in, `Orchestrator` verbs out, streams back.

Clients are DEALER sockets, this is a ROUTER. A send to a client that is gone fails at once, so that every event, the
keep-alives included, also asks whether its client still lives.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from ..protocol import checks, codec
from ..protocol.codec import Message
from ..protocol.commands import (
    AddAdapter,
    Attach,
    Cancel,
    Command,
    DropAdapter,
    Generate,
    Load,
    Models,
    Restart,
    Shutdown,
    Stats,
    Unload,
)
from ..protocol.errors import RETRYABLE, BulkheadError, ErrorCode, TooLarge, error_for
from ..protocol.events import (
    AdaptersReply,
    Exiting,
    Failed,
    Loaded,
    LoadFailed,
    LoadProgress,
    ModelsReply,
    Progress,
    Unloaded,
)
from .channel import Context, Pump, bind, open_socket
from .requests import LiveRequest
from .streams import Body

if TYPE_CHECKING:
    from .config import LimitsConfig
    from .embedded import Orchestrator

log = logging.getLogger(__name__)

RETRY_S = 0.01
"""How soon a client whose queue was full is tried again."""

CLIENT_QUEUE = 128
"""Messages that wait in the socket for one client; what is more waits, merged, in the logs."""


class _Stream:
    """One request that one client follows."""

    def __init__(self, client: _Client, stream_id: bytes, request: LiveRequest, door: FrontDoor) -> None:
        self.client = client
        self.id = stream_id
        self.request = request
        self._door = door
        self.unsent: deque[Body] = deque()
        self.cursor = request.log.cursor(self._wake)
        self._wake()

    def _wake(self) -> None:
        self._door.dirty(self)


class _Client:
    """One connected client: the routing id that zmq gave it, and its streams."""

    def __init__(self, identity: bytes) -> None:
        self.identity = identity
        self.streams: dict[bytes, _Stream] = {}


class FrontDoor:
    """Serves clients for one orchestrator. Lives on its loop."""

    def __init__(
        self,
        host: Orchestrator,
        context: Context,
        path: Path,
        limits: LimitsConfig,
    ) -> None:
        self._host = host
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._max_clients = limits.max_clients
        self._clients: dict[bytes, _Client] = {}
        self._dirty: dict[_Stream, None] = {}
        self._flush_scheduled = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._frames_refused = 0
        self._clients_lost = 0
        self._socket = open_socket(context, zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, CLIENT_QUEUE)
        bind(self._socket, path)
        self._pump = Pump(self._socket, self._receive)

    def figures(self) -> dict[str, float]:
        """Counters for `stats`. Clients that have left are not counted."""
        self._look_for_idle()
        return {
            "clients": float(len(self._clients)),
            "clients_lost": float(self._clients_lost),
            "client_frames_refused": float(self._frames_refused),
        }

    def close(self) -> None:
        """Send what the clients' queues take, say goodbye, close. Requests have ended before."""
        self._flush()
        for task in self._tasks:
            task.cancel()
        goodbye = codec.encode(Exiting(reason="the daemon ends"))
        for client in list(self._clients.values()):
            self._try_send(client, goodbye)
        self._pump.close()
        self._path.unlink(missing_ok=True)

    # ---- frames in --------------------------------------------------------------------------------------

    def _receive(self, parts: list[bytes]) -> None:
        identity, *frame = parts
        client = self._clients.get(identity) or _Client(identity)
        try:
            kind, request_id, message = codec.decode(frame)
        except codec.UnknownKind:
            self._frames_refused += 1  # of a newer version: skipped
            return
        except codec.FrameError as error:
            self._frames_refused += 1
            if error.request_id is not None:
                self._refuse(client, error.kind, error.request_id, error_for(error.code.value, str(error)))
            return
        if identity not in self._clients:
            if len(self._clients) >= self._max_clients:
                self._look_for_idle()
            if len(self._clients) >= self._max_clients:
                full = f"{len(self._clients)} clients are connected; the limit is {self._max_clients}"
                self._refuse(client, kind, request_id, error_for("queue_full", full))
                return
            self._clients[identity] = client
        try:
            self._obey(client, request_id, message)
        except BulkheadError as error:
            self._refuse(client, kind, request_id, error)

    def _look_for_idle(self) -> None:
        """Forget the clients that left while nothing was sent to them: a keep-alive of no request finds them."""
        frame = codec.encode(Progress(phase="queued"))
        for client in list(self._clients.values()):
            if not client.streams:
                self._try_send(client, frame)

    def _obey(self, client: _Client, request_id: bytes, message: Message) -> None:
        if isinstance(message, Command) and (problem := checks.check(message)):
            raise error_for(problem.code.value, problem.message)
        match message:
            case Generate():
                self._follow(client, request_id, self._host.start(request_id, message))
            case Attach():
                self._follow(client, request_id, self._host.find(message.request))
            case Cancel():
                self._cancel(client, request_id)
            case Load():
                self._run(self._load(client, request_id, message))
            case Unload():
                self._run(self._unload(client, request_id, message.model))
            case Restart():
                self._run(self._restart(client, request_id, message.model))
            case AddAdapter() | DropAdapter():
                self._run(self._change_adapters(client, request_id, message))
            case Models():
                self._send(client, ModelsReply(models=self._host.model_statuses()), request_id)
            case Stats():
                self._send(client, self._host.stats_reply(message.model), request_id)
            case Shutdown():
                self._send(client, Exiting(reason="asked to end"), request_id)
                self._host.request_shutdown()
            case _:
                self._frames_refused += 1
                raise error_for("protocol", f"{type(message).__name__} is not a command")

    def _follow(self, client: _Client, stream_id: bytes, request: LiveRequest) -> None:
        if stream_id in client.streams:
            raise error_for("bad_request", f"stream id {stream_id.hex()} is in use")
        client.streams[stream_id] = _Stream(client, stream_id, request, self)

    def _cancel(self, client: _Client, stream_id: bytes) -> None:
        """The id may be a request's or that of an `Attach` that follows one."""
        stream = client.streams.get(stream_id)
        if stream is not None:
            self._host.cancel(stream.request)
        else:
            self._host.cancel_id(stream_id)

    def _refuse(self, client: _Client, kind: int | None, request_id: bytes, error: BulkheadError) -> None:
        if kind in (codec.kind_of(Load), codec.kind_of(Restart)):
            answer: Message = LoadFailed(error.code.value, error.message, error.retryable)
        elif kind == codec.kind_of(Cancel):
            return
        else:
            answer = Failed(error.code.value, error.message, error.retryable)
        self._send(client, answer, request_id)

    # ---- verbs that take a while ------------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self, client: _Client, request_id: bytes, load: Load) -> None:
        def tell(progress: LoadProgress) -> None:
            self._send(client, progress, request_id)

        try:
            info = await self._host.load_command(load, tell)
            self._send(client, Loaded(load.name, info), request_id)
        except BulkheadError as error:
            self._refuse(client, codec.kind_of(Load), request_id, error)

    async def _restart(self, client: _Client, request_id: bytes, name: str) -> None:
        def tell(progress: LoadProgress) -> None:
            self._send(client, progress, request_id)

        try:
            info = await self._host.restart(name, on_progress=tell)
            self._send(client, Loaded(name, info), request_id)
        except BulkheadError as error:
            self._refuse(client, codec.kind_of(Restart), request_id, error)

    async def _unload(self, client: _Client, request_id: bytes, name: str) -> None:
        try:
            was_loaded = await self._host.unload(name)
            self._send(client, Unloaded(name, was_loaded), request_id)
        except BulkheadError as error:
            self._refuse(client, codec.kind_of(Unload), request_id, error)

    async def _change_adapters(self, client: _Client, request_id: bytes, change: AddAdapter | DropAdapter) -> None:
        try:
            adapters = await self._host.change_adapters(change)
            self._send(client, AdaptersReply(change.model, adapters), request_id)
        except BulkheadError as error:
            self._refuse(client, codec.kind_of(type(change)), request_id, error)

    # ---- frames out -------------------------------------------------------------------------------------

    def dirty(self, stream: _Stream) -> None:
        """A stream has something to send. All that becomes dirty in one turn of the loop is sent together."""
        self._dirty[stream] = None
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        streams, self._dirty = self._dirty, {}
        blocked = [stream for stream in streams if not self._send_stream(stream)]
        if blocked and not self._socket.closed:
            self._loop.call_later(RETRY_S, self._retry, blocked)
        if not self._socket.closed:
            self._pump.check()

    def _retry(self, streams: list[_Stream]) -> None:
        for stream in streams:
            if stream.id in stream.client.streams:
                self.dirty(stream)

    def _send_stream(self, stream: _Stream) -> bool:
        """Send all that a stream has. False when its queue is full: the rest waits in the log, and merges."""
        if self._socket.closed:
            return True
        if not stream.unsent:
            stream.unsent.extend(self._take(stream))
        while stream.unsent:
            kind, body = stream.unsent[0]
            sent = self._try_send(stream.client, [codec.head_of(kind, stream.id), body])
            if sent is None:
                return True  # the client is gone, and with it the stream
            if not sent:
                return False
            stream.unsent.popleft()
        if stream.cursor.finished:
            self._end(stream)
        return True

    def _take(self, stream: _Stream) -> list[Body]:
        try:
            return stream.cursor.take()
        except codec.FrameError as error:
            failed = Failed(ErrorCode.PROTOCOL.value, str(error))
            self._host.cancel(stream.request)
            stream.cursor.finished = True
            return [(codec.kind_of(Failed), codec.encode_body(failed))]

    def _end(self, stream: _Stream) -> None:
        stream.cursor.close()
        stream.client.streams.pop(stream.id, None)

    def _send(self, client: _Client, message: Message, request_id: bytes) -> None:
        try:
            frame = codec.encode(message, request_id)
        except codec.FrameError as error:
            too_large = TooLarge(str(error))
            code = too_large.code
            frame = codec.encode(Failed(code.value, too_large.message, code in RETRYABLE), request_id)
        self._try_send(client, frame)
        if not self._socket.closed:
            self._pump.check()

    def _try_send(self, client: _Client, frame: list[bytes]) -> bool | None:
        """True: sent. False: the client's queue is full. None: the client is gone."""
        if self._socket.closed:
            return None
        try:
            self._socket.send_multipart([client.identity, *frame], zmq.NOBLOCK)
            return True
        except zmq.Again:
            return False
        except zmq.ZMQError:  # EHOSTUNREACH
            self._lost(client)
            return None

    def _lost(self, client: _Client) -> None:
        """A client is gone: nobody reads its streams any more."""
        if self._clients.pop(client.identity, None) is None:
            return
        self._clients_lost += 1
        streams = list(client.streams.values())
        client.streams.clear()
        for stream in streams:
            stream.cursor.close()
            if not stream.request.message.detached and not stream.request.log.followed:
                self._host.cancel(stream.request)
