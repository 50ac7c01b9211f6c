"""Owns the checks of caps and footprint on this machine, and of the caps of other platforms through their seam."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from mlx_bulkhead.worker.memory.caps import apply_caps, backend
from mlx_bulkhead.worker.memory.device import measure
from mlx_bulkhead.worker.memory.footprint import footprint, give_back

GIB = 2**30


class Platform:
    """Metal or CUDA as the seam sees it; all that was asked of it is written down."""

    enforced_by = "somebody"

    def __init__(self, backend: str = "metal", recommended: int = 100 * GIB) -> None:
        self.backend = backend
        self.size = recommended
        self.now = {"memory": 150 * GIB, "wired": 0, "cache": 150 * GIB}
        self.settled: list[Any] = []
        self.cleared = 0

    def recommended(self) -> int:
        return self.size

    def _set(self, name: str, size: int) -> int:
        before, self.now[name] = self.now[name], size
        return before

    def set_memory(self, size: int) -> int:
        return self._set("memory", size)

    def set_wired(self, size: int) -> int:
        return self._set("wired", size)

    def set_cache(self, size: int) -> int:
        return self._set("cache", size)

    def settle(self, *streams: Any) -> None:
        self.settled += streams

    def clear(self) -> None:
        self.cleared += 1


@pytest.fixture
def limits() -> Iterator[None]:
    import mlx.core as mx

    memory = mx.get_memory_limit()
    cache = mx.set_cache_limit(GIB)
    mx.set_cache_limit(cache)
    yield
    mx.set_memory_limit(memory)
    mx.set_cache_limit(cache)


def test_no_limit_sets_nothing_on_a_cpu(limits: None) -> None:
    import mlx.core as mx

    if backend() != "cpu":
        pytest.skip("the default device is a GPU")
    before = mx.get_memory_limit()
    caps = apply_caps(None)
    assert (caps.backend, caps.memory, caps.wired, caps.cache, caps.enforced_by) == ("cpu", 0, 0, 0, "")
    assert mx.get_memory_limit() == before
    caps.reassert()
    caps.release()


def test_a_limit_is_set_read_back_and_lowered(limits: None) -> None:
    import mlx.core as mx

    if backend() != "cpu":
        pytest.skip("the default device is a GPU")
    before = mx.get_memory_limit()
    caps = apply_caps(4 * GIB)
    assert caps.memory == mx.get_memory_limit() == 4 * GIB
    assert caps.enforced_by == "worker"
    assert caps.cache == GIB
    assert caps.unsupported == ("wired",)
    caps.reassert()
    caps.release()
    assert mx.get_memory_limit() == before
    assert mx.set_cache_limit(1) != GIB


@pytest.mark.parametrize(
    ("limit", "memory", "wired"),
    [
        (None, int(100 * GIB * 0.85), int(100 * GIB * 0.85)),
        (8 * GIB, 8 * GIB, 8 * GIB),
        (120 * GIB, 120 * GIB, 100 * GIB),
    ],
)
def test_metal_caps(limit: int | None, memory: int, wired: int) -> None:
    metal = Platform()
    caps = apply_caps(limit, metal)
    assert (caps.memory, caps.wired, caps.cache) == (memory, wired, memory // 4)
    assert metal.now == {"memory": memory, "wired": wired, "cache": memory // 4}
    assert caps.unsupported == ()


def test_the_wired_limit_is_put_back_when_nothing_is_in_flight() -> None:
    metal = Platform()
    caps = apply_caps(8 * GIB, metal)
    metal.set_wired(100 * GIB)  # as the library does
    caps.reassert("a stream")
    assert metal.now["wired"] == 8 * GIB
    assert metal.settled == ["a stream"]


def test_release_wires_nothing_and_puts_the_rest_back() -> None:
    metal = Platform()
    before = dict(metal.now)
    caps = apply_caps(8 * GIB, metal)
    caps.release()
    assert metal.now == before
    assert metal.cleared == 1


def test_a_release_that_fails_only_warns(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Platform):
        def clear(self) -> None:
            raise RuntimeError("no device")

    apply_caps(8 * GIB, Broken()).release()
    assert "no device" in caplog.text


def test_what_a_platform_lacks_is_said() -> None:
    class Bare(Platform):
        def _set(self, name: str, size: int) -> int:
            return 0

    caps = apply_caps(8 * GIB, Bare("cuda", recommended=0))
    assert (caps.backend, caps.memory, caps.wired, caps.cache) == ("cuda", 8 * GIB, 0, 0)
    assert caps.unsupported == ("memory", "wired", "cache")
    assert apply_caps(None, Platform("cuda", recommended=0)).memory == 0


def test_footprint_grows_with_what_is_used() -> None:
    before = footprint()
    held = b"x" * (512 * 2**20)  # far more than what a collection could give back meanwhile
    assert footprint() - before > 128 * 2**20
    assert len(held) == 512 * 2**20
    give_back()


def test_a_sample_has_all_figures() -> None:
    import mlx.core as mx

    held = mx.zeros((1024, 1024))
    mx.eval(held)
    sample = measure()
    assert sample.mlx_active >= 4 * 2**20
    assert sample.mlx_peak >= sample.mlx_active
    assert sample.footprint > 2**20
