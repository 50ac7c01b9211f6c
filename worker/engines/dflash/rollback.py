"""Takes a recurrent state back to the tokens that were kept, exactly.

The library does this with a tape of its Metal kernel. Elsewhere its tape is computed from the state before the block
for all of its tokens, which is right for the first of them only. So there the input of each layer is noted, and the
model's own layer reads the kept part again, from the state before the block. Its output is never computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from dflash_mlx.recurrent_rollback_cache import RecurrentRollbackCache
from mlx_lm.models.cache import ArraysCache

_SEEN: Final = "_bulkhead_seen"


def noting(hooked: Callable[..., Any]) -> Callable[..., Any]:
    """The library's version of a recurrent layer's `__call__`, with a note of what it read."""

    def call(self: Any, inputs: Any, mask: Any = None, cache: Any = None) -> Any:
        if isinstance(cache, RecurrentRollbackCache) and cache._armed:
            setattr(cache, _SEEN, (self, inputs))
        return hooked(self, inputs, mask=mask, cache=cache)

    return call


def take_back(caches: list[Any], kept: int, own_call: Callable[[Any], Callable[..., Any]]) -> None:
    """Leave the states after the first `kept` tokens of the block. Caches without a note are left to the library."""
    for cache in caches:
        if not isinstance(cache, RecurrentRollbackCache) or (seen := getattr(cache, _SEEN, None)) is None:
            continue
        delattr(cache, _SEEN)
        layer, inputs = seen
        before = cache._snapshot
        if before is None or kept >= inputs.shape[1]:
            continue
        plain = ArraysCache(size=len(cache.cache))
        plain.cache = list(before)
        own_call(layer)(layer, inputs[:, :kept], mask=None, cache=plain)
        cache.cache = list(plain.cache)
        cache.clear_transients()  # the library then has nothing to take back
