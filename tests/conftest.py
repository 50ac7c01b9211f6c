"""Fixtures for all tests: short temporary directories, tiny models, and the search for leaks."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support import leaks

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for a model hub, workers included

settings.register_profile("default", deadline=None, print_blob=True)  # two busy cores: no time limits an example
settings.register_profile("ci", parent=settings.get_profile("default"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so it is in a background job; children would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "leaks_ok(reason): the test may leave processes or descriptors behind")


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A temporary directory whose path is short, since those of Unix sockets are limited. Removed afterwards.

    Fails the test if a process still holds a run directory in it.
    """
    path = Path(tempfile.mkdtemp(prefix="bh-", dir="/tmp")).resolve()
    yield path
    left = leaks.find_run_dirs(path)
    shutil.rmtree(path, ignore_errors=True)
    if left:
        pytest.fail("the test left held:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a process, a thread or a descriptor behind.

    What session fixtures hold is there before. A test that must leave something says
    `@pytest.mark.leaks_ok("why")`.
    """
    before = leaks.take()
    yield
    if request.node.get_closest_marker("leaks_ok"):
        return
    left = leaks.find(before)
    if left:
        leaks.end_children(before)
        pytest.fail("the test left behind:\n  " + "\n  ".join(left), pytrace=False)


def _make_tiny(factory: pytest.TempPathFactory, architecture: str) -> Path:
    from tests.support.tiny_models import make_tiny

    return make_tiny(factory.mktemp(f"tiny-{architecture}"), architecture=architecture)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny random qwen3 model, made once a session."""
    return _make_tiny(tmp_path_factory, "qwen3")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny random llama model, made once a session."""
    return _make_tiny(tmp_path_factory, "llama")
