"""Values that messages are made of. No behaviour beyond construction."""

from __future__ import annotations

from typing import Any, Literal

from .speculation import Draft as Draft
from .speculation import DraftDtype as DraftDtype
from .speculation import Speculation as Speculation
from .speculation import SpeculationInfo as SpeculationInfo
from .speculation import Speculative as Speculative
from .speculation import VerifyMode as VerifyMode
from .value import Value as Value

Role = Literal["system", "developer", "user", "assistant", "tool"]
Phase = Literal["queued", "loading", "prefill", "decode", "restarting"]
FinishReason = Literal["stop", "length", "tool_calls", "cancelled", "deadline"]
Channel = Literal["content", "reasoning", "tool_calls"]
OnCrash = Literal["resume", "fail"]
CancelReason = Literal["cancelled", "deadline"]

ROLES: tuple[str, ...] = ("system", "developer", "user", "assistant", "tool")

FORMATS: dict[str, str | None] = {
    "json_schema": "schema",
    "json_object": None,
    "regex": "pattern",
    "choice": "choices",
    "grammar": "grammar",
}
"""Types of a `ResponseFormat`, and the field that each needs."""


class Part(Value, frozen=True):
    """A piece of a message: `text`, or `image` with one of `data`, `path` and `url`. None: a place for a picture."""

    type: str
    text: str | None = None
    data: bytes | None = None
    path: str | None = None
    url: str | None = None


class ChatMessage(Value, frozen=True):
    """One turn of a chat. `content` may be absent only when `tool_calls` is given."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ToolCall(Value, frozen=True):
    """A call of a tool that an answer asks for."""

    id: str
    """Made by the worker; unique."""
    name: str
    arguments: str
    """A JSON object."""


class ResponseFormat(Value, frozen=True):
    """The form that an answer must have. `type` says which one of the other fields is given (`FORMATS`)."""

    type: str
    """`json_schema`, `json_object`, `regex`, `choice` or `grammar`."""
    schema: dict[str, Any] | None = None
    pattern: str | None = None
    """In the syntax of Rust's regex crate, for the whole answer."""
    choices: list[str] | None = None
    grammar: str | None = None
    """In Lark syntax, as llguidance reads it; the answer is `start`."""


class Usage(Value, frozen=True):
    """Token counts of one request. `prompt_tokens` includes `cached_tokens`."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Timings(Value, frozen=True):
    """Durations of one request, with llama-server's field names. Milliseconds and tokens a second."""

    prompt_n: int = 0
    prompt_ms: float = 0.0
    prompt_per_token_ms: float = 0.0
    prompt_per_second: float = 0.0
    predicted_n: int = 0
    predicted_ms: float = 0.0
    predicted_per_token_ms: float = 0.0
    predicted_per_second: float = 0.0
    cache_n: int = 0
    queued_ms: float = 0.0


class Memory(Value, frozen=True):
    """Bytes, as the worker sees them. `mlx_*` is MLX's allocator, `footprint` the whole process."""

    mlx_active: int = 0
    mlx_cache: int = 0
    mlx_peak: int = 0
    footprint: int = 0


class Limits(Value, frozen=True):
    """Limits really in force in a worker, read back after they were set."""

    context_tokens: int = 0
    max_running: int = 0
    max_queued: int = 0
    memory_bytes: int = 0
    wired_bytes: int = 0
    cache_bytes: int = 0
    enforced_by: str = ""
    """Who enforces the memory limit: `metal`, `worker` or empty when there is none."""
    soft_bytes: int = 0
    """Where the worker begins to give memory back; 0 without a limit. `hard_bytes`: where it fails requests."""
    hard_bytes: int = 0
    unsupported: list[str] = []
    """Of `memory`, `wired` and `cache` those that this platform does not have."""


class KVCacheInfo(Value, frozen=True):
    """The KV cache in force. `bits` 0: not quantised. `max_tokens` 0: unbounded."""

    bits: int = 0
    group_size: int = 0
    layers: int = 0
    quantised_layers: int = 0
    """Layers without a KV cache, with a recurrent state for instance, are not."""
    max_tokens: int = 0


class AdapterInfo(Value, frozen=True):
    """An adapter in a worker."""

    name: str
    kind: str
    """`lora` or `dora`."""
    rank: int
    layers: int
    """Modules of the model that it changes."""
    bytes: int
    default: bool = False
    """It serves the requests that name none."""


class TemplateInfo(Value, frozen=True):
    """What is known of the chat template. `format` is chatml, llama3, mistral, custom or generic."""

    has_template: bool = False
    format: str = "generic"
    overridden: bool = False
    thinking: bool = False
    tools: bool = False
    bos: bool = False
    """The tokenizer has a token for the beginning of a text; `eos` and `pad` alike."""
    eos: bool = False
    pad: bool = False


class CacheStats(Value, frozen=True):
    """Kept prefixes of prompts, in memory and on disk. Hits, misses, tokens, evictions and errors are counters."""

    entries: int = 0
    bytes: int = 0
    hits: int = 0
    misses: int = 0
    tokens_reused: int = 0
    evictions: int = 0
    disk_entries: int = 0
    disk_bytes: int = 0
    disk_hits: int = 0
    disk_errors: int = 0


class SpeculationStats(Value, frozen=True):
    """What speculation did in a worker so far. All but mode, gain and tokens_a_cycle are counters."""

    mode: str = ""
    """Which engine has rows now: `dflash`, `plain` or `idle`."""
    reason: str = ""
    """Why DFlash is not in use any more, or not for now."""
    requests: int = 0
    """Served by DFlash from their beginning."""
    fallbacks: dict[str, int] = {}
    """Reason → requests that it did not serve, or not to their end."""
    switches: int = 0
    """Requests that moved to the text engine in mid-answer."""
    switch_seconds: float = 0.0
    """Time that these moves took."""
    cycles: int = 0
    tokens: int = 0
    accepted: int = 0
    tokens_a_cycle: float = 0.0
    """As expected of the next request."""
    gain: float = 0.0
    """Times as fast as plain decoding, measured. 0: not known yet."""
    cache: CacheStats = CacheStats()


class WorkerInfo(Value, frozen=True):
    """What a worker reports once its model is loaded."""

    engine: str = ""
    model_type: str = ""
    backend: str = ""
    """`metal`, `cuda` or `cpu`."""
    vocab_size: int = 0
    load_seconds: float = 0.0
    import_seconds: float = 0.0
    memory_before: Memory = Memory()
    memory_after: Memory = Memory()
    limits: Limits = Limits()
    template: TemplateInfo = TemplateInfo()
    versions: dict[str, str] = {}
    kv_cache: KVCacheInfo = KVCacheInfo()
    adapters: list[AdapterInfo] = []
    speculation: SpeculationInfo | None = None
    """Set if the load has a draft."""
    weight_bytes: int = 0
    """Of the weights in memory, measured."""
    kv_token_bytes: int = 0
    """KV cache of one more token; 0: not known."""


class LadderStats(Value, frozen=True):
    """How a worker keeps within its memory limit. All but `level` and `holding` are counters."""

    level: str = "off"
    """calm, soft or hard: the line that is reached; off: there is no limit."""
    holding: bool = False
    """New requests wait until memory is back."""
    clears: int = 0
    drops: int = 0
    waits: int = 0
    fails: int = 0
    refusals: int = 0
    """Prompts that did not fit."""


class WorkerStats(Value, frozen=True):
    """One sample of a live worker. Counters only ever grow within one incarnation."""

    running: int = 0
    queued: int = 0
    steps: int = 0
    requests_started: int = 0
    requests_done: int = 0
    requests_failed: int = 0
    requests_cancelled: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prefill_tokens_per_second: float = 0.0
    decode_tokens_per_second: float = 0.0
    last_token_age_s: float | None = None
    oldest_request_age_s: float | None = None
    engine: str = ""
    phase: str = "idle"
    """What the executor does now: idle, importing, loading, prefill, decode or closing."""
    memory: Memory = Memory()
    frames_unknown: int = 0
    frames_refused: int = 0
    cache: CacheStats = CacheStats()
    speculation: SpeculationStats | None = None
    """Set if the load has a draft."""
    ladder: LadderStats = LadderStats()


class ModelStatus(Value, frozen=True):
    """One model as the orchestrator sees it: a line of `bulkhead ps`."""

    name: str
    state: str
    model: str = ""
    pid: int | None = None
    incarnation: int = 0
    engine: str = ""
    in_flight: int = 0
    restarts: int = 0
    uptime_s: float = 0.0
    footprint: int = 0
    last_exit: str = ""
    """Plain words on how the last process ended, empty while none has."""
    next_retry_s: float | None = None
    info: WorkerInfo | None = None
    stats: WorkerStats | None = None
    crashes: int = 0
    recycles: int = 0
    """Times that the worker was replaced on purpose."""
    requests_total: int = 0
    requests_resumed: int = 0
    stats_age_s: float | None = None
    problem: str = ""
    """Why the model is in BACKOFF or FAILED, or what ended the last worker."""
    health: str = ""
    """fine, suspect (late heartbeat), suspended (stopped by a signal) or stalled."""
    log_tail: list[str] = []
    """Last lines of the worker's output, in BACKOFF and FAILED."""


class PlaceInfo(Value, frozen=True):
    """One model in the ledger of the memory budget. Bytes, and seconds."""

    name: str
    phase: str
    """`waiting`, `loading`, `resident` or `leaving`; all but the first hold their share."""
    share: int = 0
    """What it holds of the budget: the cap of its worker."""
    predicted: int = 0
    """What it was predicted to take, before it was loaded."""
    peak: int = 0
    """The most that its worker was seen to take."""
    pinned: bool = False
    busy: bool = False
    idle_s: float | None = None
    waiting_s: float | None = None
    group: str = ""


class PlacementInfo(Value, frozen=True):
    """The memory budget: who holds what, and the last decisions, oldest first. 0: no such bound."""

    budget: int = 0
    held: int = 0
    max_loaded: int = 0
    host_free: int = 0
    pressure: str = ""
    """Of the host: `normal`, `warn` or `critical`; `off` or `unsupported` where nobody looks."""
    places: list[PlaceInfo] = []
    next_eviction: str = ""
    """The model that would make room next. Empty: none may."""
    decisions: list[str] = []
    groups: dict[str, int] = {}
