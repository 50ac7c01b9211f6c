"""The prompt cache as the engine uses it: memory first, then disk, and what to keep of a row."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from ...protocol.commands import Load
from ...protocol.values import CacheStats
from .coverage import HEADER, checkpoints, is_plain, layout
from .disk_tier import DiskTier
from .identity import default_folder, model_key
from .prompt_cache import PromptCache, copied, pack

LEAST_PREFILL: Final = 256
"""A prompt with so much to compute goes to disk before its answer is there: a crash may come first."""

DEFAULT_SHARE: Final = 0.15
"""Share of the memory limit that prefixes may take."""

DEFAULT_BYTES: Final = 2 * 1024**3
"""The same without a memory limit."""

CLOSE_S: Final = 1.0
"""For writing the rest when the model is unloaded: less than the orchestrator waits."""

_log = logging.getLogger(__name__)


class PrefixStore:
    """Both tiers of one model. Executor thread only."""

    def __init__(self, memory: PromptCache, disk: DiskTier | None, *, plain: bool, faults: int = 0) -> None:
        self._memory = memory
        self._disk = disk
        self._plain = plain
        self._faults = faults

    def fetch(self, salt: str, ids: Sequence[int]) -> tuple[list[Any] | None, int]:
        """A cache of one's own over the first tokens of a prompt, and how many these are; never all of them."""
        prompt = pack(ids)
        entry, saved = self._memory.best(salt, prompt)
        if self._disk is not None:
            name, more = self._disk.best(salt, prompt)
            if name is not None and more > saved and (read := self._disk.read(name)) is not None:
                cache, tokens = read
                kept = self._memory.put(salt, ids_of(tokens), cache, copy=False)
                if kept is None:  # too large for the memory tier: this row has it alone
                    self._memory.hits += 1
                    self._memory.tokens_reused += more
                    return (copied(cache, more) if is_plain(cache) else cache), more
                entry, saved = kept, more
        if entry is None:
            self._memory.misses += 1
            return None, 0
        return self._memory.take(entry, saved), saved

    def marks(self, start: int, total: int) -> list[tuple[int, bool]]:
        """Where the prefill of a prompt should stop for `keep`, and whether that is for the disk too.

        Caches that can be cut back need no stop: what is kept at the end of the row has it all.
        """
        if not self._plain:
            return [(position, position == total - 1 - HEADER) for position in checkpoints(start, total)]
        if self._disk is not None and total - 1 - start >= LEAST_PREFILL:
            return [(total - 1, True)]
        return []

    def keep(self, salt: str, ids: Sequence[int], cache: Sequence[Any] | None, *, copy: bool, durable: bool) -> None:
        """Keep what a row has computed.

        Args:
            ids: the tokens that are in its cache.
            copy: the row goes on with the cache.
            durable: also on disk.
        """
        if not cache or not ids:
            return
        entry = self._memory.put(salt, ids, cache, copy=copy)
        if entry is not None and durable and self._disk is not None:
            self._disk.offer(entry)

    def tend(self, *, busy: bool = False) -> bool:
        """Do a little of what waits for the disk; gives whether there is more."""
        return self._disk is not None and self._disk.tend(late_only=busy)

    def __len__(self) -> int:
        return len(self._memory)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self._memory.nbytes

    def drop_oldest(self) -> None:
        """Let the prefix in memory go that was used longest ago. On disk it stays."""
        self._memory.drop_oldest()

    def stats(self) -> CacheStats:
        """Counts of both tiers."""
        stats, disk = self._memory.stats(), self._disk
        if disk is None:
            return msgspec.structs.replace(stats, disk_errors=self._faults)
        entries, size, hits, errors = disk.stats()
        return msgspec.structs.replace(
            stats, disk_entries=entries, disk_bytes=size, disk_hits=hits, disk_errors=errors
        )

    def close(self) -> None:
        """Write what is left, and let everything go."""
        disk, self._disk = self._disk, None  # several engines may share a store
        if disk is not None:
            disk.close(CLOSE_S)
        self._memory.clear()


def ids_of(packed: bytes) -> Sequence[int]:
    """The ids in packed tokens."""
    return memoryview(packed).cast("I")


def make_store(
    load: Load,
    memory_limit: int,
    directory: Path,
    versions: Mapping[str, str],
    make: Callable[[], list[Any]],
    filled: Sequence[Any],
) -> PrefixStore | None:
    """The store that a load asks for; None when it asks for none.

    Args:
        memory_limit: bytes in force for this worker; 0: none.
        make: fresh caches of the model.
        filled: such caches after some token.
    """
    limit = load.cache_bytes
    if limit is None:
        limit = int(memory_limit * DEFAULT_SHARE) if memory_limit else DEFAULT_BYTES
    if load.cache_entries == 0 or limit == 0:
        return None
    disk: DiskTier | None = None
    faults = 0
    if load.cache_disk_bytes:
        folder = Path(load.cache_dir) if load.cache_dir is not None else default_folder()
        try:
            wanted = layout(filled)
            disk = DiskTier(folder, model_key(directory, versions, wanted), load.cache_disk_bytes, make, wanted)
        except Exception as error:
            faults = 1
            _log.warning("prefixes are kept in memory only: %s: %s", type(error).__name__, error)
    return PrefixStore(PromptCache(load.cache_entries, limit), disk, plain=is_plain(make()), faults=faults)
