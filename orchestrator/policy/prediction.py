"""What a model will take, from its dimensions, before it is loaded. Pure.

Weights and adapters are what their files hold. The KV cache is that of a working context, all running requests
together: `working_context` tokens, but no more than `ROWS` full requests take, and no less than one of them where the
load says by its `context_limit` how long it may be. `max_tokens` of requests plays no part.
"""

from __future__ import annotations

import msgspec

from ...protocol.commands import Load

PROCESS_BYTES = 100 * 2**20
"""An interpreter with its libraries, tokenizer included, and no model."""

FILL = 0.8
"""A worker's predicted use over its cap, below the soft line of 0.85. The rest is for prefixes and freed buffers."""

ROWS = 4
"""Full requests at once, and rows for which state of fixed size (recurrent layers, logits) is counted."""

FUSED_CHUNK = 2048
"""Prompt tokens in one step where attention is one kernel; the engine takes no more."""
PLAIN_CHUNK = 128
"""The same on CPUs, where chunks are cut by time and attention writes out its scores."""

KV_STEP = 256
"""Tokens by which a cache grows."""


class Dims(msgspec.Struct, frozen=True):
    """Of `config.json`. Counts of layers by what they keep for each token or row."""

    hidden: int
    inner: int
    """Width of the feed-forward part that one token sees."""
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    full_layers: int
    window_layers: int = 0
    window: int = 0
    state_bytes: int = 0
    """Of recurrent layers, for each row."""
    latent: int = 0
    """Values for each token and layer of compressed attention (MLA), in place of keys and values."""
    context: int = 0
    """Tokens; 0: the model names no limit."""
    value_bytes: int = 2
    """Of one activation or cached value."""


class Prediction(msgspec.Struct, frozen=True):
    """Bytes, by what takes them."""

    weights: int
    adapters: int = 0
    kv: int = 0
    work: int = 0
    process: int = PROCESS_BYTES
    context: int = 0
    """Tokens for which `kv` is."""
    guessed: bool = False
    """The dimensions are not known: `kv` and `work` are a share of the weights."""
    measured: bool = False
    """`process`, `weights` and `adapters` are what an earlier worker of this model was seen to take."""

    @property
    def resident(self) -> int:
        """What is there once it is loaded."""
        return self.process + self.weights + self.adapters

    @property
    def total(self) -> int:
        """What it will take at its peak."""
        return self.resident + self.kv + self.work

    @property
    def share(self) -> int:
        """The cap that gives it room for that, in whole MiB."""
        return -(-int(self.total / FILL) // 2**20) * 2**20

    def corrected(self, resident: int) -> Prediction:
        """The same with what a loaded worker was seen to take."""
        weights = max(0, resident - self.process - self.adapters)
        return msgspec.structs.replace(self, weights=weights, measured=True) if resident else self


def predict(
    load: Load, dims: Dims | None, *, weights: int, adapters: int = 0, working_context: int, fused: bool
) -> Prediction:
    """What a worker for this load will take.

    Args:
        dims: None when `config.json` does not tell; then a quarter of the weights is taken for cache and work.
        weights: bytes of all tensors, a draft model's included.
        adapters: the same of all adapters.
        working_context: tokens for a model whose load names no `context_limit`.
        fused: attention never writes out its scores (Metal, CUDA).
    """
    if dims is None:
        return Prediction(weights, adapters, kv=weights // 8, work=weights // 8, guessed=True)
    tokens = context_of(load, dims, working_context)
    kv = kv_bytes(load, dims, tokens) + (load.cache_bytes or 0)  # prefixes that were asked for by number are extra
    longest = min(tokens, _longest(load, dims) or tokens)
    return Prediction(weights, adapters, kv=kv, work=work_bytes(dims, longest, fused), context=tokens)


def context_of(load: Load, dims: Dims, working_context: int) -> int:
    """Tokens of all running requests together for which a cache is counted."""
    longest = _longest(load, dims)
    shared = min(working_context, ROWS * longest) if longest else working_context
    return max(shared, longest) if load.context_limit else shared


def _longest(load: Load, dims: Dims) -> int:
    """Tokens that one request may have; 0: nobody says."""
    return min((limit for limit in (load.context_limit, dims.context) if limit), default=0)


def kv_bytes(load: Load, dims: Dims, tokens: int) -> int:
    """Bytes of the KV cache for so many tokens, and of recurrent state."""
    if load.max_kv_size is not None:
        tokens = min(tokens, load.max_kv_size)
    tokens = -(-tokens // KV_STEP) * KV_STEP
    values = 2 * dims.kv_heads * dims.head_dim
    each = values * _kept_bytes(load, dims)
    windowed = min(tokens, ROWS * (dims.window + KV_STEP))
    if dims.latent:
        each = float(dims.latent * dims.value_bytes)
    full = dims.full_layers * tokens * each
    return int(full + dims.window_layers * windowed * values * dims.value_bytes) + ROWS * dims.state_bytes


def _kept_bytes(load: Load, dims: Dims) -> float:
    """Bytes of one cached value; a quantised one has a share in the scale and the bias of its group."""
    if load.kv_bits is None:
        return float(dims.value_bytes)
    return load.kv_bits / 8 + 2 * dims.value_bytes / load.kv_group_size


def work_bytes(dims: Dims, tokens: int, fused: bool) -> int:
    """Activations of the largest step: a chunk of a prompt of so many tokens through one layer, its attention, and
    logits."""
    chunk = min(FUSED_CHUNK if fused else PLAIN_CHUNK, max(tokens, 1))
    layer = chunk * (6 * dims.hidden + 3 * dims.inner) * dims.value_bytes
    attention = dims.heads * chunk * dims.head_dim * 4
    if not fused:
        attention += 2 * dims.heads * chunk * tokens * dims.value_bytes
    return layer + attention + ROWS * dims.vocabulary * 4 * 2
