"""Owns the table of prefill chunks."""

from __future__ import annotations

import pytest
from mlx_bulkhead.worker.engines.schedule import MIN_CHUNK, chunk_size, smooth


@pytest.mark.parametrize(
    ("seconds_per_token", "prompts", "decoding", "decode_seconds", "chunk"),
    [
        (None, 1, False, 0.0, 256),  # nothing measured yet
        (None, 8, False, 0.0, 32),
        (None, 1, True, 0.003, 32),
        (0.001, 1, True, 0.003, 40),  # 40 ms of prefill beside running streams
        (0.001, 1, False, 0.0, 150),  # 150 ms while nothing decodes
        (0.0005, 2, True, 0.003, 40),  # prompts share the time
        (0.000125, 1, True, 0.003, 320),
        (0.00001, 1, True, 0.003, 512),  # ceilings
        (0.00001, 1, False, 0.0, 2048),
        (0.01, 1, True, 0.003, MIN_CHUNK),  # and floor
        (0.01, 8, False, 0.0, MIN_CHUNK),
        (0.001, 1, True, 0.1, 100),  # where decoding is slow, prefill gets as much time as it
        (0.0, 1, True, 0.0, 512),
    ],
)
def test_chunks(
    seconds_per_token: float | None, prompts: int, decoding: bool, decode_seconds: float, chunk: int
) -> None:
    assert chunk_size(seconds_per_token, prompts=prompts, decoding=decoding, decode_seconds=decode_seconds) == chunk


@pytest.mark.parametrize("decoding", [True, False])
@pytest.mark.parametrize(("fixed", "per_token"), [(0.0, 0.0005), (0.01, 0.0002), (0.02, 0.0001)])
def test_chunks_approach_the_time_wanted(decoding: bool, fixed: float, per_token: float) -> None:
    """A device with a cost for each chunk besides that for each token, as all have."""
    cost, seconds = None, 0.0
    for _ in range(12):
        chunk = chunk_size(cost, prompts=1, decoding=decoding, decode_seconds=0.0)
        seconds = fixed + per_token * chunk
        cost = smooth(cost, seconds / chunk)
    assert seconds == pytest.approx(0.04 if decoding else 0.15, rel=0.1)


def test_one_slow_step_does_not_shrink_the_chunks_much() -> None:
    assert smooth(0.001, 0.1) == pytest.approx(0.0015)
    assert smooth(None, 0.1) == 0.1
