"""Reads what answers a client's requests: items of a sink in; views, values and typed errors out. Sans IO."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from ..protocol import codec
from ..protocol.errors import BadRequest, BulkheadError, ProtocolMismatch, error_for
from ..protocol.events import Accepted, Done, Event, Failed, LoadFailed, LoadProgress, Progress, Snapshot
from ..protocol.values import AdapterInfo
from .client_live import Item, Rewind
from .views import Assembler, Snap

PROGRESS: Final = codec.kind_of(Progress)

E = TypeVar("E", bound=Event)
OnProgress = Callable[[LoadProgress], None]


def remedy(run_dir: Path) -> str:
    """The end of a `Disconnected` message: where the daemon was looked for, and how to start it."""
    return f"start a daemon with: bulkhead serve --run-dir {run_dir}"


class StreamReader:
    """Decodes the items of one stream and assembles its views."""

    def __init__(self, request_id: bytes) -> None:
        self.assembler = Assembler(request_id)

    def feed(self, item: Item) -> Snap | None:
        """Take one item of the sink; gives a snap when there is something new."""
        if isinstance(item, tuple):
            kind, body = item
            try:
                message = codec.decode_body(kind, self.assembler.request_id, body)
            except codec.FrameError as error:
                self.assembler.fail(ProtocolMismatch(str(error)))
                return None
            if isinstance(message, (Accepted, Progress, Snapshot, Done, Failed)):
                return self.assembler.feed(message)
            self.assembler.fail(ProtocolMismatch(f"{type(message).__name__} does not belong into a stream"))
        elif isinstance(item, Rewind):
            self.assembler.rewind()
        else:
            self.assembler.fail(item)
        return None

    @property
    def broken(self) -> bool:
        """Whether the stream ended here by its receiver's judgement, while the daemon may go on sending."""
        return isinstance(self.assembler.error, ProtocolMismatch)


def read_answer(item: Item, wanted: type[E], on_progress: OnProgress | None = None) -> E | None:
    """The answer of a call, or None if the item was only progress. Raises the typed error of a bad answer."""
    if isinstance(item, BulkheadError):
        raise item
    if isinstance(item, Rewind):
        return None
    try:
        message = codec.decode_body(item[0], codec.NO_REQUEST, item[1])
    except codec.FrameError as error:
        raise ProtocolMismatch(str(error)) from None
    if isinstance(message, wanted):
        return message
    if isinstance(message, (Failed, LoadFailed)):
        raise error_for(message.code, message.message)
    if isinstance(message, LoadProgress):
        if on_progress is not None:
            on_progress(message)
        return None
    raise ProtocolMismatch(f"{type(message).__name__} came where {wanted.__name__} was expected")


def added(adapters: list[AdapterInfo], name: str) -> AdapterInfo:
    """The one that was added, among all of a model."""
    for adapter in adapters:
        if adapter.name == name:
            return adapter
    raise ProtocolMismatch(f"the daemon added adapter {name!r}, and does not list it")


def request_id_bytes(request_id: str | bytes) -> bytes:
    """The 16 bytes of a request id given as such or in hexadecimal. Raises `BadRequest`."""
    if isinstance(request_id, str):
        try:
            request_id = bytes.fromhex(request_id)
        except ValueError:
            raise BadRequest(f"a request id is {2 * codec.ID_BYTES} hexadecimal digits") from None
    if not isinstance(request_id, bytes) or len(request_id) != codec.ID_BYTES:
        raise BadRequest(f"a request id is {codec.ID_BYTES} bytes or {2 * codec.ID_BYTES} hexadecimal digits")
    return request_id
