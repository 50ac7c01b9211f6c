"""The faults, each with its weight: which go where, and what is done."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mlx_bulkhead import BulkheadError, Client, Disconnected

from .bank import Bank, fresh
from .frames import junk
from .raw import Raw
from .record import Record
from .servers import Server
from .traffic import explained
from .victims import Victim

SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGABRT": signal.SIGABRT, "SIGSEGV": signal.SIGSEGV}
PLANS = {
    "hang": "hang:30",
    "executor died": "executor_died:20",
    "exit 0": "exit:20",
    "abort by itself": "abort:20",
    "junk from worker": "garbage:10",
    "1 MB log line": "long_line:10",
    "memory balloon": "balloon:64",
    "deaf to SIGTERM": "ignore_sigterm",
    "dies on load": "crash_on_load:-6",
    "dies on start": "crash_on_start",
    "load hangs": "load_hangs",
    "never hello": "never_hello",
    "slow load": "load_slow:1",
    "wrong version": "wrong_version",
    "two terminal events": "duplicate_done",
}


Act = Callable[["Stage"], str | None]
"""Does a fault and names it; None: it could not be done now."""


@dataclass
class Stage:
    """What the faults work on."""

    real: Server
    fake: Server
    bank: Bank
    record: Record
    dice: random.Random
    victims: dict[str, Victim]
    plans: Path
    daemon_kills_until: float
    first: deque[Act] = field(default_factory=lambda: deque((kill_server("real"), kill_server("fake"))))
    """Done before the dice are thrown, so that no run is without them."""
    plans_left: list[str] = field(default_factory=list[str])

    def next_plan(self) -> str:
        """All in turn, in an order of the dice."""
        with self._lock:
            if not self.plans_left:
                self.plans_left = self.dice.sample(sorted(PLANS), len(PLANS))
            return self.plans_left.pop()

    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def control(self, server: Server) -> Iterator[Client]:
        """A client for one act."""
        with server.client() as client:
            yield client


def signal_worker(server: str) -> Act:
    """A signal out of the blue."""

    def act(stage: Stage) -> str | None:
        where: Server = getattr(stage, server)
        model, name = stage.dice.choice(where.models), stage.dice.choice(tuple(SIGNALS))
        with stage.control(where) as client:
            pid = where.worker_pid(model, client)
        if pid is None:
            return None
        stage.record.died((server, model))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, SIGNALS[name])
        return f"{name} of a worker"

    return act


def stop_worker(server: str) -> Act:
    """SIGSTOP, and a while later SIGCONT."""

    def act(stage: Stage) -> str | None:
        where: Server = getattr(stage, server)
        model = stage.dice.choice(where.models)
        with stage.control(where) as client:
            pid = where.worker_pid(model, client)
        if pid is None:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(stage.dice.uniform(0.1, 1.0))
            os.kill(pid, signal.SIGCONT)
            stage.record.stopped((server, model))
        return "SIGSTOP and SIGCONT"

    return act


def planned(stage: Stage) -> str | None:
    """The next worker misbehaves in some way; it is started by a restart, or by a kill."""
    model, name = stage.dice.choice(stage.fake.models), stage.next_plan()
    (stage.plans / model).write_text(PLANS[name], encoding="utf-8")
    with stage.control(stage.fake) as client, contextlib.suppress(BulkheadError):
        client.restart(model)
    if name in ("load hangs", "wrong version"):  # these end in FAILED, which only an explicit act leaves
        with stage.control(stage.fake) as client:
            try:
                client.restart(model)
            except BulkheadError as error:  # a restart that was under way already left the plan to this one
                if not explained("fake", error):
                    raise
    return name


def daemon_junk(stage: Stage) -> str:
    """A burst of frames that make no sense."""
    raw = Raw(stage.dice.choice((stage.real, stage.fake)).run_dir)
    try:
        for _ in range(50):
            raw.socket.send_multipart(junk(stage.dice))
    finally:
        raw.close()
    return "junk from client"


def kill_client(stage: Stage) -> None:
    """The victim counts it itself."""
    stage.victims[stage.dice.choice(("real", "fake"))].kill()


def kill_server(server: str) -> Act:
    """SIGKILL of the whole server, and a start on the same run directory."""

    def act(stage: Stage) -> str | None:
        where: Server = getattr(stage, server)
        if time.monotonic() > stage.daemon_kills_until:
            return None
        for orphan in where.kill():
            stage.record.violation(orphan)
        return f"SIGKILL of the {'daemon' if server == 'real' else 'embedding host'}"

    return act


def unload_race(server: str) -> Act:
    """Unload a model while requests for it come and run."""

    def act(stage: Stage) -> str:
        where: Server = getattr(stage, server)
        model = stage.dice.choice(where.models)
        case = fresh(stage.dice.choice(stage.bank[model]), stage.dice)

        def ask() -> None:
            with contextlib.suppress(BulkheadError), stage.control(where) as client:
                client.complete(model, prompt=case.prompt, max_tokens=case.length)

        asking = threading.Thread(target=ask)
        asking.start()
        with contextlib.suppress(Disconnected), stage.control(where) as client:
            time.sleep(stage.dice.uniform(0.0, 0.1))
            client.unload(model)
        asking.join()
        return "unload race"

    return act


WEIGHTS: tuple[tuple[Act, float], ...] = (
    (signal_worker("real"), 8),
    (signal_worker("fake"), 22),
    (stop_worker("real"), 3),
    (stop_worker("fake"), 5),
    (planned, 24),
    (daemon_junk, 20),
    (kill_client, 5),
    (kill_server("real"), 0.5),
    (kill_server("fake"), 1),
    (unload_race("real"), 1),
    (unload_race("fake"), 8),
)


def inject(stage: Stage) -> None:
    """One fault by the dice."""
    acts, weights = zip(*WEIGHTS, strict=True)
    try:
        act = stage.first.popleft()
    except IndexError:
        [act] = stage.dice.choices(acts, weights)
    try:
        kind = act(stage)
    except BulkheadError as error:  # the control client's own bad luck: it may meet a dying server too
        if error.code.value not in ("disconnected", "unloaded", "timeout"):
            stage.record.violation(f"control: {error}")
        return
    if kind is not None:
        stage.record.fault(kind)
