"""Owns the checks of the memory tier: longest prefix, cuts, tenants, bounds, copies."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import pytest
from mlx_bulkhead.worker.cache.prompt_cache import LEAST_TOKENS, PromptCache, count, pack, shared
from mlx_lm.models.cache import KVCache, RotatingKVCache

IDS = list(range(1000, 1100))
MIB = 1024 * 1024


def plain(ids: list[int]) -> list[KVCache]:
    """One layer whose keys are the ids themselves."""
    cache = KVCache()
    keys = mx.array(ids, dtype=mx.float32).reshape(1, 1, -1, 1)
    cache.update_and_fetch(keys, keys)
    return [cache]


def window(ids: list[int], size: int = 16) -> list[RotatingKVCache]:
    cache = RotatingKVCache(size)
    keys = mx.array(ids, dtype=mx.float32).reshape(1, 1, -1, 1)
    cache.update_and_fetch(keys, keys)
    return [cache]


def held(cache: Any) -> list[int]:
    keys, _ = cache[0].keys_and_values()
    return [int(key) for key in keys.reshape(-1).tolist()]


class Cache(PromptCache):
    """With the look-up in one call, as the store does it."""

    def fetch(self, ids: list[int], salt: str = "") -> tuple[Any, int]:
        entry, saved = self.best(salt, pack(ids))
        return (None, 0) if entry is None else (self.take(entry, saved), saved)

    def keep(self, ids: list[int], salt: str = "", make: Any = plain) -> bool:
        return self.put(salt, ids, make(ids), copy=False) is not None


@pytest.fixture
def cache() -> Cache:
    return Cache(8, MIB)


def test_shared_beginnings() -> None:
    choose = random.Random(1)
    for _ in range(300):
        a = [choose.randrange(2**31) for _ in range(choose.randrange(50))]
        b = a[: choose.randrange(50)] + [choose.randrange(3) for _ in range(choose.randrange(5))]
        wanted = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        assert shared(pack(a), pack(b)) == shared(pack(b), pack(a)) == wanted
    assert shared(pack([256, 1]), pack([256, 257])) == 1  # alike in their first bytes, and not the same
    assert count(pack(IDS)) == 100


def test_nothing_kept_is_a_miss(cache: Cache) -> None:
    assert cache.fetch(IDS) == (None, 0)


def test_a_prefix_serves_a_longer_prompt(cache: Cache) -> None:
    assert cache.keep(IDS[:50])
    found, saved = cache.fetch(IDS)
    assert saved == 50
    assert held(found) == IDS[:50]


def test_the_remainder_is_never_empty(cache: Cache) -> None:
    cache.keep(IDS)
    for length in (100, 60, LEAST_TOKENS + 1):
        found, saved = cache.fetch(IDS[:length])
        assert saved == length - 1
        assert held(found) == IDS[: length - 1]
        assert found[0].offset == length - 1
    assert cache.fetch(IDS[:LEAST_TOKENS]) == (None, 0)
    assert cache.fetch(IDS[:1]) == (None, 0)


def test_a_plain_entry_is_cut_where_the_prompt_differs(cache: Cache) -> None:
    cache.keep(IDS)
    found, saved = cache.fetch([*IDS[:40], 7, 8, 9])
    assert saved == 40
    assert held(found) == IDS[:40]


def test_the_longest_of_several(cache: Cache) -> None:
    cache.keep([*IDS[:30], 1, 1])
    cache.keep([*IDS[:60], 2, 2])
    cache.keep([*IDS[:45], 3, 3])
    assert cache.fetch(IDS)[1] == 60


@pytest.mark.parametrize("length", [12, 40])  # within the window, and long past it
def test_a_window_serves_only_what_goes_on_from_it(cache: Cache, length: int) -> None:
    cache.keep(IDS[:length], make=window)
    assert cache.fetch(IDS[:length]) == (None, 0)
    assert cache.fetch(IDS[: length - 1]) == (None, 0)
    assert cache.fetch([*IDS[: length - 1], 5, 6]) == (None, 0)
    found, saved = cache.fetch([*IDS[:length], 5])
    assert saved == length
    assert found[0].offset == length


def test_an_exact_hit_on_a_window_takes_the_next_shorter_checkpoint(cache: Cache) -> None:
    cache.keep(IDS[:20], make=window)
    cache.keep(IDS[:39], make=window)
    cache.keep(IDS[:40], make=window)
    assert cache.fetch(IDS[:40])[1] == 39
    assert cache.fetch(IDS[:39])[1] == 20
    assert len(cache) == 3


def test_tenants_do_not_meet(cache: Cache) -> None:
    cache.keep(IDS, salt="alice")
    assert cache.fetch(IDS, "bob") == (None, 0)
    assert cache.fetch(IDS) == (None, 0)
    assert cache.fetch(IDS, "alice")[1] == 99
    cache.keep(IDS[:50], salt="bob")  # another one's longer entry is no reason not to keep it
    assert cache.fetch(IDS, "bob")[1] == 50


def test_a_longer_plain_entry_replaces_its_prefixes(cache: Cache) -> None:
    cache.keep(IDS[:30])
    cache.keep(IDS[:60])
    assert len(cache) == 1
    assert not cache.keep(IDS[:40])
    assert len(cache) == 1
    assert cache.stats().evictions == 0


def test_users_never_change_an_entry(cache: Cache) -> None:
    cache.keep(IDS[:50])
    cache.keep([*IDS[:20], 9, 9], make=window)
    before = [held(cache.fetch(IDS)[0]), held(cache.fetch([*IDS[:20], 9, 9, 1])[0])]
    for ids in (IDS, IDS[:30], [*IDS[:20], 9, 9, 1]):
        found, _ = cache.fetch(ids)
        for _ in range(3):
            new = mx.full((1, 1, 1, 1), -1.0)
            found[0].update_and_fetch(new, new)
        mx.eval(found[0].keys)
    assert [held(cache.fetch(IDS)[0]), held(cache.fetch([*IDS[:20], 9, 9, 1])[0])] == before


def test_a_copy_does_not_follow_its_maker(cache: Cache) -> None:
    row = plain(IDS[:50])
    assert cache.put("", IDS[:50], row, copy=True)
    new = mx.full((1, 1, 1, 1), -1.0)
    row[0].update_and_fetch(new, new)
    mx.eval(row[0].keys)
    assert held(cache.fetch(IDS)[0]) == IDS[:50]


def test_an_entry_is_kept_under_what_it_covers(cache: Cache) -> None:
    assert cache.put("", IDS, plain(IDS[:70]), copy=False)
    assert cache.fetch(IDS)[1] == 70
    assert cache.put("", IDS[:20], plain(IDS[:30]), copy=False) is None
    assert cache.put("", IDS, [KVCache()], copy=False) is None
    assert cache.put("", IDS, [object()], copy=False) is None
    assert not cache.keep(IDS[: LEAST_TOKENS - 1])


def test_the_number_is_bounded_and_the_oldest_use_goes_first() -> None:
    cache = Cache(3, MIB)
    for first in (1, 2, 3):
        cache.keep([first, *IDS])
    assert cache.fetch([1, *IDS])[1] == 100
    cache.keep([4, *IDS])
    assert cache.fetch([2, *IDS]) == (None, 0)
    assert cache.fetch([1, *IDS])[1] == 100
    assert (len(cache), cache.stats().evictions) == (3, 1)


def test_bytes_are_bounded() -> None:
    size = 2 * 101 * 4  # keys and values of one float, without the room that the library makes for 256
    cache = Cache(64, 3 * size)
    for first in range(10):
        cache.keep([first, *IDS])
        assert cache.stats().bytes <= 3 * size
    assert (len(cache), cache.stats().evictions, cache.stats().bytes) == (3, 7, 3 * size)


def test_one_entry_over_the_budget_keeps_the_others() -> None:
    cache = Cache(64, 3 * 800)
    cache.keep(IDS)
    assert not cache.keep([5] * 2000)
    assert cache.fetch(IDS)[1] == 99
    assert cache.stats().evictions == 0


def test_counts(cache: Cache) -> None:
    cache.keep(IDS[:50])
    cache.fetch(IDS)
    cache.fetch(IDS[:20])
    stats = cache.stats()
    assert (stats.entries, stats.hits, stats.tokens_reused) == (1, 2, 69)
    cache.clear()
    assert cache.stats().entries == cache.stats().bytes == 0
