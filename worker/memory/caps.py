"""Sets MLX's memory caps and says which are in force: one seam for Metal, CUDA and CPU.

The library sets the wired limit to the whole recommended size whenever it makes a generator, so `reassert`
puts ours back. Executor thread only.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from ...protocol.values import Memory
from .footprint import footprint

DEFAULT_SHARE = 0.85
"""Share of what the device recommends that one process takes when no limit was given."""

CACHE_SHARE = 0.25
"""Share of the limit that freed buffers may keep, so that an idle worker gives memory back."""


@dataclass(frozen=True, slots=True)
class Caps:
    """Caps in force, bytes; 0 where there is none."""

    backend: str
    memory: int = 0
    wired: int = 0
    cache: int = 0
    enforced_by: str = ""

    def reassert(self) -> None:
        """Put the wired limit back after the library has changed it."""
        if self.wired:
            mx.set_wired_limit(self.wired)


def backend() -> str:
    """`metal`, `cuda` or `cpu`: where the default device of this process computes."""
    if mx.default_device().type != mx.DeviceType.gpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def apply_caps(memory_limit: int | None) -> Caps:
    """Set the caps for a limit in bytes, or the platform's default for None. To be called before the load."""
    kind = backend()
    if kind == "metal":
        return _metal(memory_limit)
    if memory_limit is None:
        return Caps(kind)
    # MLX takes the limit as a guideline here: it frees its cache first. The orchestrator watches the process.
    mx.set_memory_limit(memory_limit)
    cache = int(memory_limit * CACHE_SHARE)
    mx.set_cache_limit(cache)
    return Caps(kind, mx.get_memory_limit(), 0, cache, "orchestrator")


def _metal(memory_limit: int | None) -> Caps:
    recommended = int(mx.device_info().get("max_recommended_working_set_size", 0))
    limit = memory_limit if memory_limit is not None else int(recommended * DEFAULT_SHARE)
    if limit <= 0:
        return Caps("metal")
    wired = min(recommended, limit)
    cache = int(limit * CACHE_SHARE)
    mx.set_memory_limit(limit)
    mx.set_wired_limit(wired)
    mx.set_cache_limit(cache)
    return Caps("metal", mx.get_memory_limit(), wired, cache, "metal")


def measure() -> Memory:
    """MLX's allocator and the whole process, now."""
    return Memory(
        mlx_active=mx.get_active_memory(),
        mlx_cache=mx.get_cache_memory(),
        mlx_peak=mx.get_peak_memory(),
        footprint=footprint(),
    )
