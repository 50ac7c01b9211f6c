"""Owns the checks of caps and footprint on this machine, and of the caps of Metal by what is asked of MLX."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

GIB = 2**30


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
    from mlx_bulkhead.worker.memory.caps import apply_caps, backend

    if backend() != "cpu":
        pytest.skip("the default device is a GPU")
    before = mx.get_memory_limit()
    caps = apply_caps(None)
    assert (caps.backend, caps.memory, caps.wired, caps.cache, caps.enforced_by) == ("cpu", 0, 0, 0, "")
    assert mx.get_memory_limit() == before


def test_a_limit_is_set_and_read_back(limits: None) -> None:
    import mlx.core as mx
    from mlx_bulkhead.worker.memory.caps import apply_caps, backend

    if backend() != "cpu":
        pytest.skip("the default device is a GPU")
    caps = apply_caps(4 * GIB)
    assert caps.memory == mx.get_memory_limit() == 4 * GIB
    assert caps.enforced_by == "orchestrator"
    assert caps.cache == GIB
    caps.reassert()


@pytest.mark.parametrize(
    ("limit", "memory", "wired"),
    [
        (None, int(100 * GIB * 0.85), int(100 * GIB * 0.85)),
        (8 * GIB, 8 * GIB, 8 * GIB),
        (120 * GIB, 120 * GIB, 100 * GIB),
    ],
)
def test_metal_caps(monkeypatch: pytest.MonkeyPatch, limit: int | None, memory: int, wired: int) -> None:
    """Metal is not here, so MLX's setters are recorded instead of called."""
    from mlx_bulkhead.worker.memory import caps as module

    calls: dict[str, list[int]] = {"set_memory_limit": [], "set_wired_limit": [], "set_cache_limit": []}

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            if name in calls:
                return calls[name].append
            if name == "device_info":
                return lambda: {"max_recommended_working_set_size": 100 * GIB}
            assert name == "get_memory_limit"
            return lambda: calls["set_memory_limit"][-1]

    monkeypatch.setattr(module, "mx", Recorder())
    monkeypatch.setattr(module, "backend", lambda: "metal")
    caps = module.apply_caps(limit)
    assert (caps.memory, caps.wired, caps.enforced_by) == (memory, wired, "metal")
    assert calls["set_wired_limit"] == [wired]
    caps.reassert()
    assert calls["set_wired_limit"] == [wired, wired]
    assert calls["set_cache_limit"] == [caps.cache]


def test_footprint_grows_with_what_is_used() -> None:
    from mlx_bulkhead.worker.memory.footprint import footprint

    before = footprint()
    held = b"x" * (512 * 2**20)  # far more than what a collection could give back meanwhile
    assert footprint() - before > 128 * 2**20
    assert len(held) == 512 * 2**20


def test_a_sample_has_all_figures() -> None:
    import mlx.core as mx
    from mlx_bulkhead.worker.memory.caps import measure

    held = mx.zeros((1024, 1024))
    mx.eval(held)
    sample = measure()
    assert sample.mlx_active >= 4 * 2**20
    assert sample.mlx_peak >= sample.mlx_active
    assert sample.footprint > 2**20
