"""Every number that bounds a message. One table, so that errors and docs can quote it."""

from __future__ import annotations

from typing import Final

MIB: Final = 1024 * 1024

MAX_FRAME_BYTES: Final = 64 * MIB
"""Largest body of one frame; sockets drop a peer that sends more."""

MAX_NAME_CHARS: Final = 256
MAX_PATH_CHARS: Final = 4096
MAX_ADAPTERS: Final = 64
"""Of a model."""
MAX_MESSAGES: Final = 10_000
MAX_PROMPT_TOKENS: Final = 4 * MIB
"""Ids that `tokens` may hold; the context limit of the model cuts first."""

MAX_STOP_STRINGS: Final = 64
MAX_STOP_CHARS: Final = 1024
MAX_LOGIT_BIAS: Final = 4096
MAX_TOKENS: Final = 2**31 - 1
"""Ceiling of `max_tokens` and of a token id; the context limit and the vocabulary of the model cut first."""

MAX_TOP_LOGPROBS: Final = 20
MAX_XTC_THRESHOLD: Final = 0.5
MAX_FORMAT_BYTES: Final = 128 * 1024
"""Of a schema (as JSON), a pattern, a grammar, or all choices together."""
MAX_SEED: Final = 2**63 - 1
MAX_TEMPERATURE: Final = 100.0
MAX_PENALTY: Final = 100.0
MAX_BIAS: Final = 1000.0
MAX_STREAM_INTERVAL: Final = 4096
MAX_DEADLINE_S: Final = 7 * 24 * 3600.0
MAX_AGE_S: Final = 365 * 24 * 3600.0
"""Ceiling of `stall_budget_s` and `recycle_age_s`."""
MAX_GRACE_S: Final = 24 * 3600.0

DEFAULT_MAX_TOKENS: Final = 512
DEFAULT_TEMPERATURE: Final = 0.0
MAX_REPETITION_WINDOW: Final = 65_536
MIN_REPETITION_PENALTY: Final = 0.01
"""Penalties multiply logits in float32; far smaller ones would make nonsense of them."""

DEFAULT_REPETITION_WINDOW: Final = 64
"""Tokens that the repetition penalty looks back over, prompt included."""

DEFAULT_IMAGES: Final = 16
MAX_IMAGES: Final = 1024
DEFAULT_IMAGE_BYTES: Final = 20 * MIB
DEFAULT_IMAGE_PIXELS: Final = 50_000_000
MAX_IMAGE_PIXELS: Final = 10**9
MIN_IMAGE_SIDE: Final = 28
MAX_IMAGE_SIDE: Final = 65_536
MAX_IMAGE_DIRS: Final = 64
MAX_URL_CHARS: Final = 4096

SOCKET_PATH_BYTES: Final = 100
"""Unix socket paths stay under this (macOS allows 103 bytes, Linux 107)."""

MEMORY_STEPS: Final = ("guard", "clear", "drop", "wait", "fail")
"""What a worker does to keep within its memory limit, each of which can be turned off."""
LEAST_MEMORY_SHARE: Final = 0.05
"""Floor of `memory_soft` and `memory_hard`."""
