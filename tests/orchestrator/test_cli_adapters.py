"""The `bulkhead` command and adapters, against a scripted daemon."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from mlx_bulkhead.orchestrator.cli.app import run
from mlx_bulkhead.protocol.commands import AddAdapter, DropAdapter, Generate, Load
from mlx_bulkhead.protocol.events import AdaptersReply, Failed, Loaded
from mlx_bulkhead.protocol.exit_codes import CliExit
from mlx_bulkhead.protocol.values import AdapterInfo, ModelStatus, WorkerInfo

from tests.support.fake_daemon import FakeDaemon, answer_with

ADAPTERS = [AdapterInfo("d", "dora", 8, 4, 2**21, default=True), AdapterInfo("legal", "lora", 4, 28, 2**20)]


@pytest.fixture
def daemon(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    monkeypatch.setenv("BULKHEAD_RUN_DIR", str(short_tmp))
    with FakeDaemon(short_tmp) as fake:
        fake.models = [ModelStatus(name="a", state="READY", info=WorkerInfo(adapters=ADAPTERS))]
        yield fake


def test_add_drop_and_list(daemon: FakeDaemon, capfd: pytest.CaptureFixture[str]) -> None:
    for command in (AddAdapter, DropAdapter):
        daemon.answers[command] = lambda r: r.reply(AdaptersReply("a", ADAPTERS))
    assert run(["adapter", "add", "a", "legal", "/adapters/legal"]) == 0
    assert run(["adapter", "drop", "a", "old"]) == run(["adapter", "list", "a"]) == 0
    out, err = capfd.readouterr()
    assert err.splitlines() == ["a: adapter legal added, lora of rank 4, 1 MiB", "a: adapter old dropped"]
    assert [line.split() for line in out.splitlines()] == [
        ["ADAPTER", "KIND", "RANK", "LAYERS", "MEMORY", "NOTE"],
        ["d", "dora", "8", "4", "2", "MiB", "default"],
        ["legal", "lora", "4", "28", "1", "MiB"],
    ]
    assert daemon.expect(AddAdapter).message == AddAdapter("a", "legal", "/adapters/legal")
    assert daemon.expect(DropAdapter).message == DropAdapter("a", "old")


def test_what_is_refused(daemon: FakeDaemon, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["adapter", "list", "b"]) == CliExit.UNKNOWN_MODEL
    daemon.answers[AddAdapter] = lambda r: r.reply(Failed("load_failed", "adapter 'x': no"))
    assert run(["adapter", "add", "a", "x", "/x"]) == CliExit.LOAD_FAILED
    daemon.answers[DropAdapter] = lambda r: r.reply(Failed("bad_request", "adapter 'x' serves a live request"))
    assert run(["adapter", "drop", "a", "x"]) == CliExit.USAGE
    assert run(["load", "a", "-m", "x/y", "--adapter", "x"]) == CliExit.USAGE
    assert capfd.readouterr().err.splitlines() == [
        "error: no model 'b'; known are a",
        "error: adapter 'x': no",
        "error: adapter 'x' serves a live request",
        "error: --adapter wants NAME=PATH, got 'x'",
    ]


def test_of_a_load_and_of_a_run(daemon: FakeDaemon) -> None:
    daemon.answers[Load] = lambda r: r.reply(Loaded("a", WorkerInfo()))
    more = ["--adapter", "x=/x", "--adapter", "y=/y", "--default-adapter", "y"]
    assert run(["load", "a", "-m", "x/y", *more]) == 0
    assert daemon.expect(Load).message == Load("a", "x/y", adapters={"x": "/x", "y": "/y"}, adapter="y")
    daemon.answers[Generate] = answer_with("Hi")
    assert run(["run", "a", "hello", "--adapter", "x"]) == 0
    message = daemon.expect(Generate).message
    assert isinstance(message, Generate)
    assert message.adapter == "x"
