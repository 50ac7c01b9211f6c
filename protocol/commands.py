"""Commands: client → orchestrator, and (those marked so) orchestrator → worker.

The request id of a command is in the frame's head, not in its body.
"""

from __future__ import annotations

from typing import Any

import msgspec

from . import limits
from .values import CancelReason, ChatMessage, Draft, OnCrash, Part, ResponseFormat, Speculative


class Command(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type", tag=0):
    """Base of all commands."""


class Load(Command, tag=0x01, frozen=True):
    """Load a model into a worker of its own. Forwarded to the worker.

    Answer: `LoadProgress`*, then `Loaded` or `LoadFailed`. What is already loaded answers `Loaded` at once.
    """

    name: str
    model: str
    """A directory, or a Hugging Face id. A path that exists never touches the network."""
    context_limit: int | None = None
    """Tokens of prompt and answer together. None: the model's own limit."""
    memory_limit: int | None = None
    """Bytes. None: the platform's default."""
    trust_remote_code: bool = False
    chat_template: str | None = None
    """Replaces the checkpoint's template."""
    max_running: int = 32
    """Rows decoded together."""
    max_queued: int = 256
    """Requests that may wait behind them."""
    env: dict[str, str] = {}
    """Environment variables of the worker process. Not forwarded in the message."""
    stall_budget_s: float = 60.0
    """Seconds without an executor step while busy after which the worker is replaced."""
    recycle_requests: int | None = None
    """Replace the worker on purpose after so many requests, without dropping a stream. None: never."""
    recycle_age_s: float | None = None
    """The same after so many seconds."""
    recycle_footprint: int | None = None
    """The same when its process takes so many bytes."""
    deterministic: bool = False
    """Decode one request at a time, for text that never depends on company."""
    cache_entries: int = 64
    """Prefixes of prompts kept in memory. 0: nothing is kept, on disk neither."""
    cache_bytes: int | None = None
    """Bytes that they may take. None: 15 % of the memory limit, 2 GiB without one. 0: as with `cache_entries`."""
    cache_disk_bytes: int = 0
    """Bytes that prefixes may take on disk, where they outlive the worker. 0: none."""
    cache_dir: str | None = None
    """Folder for them. None: the user's cache folder."""
    kv_bits: int | None = None
    """Quantise the KV cache to so many bits, from the first token. None: as the model computes."""
    kv_group_size: int = 64
    """Values that share a scale in a quantised KV cache."""
    max_kv_size: int | None = None
    """Tokens that a KV cache holds: the first 4 and the newest. None: all of them."""
    rank: int = 0
    """Of this worker in a distributed group."""
    size: int = 1
    """Of that group. More than 1 is refused: distributed models are not built yet."""
    adapters: dict[str, str] = {}
    """Name → directory of a LoRA or DoRA adapter, as mlx-lm makes them. All are loaded with the model."""
    adapter: str = ""
    """The one for requests that name none. Empty: the base model."""
    draft: Draft | None = None
    """Speculative decoding with this draft. None: plain decoding."""
    memory_soft: float = 0.85
    """Share of the memory limit from which on the worker gives memory back and starts no more requests."""
    memory_hard: float = 0.95
    """Share from which on it refuses prompts that would not fit, and fails the biggest request."""
    memory_off: list[str] = []
    """What it is not to do about memory: any of `limits.MEMORY_STEPS`."""
    max_images: int = limits.DEFAULT_IMAGES
    """Pictures of a request. 0: none."""
    max_image_bytes: int = limits.DEFAULT_IMAGE_BYTES
    """Of a picture's file."""
    max_image_pixels: int = limits.DEFAULT_IMAGE_PIXELS
    """Width times height, as the file says before it is decoded."""
    image_max_side: int | None = None
    """Shrink a picture until its longer side has so many pixels. None: the model's processor decides."""
    image_dirs: list[str] = []
    """Directories in which pictures given by path may lie. None given: no paths are taken."""
    image_urls: bool = False
    """Fetch pictures given by http or https, from public addresses only."""


class Generate(Command, tag=0x02, frozen=True):
    """Generate text. Forwarded to the worker. Exactly one of `prompt`, `tokens`, `messages`.

    Answer: `Accepted (Progress | Snapshot)* (Done | Failed)`, or `Failed` alone.
    """

    model: str
    prompt: str | None = None
    tokens: list[int] | None = None
    messages: list[ChatMessage] | None = None
    tools: list[dict[str, Any]] | None = None
    template_args: dict[str, Any] | None = None
    """Extra variables for the chat template, such as `enable_thinking`."""
    max_tokens: int | None = None
    """None: `limits.DEFAULT_MAX_TOKENS`, or what the daemon is configured with."""
    temperature: float | None = None
    """None: 0, greedy, as mlx-lm."""
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    min_p: float = 0.0
    xtc_probability: float = 0.0
    """How often, token by token, all likely candidates but the least likely of them are left out. 0: off."""
    xtc_threshold: float = 0.1
    """From which probability on a candidate is a likely one."""
    seed: int | None = None
    """None: fresh randomness for every request."""
    stop: list[str] | str | None = None
    logit_bias: dict[int, float] | None = None
    """Token id → value added to its logit."""
    repetition_penalty: float = 1.0
    repetition_window: int = 64
    presence_penalty: float = 0.0
    """Subtracted once from every token generated so far, as the OpenAI API means it."""
    frequency_penalty: float = 0.0
    """Subtracted for each time that a token was generated."""
    logprobs: bool = False
    """Give the log probability of each token, after bias and penalties, before filters and temperature."""
    top_logprobs: int = 0
    """Give so many of the likeliest tokens at each position too. Needs `logprobs`."""
    response_format: ResponseFormat | None = None
    """The form that the answer must have; after the reasoning, if there is any."""
    stream_interval: int = 1
    """Tokens a snapshot, at least."""
    deadline_s: float | None = None
    """Seconds from acceptance; then the request ends with what it has and `deadline`."""
    on_crash: OnCrash = "resume"
    detached: bool = False
    """Goes on when its client goes away; to be picked up with `Attach`."""
    resume_tokens: list[int] = []
    """Set by the orchestrator only: ids already sent to the client by an earlier incarnation."""
    resume_chars: int = 0
    """Set by the orchestrator only: characters of the content channel already sent."""
    resume_seq: int = 0
    """Set by the orchestrator only: the `seq` of the next snapshot."""
    tenant: str = ""
    """Kept prefixes are shared within a tenant only."""
    cache: bool = True
    """Use kept prefixes, and leave this prompt for later ones."""
    channels: bool = True
    """Split the answer to `messages` into content, reasoning and tool calls. False: all of it is content."""
    resume_reasoning_chars: int = 0
    """Set by the orchestrator only: characters of the reasoning channel already sent."""
    resume_tool_chars: int = 0
    """Set by the orchestrator only: characters of the tool_calls channel already sent."""
    continue_final: bool = False
    """Go on with the last message, which is the assistant's, instead of answering it. The answer is what is new."""
    adapter: str | None = None
    """Name of a loaded adapter, or `base`. None: the default of the model's load."""
    speculative: Speculative = "auto"
    """Where the load has a draft. `on`: also while speculation does not pay. `off`: plain decoding."""
    images: list[Part] = []
    """Pictures for the `image` parts of the messages that hold none, in their order. If no message has an image
    part, they go before the text of the last user message."""


class Cancel(Command, tag=0x03, frozen=True):
    """Cancel the request whose id is in the head. Forwarded. Idempotent, and never answered:
    the request itself ends with `Done` and this reason. An unknown id is a no-op."""

    reason: CancelReason = "cancelled"
    """`deadline` is set by the orchestrator only."""


class Stats(Command, tag=0x04, frozen=True):
    """Ask for statistics. Answer: `StatsReply`. `model` None: all of them."""

    model: str | None = None


class Unload(Command, tag=0x05, frozen=True):
    """Unload a model. Answer: `Unloaded`, after its process is gone. Its requests end with `unloaded`."""

    model: str


class Shutdown(Command, tag=0x06, frozen=True):
    """End the daemon, or, from the orchestrator, a worker. Answer: `Exiting`."""

    grace_s: float = 5.0
    drain: bool = False
    """Let running requests finish within the grace instead of cancelling them."""


class Models(Command, tag=0x07, frozen=True):
    """List the models. To the orchestrator only. Answer: `ModelsReply`."""


class Attach(Command, tag=0x08, frozen=True):
    """Receive the stream of a live or lately finished request, whole from its start. Orchestrator only.

    The answer comes under the head id of this command, with the grammar of `Generate`.
    """

    request: bytes
    """The 16-byte id of the request to follow."""


class Restart(Command, tag=0x09, frozen=True):
    """Replace a model's worker by a fresh one, also out of state FAILED. To the orchestrator only.

    Answer: as for `Load`.
    """

    model: str


class AddAdapter(Command, tag=0x0A, frozen=True):
    """Add an adapter to a loaded model, beside its running requests. Forwarded. Answer: `AdaptersReply`."""

    model: str
    name: str
    """For requests. The name of an adapter with the same directory and files is no mistake, and changes nothing."""
    path: str
    """Its directory."""


class DropAdapter(Command, tag=0x0B, frozen=True):
    """Drop an adapter that no request uses. Forwarded. Answer: `AdaptersReply`."""

    model: str
    name: str


AnyCommand = (
    Load | Generate | Cancel | Stats | Unload | Shutdown | Models | Attach | Restart | AddAdapter | DropAdapter
)
