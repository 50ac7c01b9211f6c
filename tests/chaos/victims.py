"""Keeps one client process a server, kills it, and picks up what it left."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading

from mlx_bulkhead import BulkheadError

from .bank import Bank, Case
from .record import Record
from .servers import Server


class Victim:
    """A client process of one server."""

    def __init__(self, server: Server, bank: Bank, record: Record, dice: random.Random) -> None:
        self._server = server
        self._cases: list[Case] = [case for model in server.models for case in bank[model]]
        self._record = record
        self._dice = dice
        self._lock = threading.Lock()
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.victim", str(self._server.run_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert process.stdin is not None
        chosen = self._cases if len(self._cases) < 60 else self._dice.sample(self._cases, 60)
        self._chosen = chosen
        process.stdin.write(json.dumps([[c.model, c.prompt, c.length, c.text] for c in chosen]) + "\n")
        process.stdin.flush()
        return process

    def kill(self) -> None:
        """SIGKILL; its last request, which is detached, is picked up by another client; another victim starts."""
        with self._lock:
            self._kill()

    def _kill(self) -> None:
        last = self._end()
        self._record.fault("client killed")
        if last is not None:
            self._pick_up(*last)
        self._process = self._start()

    def _end(self) -> tuple[str, Case] | None:
        self._process.kill()
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._process.wait()
        lines = [line for line in (self._process.stdout.read() or "").splitlines() if line]
        self._process.stdout.close()
        self._process.stdin.close()
        for line in lines:
            if line.startswith("wrong"):
                self._record.violation(f"{self._server.name}: a client process got a wrong answer: {line}")
        known = [line.split() for line in lines if not line.startswith("wrong")]
        return (known[-1][0], self._chosen[int(known[-1][1])]) if known and len(known[-1]) == 2 else None

    def _pick_up(self, request_id: str, case: Case) -> None:
        number = self._record.began(f"picked up {self._server.name}/{case.model}")
        try:
            with self._server.client() as client:
                result = client.attach(request_id).result()
        except BulkheadError as error:
            self._record.ended(number, f"attach {error.code.value}")
            return
        self._record.ended(number, f"attach {result.finish_reason}", result.restarts)
        if not case.fits(result.text, result.finish_reason):
            self._record.violation(f"picked up {self._server.name}/{case.model}: {result.text!r}")

    def close(self) -> None:
        """End it for good."""
        self._end()
