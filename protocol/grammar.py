"""The order of events in one request: `Accepted (Progress | Snapshot)* (Done | Failed)`, or `Failed` alone.

Both ends run it: the orchestrator on what a worker sends, the client on what the orchestrator sends.
"""

from __future__ import annotations

from enum import Enum

from .codec import KINDS
from .events import Accepted, Done, Failed, Progress, Snapshot


class GrammarError(Exception):
    """An event came where the grammar allows none of its kind."""


class RequestState(Enum):
    """Where a request is in its grammar."""

    NEW = "new"
    OPEN = "open"
    CLOSED = "closed"


_OPEN = {
    Progress: RequestState.OPEN,
    Snapshot: RequestState.OPEN,
    Done: RequestState.CLOSED,
    Failed: RequestState.CLOSED,
}
_EDGES: dict[RequestState, dict[type, RequestState]] = {
    RequestState.NEW: {Accepted: RequestState.OPEN, Failed: RequestState.CLOSED},
    RequestState.OPEN: _OPEN,
    RequestState.CLOSED: {},
}


def advance(state: RequestState, kind: int) -> RequestState:
    """The state after an event of that kind. Raises `GrammarError` for an illegal one."""
    cls = KINDS.get(kind)
    after = _EDGES[state].get(cls) if cls is not None else None
    if after is None:
        name = cls.__name__ if cls is not None else f"kind 0x{kind:02x}"
        raise GrammarError(f"{name} is not allowed in state {state.value}")
    return after
