"""What the client's core and its drivers talk about: live requests, actions, settings. No behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

from ..protocol import codec
from ..protocol.commands import (
    AddAdapter,
    Attach,
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
from ..protocol.errors import BulkheadError
from ..protocol.events import (
    AdaptersReply,
    Done,
    Event,
    Exiting,
    Failed,
    Loaded,
    LoadFailed,
    ModelsReply,
    StatsReply,
    Unloaded,
)


def _kinds(*classes: type[Event]) -> frozenset[int]:
    return frozenset(codec.kind_of(cls) for cls in (*classes, Failed))


TERMINAL: Final[dict[type[Command], frozenset[int]]] = {
    Generate: _kinds(Done),
    Attach: _kinds(Done),
    Load: _kinds(Loaded, LoadFailed),
    Restart: _kinds(Loaded, LoadFailed),
    Unload: _kinds(Unloaded),
    Stats: _kinds(StatsReply),
    Models: _kinds(ModelsReply),
    Shutdown: _kinds(Exiting),
    AddAdapter: _kinds(AdaptersReply),
    DropAdapter: _kinds(AdaptersReply),
}
"""Which event ends the answer to a command."""


ENDED: Final = "the event loop of this client has ended, or is another; make a new AsyncClient in this one"


class Rewind:
    """Item of a sink: the stream starts again from its beginning (after an `Attach`)."""


REWIND: Final = Rewind()
Item = tuple[int, bytes] | BulkheadError | Rewind
"""What a sink gets: kind and body of a frame, an error of the client's own, or `REWIND`."""


class Sink(Protocol):
    """Where the answers to one request go."""

    def push(self, item: Item) -> None: ...


@dataclass(slots=True, eq=False)
class Live:
    """A request or call that has no terminal event yet. Only the core changes it."""

    command: type[Command]
    request_id: bytes
    """What the daemon calls the work; `Cancel` and `Attach` name it."""
    sink: Sink
    timeout: float | None = None
    """Seconds until a call fails with `RequestTimeout`; None: as long as the daemon is there."""
    cancel_on_close: bool = False
    """Whether the work is the client's own, and ends with it: not what is detached or only watched."""
    wire_id: bytes = b""
    """Head id under which its answers come: another one after an `Attach`."""
    heard: float = 0.0
    deadline: float | None = None
    sent: bool = False
    accepted: bool = False
    rejoining: bool = False

    @property
    def is_stream(self) -> bool:
        return self.command in (Generate, Attach)


class Link(Enum):
    """The way to the daemon."""

    DOWN = "down"
    """No socket, and nothing that wants one."""
    JOINING = "joining"
    """A fresh socket; its first probe is out."""
    UP = "up"
    RESTING = "resting"
    """Waiting to try again."""


class Connect:
    """Action: replace the socket by a fresh one. Answer a refused connection with `lost(refused=True)`."""


class Disconnect:
    """Action: close the socket."""


Action = Connect | Disconnect | list[bytes]
"""A list of bytes is a frame to send."""


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Seconds, all of them."""

    timeout: float = 10.0
    """For a short answer, and for a lost daemon to come back."""
    silence: float = 5.0
    """Without a word for a live request, then the daemon is probed."""
    backoff_first: float = 0.05
    backoff_most: float = 1.0
