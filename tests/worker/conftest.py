"""The engine that many tests share, with a driver for each of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from .test_engine import Driver, shared_engine


@pytest.fixture
def drive() -> Iterator[Driver]:
    driver = Driver(shared_engine())
    yield driver
    for name in driver.tokens:
        driver.drop(name)
    assert not driver.engine.busy


@pytest.fixture(scope="module")
def pairs() -> Iterator[Any]:
    """Engines by architecture and draft settings, closed at the end."""
    from tests.support.speculation import open_pair

    opened: dict[Any, Any] = {}

    def get(architecture: str = "qwen3", **draft: Any) -> Any:
        key = (architecture, *sorted(draft.items()))
        if key not in opened:
            opened[key] = open_pair(architecture, **draft)
        return opened[key]

    yield get
    for engine in opened.values():
        assert not engine.busy
        engine.close()
