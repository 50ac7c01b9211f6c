"""Decides which KV cache a model gets: its own, a quantised one, or one of bounded size. Makes them.

A quantised cache is quantised from its first token, so that the text does not depend on how the prompt was cut into
chunks. Neither kind can be merged into a batch by mlx-lm: such a model serves its rows one after the other.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache

from ...protocol.commands import Load
from ...protocol.errors import ErrorCode
from ...protocol.values import KVCacheInfo
from .base import LoadProblem
from .reasons import short

_STATES = ("ArraysCache", "MambaCache")
"""Recurrent states: small, of fixed size, and not quantised."""
KEPT = 4
"""Tokens at the start that a cache of bounded size never drops, as mlx-lm has it."""


class KVCaches:
    """Makes the caches of a loaded model, one list a row."""

    def __init__(self, model: Any, load: Load) -> None:
        """Raises `LoadProblem` for what the model's caches cannot do."""
        self._model = model
        self._bits, self._group = load.kv_bits, load.kv_group_size
        self._max_size = load.max_kv_size
        plain = make_prompt_cache(model)
        kinds = [type(layer).__name__ for layer in plain]
        quantised = 0
        if self._max_size is not None and any(type(layer) is not KVCache for layer in plain):
            raise _refused("max_kv_size", f"this model has caches of its own: {_counts(kinds)}")
        if self._bits is not None:
            quantised = sum(type(layer) is KVCache for layer in plain)
            if others := [kind for kind in kinds if kind != "KVCache" and kind not in _STATES]:
                raise _refused("kv_bits", f"mlx-lm cannot quantise {_counts(others)}")
            if not quantised:
                raise _refused("kv_bits", f"this model has nothing to quantise, only {_counts(kinds)}")
            self._try()
        self.info = KVCacheInfo(
            bits=self._bits or 0,
            group_size=self._group if self._bits else 0,
            layers=len(kinds),
            quantised_layers=quantised,
            max_tokens=self._max_size or 0,
        )

    def make(self) -> list[Any]:
        """Empty caches, one a layer."""
        if self._max_size is not None:
            return [RotatingKVCache(max_size=self._max_size, keep=KEPT) for _ in self._model.layers]
        caches = make_prompt_cache(self._model)
        if self._bits is None:
            return caches
        return [
            QuantizedKVCache(group_size=self._group, bits=self._bits) if type(layer) is KVCache else layer
            for layer in caches
        ]

    def _try(self) -> None:
        """Two tokens, one after the other, really go through."""
        try:
            cache = self.make()
            for token in (0, 0):
                mx.eval(self._model(mx.array([[token]]), cache=cache))
        except Exception as error:
            what = f"{self._bits} bits in groups of {self._group}: {short(error)}"
            raise _refused("kv_bits", f"its caches do not take {what}") from error


def _refused(option: str, why: str) -> LoadProblem:
    return LoadProblem(f"{option} cannot be used with this model: {why}; load it without", ErrorCode.UNSUPPORTED)


def _counts(kinds: list[str]) -> str:
    return ", ".join(f"{kinds.count(kind)} x {kind}" for kind in sorted(set(kinds)))
