"""Long names and long temporary directories, with real workers: sockets have short paths whatever they are called."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mlx_bulkhead import Client, Orchestrator
from tests.integration.conftest import start_daemon, stop_daemon

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def long_tmp(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = short_tmp / ("t" * (90 - len(str(short_tmp)) - 1))
    path.mkdir()
    assert len(str(path)) == 90
    monkeypatch.setenv("TMPDIR", str(path))
    return path


NAMES = ("m" * 199 + "1", "m" * 199 + "2")


async def test_two_names_of_200_characters_with_a_tmpdir_of_90(long_tmp: Path, tiny_model: Path) -> None:
    async with Orchestrator() as host:
        await asyncio.gather(*(host.load(name, tiny_model) for name in NAMES))
        one, two = await asyncio.gather(*(host.complete(n, prompt="Hello", max_tokens=8) for n in NAMES))
        assert one.text == two.text
        assert one.usage.completion_tokens == 8


def test_a_daemon_whose_run_directory_has_90_characters(long_tmp: Path, tiny_model: Path) -> None:
    daemon = start_daemon(long_tmp / "run")
    try:
        with Client(long_tmp / "run") as client:
            client.load(NAMES[0], tiny_model)
            assert client.complete(NAMES[0], prompt="Hello", max_tokens=8).usage.completion_tokens == 8
    finally:
        assert stop_daemon(daemon) == 0
