"""Owns the checks of what a cache covers: wrapped, slid, mismatched and unreadable ones."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_bulkhead.worker.cache.coverage import HEADER, MOST_BETWEEN, checkpoints, covered, is_plain, layout, size_of
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)


def fed(cache: Any, tokens: int, chunk: int = 100) -> Any:
    """A cache after so many tokens."""
    while tokens > 0:
        now = min(chunk, tokens)
        cache.update_and_fetch(mx.zeros((1, 2, now, 64)), mx.zeros((1, 2, now, 64)))
        tokens -= now
    return cache


def state(parts: int = 2) -> ArraysCache:
    cache = ArraysCache(parts)
    for index in range(parts):
        cache[index] = mx.zeros((1, 3, 4))
    return cache


def test_plain_layers_cover_what_went_through_them() -> None:
    cache = [fed(KVCache(), 30), fed(KVCache(), 30)]
    assert covered(cache, 30) == covered(cache, 31) == 30
    assert is_plain(cache)
    cache[0].trim(3), cache[1].trim(3)
    assert covered(cache, 30) == 27


def test_more_than_was_tracked_is_never_covered() -> None:
    assert covered([fed(KVCache(), 30)], 29) is None


def test_layers_at_different_positions_cover_nothing() -> None:
    assert covered([fed(KVCache(), 30), fed(KVCache(), 31)], 31) is None
    assert covered([fed(KVCache(), 30), fed(RotatingKVCache(64), 29)], 31) is None


def test_empty_and_half_filled_caches_cover_nothing() -> None:
    half = ArraysCache(2)
    half[0] = mx.zeros((1, 3))
    assert covered([], 5) is None
    assert covered([KVCache()], 5) is None
    assert covered([fed(KVCache(), 5), KVCache()], 5) is None
    assert covered([half], 5) is None
    assert covered([ArraysCache(2)], 5) is None


@pytest.mark.parametrize("tokens", [10, 64, 65, 300])
def test_a_window_covers_its_position_but_is_not_plain(tokens: int) -> None:
    cache = [fed(RotatingKVCache(64), tokens), fed(KVCache(), tokens)]
    assert covered(cache, tokens) == tokens
    assert not is_plain(cache)


def test_a_window_that_was_cut_by_its_logical_length_covers_nothing() -> None:
    cache = fed(RotatingKVCache(64), 300, chunk=10)
    cache.keys, cache.values = cache.keys[..., :20, :], cache.values[..., :20, :]
    assert covered([cache], 300) is None


def test_a_slid_window_covers_nothing() -> None:
    cache = fed(ChunkedKVCache(64), 60)
    assert covered([cache], 60) == 60
    fed(cache, 40)
    cache.maybe_trim_front()
    assert covered([cache], 100) is None


def test_a_recurrent_state_covers_what_was_tracked() -> None:
    assert covered([state(), fed(KVCache(), 9)], 9) == 9
    assert covered([state()], 9) == 9
    assert not is_plain([state()])
    padded = state()
    padded.prepare(lengths=[3])
    assert covered([padded], 9) is None


def test_caches_of_a_batch_and_foreign_ones_cover_nothing() -> None:
    batch = fed(BatchKVCache([0]), 9)
    assert covered([batch], 9) is None
    two = ArraysCache(1)
    two[0] = mx.zeros((2, 3))
    assert covered([two], 9) is None
    assert covered([object()], 9) is None


def test_lists_of_caches_are_looked_into() -> None:
    assert covered([CacheList(fed(KVCache(), 9), fed(KVCache(), 9))], 9) == 9
    assert covered([CacheList(fed(KVCache(), 9), fed(KVCache(), 8))], 9) is None
    assert is_plain([CacheList(KVCache(), KVCache())])
    assert not is_plain([CacheList(KVCache(), RotatingKVCache(8))])


def test_sizes() -> None:
    assert size_of([fed(KVCache(), 9), state()]) == 2 * 2 * 256 * 64 * 4 + 2 * 12 * 4
    assert size_of([object()]) is None
    assert size_of([QuantizedKVCache()]) is None  # its size cannot be read while it is empty


def test_a_layout_does_not_depend_on_the_tokens() -> None:
    def made(tokens: int) -> list[Any]:
        quantised = fed(QuantizedKVCache(group_size=64, bits=8), tokens)
        return [fed(KVCache(), tokens), fed(RotatingKVCache(64), tokens), state(), quantised]

    assert layout(made(1)) == layout(made(300))
    assert layout(made(1)) != layout([*made(1)[:2], state(3), made(1)[3]])


@pytest.mark.parametrize("total", [1, 2, 10, 17, 18, 257, 450, 2000, 100_000])
@pytest.mark.parametrize("start", [0, 300])
def test_checkpoints_are_few_and_within_the_prompt(total: int, start: int) -> None:
    found = checkpoints(start, total)
    assert found == sorted(set(found))
    assert all(start < position < total for position in found)
    assert len(found) <= MOST_BETWEEN + 2
    if total - 1 > start:
        assert found[-1] == total - 1
    if total - 1 - HEADER > start:
        assert total - 1 - HEADER in found
