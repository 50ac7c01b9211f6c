"""Clients that ask all the time and check every answer: threads with `Client`, and one that sees the bare frames."""

from __future__ import annotations

import random
import threading
import time

from mlx_bulkhead.orchestrator.views import Snap

from mlx_bulkhead import BulkheadError, Client, Disconnected

from .bank import Bank, Case, fresh
from .raw import Raw
from .record import Gap, Place, Record
from .servers import Server

TYPED = {"worker_crashed", "worker_stalled", "quarantined", "unloaded", "disconnected", "queue_full"}
"""Codes that the faults of a run explain."""
CANCEL_SHARE, ATTACH_SHARE, DEADLINE_SHARE = 0.15, 0.05, 0.03


def explained(server: str, error: BulkheadError) -> bool:
    """Whether a fault of the run accounts for an error. On the fake server loads are made to fail, too, and workers
    speak another version."""
    code = error.code.value
    made = code == "load_failed" or (code == "protocol" and "version 999" in error.message)
    return code in TYPED or (server == "fake" and made)


class Watch:
    """The times of one stream: gaps, and after a death when its client was told and when it went on."""

    def __init__(self, record: Record, place: Place) -> None:
        self._record = record
        self._place = place
        self._last: float | None = None
        self._death: float | None = None

    def saw(self, snap: Snap) -> None:
        now = time.monotonic()
        if snap.tokens:
            if self._death is not None:
                self._record.recovered_s.append(now - self._death)
                self._death = None
            elif self._last is not None:
                self._record.gaps.append(Gap(now, now - self._last, self._place))
            self._last = now
        elif snap.phase == "restarting" and self._death is None and self._last is not None:
            death = self._record.death_before(self._place, now)
            if death is not None and death > self._last - 0.05:
                self._death = death
                self._record.told_s.append(now - death)
        if snap.phase == "restarting":
            self._last = None  # what follows is a recovery, not a gap


class Session(threading.Thread):
    """One client that asks again and again."""

    def __init__(self, server: Server, bank: Bank, record: Record, seed: str, stop: threading.Event) -> None:
        super().__init__(name=f"session-{seed}", daemon=True)
        self._server = server
        self._bank = bank
        self._record = record
        self._dice = random.Random(seed)
        self._stop_asked = stop
        self.client: Client | None = None

    def run(self) -> None:
        try:
            while not self._stop_asked.is_set():
                try:
                    with self._server.client() as self.client:
                        self._serve(self.client)
                except Disconnected:
                    self._stop_asked.wait(0.2)
        except Exception as error:
            self._record.violation(f"{self.name}: {error!r}")

    def _serve(self, client: Client) -> None:
        while not self._stop_asked.is_set():
            model = self._dice.choice(self._server.models)
            how = self.ask(client, fresh(self._dice.choice(self._bank[model]), self._dice))
            if how not in ("length", "cancelled", "deadline"):
                self._stop_asked.wait(0.2)

    def ask(self, client: Client, case: Case) -> str:
        """One request to its end, checked. How it ended."""
        record, dice = self._record, self._dice
        cancel_at = dice.choice((0, 1, 5, 20)) if dice.random() < CANCEL_SHARE else None
        deadline = dice.uniform(0.05, 0.5) if dice.random() < DEADLINE_SHARE else None
        number = record.began(f"{self._server.name}/{case.model} {case.prompt!r} {case.length}")
        watch = Watch(record, (self._server.name, case.model))
        text, how, restarts, reason = "", "", 0, None
        other = None
        try:
            stream = client.generate(case.model, prompt=case.prompt, max_tokens=case.length, deadline_s=deadline)
            if cancel_at is None and deadline is None and dice.random() < ATTACH_SHARE:
                other = stream.request_id
            seen = 0
            if cancel_at == 0:
                record.fault("cancel")
                stream.cancel()
            for snap in stream.snapshots(progress=True):
                watch.saw(snap)
                text, seen = snap.text, seen + len(snap.tokens)
                if cancel_at and seen >= cancel_at:
                    record.fault("cancel")
                    stream.cancel()
                    cancel_at = None
            result = stream.result()
            text, how, restarts, reason = result.text, result.finish_reason, result.restarts, result.finish_reason
        except BulkheadError as error:
            how = error.code.value
            if not explained(self._server.name, error):
                record.violation(f"{self._server.name}/{case.model}: {error}")
        record.ended(number, how, restarts)
        self._check(case, text, reason, restarts)
        if other is not None and how == "length":
            self._attach(client, other, case)
        return how

    def _check(self, case: Case, text: str, reason: str | None, restarts: int) -> None:
        if not case.fits(text, reason):
            self._record.violation(
                f"{self._server.name}/{case.model} {case.prompt!r} {case.length} ({reason}, {restarts} restarts): "
                f"got {text!r}, expected {case.text!r}"
            )

    def _attach(self, client: Client, request_id: str, case: Case) -> None:
        """A second reader gets the same, after the end too."""
        number = self._record.began(f"attach {self._server.name}/{case.model}")
        try:
            result = client.attach(request_id).result()
        except BulkheadError as error:
            self._record.ended(number, f"attach {error.code.value}")
            if error.code.value not in ("disconnected", "bad_request"):  # a restarted server knows no old requests
                self._record.violation(f"attach: {error}")
            return
        self._record.ended(number, "attach length")
        self._check(case, result.text, "length", result.restarts)


class Witness(threading.Thread):
    """Asks over a bare socket, and notes each frame that breaks the grammar."""

    def __init__(self, server: Server, bank: Bank, record: Record, seed: str, stop: threading.Event) -> None:
        super().__init__(name=f"witness-{seed}", daemon=True)
        self._server = server
        self._bank = bank
        self._record = record
        self._dice = random.Random(seed)
        self._stop_asked = stop

    def run(self) -> None:
        raw = Raw(self._server.run_dir)
        try:
            while not self._stop_asked.is_set():
                model = self._dice.choice(self._server.models)
                case = fresh(self._dice.choice(self._bank[model]), self._dice)
                slow = self._dice.random() < 0.1
                if slow:
                    self._record.fault("slow client")
                if not watch_raw(self._record, self._server.name, raw, case, 1.0 if slow else 0.0):
                    raw.close()
                    raw = Raw(self._server.run_dir)
            raw.drain(0.3)
            for late in raw.late:
                self._record.violation(f"{self._server.name}: {late}")
        except Exception as error:
            self._record.violation(f"{self.name}: {error!r}")
        finally:
            raw.close()


def watch_raw(record: Record, server: str, raw: Raw, case: Case, sleep_s: float) -> bool:
    """One request over a bare socket, checked. False when the server fell silent."""
    number = record.began(f"raw {server}/{case.model} {case.prompt!r}")
    assembler = raw.follow(case, sleep_s)
    if assembler is None:
        record.ended(number, "disconnected")
        return False
    if assembler.result is not None:
        record.ended(number, assembler.result.finish_reason, assembler.result.restarts)
        if not case.fits(assembler.result.text, assembler.result.finish_reason):
            record.violation(f"raw {server}/{case.model}: {assembler.result.text!r}, expected {case.text!r}")
        return True
    assert assembler.error is not None
    record.ended(number, assembler.error.code.value)
    if not explained(server, assembler.error):
        record.violation(f"raw {server}/{case.model}: {assembler.error}")
    return True
