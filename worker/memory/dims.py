"""Reads from a model what the prefill guard's estimate needs. Reads attributes; no arithmetic on arrays.

Heads come from the configuration, kinds of layers from fresh caches, and bytes a token, where they can be seen, from
caches that a token went through: models with layers of several widths are charged as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

from .prefill_guard import Dims, Group

_NESTED: Final = ("text_config", "language_config", "llm_config")
_LAYERS: Final = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
_HEADS: Final = ("num_attention_heads", "n_heads", "n_head")
_KV_HEADS: Final = ("num_key_value_heads", "n_kv_heads", "num_kv_heads")
_HIDDEN: Final = ("hidden_size", "n_embd", "dim")
_STATES: Final = ("ArraysCache", "MambaCache")


def read_dims(model: Any, caches: Sequence[Any], filled: Sequence[Any] = (), *, fused: bool = True) -> Dims | None:
    """The dimensions of a model; None when they are not known, and then nothing is estimated.

    Args:
        caches: fresh ones, a list a layer.
        filled: the same after some token, if there are such.
        fused: whether its attention may run in fused kernels.
    """
    config = _config(model)
    layers, heads, kv_heads = _number(config, _LAYERS), _number(config, _HEADS), _number(config, _KV_HEADS)
    head_dim, hidden = _number(config, ("head_dim",)), _number(config, _HIDDEN)
    if not head_dim and heads:
        head_dim = hidden // heads
    if not (layers and kv_heads and head_dim):
        return None
    wide = _act_bytes(config, filled)
    rank, rope = _number(config, ("kv_lora_rank",)), _number(config, ("qk_rope_head_dim",))
    # Multi-head latent attention keeps one compressed vector and one rotary key a token.
    token_bytes = (rank + rope) * wide if rank else kv_heads * head_dim * wide * 2
    return Dims(
        heads=heads or kv_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        act_bytes=wide,
        groups=_groups(caches, filled, layers, token_bytes),
        state_bytes=sum(_nbytes(leaf) for leaf in _leaves(filled) if _is_state(leaf)),
        fused=fused,
    )


def _config(model: Any) -> Any:
    """The configuration of the part that generates text."""
    config = getattr(model, "config", None) or getattr(model, "args", None)
    for name in _NESTED:
        nested = _get(config, name)
        if nested is not None and _number(nested, _LAYERS):
            return nested
    return config


def _groups(caches: Sequence[Any], filled: Sequence[Any], layers: int, token_bytes: float) -> tuple[Group, ...]:
    kinds: Counter[tuple[int, float]] = Counter()
    seen = list(_leaves(filled))
    fresh = list(_leaves(caches))
    some = False
    for index, leaf in enumerate(fresh):
        used = seen[index] if len(seen) == len(fresh) else leaf
        if _is_state(leaf):
            some = True
            continue
        window = getattr(leaf, "max_size", None)
        if isinstance(window, int) and window > 0 and hasattr(leaf, "keep"):
            kinds[window, _token_bytes(used) or token_bytes] += 1
        elif hasattr(leaf, "update_and_fetch"):
            kinds[0, _token_bytes(used) or token_bytes] += 1
    if not kinds and not some:
        return (Group(layers, 0, token_bytes),)
    return tuple(Group(count, window, size) for (window, size), count in sorted(kinds.items()))


def _leaves(caches: Sequence[Any]) -> Iterator[Any]:
    for cache in caches:
        parts = getattr(cache, "caches", None)
        if parts is None:
            yield cache
        else:
            yield from _leaves(parts)


def _is_state(leaf: Any) -> bool:
    return any(kind.__name__ in _STATES for kind in type(leaf).__mro__)


def _token_bytes(leaf: Any) -> float:
    """Bytes of a token in a cache that holds some; 0 when it cannot be seen."""
    total = 0.0
    for part in (getattr(leaf, "keys", None), getattr(leaf, "values", None)):
        for array in part if isinstance(part, (tuple, list)) else [part]:
            if array is None or len(array.shape) != 4:
                return 0.0
            total += array.shape[1] * array.shape[3] * array.dtype.size
    return total


def _nbytes(leaf: Any) -> int:
    return sum(int(part.nbytes) for part in getattr(leaf, "cache", ()) if part is not None)


def _act_bytes(config: Any, filled: Sequence[Any]) -> int:
    """2, or 4 for a model that computes in float32, as its caches or else its configuration say."""
    for leaf in _leaves(filled):
        keys = getattr(leaf, "keys", None)
        if isinstance(keys, (tuple, list)) and len(keys) > 1:
            keys = keys[1]  # the scales of a quantised cache
        if keys is not None and not isinstance(keys, (tuple, list)):
            return 4 if keys.dtype.size >= 4 else 2
    named = str(_get(config, "dtype") or _get(config, "torch_dtype") or "")
    return 4 if named.endswith("float32") else 2


def _number(config: Any, names: Sequence[str]) -> int:
    for name in names:
        value = _get(config, name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0


def _get(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, dict) else getattr(config, name, None)
