"""The engine that many tests share, with a driver for each of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .test_engine import Driver, shared_engine


@pytest.fixture
def drive() -> Iterator[Driver]:
    driver = Driver(shared_engine())
    yield driver
    for name in driver.tokens:
        driver.drop(name)
    assert not driver.engine.busy
