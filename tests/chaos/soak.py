"""`python -m tests.chaos.soak`: steady mixed traffic, no faults. Exit code 1 if memory or descriptors grow."""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

from .bank import real_bank
from .quiet import longest_life, rss_growth, settled
from .record import Record
from .servers import Server, real_server
from .traffic import Session, Witness

DRIFT_MOST = 2 * 2**20
REPORT_S = 60.0


def soak(seconds: float, seed: int) -> list[str]:
    """Run it; one line for each thing that is not as it should be."""
    folder = Path(tempfile.mkdtemp(prefix="bs-", dir="/tmp")).resolve()
    record, dice = Record(), random.Random(seed)
    try:
        paths, bank = real_bank(folder / "models", 12, (12, 40, 100))
        server = real_server(folder, paths)
        server.start()
        before = settled(server, bank, record, dice)
        stop = threading.Event()
        threads: list[threading.Thread] = [Session(server, bank, record, f"{seed}-{i}", stop) for i in range(6)]
        threads.append(Witness(server, bank, record, f"{seed}", stop))
        for thread in threads:
            thread.start()
        _watch(server, record, seconds)
        stop.set()
        for thread in threads:
            thread.join(60)
        after = settled(server, bank, record, dice, before)
        life, drift = longest_life(server), rss_growth(server)
        found = [*record.violations, *server.end()]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{record.requests} requests: {dict(record.ends)}")
    print(f"memory after warm-up {life[0].rss / 2**20:.2f} -> {life[-1].rss / 2**20:.2f} MiB", end="")
    print(f", drift {drift / 2**20:+.2f} MiB (at most {DRIFT_MOST / 2**20:g})")
    print(f"descriptors and threads at rest: {before} before, {after} after")
    if drift > DRIFT_MOST:
        found.append(f"memory drifted by {drift / 2**20:.2f} MiB")
    if after != before:
        found.append(f"descriptors and threads at rest were {before} and are {after}")
    return found


def _watch(server: Server, record: Record, seconds: float) -> None:
    began = reported = time.monotonic()
    while (now := time.monotonic()) - began < seconds:
        server.sample()
        if now - reported >= REPORT_S:
            reported, sample = now, server.lives[-1][-1]
            held = f"{sample.rss / 2**20:.2f} MiB  {sample.fds} descriptors"
            print(f"{now - began:6.0f} s  {record.requests:>7} requests  {held}", flush=True)
        time.sleep(0.5)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    found = soak(60 * options.minutes, options.seed)
    print("\n".join(f"VIOLATION {line}" for line in found[:40]) or "no violation")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
