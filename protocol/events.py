"""Events: worker → orchestrator → client. The request id is in the frame's head."""

from __future__ import annotations

import msgspec

from .values import (
    AdapterInfo,
    Channel,
    FinishReason,
    ModelStatus,
    Phase,
    PlacementInfo,
    Speculation,
    Timings,
    ToolCall,
    Usage,
    WorkerInfo,
    WorkerStats,
)


class Event(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type", tag=0):
    """Base of all events."""


class Hello(Event, tag=0x41, frozen=True):
    """First frame of a worker, sent before its heavy imports."""

    protocol: int
    incarnation: str
    """The token that the orchestrator gave this process; another one is refused."""
    pid: int
    rank: int = 0
    size: int = 1


class LoadProgress(Event, tag=0x42, frozen=True):
    """A load moves. `total` 0: unknown."""

    phase: str
    """queued, downloading, checking, importing, tokenizer or weights."""
    done: int = 0
    total: int = 0


class Loaded(Event, tag=0x43, frozen=True):
    """A load ended well; what is in force."""

    name: str
    info: WorkerInfo


class LoadFailed(Event, tag=0x44, frozen=True):
    """A load ended badly. No process is left."""

    code: str
    message: str
    retryable: bool = False


class Accepted(Event, tag=0x45, frozen=True):
    """The request passed all checks that need no model, and has a place. Made by the orchestrator."""

    position: int = 0
    """Requests before it; 0: starts at once."""


class Progress(Event, tag=0x46, frozen=True):
    """A request is alive. Sent when a phase changes, as prefill proceeds, and by a clock in silence."""

    phase: Phase
    processed: int = 0
    total: int = 0


class Snapshot(Event, tag=0x47, frozen=True):
    """New text of a request. Cumulative by meaning, delta on the wire: `text` belongs at `offset`."""

    seq: int
    """Counts the snapshots of a request from 0. Merging skips numbers, never repeats them."""
    offset: int
    """Characters (Unicode code points) of this channel before `text`."""
    text: str = ""
    tokens: list[int] = []
    """Ids generated since the last snapshot. Ids of held-back text come when they are generated."""
    channel: Channel = "content"
    logprobs: list[float] = []
    """One for each of `tokens`, if the request asks for them; else empty."""
    top_logprobs: list[dict[int, float]] = []
    """For each of `tokens` the likeliest ids, if the request asks for them; else empty."""


class Done(Event, tag=0x48, frozen=True):
    """The request ended well. Its last event."""

    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    engine: str
    """The engine that served it last: `text` (alone), `batch`, `dflash`."""
    fallback_reason: str = ""
    """Why it was not speculation, where the load has a draft."""
    chars: int = 0
    """Characters of the content channel in all; the receiver checks its own count against it."""
    restarts: int = 0
    """Workers that the request survived."""
    tool_calls: list[ToolCall] = []
    """What the tool_calls channel asks for, parsed."""
    tool_error: str = ""
    """What of that channel could not be parsed, or names no given tool; or why calls are not looked for."""
    adapter: str = ""
    """The adapter that served it. Empty: the base model, or nothing did."""
    speculation: Speculation | None = None
    """What speculation did for it, if it had a part in it."""


class Failed(Event, tag=0x49, frozen=True):
    """The request ended badly. Its last event; never an empty success instead."""

    code: str
    message: str
    retryable: bool = False
    usage: Usage = Usage()
    timings: Timings = Timings()
    """Of the worker that failed it. All defaults after a crash, or a refusal before it began."""


class StatsReply(Event, tag=0x4A, frozen=True):
    """Answer to `Stats`."""

    models: list[ModelStatus] = []
    worker: WorkerStats | None = None
    """Set when a worker answers."""
    daemon: dict[str, float] = {}
    """Figures of the orchestrator: rss_bytes, uptime_s, clients, requests, frames_refused, …"""
    placement: PlacementInfo | None = None
    """The memory budget, if there is one."""


class Heartbeat(Event, tag=0x4B, frozen=True):
    """From the worker's io thread, on a clock. Proves the process, not the progress: that is `steps`."""

    steps: int
    stats: WorkerStats
    busy_since_s: float | None = None
    """Seconds since the executor last made a step while it had work; None: idle."""


class Exiting(Event, tag=0x4C, frozen=True):
    """The sender ends now, on purpose."""

    reason: str = ""
    exit_code: int = 0


class Unloaded(Event, tag=0x4D, frozen=True):
    """Answer to `Unload`: the process is reaped."""

    name: str
    was_loaded: bool = True


class ModelsReply(Event, tag=0x4E, frozen=True):
    """Answer to `Models`."""

    models: list[ModelStatus] = []


class AdaptersReply(Event, tag=0x4F, frozen=True):
    """Answer to `AddAdapter` and `DropAdapter`: the change is made."""

    model: str
    adapters: list[AdapterInfo] = []
    """All that the model has now. Empty too while no worker holds it."""


AnyEvent = (
    Hello
    | LoadProgress
    | Loaded
    | LoadFailed
    | Accepted
    | Progress
    | Snapshot
    | Done
    | Failed
    | StatsReply
    | Heartbeat
    | Exiting
    | Unloaded
    | ModelsReply
    | AdaptersReply
)
