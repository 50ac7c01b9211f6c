"""Decides whether a prompt fits into memory before anything is computed for it. Pure.

A prompt is charged as a whole, with no credit for a kept prefix: taking one over allocates its KV anew. What it may
generate is not charged: `max_tokens` is a bound, not a plan, and the ladder watches what really grows.

The estimate is that of omlx's prefill guard; `Dims` has where each figure comes from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

Verdict = Literal["admit", "wait", "refuse"]

LEAST_CHUNK: Final = 128
"""Where memory is tight, prompts go through in chunks as short as this rather than not at all."""

FUSED_LONG: Final = frozenset({64, 72, 80, 96, 128})
"""Head dimensions for which Metal's fused attention takes more than `FUSED_QUERIES` queries."""
FUSED_SHORT: Final = frozenset({64, 96, 128, 256})
"""The same for fewer queries."""
FUSED_QUERIES: Final = 8
FUSED_PAIRS: Final = 32
"""Queries times query heads a KV head, at most, in the fused kernel for few queries."""


class Group(NamedTuple):
    """Layers whose KV caches are alike."""

    layers: int
    window: int
    """Tokens that each of them holds at most; 0: all."""
    token_bytes: float
    """Keys and values of one token in one layer."""


class Tile(NamedTuple):
    """A kernel that computes attention in tiles of keys, for one head dimension, from a length on."""

    floor: int = 8192
    size: int = 1024


@dataclass(frozen=True, slots=True)
class Dims:
    """What the estimate needs of a model."""

    heads: int
    kv_heads: int
    head_dim: int
    act_bytes: int
    groups: tuple[Group, ...]
    state_bytes: int = 0
    """Recurrent states of one row, measured."""
    fused: bool = True
    """Whether there are fused attention kernels: not on CPUs, and not for a quantised KV cache."""
    tiles: Mapping[int, Tile] = field(default_factory=dict[int, Tile])
    """Tiled kernels by head dimension. MLX has none of its own."""

    @property
    def token_bytes(self) -> float:
        """Of one more token in all layers that keep every token."""
        return sum(group.layers * group.token_bytes for group in self.groups if not group.window)

    def held(self, tokens: int) -> int:
        """Of a row with so many tokens, all layers."""
        kept = ((min(tokens, group.window) if group.window else tokens, group) for group in self.groups)
        return math.ceil(sum(count * group.layers * group.token_bytes for count, group in kept)) + self.state_bytes


class Prefill(NamedTuple):
    """What is left of a prompt: `new` tokens to process, after `done`."""

    new: int
    done: int = 0


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes that a prefill needs on top of what is in use."""

    kv: int = 0
    attention: int = 0
    state: int = 0

    @property
    def peak(self) -> int:
        return self.kv + self.attention + self.state


def is_fused(dims: Dims, queries: int, length: int) -> bool:
    """Whether attention of so many queries over so many keys runs in a fused kernel."""
    if not dims.fused or length < queries:
        return False
    if queries > FUSED_QUERIES:
        return dims.head_dim in FUSED_LONG
    pairs = queries * max(1, dims.heads // dims.kv_heads)
    return dims.head_dim in FUSED_SHORT and pairs <= FUSED_PAIRS


def estimate(dims: Dims, prefill: Prefill, chunk: int) -> Estimate:
    """What a prefill in chunks of at most `chunk` tokens needs."""
    new, done = prefill.new, max(prefill.done, 0)
    if new <= 0:
        return Estimate()
    queries, length = min(chunk, new), new + done
    kv = sum(
        (min(new, group.window + queries - 1) if group.window else new) * group.layers * group.token_bytes
        for group in dims.groups
    )
    attention = dims.heads * queries * dims.head_dim * 4
    if not is_fused(dims, queries, length):
        tile = dims.tiles.get(dims.head_dim)
        keys = min(tile.size, length) if tile is not None and length >= tile.floor else length
        attention += dims.heads * queries * keys * dims.act_bytes
    return Estimate(math.ceil(kv), attention, 0 if done else dims.state_bytes)


def demand(dims: Dims, prefills: Iterable[Prefill], chunk: int) -> int:
    """What several prefills need together: all of their KV, and attention of one, as they take turns."""
    kept = most = 0
    for prefill in prefills:
        need = estimate(dims, prefill, chunk)
        kept += need.kv + need.state
        most = max(most, need.attention)
    return kept + most


def fitting_chunk(dims: Dims, prefills: Sequence[Prefill], chunk: int, room: int) -> int:
    """The longest chunk, at most `chunk`, with which they need no more than `room`; the least one if none does."""
    while chunk > LEAST_CHUNK and demand(dims, prefills, chunk) > room:
        chunk = max(LEAST_CHUNK, chunk // 2)
    return chunk


def superfluous(dims: Dims, prefills: Sequence[Prefill], chunk: int, room: int) -> int:
    """Which of several prefills must go, as together they need more than `room`.

    The newest without which the others fit; if none alone is enough, the one that needs most.
    """
    for index in reversed(range(len(prefills))):
        if demand(dims, [*prefills[:index], *prefills[index + 1 :]], chunk) <= room:
            return index
    return max(range(len(prefills)), key=lambda index: estimate(dims, prefills[index], chunk).peak)


def judge(current: int, need: int, hard: int, *, freed: int = 0, alone: int = 0) -> Verdict:
    """What becomes of a prompt.

    Args:
        current: bytes in use.
        need: `demand` of it and of the prompts in prefill.
        hard: bytes that must not be exceeded; reaching them is fine.
        freed: what comes back when the rows that run have ended; 0: it cannot wait for them.
        alone: the prompt's own peak.
    """
    if current + need <= hard:
        return "admit"
    if freed and max(0, current - freed) + alone <= hard:
        return "wait"
    return "refuse"
