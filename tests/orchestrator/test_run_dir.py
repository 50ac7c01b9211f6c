"""The run directory: private, held by one, short enough for sockets, swept only when dead."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from mlx_bulkhead.orchestrator import run_dir as rd
from mlx_bulkhead.orchestrator.run_dir import RunDir, RunDirBusy
from mlx_bulkhead.orchestrator.spawn import reap_stale
from mlx_bulkhead.protocol.limits import SOCKET_PATH_BYTES


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_held_directory_is_private(short_tmp: Path) -> None:
    path = short_tmp / "run"
    path.mkdir(mode=0o755)
    held = RunDir.hold(path)
    try:
        assert mode(path) == 0o700
        assert mode(path / "workers") == 0o700
    finally:
        held.close()


def test_a_second_holder_is_refused_with_the_pid_of_the_first(short_tmp: Path) -> None:
    code = (
        "import sys, pathlib; from mlx_bulkhead.orchestrator.run_dir import RunDir;"
        "held = RunDir.hold(pathlib.Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(short_tmp / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(RunDirBusy, match=str(other.pid)):
            RunDir.hold(short_tmp / "run")
        other.stdin.close()
    RunDir.hold(short_tmp / "run").close()  # free again, whatever was left behind


def test_long_directories_get_short_sockets(short_tmp: Path) -> None:
    path = short_tmp / ("d" * 90)
    held = RunDir.hold(path)
    try:
        sockets = [held.daemon_socket, held.worker_socket("m" * 200, 12345)]
        for socket in sockets:
            assert len(os.fsencode(socket)) < SOCKET_PATH_BYTES
            assert socket.parent.is_dir()
            assert mode(socket.parent) == 0o700
        assert held.daemon_socket == rd.socket_path(path, rd.DAEMON_SOCKET)  # a client finds the same place
    finally:
        held.close()
    assert not held.daemon_socket.parent.exists()


def test_names_that_differ_have_files_that_differ() -> None:
    names = ["a" * 200 + "1", "a" * 200 + "2", "a/b", "a_b"]
    paths = {rd.log_path(Path("/r"), name) for name in names}
    assert len(paths) == len(names)
    assert all(len(p.name) < 64 for p in paths)


def test_a_dead_temporary_directory_is_swept_and_a_live_one_is_not() -> None:
    code = (
        "import os, sys; from mlx_bulkhead.orchestrator.run_dir import RunDir;"
        "held = RunDir.temporary(); print(held.path, flush=True);"
        "sys.argv[1] == 'die' and os._exit(0); sys.stdin.read()"
    )
    dead = Path(subprocess.run([sys.executable, "-c", code, "die"], capture_output=True, text=True).stdout.strip())
    assert dead.is_dir()
    with subprocess.Popen(
        [sys.executable, "-c", code, "live"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        live = Path(other.stdout.readline().strip())
        held = RunDir.temporary()
        try:
            assert not dead.exists()
            assert live.is_dir()
        finally:
            held.close()
            other.stdin.close()
    assert not held.path.exists()
    RunDir.temporary().close()  # sweeps the other's


def test_only_a_verified_stale_worker_is_killed(short_tmp: Path) -> None:
    held = RunDir.hold(short_tmp / "run")
    sleeper = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with (
        subprocess.Popen([*sleeper, "token-1"], stdin=subprocess.PIPE) as stale,
        subprocess.Popen([*sleeper, "token-2"], stdin=subprocess.PIPE) as stranger,
    ):
        held.note_worker(stale.pid, "token-1")
        held.note_worker(stranger.pid, "not-its-token")
        assert reap_stale(held.path / "workers") == [stale.pid]
        assert stale.wait(10) == -9
        assert stranger.poll() is None
        assert stranger.stdin is not None
        stranger.stdin.close()
    held.close()


def test_the_environment_names_the_run_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BULKHEAD_RUN_DIR", "/somewhere/else")
    assert rd.default_run_dir() == Path("/somewhere/else")
