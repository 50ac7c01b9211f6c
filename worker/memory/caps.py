"""Sets MLX's memory caps and says which are in force. Executor thread only.

The library sets the wired limit to the whole recommended size whenever it makes a generator, so `reassert` puts ours
back. `device.py` has what each platform can do.
"""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass
from typing import Any

from .device import Device, this_device

DEFAULT_SHARE = 0.85
"""Share of what the device recommends that one process takes when no limit was given."""

CACHE_SHARE = 0.25
"""Share of the limit that freed buffers may keep, so that an idle worker gives memory back."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Caps:
    """Caps in force, bytes, as they were read back; 0 where there is none."""

    backend: str
    memory: int = 0
    wired: int = 0
    cache: int = 0
    enforced_by: str = ""
    unsupported: tuple[str, ...] = ()
    """Caps that this platform does not have: `memory`, `wired`, `cache`."""
    device: Device | None = None
    before: tuple[int, int] = (0, 0)
    """Memory and cache limit as they were found."""

    def reassert(self, *streams: Any) -> None:
        """Put the wired limit back after the library has changed it.

        streams: those that may have work in flight, during which MLX wants the limit left alone.
        """
        if self.device is not None and self.wired:
            self.device.settle(*streams)
            self.device.set_wired(self.wired)

    def release(self) -> None:
        """The model is gone: wire nothing, and put the other limits back. Failures are logged."""
        if self.device is None:
            return
        memory, cache = self.before
        try:
            gc.collect()
            self.device.clear()
            if self.wired:
                self.device.set_wired(0)
            self.device.set_memory(memory)
            self.device.set_cache(cache)
        except Exception as error:
            _log.warning("the memory caps could not be lowered: %s: %s", type(error).__name__, error)


def backend() -> str:
    """`metal`, `cuda` or `cpu`: where the default device of this process computes."""
    return this_device().backend


def apply_caps(memory_limit: int | None, device: Device | None = None) -> Caps:
    """Set the caps for a limit in bytes, or the platform's default for None. To be called before the load."""
    device = device or this_device()
    recommended = device.recommended()
    limit = memory_limit if memory_limit is not None else int(recommended * DEFAULT_SHARE)
    if limit <= 0:
        return Caps(device.backend)
    # Each is set twice: the setters give what was there before, and no other call tells.
    found = device.set_memory(limit), device.set_cache(int(limit * CACHE_SHARE))
    memory, cache = device.set_memory(limit), device.set_cache(int(limit * CACHE_SHARE))
    wired = 0
    if recommended:
        device.set_wired(min(recommended, limit))
        wired = device.set_wired(min(recommended, limit))
    in_force = {"memory": memory, "wired": wired, "cache": cache}
    return Caps(
        device.backend,
        # The limit counts even where MLX keeps none: the ladder and the orchestrator go by it.
        limit,
        wired,
        cache,
        device.enforced_by,
        tuple(name for name, size in in_force.items() if not size),
        device,
        found,
    )
