"""A worker or the daemon is killed: how soon it is told, replaced and cleaned up, and what other models feel."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from mlx_bulkhead import BulkheadError, Client

from .. import streams
from ..bench import Bench
from ..daemon import Daemon
from ..measure import Figure, at_most, percentile, spread
from ..work import text_prompt

CONFIG = """
[limits]
spare_workers = 1
[restart]
max_restarts = 1000
stable_steps = 1
"""
VICTIM, OTHER = "victim", "other"
SETTLE_S = 3.0
"""For the next spare to be ready, and for an undisturbed stretch of the other model's stream."""
TOKENS = 4000


@dataclass(slots=True)
class Death:
    """What one kill of a worker led to; milliseconds after it."""

    told: float = 0.0
    spawned: float = 0.0
    ready: float = 0.0
    token: float = 0.0


def recovery(bench: Bench) -> list[Figure]:
    config = bench.folder / "recovery.toml"
    config.write_text(CONFIG)
    deaths: list[Death] = []
    calm: list[float] = []
    gaps: list[float] = []
    daemon = Daemon(bench.folder / "recovery", "--config", str(config))
    try:
        for name in (VICTIM, OTHER):
            daemon.client.load(name, bench.folder / "model")
        for _ in range(2 if bench.quick else 2 * bench.rounds):
            with _Watched(daemon.run_dir, OTHER) as other:
                time.sleep(SETTLE_S)
                killed_at, death = _kill_in_answer(daemon.client, text_prompt(bench.seed()))
                deaths.append(death)
                time.sleep(0.5)
            calm += other.gaps(0.0, killed_at)
            gaps += other.gaps(killed_at, killed_at + 0.5)
    finally:
        daemon.close()
    gone = [_kill_daemon(bench, index) for index in range(2 if bench.quick else bench.rounds)]
    usual = percentile(calm, 0.99) * 1e3
    return [
        at_most("death of a worker, until its client is told", [d.told for d in deaths], 100.0, digits=0),
        at_most("death of a worker, until the next is there (a spare)", [d.spawned for d in deaths], 200.0, digits=0),
        Figure(
            "death of a worker, until the model is ready again",
            [d.ready for d in deaths],
            "load time + 100 ms",
            None,
            "ms",
            0,
            f"next token after {spread([d.token for d in deaths])} ms; the load takes about 70 ms here",
        ),
        at_most(
            "largest gap of another model's stream in the half second after it",
            [max(gaps) * 1e3],
            2 * usual,
            digits=0,
            goal_text=f"2 x undisturbed p99 ({2 * usual:.0f} ms)",
            beside=f"undisturbed p99 {usual:.0f} ms, largest {max(calm) * 1e3:.0f} ms",
        ),
        at_most("kill -9 of the daemon in mid-answer, until its last worker is gone", gone, 2000.0, digits=0),
    ]


def _kill_in_answer(client: Client, prompt: str) -> tuple[float, Death]:
    death, killed, lost = Death(), 0.0, 0
    watcher: threading.Thread | None = None
    stream = client.generate(VICTIM, prompt=prompt, max_tokens=TOKENS)
    for snap in stream.snapshots(progress=True):
        since = (time.perf_counter() - killed) * 1e3
        if not killed and snap.usage.completion_tokens >= 20:
            lost = _line(client, VICTIM).pid or 0
            killed = time.perf_counter()
            os.kill(lost, signal.SIGKILL)
            watcher = threading.Thread(target=_watch, args=(client, lost, killed, death))
            watcher.start()
        elif killed and snap.phase == "restarting" and not death.told:
            death.told = since
        elif killed and death.told and snap.new_text:
            death.token = since
            stream.cancel()
            break
    if watcher is not None:
        watcher.join()
    return killed, death


def _watch(client: Client, lost: int, killed: float, death: Death) -> None:
    while not death.ready:
        line = _line(client, VICTIM)
        since = (time.perf_counter() - killed) * 1e3
        if line.pid not in (lost, None):
            death.spawned = death.spawned or since
            if line.state == "READY":
                death.ready = since
        time.sleep(0.002)


def _line(client: Client, name: str):
    return next(line for line in client.models() if line.name == name)


class _Watched:
    """The stream of a model, read by a client of its own in a thread."""

    def __init__(self, run_dir: Path, model: str) -> None:
        self._client = Client(run_dir)
        self._stream = self._client.generate(model, prompt=text_prompt(0), max_tokens=TOKENS)
        self._times: list[float] = []
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> _Watched:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.cancel()
        self._thread.join()
        self._client.close()

    def gaps(self, start: float, end: float) -> list[float]:
        """Seconds between neighbouring snaps that overlap a stretch of time."""
        return [b - a for a, b in itertools.pairwise(self._times) if b >= start and a <= end]

    def _read(self) -> None:
        for _ in self._stream:
            self._times.append(time.perf_counter())


def _is_gone(process: psutil.Process) -> bool:
    """Whether it has ended; whoever inherits it may take a while to reap it."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _kill_daemon(bench: Bench, index: int) -> float:
    """Milliseconds from the kill of a daemon, with a stream under way, to the end of its worker."""
    daemon = Daemon(bench.folder / f"killed-{index}")
    daemon.client.load(VICTIM, bench.folder / "model")
    worker = psutil.Process(_line(daemon.client, VICTIM).pid)
    stream = daemon.client.generate(VICTIM, prompt=text_prompt(bench.seed()), max_tokens=TOKENS)
    with contextlib.suppress(BulkheadError):
        next(iter(stream))
    began = streams.now()
    daemon.kill()
    while not _is_gone(worker):
        time.sleep(0.0005)
    took = (streams.now() - began) * 1e3
    daemon.client.close()
    return took
