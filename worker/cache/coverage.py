"""Decides which tokens a cache really covers, and how it may be used again. Pure: reads attributes, no MLX.

A cache stands at one position: after the tokens that went through it. A plain cache still has what every token
left, so it can also be cut back exactly. A window that has wrapped and a recurrent state have forgotten: they
serve only prompts that go on exactly where they stand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

STRIDE: Final = 256
"""Least distance between two checkpoints in a prompt."""

MOST_BETWEEN: Final = 4
"""Checkpoints within one prompt, at most; longer prompts have them farther apart."""

HEADER: Final = 16
"""Tokens at a prompt's end that the next turn may render in another way: the header of the answer."""


def leaves(cache: Sequence[Any]) -> Iterator[Any]:
    """The caches of all layers, out of lists of caches."""
    for layer in cache:
        parts = getattr(layer, "caches", None)
        if parts is None:
            yield layer
        else:
            yield from leaves(parts)


def is_plain(cache: Sequence[Any]) -> bool:
    """Whether a cache can be cut back to any shorter prefix, exactly."""
    return all(type(leaf).__name__ == "KVCache" for leaf in leaves(cache))


def covered(cache: Sequence[Any], tracked: int) -> int | None:
    """How many tokens a cache stands after; None when its layers do not agree or cannot be read.

    Args:
        tracked: tokens that went through it, as its user counted. More than that is never covered.
    """
    positions: set[int] = set()
    some = False
    for leaf in leaves(cache):
        some = True
        try:
            if leaf.empty():
                return None
        except Exception:  # a cache that cannot say so is not kept
            return None
        if hasattr(leaf, "offset"):
            position = _position(leaf)
            if position is None:
                return None
            positions.add(position)
        elif not _is_settled_state(leaf):
            return None
    if not some or len(positions) > 1:
        return None
    position = positions.pop() if positions else tracked
    return position if 0 < position <= tracked else None


def _position(leaf: Any) -> int | None:
    """Where a cache with an offset stands; None when what it holds does not fit that."""
    offset = leaf.offset
    if type(offset) is not int or getattr(leaf, "start_position", 0) != 0:  # of a batch, or slid
        return None
    keys = leaf.keys[0] if isinstance(leaf.keys, (tuple, list)) else leaf.keys
    held = keys.shape[-2]
    window = getattr(leaf, "max_size", None)
    if held < (offset if window is None else min(offset, window)):
        return None
    return offset


def _is_settled_state(leaf: Any) -> bool:
    """Whether a recurrent state is of one row, with all its parts, and no padding is pending."""
    parts = getattr(leaf, "cache", None)
    if not isinstance(parts, list) or any(part is None or part.shape[0] != 1 for part in parts):
        return False
    return getattr(leaf, "lengths", None) is None and getattr(leaf, "left_padding", None) is None


def size_of(cache: Sequence[Any]) -> int | None:
    """Bytes of all layers; None when a layer does not tell."""
    total = 0
    for leaf in leaves(cache):
        try:
            total += int(leaf.nbytes)
        except Exception:
            return None
    return total


def layout(cache: Sequence[Any]) -> list[list[Any]]:
    """Kinds, types and shapes of the layers, without what depends on how many tokens there are."""
    found: list[list[Any]] = []
    for leaf in leaves(cache):
        if hasattr(leaf, "cache"):
            arrays = [[str(part.dtype), list(part.shape)] for part in leaf.cache]
        else:
            arrays = [
                [str(part.dtype), [*part.shape[:-2], part.shape[-1]]]
                for pair in (leaf.keys, leaf.values)
                for part in (pair if isinstance(pair, (tuple, list)) else [pair])
            ]
        found.append([type(leaf).__name__, getattr(leaf, "max_size", None), arrays])
    return found


def checkpoints(start: int, total: int) -> list[int]:
    """Positions at which a prompt's prefill should stop for a copy, of a cache that cannot be cut back.

    In the middle for prompts that differ later, before the header of the answer for the next turn, and one
    token before the end for the same prompt again.

    Args:
        start: tokens that are there already.
        total: tokens of the prompt.
    """
    stride = STRIDE
    while (total - 1) // stride > MOST_BETWEEN:
        stride *= 2
    wanted = {*range(stride, total - 1, stride), total - 1 - HEADER, total - 1}
    return sorted(position for position in wanted if start < position < total)
