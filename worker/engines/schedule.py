"""Decides how many prompt tokens the next step may prefill. Pure.

Prefill and decode take turns on one device, so a chunk is as long as running streams may wait. Its size
follows from the measured time of earlier chunks: chunk by chunk it approaches the time wanted.
"""

from __future__ import annotations

from typing import Final

SHARED_SECONDS: Final = 0.04
"""Prefill in one step while other rows decode: about what a reader of a stream does not notice."""

ALONE_SECONDS: Final = 0.15
"""Prefill in one step while nothing decodes: how late a cancel or a newcomer may be seen."""

MIN_CHUNK: Final = 16
"""Below this a prompt would take for ever, whatever the streams."""

MAX_SHARED_CHUNK: Final = 512
MAX_ALONE_CHUNK: Final = 2048
"""The library's own chunk; larger ones need more memory and are no faster."""

FIRST_SHARED_CHUNK: Final = 32
FIRST_ALONE_CHUNK: Final = 256
"""While nothing is measured."""

_HICCUP: Final = 2.0
"""A measurement counts as at most so many times the mean before it."""

_WEIGHT: Final = 0.5
"""Of a new measurement against those before it: the cost a token grows with the context, and quickly."""


def chunk_size(
    seconds_per_token: float | None,
    *,
    prompts: int,
    decoding: bool,
    decode_seconds: float,
    most: int = MAX_ALONE_CHUNK,
) -> int:
    """Tokens that each of `prompts` rows may prefill in the next step.

    seconds_per_token: of prefill, measured, padding included; None before the first.
    decode_seconds: of one decode step. Where that is long, prefill may take as long: the streams then run at
    half speed at least, and the newcomer is not starved.
    most: tokens of all of them together for which there is memory.
    """
    if decoding:
        wanted, first, longest = max(SHARED_SECONDS, decode_seconds), FIRST_SHARED_CHUNK, MAX_SHARED_CHUNK
    else:
        wanted, first, longest = ALONE_SECONDS, FIRST_ALONE_CHUNK, MAX_ALONE_CHUNK
    budget = first if seconds_per_token is None else wanted / max(seconds_per_token, 1e-9)
    return max(MIN_CHUNK, int(min(budget, longest, most) / max(prompts, 1)))


def smooth(before: float | None, measured: float) -> float:
    """A running mean that follows quickly, but not a single hiccup of the machine."""
    if before is None:
        return measured
    return before + _WEIGHT * (min(measured, _HICCUP * before) - before)
