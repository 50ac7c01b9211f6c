"""One run: servers up, traffic on, faults in, everything down again, and what was found."""

from __future__ import annotations

import random
import shutil
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from tests.support import leaks

from .bank import Bank, fake_bank, real_bank
from .faults import Stage, inject
from .quiet import rss_growth, settled
from .record import Record
from .servers import Server, fake_server, real_server
from .traffic import Session, Witness
from .victims import Victim

INJECTORS = 4
"""Threads that do faults: many of them wait for a worker."""
HANG_S = 60.0
"""A request without an end for so long is a violation."""
RSS_MOST = 8 * 2**20
"""Growth of a server's memory between the first and the last tenth of its longest life, warm-up aside."""


@dataclass(frozen=True)
class Plan:
    """How long, how hard."""

    seconds: float
    faults: int
    seed: int
    prompts: int = 24
    lengths: tuple[int, ...] = (12, 40, 100)
    sessions: tuple[int, int] = (5, 4)
    """Threads with a client: of the real server, of the fake one."""


@dataclass
class Outcome:
    """What a run leaves to report."""

    plan: Plan
    record: Record
    servers: list[Server]
    took_s: float = 0.0


def run(plan: Plan) -> Outcome:
    """Do it all. Violations are in the outcome's record."""
    before = leaks.take()
    folder = Path(tempfile.mkdtemp(prefix="bc-", dir="/tmp")).resolve()
    record, dice = Record(), random.Random(plan.seed)
    outcome = Outcome(plan, record, [])
    try:
        paths, bank = real_bank(folder / "models", plan.prompts, plan.lengths)
        bank |= fake_bank((20, 100, 300))
        outcome.servers = [real_server(folder, paths), fake_server(folder)]
        began = time.monotonic()
        _with_servers(outcome, bank, folder / "plans", dice)
        outcome.took_s = time.monotonic() - began
    finally:
        for server in outcome.servers:
            if server.process is not None and server.process.poll() is None:
                server.process.kill()
                server.process.wait()
        record.violations += leaks.find(before) + leaks.find_run_dirs(folder)
        shutil.rmtree(folder, ignore_errors=True)
    return outcome


def _with_servers(outcome: Outcome, bank: Bank, plans: Path, dice: random.Random) -> None:
    plan, record, servers = outcome.plan, outcome.record, outcome.servers
    for server in servers:
        server.start()
    quiet = {server.name: settled(server, bank, record, dice) for server in servers}
    over = threading.Event()
    sampler = threading.Thread(target=_sample, args=(outcome, over), name="sampler")
    sampler.start()
    try:
        _with_traffic(outcome, bank, plans, dice)
        for server in servers:
            now = settled(server, bank, record, dice, quiet[server.name])
            if now != quiet[server.name]:
                record.violation(
                    f"{server.name}: descriptors and threads were {quiet[server.name]} with all models loaded and "
                    f"no client, and are {now} at the end"
                )
    finally:
        over.set()
        sampler.join()
    for server in servers:
        record.violations += server.end()
        growth = rss_growth(server)
        if growth > RSS_MOST and plan.seconds >= 60:
            record.violation(f"{server.name}: memory grew by {growth / 2**20:.1f} MiB after the warm-up")


def _with_traffic(outcome: Outcome, bank: Bank, plans: Path, dice: random.Random) -> None:
    plan, record = outcome.plan, outcome.record
    real, fake = outcome.servers
    stop = threading.Event()
    threads: list[threading.Thread] = []
    for server, count in zip(outcome.servers, plan.sessions, strict=True):
        threads += [Session(server, bank, record, f"{server.name}-{plan.seed}-{i}", stop) for i in range(count)]
        threads.append(Witness(server, bank, record, f"{server.name}-{plan.seed}", stop))
    for thread in threads:
        thread.start()
    began = time.monotonic()
    calm = max(2.0, min(15.0, plan.seconds / 10))
    time.sleep(calm)
    record.calm_until = time.monotonic()
    victims = {server.name: Victim(server, bank, record, dice) for server in outcome.servers}
    stage = Stage(real, fake, bank, record, dice, victims, plans, began + plan.seconds / 2)
    until = began + plan.seconds
    try:
        others = [
            threading.Thread(target=_inject_until, args=(stage, until, plan.faults // INJECTORS), name=f"faults-{i}")
            for i in range(1, INJECTORS)
        ]
        for other in others:
            other.start()
        _inject_until(stage, until, plan.faults // INJECTORS)
        for other in others:
            other.join()
    finally:
        for victim in victims.values():
            victim.close()
        stop.set()
        for thread in threads:
            thread.join(HANG_S)
            if thread.is_alive():
                record.violation(f"{thread.name} did not end")
                if isinstance(thread, Session) and thread.client is not None:
                    thread.client.close()
                    thread.join(5)


def _inject_until(stage: Stage, until: float, faults: int) -> None:
    """Faults at an even pace, with some noise; whoever is late hurries."""
    record = stage.record
    began, done = time.monotonic(), 0
    while (now := time.monotonic()) < until:
        for what in record.overdue(HANG_S):
            record.violation(f"no end within {HANG_S:g} s: {what}")
            return
        due = faults * (now - began) / (until - began)
        if done <= due:
            inject(stage)
            done += 1
        else:
            time.sleep(min(until - now, stage.dice.uniform(0.0, 0.2)))


def _sample(outcome: Outcome, over: threading.Event) -> None:
    while not over.wait(0.5):
        for server in outcome.servers:
            server.sample()
