"""`bulkhead plan`, and the memory budget in `ps` and `stats`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlx_bulkhead.orchestrator import host_memory
from mlx_bulkhead.orchestrator.cli.app import run
from mlx_bulkhead.protocol.commands import Stats
from mlx_bulkhead.protocol.events import StatsReply
from mlx_bulkhead.protocol.exit_codes import CliExit
from mlx_bulkhead.protocol.values import PlaceInfo, PlacementInfo

from tests.support.fake_daemon import FakeDaemon

from .test_prediction import QWEN3_8B, write

GIB = 2**30
BUDGET = PlacementInfo(
    budget=16 * GIB,
    held=9 * GIB,
    host_free=3 * GIB,
    pressure="warn",
    places=[
        PlaceInfo("a", "resident", 6 * GIB, 5 * GIB, 4 * GIB, pinned=True, idle_s=65.0),
        PlaceInfo("b", "loading", 3 * GIB, busy=True, group="big"),
        PlaceInfo("c", "waiting", 9 * GIB, waiting_s=4.0),
    ],
    next_eviction="a",
    groups={"big": 2},
    decisions=[f"{n}.0 s ago: something" for n in range(9, 0, -1)],
)


@pytest.fixture(autouse=True)
def where(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BULKHEAD_RUN_DIR", str(short_tmp))


@pytest.fixture
def daemon(short_tmp: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(short_tmp) as fake:
        fake.answers[Stats] = lambda r: r.reply(StatsReply(placement=BUDGET))
        yield fake


HEAD = (
    "memory budget: 9.0 GiB of 16.0 GiB held, 2 loaded, 1 waiting, 1 of 2 of group big, host 3.0 GiB free, "
    "pressure warn, next to make room: a"
)


def test_ps_has_a_line_on_the_budget(daemon: FakeDaemon, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["ps"]) == 0
    assert capfd.readouterr().out.splitlines()[0] == HEAD


def test_stats_have_the_ledger_and_the_last_decisions(daemon: FakeDaemon, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["stats"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert HEAD in lines
    assert "a     resident  6.0 GiB  5.0 GiB    4.0 GiB  1m05s  pinned" in lines
    assert any(line.split() == ["c", "waiting", "9.0", "GiB", "-", "-", "-", "for", "4s"] for line in lines)
    assert lines[-1] == "  1.0 s ago: something"
    assert "  9.0 s ago: something" not in lines
    assert run(["stats", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["placement"]["decisions"][0] == "9.0 s ago: something"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "small", {"a": 2**20})
    write(tmp_path / "large", {"a": 2**26})
    (tmp_path / "large" / "config.json").write_text(json.dumps(QWEN3_8B))
    return tmp_path


def test_plan_says_what_fits_together(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    models = [str(folder / "large"), str(folder / "small")]
    assert run(["plan", *models, "--budget", str(8 * GIB)]) == 0
    head, large, small, last = capfd.readouterr().out.splitlines()
    assert head.split()[:3] == ["MODEL", "PROCESS", "WEIGHTS"]
    assert "64 MiB" in large
    assert "16384 tokens" in large
    assert "guessed" in small
    assert last == "budget: 8.0 GiB (--budget)"
    assert run(["plan", *models, "--budget", str(GIB), "--json"]) == CliExit.FAILED
    told = json.loads(capfd.readouterr().out)
    assert [one["fits"] for one in told["models"]] == [False, True]
    assert run(["plan", models[0], "--budget", str(GIB), "--context", "256"]) == 0


def test_plan_reads_a_configuration(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = folder / "bulkhead.toml"
    file.write_text(
        '[memory]\nbudget = 1073741824\n[models.a]\nmodel = "./large"\ncontext_limit = 256\n[models.b]\nmodel = "o/b"'
    )
    assert run(["plan", "--config", str(file)]) == CliExit.FAILED
    out = capfd.readouterr().out
    assert "1024 tokens" in out  # four requests of 256
    assert "o/b is neither a directory here nor a downloaded model" in out
    assert "budget: 1.0 GiB (memory.budget of the file)" in out


def test_plan_asks_a_running_daemon_for_its_budget(
    daemon: FakeDaemon, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", str(folder / "small")]) == 0
    out, err = capfd.readouterr()
    assert "budget: 16.0 GiB (memory.budget of the running daemon)" in out
    assert "holds 9.0 GiB of it now" in err


def test_plan_without_a_budget_takes_the_machine(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "usable", lambda: 5 * GIB)
    assert run(["plan", str(folder / "small")]) == 0
    assert "budget: 5.0 GiB (no memory.budget is set; " in capfd.readouterr().out


@pytest.mark.parametrize("arguments", [["plan"], ["plan", "x", "--budget", "0"], ["plan", "x", "--context", "0"]])
def test_bad_arguments(arguments: list[str]) -> None:
    assert run(arguments) == CliExit.USAGE
