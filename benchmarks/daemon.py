"""A daemon in a process of its own, started as a user would start it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import psutil

from mlx_bulkhead import Client, Disconnected

READY_WITHIN_S = 30.0
COMMAND = (sys.executable, "-P", "-m", "mlx_bulkhead.orchestrator")


class Daemon:
    """Starts a daemon and waits until it answers."""

    def __init__(self, run_dir: Path, *arguments: str) -> None:
        self.run_dir = run_dir
        began = time.perf_counter()
        command = [*COMMAND, "--run-dir", str(run_dir), *arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            self.client = self._connect(began + READY_WITHIN_S)
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        self.ready_s = time.perf_counter() - began
        """From the start of the process to its first answer."""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def rss_mb(self) -> float:
        return psutil.Process(self.pid).memory_info().rss / 1e6

    def kill(self) -> None:
        """SIGKILL, as a crash would be. Its client stays as it is."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        try:
            self.client.shutdown()
            self.client.close()
            self._process.wait(10)
        finally:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()

    def _connect(self, until: float) -> Client:
        while time.perf_counter() < until:
            if self._process.poll() is not None:
                raise RuntimeError(f"the daemon ended with code {self._process.returncode}; its error is above")
            if (self.run_dir / "daemon.sock").exists():
                with contextlib.suppress(Disconnected):  # the socket is there a moment before it listens
                    return Client(self.run_dir)
            time.sleep(0.001)
        raise RuntimeError("the daemon was not ready in time")
