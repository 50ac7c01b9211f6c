"""`bulkhead serve` as a process: its ready line, exit codes, signals, and the commands that need a real daemon."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from mlx_bulkhead.orchestrator.cli.app import run
from mlx_bulkhead.orchestrator.client import Client
from mlx_bulkhead.protocol.exit_codes import CliExit

CLI = [sys.executable, "-m", "mlx_bulkhead.orchestrator.cli"]


@pytest.fixture(autouse=True)
def where(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BULKHEAD_RUN_DIR", str(short_tmp))


def serve(*arguments: str, command: list[str] | None = None) -> subprocess.Popen[str]:
    """A daemon that is ready."""
    child = subprocess.Popen([*(command or [*CLI, "serve"]), *arguments], stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    lines = []
    for line in child.stderr:  # a model that is loaded at start may log before
        lines.append(line)
        if line.startswith("bulkhead ready: "):
            assert Path(line.removeprefix("bulkhead ready: ").strip()).is_socket()
            return child
    child.wait(30)
    pytest.fail(f"the daemon ended with {child.returncode}: {''.join(lines)}")


def end(child: subprocess.Popen[str]) -> str:
    """What else it said, once it has ended."""
    _, err = child.communicate(timeout=30)
    return err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_code_0(short_tmp: Path, number: signal.Signals) -> None:
    with serve() as child:
        assert (short_tmp.stat().st_mode & 0o777, (short_tmp / "daemon.sock").stat().st_mode & 0o777) == (
            0o700,
            0o600,
        )
        child.send_signal(number)
        end(child)
    assert child.returncode == 0
    assert not (short_tmp / "daemon.sock").exists()


def test_both_other_ways_to_start_it(short_tmp: Path) -> None:
    for command in (
        [sys.executable, "-m", "mlx_bulkhead.orchestrator"],
        [*CLI, "--run-dir", str(short_tmp), "serve"],
    ):
        with serve(command=command) as child:
            assert run(["stop"]) == 0
            end(child)
        assert child.returncode == 0


def test_a_second_daemon_is_refused(short_tmp: Path) -> None:
    with serve() as child:
        second = subprocess.run([*CLI, "serve"], capture_output=True, text=True, timeout=30, check=False)
        assert second.returncode == CliExit.ALREADY_RUNNING
        assert second.stderr.startswith("error: run directory")
        assert str(child.pid) in second.stderr
        assert run(["ps"]) == 0
        assert run(["stop"]) == 0
        end(child)


def test_the_next_daemon_takes_over_what_a_killed_one_left(short_tmp: Path) -> None:
    with serve() as first:
        first.kill()
        end(first)
    assert (short_tmp / "daemon.sock").exists()
    assert run(["ps"]) == CliExit.NO_DAEMON
    with serve() as second:
        assert run(["ps"]) == 0
        assert run(["stop"]) == 0
        end(second)
    assert second.returncode == 0


def test_a_daemon_that_gave_up_says_so(short_tmp: Path, tmp_path: Path) -> None:
    config = tmp_path / "bulkhead.toml"
    config.write_text('[models.lost]\nmodel = "./nothing-here"\npreload = true\n')
    with serve("--config", str(config)) as child:
        assert run(["restart", "lost"]) == CliExit.LOAD_FAILED
        with Client() as client:
            (status,) = client.models()
            assert (status.name, status.state) == ("lost", "FAILED")
        child.terminate()
        err = end(child)
    assert child.returncode == CliExit.GAVE_UP
    assert f"error: gave up on lost; see: bulkhead logs lost --run-dir {short_tmp}\n" in err


@pytest.mark.parametrize("text", ["x = = 1", "[limits]\nmax_clients = 0"])
def test_a_bad_file_is_a_usage_error(short_tmp: Path, text: str) -> None:
    config = short_tmp / "bad.toml"
    config.write_text(text)
    ended = subprocess.run(
        [*CLI, "serve", "--config", str(config)], capture_output=True, text=True, timeout=30, check=False
    )
    assert ended.returncode == CliExit.USAGE
    assert ended.stderr.startswith(f"error: {config}")
    assert ended.stderr.count("\n") == 1


def test_tap_shows_frames_and_ends_with_the_daemon(short_tmp: Path) -> None:
    with serve() as child:
        with subprocess.Popen(
            [*CLI, "tap", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as tap:
            assert tap.stderr is not None
            assert "watching" in tap.stderr.readline()
            assert tap.stdout is not None
            run(["load", "secret", "--model", str(short_tmp / "private")])
            first = json.loads(tap.stdout.readline())
            assert run(["stop"]) == 0
            frames = [first, *map(json.loads, tap.stdout)]
            assert tap.wait(30) == 0
            assert {frame["model"] for frame in frames} == {"secret"}
            (load,) = (frame["body"] for frame in frames if frame["kind"] == "Load")
            assert load["model"].endswith("private")  # a path is no text of anybody's
            assert not [frame for frame in frames if frame["kind"] == "Heartbeat"]
        end(child)


@pytest.mark.skipif(find_spec("mlx") is None, reason="needs MLX")
def test_run_without_a_daemon_loads_a_path_for_one_answer(
    tiny_model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["run", str(tiny_model), "hello", "--raw", "--max-tokens", "3", "--json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["usage"]["completion_tokens"] == 3
    assert "weights" in err
