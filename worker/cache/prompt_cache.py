"""Owns the prefixes in memory: which entry serves a prompt, what is kept, what goes.

Not mlx-lm's `LRUPromptCache`: that answers an exact hit with nothing left to process, cuts windows back by
their logical length, and keeps a dictionary for each token. Entries are few and large here, so a prompt is
compared with each of them, as bytes.
"""

from __future__ import annotations

import copy
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import mlx.core as mx

from ...protocol.values import CacheStats
from .coverage import covered, is_plain, leaves, size_of

LEAST_TOKENS: Final = 8
"""A shorter prefix is computed sooner than it is found."""

_ROOM: Final = 8
"""Room of up to this part of the tokens is left in an entry: to remove it would be a copy for little."""

_WIDTH: Final = array("I").itemsize


def pack(ids: Sequence[int]) -> bytes:
    """Token ids as bytes, which compare fast."""
    return array("I", ids).tobytes()


def count(packed: bytes) -> int:
    """How many tokens there are in packed ids."""
    return len(packed) // _WIDTH


def shared(a: bytes, b: bytes) -> int:
    """Tokens that two packed sequences begin with alike."""
    low, high = 0, min(count(a), count(b))
    if a[: high * _WIDTH] == b[: high * _WIDTH]:
        return high
    while low + 1 < high:  # alike up to `low`, not up to `high`
        middle = (low + high) // 2
        if a[low * _WIDTH : middle * _WIDTH] == b[low * _WIDTH : middle * _WIDTH]:
            low = middle
        else:
            high = middle
    return low


def usable(entry: bytes, plain: bool, prompt: bytes) -> int:
    """Tokens that an entry saves a prompt. At least the prompt's last one is always left to process."""
    alike = min(shared(entry, prompt), count(prompt) - 1)
    if alike < LEAST_TOKENS or (not plain and alike < count(entry)):
        return 0
    return alike


@dataclass(slots=True, eq=False)
class Entry:
    """A cache and the tokens that it stands after. Nobody changes the cache: users get copies."""

    salt: str
    tokens: bytes
    cache: Sequence[Any] = field(repr=False)
    nbytes: int
    plain: bool


class PromptCache:
    """Entries in order of their last use, bounded in number and bytes."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: OrderedDict[tuple[str, bytes], Entry] = OrderedDict()
        self._bytes = 0
        self.hits = self.misses = self.tokens_reused = self.evictions = 0

    def __len__(self) -> int:
        return len(self._entries)

    def best(self, salt: str, prompt: bytes) -> tuple[Entry | None, int]:
        """The entry that saves a prompt most, and how many tokens; the smallest such entry."""
        best: Entry | None = None
        most = 0
        for entry in self._entries.values():
            if entry.salt != salt:
                continue
            saved = usable(entry.tokens, entry.plain, prompt)
            if saved > most or (saved == most and best is not None and entry.nbytes < best.nbytes):
                best, most = entry, saved
        return best, most

    def take(self, entry: Entry, tokens: int) -> list[Any]:
        """A copy of an entry's cache, cut to so many tokens."""
        self._entries.move_to_end((entry.salt, entry.tokens))
        self.hits += 1
        self.tokens_reused += tokens
        return copied(entry.cache, tokens if entry.plain else None)

    def put(self, salt: str, ids: Sequence[int], cache: Sequence[Any], *, copy: bool) -> Entry | None:
        """Keep a cache under the tokens that it covers.

        Args:
            ids: the tokens that went through it, at least.
            copy: its user goes on with it; else it belongs to the entry from now on.

        Returns:
            The new entry; None when nothing was kept, or something as good is there already.
        """
        position = covered(cache, len(ids))
        if position is None or position < LEAST_TOKENS:
            return None
        tokens, plain = pack(ids[:position]), is_plain(cache)
        if known := self._holder(salt, tokens):
            self._entries.move_to_end((known.salt, known.tokens))
            return None
        cache = copied(cache, None) if copy else list(cache)
        _fold(cache)
        size = size_of(cache)
        if size is None or size > self._max_bytes:
            return None  # to make room for it would empty the cache for nothing
        mx.async_eval([leaf.state for leaf in leaves(cache)])  # else it would hold on to what it is cut from
        entry = Entry(salt, tokens, cache, size, plain)
        if plain:
            self._drop_prefixes(entry)
        self._entries[salt, tokens] = entry
        self._bytes += size
        while len(self._entries) > self._max_entries or self._bytes > self._max_bytes:
            self.drop_oldest()
        return entry

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return self._bytes

    def drop_oldest(self) -> None:
        """Let the entry go that was used longest ago, if there is any."""
        if self._entries:
            self._drop(next(iter(self._entries.values())))
            self.evictions += 1

    def clear(self) -> None:
        """Let all entries go."""
        self._entries.clear()
        self._bytes = 0

    def stats(self) -> CacheStats:
        """Counts of this tier."""
        return CacheStats(
            entries=len(self._entries),
            bytes=self._bytes,
            hits=self.hits,
            misses=self.misses,
            tokens_reused=self.tokens_reused,
            evictions=self.evictions,
        )

    def _holder(self, salt: str, tokens: bytes) -> Entry | None:
        """An entry that can do all that one under these tokens could."""
        exact = self._entries.get((salt, tokens))
        if exact is not None:
            return exact
        for entry in self._entries.values():
            if entry.salt == salt and entry.plain and entry.tokens.startswith(tokens):
                return entry
        return None

    def _drop_prefixes(self, longer: Entry) -> None:
        """A plain cache can be cut to any of its prefixes: they need no entries of their own."""
        for entry in list(self._entries.values()):
            if entry.salt == longer.salt and longer.tokens.startswith(entry.tokens):
                self._drop(entry)

    def _drop(self, entry: Entry) -> None:
        del self._entries[entry.salt, entry.tokens]
        self._bytes -= entry.nbytes


def _fold(cache: Sequence[Any]) -> None:
    """Give back the room for later tokens, where that is much of a cache: a user's copy makes room anew."""
    for leaf in leaves(cache):
        if type(leaf).__name__ == "KVCache" and leaf.keys.shape[-2] - leaf.offset > leaf.offset // _ROOM:
            leaf.keys = mx.contiguous(leaf.keys[..., : leaf.offset, :])
            leaf.values = mx.contiguous(leaf.values[..., : leaf.offset, :])


def copied(cache: Sequence[Any], tokens: int | None) -> list[Any]:
    """A copy that its user may change; the data is shared until then. `tokens` cuts a plain cache."""
    if tokens is None:
        return copy.deepcopy(list(cache))
    made = copy.deepcopy(list(cache))
    for leaf in leaves(made):
        leaf.keys, leaf.values = leaf.keys[..., :tokens, :], leaf.values[..., :tokens, :]
        leaf.offset = tokens
    return made
