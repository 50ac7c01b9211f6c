"""No orphan, whatever phase a worker is in when its orchestrator is killed; and a clean next start."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from mlx_bulkhead import BulkheadError, Disconnected
from tests.integration.conftest import Daemon, start_daemon, stop_daemon

pytestmark = pytest.mark.timeout(90)


def workers_of(daemon: Daemon) -> list[psutil.Process]:
    return psutil.Process(daemon.process.pid).children(recursive=True)


def is_gone(process: psutil.Process) -> bool:
    """Whether it has ended; whoever inherits it may take a while to reap it."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for(daemon: Daemon, phase: str) -> None:
    """Until the worker says that it is in this phase."""
    with daemon.client() as client:
        for _ in range(2000):
            for line in client.stats().models:
                if line.state == phase or (line.stats is not None and line.stats.phase == phase):
                    return
            time.sleep(0.005)
    raise TimeoutError(phase)


@pytest.mark.parametrize("phase", ["idle", "HANDSHAKING", "importing", "prefill", "decode"])
def test_kill_of_the_daemon_leaves_no_worker(own_daemon: Daemon, tiny_model: Path, phase: str) -> None:
    def keep_busy() -> None:
        with contextlib.suppress(BulkheadError), own_daemon.client() as client:
            client.load("tiny", tiny_model)
            if phase == "prefill":
                client.complete("tiny", tokens=[7] * 8000, max_tokens=4)
            elif phase == "decode":
                client.complete("tiny", prompt="a", max_tokens=8000)

    busy = threading.Thread(target=keep_busy)
    busy.start()
    try:
        wait_for(own_daemon, phase)
        workers = workers_of(own_daemon)
        assert workers
        killed = time.monotonic()
        os.kill(own_daemon.process.pid, signal.SIGKILL)
        while not all(map(is_gone, workers)):
            assert time.monotonic() - killed < 2.0
            time.sleep(0.001)
    finally:
        own_daemon.process.kill()
        own_daemon.process.wait()
        busy.join(30)
    again = start_daemon(own_daemon.run_dir)  # sweeps what the dead one left
    assert stop_daemon(again) == 0


def test_worker_and_daemon_without_their_run_directory_end(own_daemon: Daemon, tiny_model: Path) -> None:
    with own_daemon.client() as client:
        client.load("tiny", tiny_model)
    [worker] = workers_of(own_daemon)
    own_daemon.run_dir.rename(own_daemon.run_dir.with_name("away"))
    assert worker.wait(5) in (41, 40, None)
    assert own_daemon.process.wait(5) == 1  # nobody could reach it any more


def test_a_second_daemon_on_the_same_directory_is_refused(own_daemon: Daemon) -> None:
    import subprocess
    import sys

    second = subprocess.run(
        [sys.executable, "-m", "mlx_bulkhead.orchestrator", "--run-dir", str(own_daemon.run_dir)],
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert second.returncode == 6
    assert str(own_daemon.process.pid) in second.stderr
    assert "in use" in second.stderr
    with own_daemon.client() as client:
        client.models()


def test_sigterm_with_three_busy_workers_ends_all_and_tells_every_client(
    own_daemon: Daemon, tiny_model: Path
) -> None:
    ends: list[str] = []

    def ask(name: str) -> None:
        with own_daemon.client() as client:
            try:
                client.complete(name, prompt="a", max_tokens=8000)
            except BulkheadError as error:
                ends.append(error.code.value)

    with own_daemon.client() as client:
        for name in ("a", "b", "c"):
            client.load(name, tiny_model)
        threads = [threading.Thread(target=ask, args=(name,)) for name in ("a", "b", "c")]
        for thread in threads:
            thread.start()
        while sum(line.stats.running for line in client.stats().models if line.stats is not None) < 3:
            time.sleep(0.01)
    workers = workers_of(own_daemon)
    begun = time.monotonic()
    assert stop_daemon(own_daemon) == 0
    assert time.monotonic() - begun < 5.0
    assert not any(worker.is_running() for worker in workers)
    for thread in threads:
        thread.join(10)
    assert ends == ["shutting_down"] * 3


def test_a_client_without_a_daemon_says_what_to_do(short_tmp: Path) -> None:
    from mlx_bulkhead import Client

    with pytest.raises(Disconnected, match="bulkhead serve"), Client(short_tmp / "none", timeout=1.0) as client:
        client.models()
