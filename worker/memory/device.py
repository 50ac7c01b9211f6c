"""What MLX's memory limits can do on this platform: the one seam for Metal, CUDA and CPU. Executor thread only.

Setters return the value before, as MLX's do. 0 from a repeated call means that the platform has no such limit.
"""

from __future__ import annotations

from typing import Any, Protocol

import mlx.core as mx

from ...protocol.values import Memory
from .footprint import footprint, give_back


class Device(Protocol):
    """One platform."""

    backend: str
    """`metal`, `cuda` or `cpu`."""
    enforced_by: str
    """Who sees to the memory limit there."""

    def recommended(self) -> int:
        """Bytes that the system recommends to use at most; 0: it does not say."""
        ...

    def set_memory(self, size: int) -> int: ...
    def set_wired(self, size: int) -> int: ...
    def set_cache(self, size: int) -> int: ...

    def settle(self, *streams: Any) -> None:
        """Wait for what is in flight."""
        ...

    def clear(self) -> None:
        """Give freed memory back to the system."""
        ...


class MLXDevice:
    """MLX as it is installed. CPUs and CUDA have no wired limit."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        # Only Metal holds to the limit. Elsewhere MLX frees its cache first and then goes over it: the worker's own
        # ladder acts, and the orchestrator from outside.
        self.enforced_by = "metal" if backend == "metal" else "worker"

    def recommended(self) -> int:
        if self.backend != "metal":
            return 0
        return int(mx.device_info().get("max_recommended_working_set_size", 0))

    def set_memory(self, size: int) -> int:
        return int(mx.set_memory_limit(size))

    def set_wired(self, size: int) -> int:
        return int(mx.set_wired_limit(size)) if self.backend == "metal" else 0

    def set_cache(self, size: int) -> int:
        return int(mx.set_cache_limit(size))

    def settle(self, *streams: Any) -> None:
        for stream in streams:
            mx.synchronize(stream)

    def clear(self) -> None:
        mx.clear_cache()
        give_back()


def this_device() -> Device:
    """Where the default device of this process computes."""
    if mx.default_device().type != mx.DeviceType.gpu:
        return MLXDevice("cpu")
    return MLXDevice("metal" if mx.metal.is_available() else "cuda")


def measure() -> Memory:
    """MLX's allocator and the whole process, now."""
    return Memory(
        mlx_active=mx.get_active_memory(),
        mlx_cache=mx.get_cache_memory(),
        mlx_peak=mx.get_peak_memory(),
        footprint=footprint(),
    )
