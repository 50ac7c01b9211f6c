"""`python -m tests.chaos.fuzz`: junk at every socket. Exit code 1 if a process ends, grows, or answers wrongly."""

from __future__ import annotations

import argparse
import os
import random
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import zmq
from mlx_bulkhead.orchestrator.run_dir import socket_path

from mlx_bulkhead import BulkheadError, RequestTimeout
from tests.support.misbehaving_worker import expected_text
from tests.support.tiny_models import make_tiny
from tests.support.worker_harness import WorkerHarness

from .frames import junk
from .raw import Raw
from .servers import Server, fake_server

BATCH = 500
RSS_MOST = 6 * 2**20


@dataclass
class Finding:
    """What one target did."""

    target: str
    frames: int = 0
    seconds: float = 0.0
    rss: list[int] = field(default_factory=list[int])
    wrong: list[str] = field(default_factory=list[str])

    def judge(self) -> None:
        """Memory is flat once the first fifth is over."""
        warm = self.rss[len(self.rss) // 5 :]
        if len(warm) > 4 and warm[-1] - warm[0] > RSS_MOST:
            self.wrong.append(f"memory grew from {warm[0] / 2**20:.1f} to {warm[-1] / 2**20:.1f} MiB")

    def line(self) -> str:
        first, last = (self.rss[len(self.rss) // 5], self.rss[-1]) if self.rss else (0, 0)
        return (
            f"{self.target:<28}{self.frames:>9} frames {self.seconds:>6.1f} s   "
            f"memory {first / 2**20:.1f} -> {last / 2**20:.1f} MiB   {'; '.join(self.wrong) or 'fine'}"
        )


Target = Callable[[Path, int, random.Random, Finding], None]


@contextmanager
def serving(folder: Path, worker: str = "planned_worker.py", **env: str) -> Iterator[Server]:
    """An embedding host with a front door. Ends it, and it must end well."""
    server = fake_server(folder)
    server.env |= {"CHAOS_WORKER": worker, **env}
    server.start()
    try:
        with server.client() as client:
            client.complete("fake-a", prompt="warm", max_tokens=5)
        yield server
    finally:
        problems = server.end()
    if problems:
        raise RuntimeError("; ".join(problems))


def check(server: Server, finding: Finding) -> None:
    """One good request, in the middle of it all."""
    prompt = f"after {finding.frames}"
    try:
        with server.client() as client:
            if client.complete("fake-a", prompt=prompt, max_tokens=10).text != expected_text(prompt, 10):
                finding.wrong.append(f"a wrong answer after {finding.frames} frames")
    except BulkheadError as error:
        finding.wrong.append(f"after {finding.frames} frames: {error}")
    finding.rss.append(psutil.Process(server.pid).memory_info().rss)


def front_door(folder: Path, frames: int, dice: random.Random, finding: Finding) -> None:
    """Junk from clients."""
    with serving(folder) as server:
        raw = Raw(server.run_dir)
        while finding.frames < frames and not finding.wrong:
            for _ in range(BATCH):
                raw.socket.send_multipart(junk(dice))
            finding.frames += BATCH
            while raw.socket.poll(0):
                raw.socket.recv_multipart()
            if finding.frames % (BATCH * 40) == 0:
                check(server, finding)
        check(server, finding)
        raw.close()


def bare_sockets(folder: Path, frames: int, dice: random.Random, finding: Finding) -> None:
    """Bytes that are no ZeroMQ, at the front door and the tap; and junk subscriptions."""
    with serving(folder) as server, zmq.Context() as context, context.socket(zmq.XSUB) as tap:
        tap.linger = 0
        tap.connect(f"ipc://{socket_path(server.run_dir, 'tap.sock')}")
        for count in range(frames):
            tap.send(dice.randbytes(dice.randrange(40)))
            if count % 10 == 0:
                with socket.socket(socket.AF_UNIX) as bare:
                    bare.connect(str(socket_path(server.run_dir, dice.choice(("daemon.sock", "tap.sock")))))
                    try:
                        bare.sendall(dice.randbytes(dice.randrange(1, 300)))
                    except OSError:
                        pass  # hung up on already
            finding.frames += 1
            if count % max(1, frames // 20) == 0:
                check(server, finding)
        check(server, finding)


def from_worker(folder: Path, frames: int, dice: random.Random, finding: Finding) -> None:
    """Junk from a worker that serves as well."""
    count = folder / "count"
    with serving(folder, "junk_worker.py", FUZZ_COUNT=str(count), FUZZ_SEED=str(dice.getrandbits(32))) as server:
        with server.client() as client:
            pid = server.worker_pid("fake-a", client)
        while finding.frames < frames and not finding.wrong:
            with server.client() as client:
                victim = client.generate("fake-a", prompt="VICTIM", max_tokens=300)
                client.complete("fake-a", prompt="keep it busy", max_tokens=100)
                try:
                    victim.result(timeout=20.0)
                except RequestTimeout:
                    finding.wrong.append("a request with junk in its stream did not end")
                except BulkheadError:
                    pass  # any end will do
                if server.worker_pid("fake-a", client) != pid:
                    finding.wrong.append("the worker was replaced")
            finding.frames = int(count.read_text() or 0)
            check(server, finding)


def to_worker(folder: Path, frames: int, dice: random.Random, finding: Finding) -> None:
    """Junk to a real worker with a real model."""
    model = make_tiny(folder / "model")
    run_dir = folder / "run"
    run_dir.mkdir()
    with WorkerHarness(run_dir) as worker:
        worker.load(model, name="fuzzed")
        want = worker.run(model="fuzzed", prompt="before", max_tokens=20).tokens
        while finding.frames < frames and not finding.wrong:
            for _ in range(BATCH):
                worker.socket.send_multipart(junk(dice))
            finding.frames += BATCH
            worker.drop_incoming()
            if worker.process.poll() is not None:
                finding.wrong.append(f"the worker ended with {worker.process.returncode}: {worker.log()}")
            elif finding.frames % (BATCH * 20) == 0:
                finding.rss.append(psutil.Process(worker.process.pid).memory_info().rss)
                if worker.run(model="fuzzed", prompt="before", max_tokens=20).tokens != want:
                    finding.wrong.append(f"a wrong answer after {finding.frames} frames")


TARGETS: dict[str, tuple[Target, float]] = {
    "front door": (front_door, 0.4),
    "bare sockets, tap": (bare_sockets, 0.01),
    "worker to orchestrator": (from_worker, 0.3),
    "orchestrator to worker": (to_worker, 0.3),
}


def fuzz(frames: int, seed: int) -> list[Finding]:
    """All targets, their shares of the frames."""
    findings: list[Finding] = []
    for name, (target, share) in TARGETS.items():
        finding = Finding(name)
        folder = Path(tempfile.mkdtemp(prefix="bf-", dir="/tmp")).resolve()
        began = time.monotonic()
        try:
            target(folder, max(BATCH, int(frames * share)), random.Random(f"{seed} {name}"), finding)
        except Exception as error:
            finding.wrong.append(repr(error))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        finding.seconds = time.monotonic() - began
        finding.judge()
        findings.append(finding)
        print(finding.line(), flush=True)
    return findings


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.fuzz", description=__doc__)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    print(f"seed {options.seed}")
    return 1 if any(finding.wrong for finding in fuzz(options.frames, options.seed)) else 0


if __name__ == "__main__":
    sys.exit(main())
