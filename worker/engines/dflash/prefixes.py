"""Kept prefixes of DFlash: the library's store in memory and on disk, of this project's own making.

The library reads the state of a KV cache as keys and values without spare room. Since mlx-lm 0.32 it has three parts,
with room; the builder here shows it the view that it expects. Executor thread only.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dflash_mlx.cache.codecs import PrefixSnapshotBuilder
from dflash_mlx.cache.fingerprints import DFlashPrefixKey
from dflash_mlx.cache.manager import RuntimeCacheManager
from dflash_mlx.cache.prefix_l1 import DFlashPrefixCache
from dflash_mlx.cache.prefix_l2 import DFlashPrefixL2Cache
from dflash_mlx.cache.snapshot_service import SnapshotService
from dflash_mlx.cache.store import PrefixSnapshotStore
from dflash_mlx.server.prefix_cache_flow import compute_request_stable_prefix_len
from mlx_lm.models.cache import KVCache

from ....protocol.values import CacheStats
from .pair import LONGEST_SNAPSHOT, Pair

_ERRORS = ("write_errors", "materialize_errors", "load_errors", "schema_rejects")
_log = logging.getLogger(__name__)


class Found(NamedTuple):
    """What a row starts with, and what takes its own prefixes."""

    snapshot: Any
    service: Any
    stable: int
    """Tokens up to which the prompt will be the same in the next turn."""


class Prefixes:
    """Both tiers of one pair."""

    def __init__(self, pair: Pair, tokenizer: Any, identity: str, folder: Path | None) -> None:
        """`identity`: of the target, its files and the libraries. `folder`: for the disk, None without."""
        settings = pair.settings
        self._pair = pair
        self._tokenizer = tokenizer
        self._identity = identity
        self._faults = 0
        memory = DFlashPrefixCache(
            max_entries=settings.cache_entries,
            max_bytes=settings.cache_bytes,
            max_snapshot_tokens=LONGEST_SNAPSHOT,
            cross_kind_prune=False,  # else the same prompt again finds nothing once it has an answer
        )
        self._disk = self._open(folder, settings.disk_bytes) if folder is not None else None
        self._memory = memory
        self._manager = RuntimeCacheManager(PrefixSnapshotStore(l1=memory, l2=self._disk))

    def _open(self, folder: Path, most: int) -> DFlashPrefixL2Cache | None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.chmod(folder, 0o700)
            return DFlashPrefixL2Cache(cache_dir=folder, max_bytes=most)
        except OSError as error:
            _log.warning("prefixes stay in memory: %s", error)
            self._faults += 1
            return None

    def find(self, ids: list[int], tenant: str) -> Found | None:
        """The longest kept prefix of a prompt; None when the store fails."""
        key = self._key(tenant)
        try:
            stable = compute_request_stable_prefix_len(ids, tokenizer=self._tokenizer)
            snapshot = self._manager.lookup(ids[:stable], key).snapshot
        except Exception:
            _log.exception("a kept prefix cannot be used; the prompt is computed")
            self._faults += 1
            return None
        settings = self._pair.settings
        builder = _Builder(
            key=key, draft_model=self._pair.draft, draft_sink_size=settings.sink, draft_window_size=settings.window
        )
        return Found(snapshot, SnapshotService(cache_manager=self._manager, builder=builder), stable)

    def __len__(self) -> int:
        return int(self._memory.stats()["current_entries"])

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return int(self._memory.stats()["current_bytes"])

    def drop_oldest(self) -> None:
        """Let go of what is in memory: the library knows no way to drop one alone."""
        self._memory.clear()

    def stats(self) -> CacheStats:
        """Counts of both tiers, in the words of the prompt cache."""
        stats = self._manager.stats()
        disk = stats.get("l2") or {}
        errors = sum(int(disk.get(name, 0)) for name in _ERRORS)
        return CacheStats(
            entries=int(stats["current_entries"]),
            bytes=int(stats["current_bytes"]),
            hits=int(stats["exact_hits"]) + int(stats["prefix_hits"]),
            misses=int(stats["misses"]),
            tokens_reused=int(stats["prefill_tokens_saved"]),
            evictions=int(stats["evictions"]),
            disk_entries=int(disk.get("writes", 0)),
            disk_bytes=int(disk.get("current_bytes", 0)),
            disk_hits=int(stats["l2_hits"]),
            disk_errors=errors + self._faults,
        )

    def close(self) -> None:
        """Write what is left, and let everything go."""
        self._manager.shutdown()

    def _key(self, tenant: str) -> DFlashPrefixKey:
        settings, files = self._pair.settings, self._pair.files
        owner = hashlib.sha256(tenant.encode(errors="surrogatepass")).hexdigest()
        return DFlashPrefixKey(
            target_model_id=self._identity,
            draft_model_id=f"{files.path}.{self._pair.dtype}.{self._pair.quant}",
            capture_layer_ids=tuple(int(layer) for layer in self._pair.draft.target_layer_ids),
            draft_sink_size=settings.sink,
            draft_window_size=settings.window,
            template_hash=owner,  # a prompt is found by its tokens, so the template has no say
            prompt_policy_hash=hashlib.sha256(b"").hexdigest(),
        )


class _View(KVCache):
    """A plain KV cache as the library reads one."""

    keys: Any
    values: Any

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.keys[..., : self.offset, :], self.values[..., : self.offset, :]


class _Builder(PrefixSnapshotBuilder):
    def build(self, *, target_cache: Sequence[Any], **rest: Any) -> Any:
        return super().build(target_cache=[_view(layer) for layer in target_cache], **rest)


def _view(layer: Any) -> Any:
    if type(layer) is not KVCache or layer.keys is None:
        return layer
    view = _View()
    view.keys, view.values, view.offset = layer.keys, layer.values, layer.offset
    return view
