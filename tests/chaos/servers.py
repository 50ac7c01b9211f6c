"""The two servers of a run as processes: started, sampled, killed, started again, ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from mlx_bulkhead import Client

from .bank import FAKE

READY_S = 60.0
ORPHANS_S = 5.0
_RESTART = "[restart]\nmax_restarts = 1000\nbase_delay_s = 0.02\nmax_delay_s = 0.2\n"


@dataclass(frozen=True)
class Sample:
    """What a server's process used at a moment."""

    at: float
    rss: int
    fds: int
    threads: int


@dataclass
class Server:
    """A process with a front door."""

    name: str
    run_dir: Path
    command: Sequence[str]
    models: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict[str, str])
    process: subprocess.Popen[bytes] | None = None
    lives: list[list[Sample]] = field(default_factory=list[list[Sample]])
    """Samples of each process that it has had."""
    workers: set[psutil.Process] = field(default_factory=set[psutil.Process])
    """All children ever seen."""
    gate: threading.Lock = field(default_factory=threading.Lock)
    """Held while the process is being replaced."""

    @property
    def log(self) -> Path:
        return self.run_dir.with_name(self.name + ".log")

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        """Start it, and wait until it says that it is ready."""
        began = self.log.stat().st_size if self.log.exists() else 0
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **self.env}
            )
        self.lives.append([])
        deadline = time.monotonic() + READY_S
        while b"bulkhead ready" not in self.log.read_bytes()[began:]:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} did not start: {self.tail()}")
            time.sleep(0.02)

    def client(self) -> Client:
        return Client(self.run_dir)

    def sample(self) -> None:
        """Note what the process uses and which children it has."""
        with self.gate:
            try:
                process = psutil.Process(self.pid)
                self.workers.update(process.children(recursive=True))
                with process.oneshot():
                    rss, threads = process.memory_info().rss, process.num_threads()
                self.lives[-1].append(Sample(time.monotonic(), rss, process.num_fds(), threads))
            except psutil.Error:
                pass  # it has just been killed

    def worker_pid(self, model: str, client: Client) -> int | None:
        """The process of a model that is READY."""
        for line in client.models():
            if line.name == model and line.state == "READY":
                return line.pid
        return None

    def kill(self) -> list[str]:
        """SIGKILL, look for orphans, start again on the same run directory. One line for each orphan."""
        with self.gate:
            assert self.process is not None
            children = psutil.Process(self.pid).children(recursive=True)
            self.workers.update(children)
            self.process.kill()
            self.process.wait()
            orphans = _alive(children, ORPHANS_S)
            self.start()
        return [f"{self.name}: worker {pid} outlived a killed server by {ORPHANS_S:g} s" for pid in orphans]

    def end(self) -> list[str]:
        """SIGTERM. One line for each thing that is not as it should be."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        found: list[str] = []
        try:
            code = self.process.wait(20)
            if code:
                found.append(f"{self.name}: SIGTERM ended it with code {code}: {self.tail()}")
        except subprocess.TimeoutExpired:
            found.append(f"{self.name}: still there 20 s after SIGTERM")
            self.process.kill()
            self.process.wait()
        found += [f"{self.name}: worker {pid} is left" for pid in _alive(list(self.workers), ORPHANS_S)]
        found += [f"{self.name}: socket {p.name} is left" for p in self.run_dir.iterdir() if p.is_socket()]
        return found

    def tail(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-1500:] if self.log.exists() else ""


def _alive(processes: list[psutil.Process], within_s: float) -> list[int]:
    """Those that are still there after a while. They are nobody's children of ours, so they are polled."""
    deadline = time.monotonic() + within_s
    while (left := [p.pid for p in processes if _runs(p)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def real_server(folder: Path, models: dict[str, Path]) -> Server:
    """`bulkhead serve` with the tiny models."""
    config = folder / "real.toml"
    tables = "".join(
        f'[models.{name}]\nmodel = "{path}"\npreload = true\nrecycle_requests = 60\n' for name, path in models.items()
    )
    limits = "[limits]\nspare_workers = 1\nkeepalive_s = 0.25\n"
    config.write_text(f'log_level = "error"\n{limits}{_RESTART}{tables}', encoding="utf-8")
    run_dir = folder / "real"
    command = [sys.executable, "-m", "mlx_bulkhead.orchestrator", "--run-dir", str(run_dir), "--config", str(config)]
    return Server("real", run_dir, command, tuple(models))


def fake_server(folder: Path) -> Server:
    """An embedding application with planned workers."""
    config, plans = folder / "fake.toml", folder / "plans"
    plans.mkdir()
    env = 'env = {BULKHEAD_FAKE_RATE = "100"}'
    tables = "".join(
        f'[models.{name}]\nmodel = "fake"\npreload = true\nstall_budget_s = 1.0\nrecycle_requests = 15\n{env}\n'
        for name in FAKE
    )
    limits = "[limits]\nhello_s = 2.0\nload_silence_s = 1.5\npolite_s = 0.5\nterm_s = 0.5\nkeepalive_s = 0.25\n"
    config.write_text(f'log_level = "error"\n{limits}{_RESTART}{tables}', encoding="utf-8")
    run_dir = folder / "fake"
    command = [sys.executable, "-m", "tests.chaos.embedded_host", str(run_dir), str(config)]
    return Server("fake", run_dir, command, FAKE, {"CHAOS_PLANS": str(plans)})
