"""A server at rest: all its models serve, nothing is live, and it holds what it always holds."""

from __future__ import annotations

import random
import time

import psutil

from mlx_bulkhead import BulkheadError, Client

from .bank import Bank, fresh
from .record import Record
from .servers import Sample, Server

SETTLE_S = 20.0
STILL_S = 1.5
Held = tuple[int, int]
"""Descriptors and threads."""


def settled(server: Server, bank: Bank, record: Record, dice: random.Random, wanted: Held | None = None) -> Held:
    """Ask each model once more, wait until nothing is live, and say what the process then holds.

    Waits until that is what was wanted, or without a wish until it no longer changes."""
    try:
        with server.client() as client:
            for model in server.models:
                _ask(client, server, model, bank, record, dice)
            _wait_idle(client, server, record)
    except BulkheadError as error:
        record.violation(f"{server.name} does not serve when it should be at rest: {error}")
    deadline = time.monotonic() + SETTLE_S
    last, since = (0, 0), time.monotonic()
    while time.monotonic() < deadline:
        process = psutil.Process(server.pid)
        held = (process.num_fds(), process.num_threads())
        if held != last:
            last, since = held, time.monotonic()
        elif held == wanted or (wanted is None and time.monotonic() - since > STILL_S):
            break
        time.sleep(0.05)
    return last


def _ask(client: Client, server: Server, model: str, bank: Bank, record: Record, dice: random.Random) -> None:
    state = next(line.state for line in client.models() if line.name == model)
    if state == "FAILED":
        client.restart(model)
    for case in bank[model]:  # the first one that is not in quarantine
        case = fresh(case, dice)
        try:
            text = client.complete(model, prompt=case.prompt, max_tokens=case.length).text
        except BulkheadError as error:
            if error.code.value != "quarantined":
                raise
            continue
        if text != case.text:
            record.violation(f"{server.name}/{model} at rest: got {text!r}, expected {case.text!r}")
        return
    record.violation(f"{server.name}/{model}: every prompt of the bank is in quarantine")


def _wait_idle(client: Client, server: Server, record: Record) -> None:
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        reply = client.stats()
        spares = 1.0 if server.name == "real" else 0.0
        busy = sum(m.in_flight + (m.stats.running + m.stats.queued if m.stats else 0) for m in reply.models)
        if not busy and not reply.daemon["requests_live"] and reply.daemon["spares"] == spares:
            return
        time.sleep(0.1)
    lines = [(m.name, m.state, m.in_flight, m.stats) for m in reply.models]
    record.violation(f"{server.name} is not idle {SETTLE_S:g} s after its last request: {reply.daemon}, {lines}")


def longest_life(server: Server) -> list[Sample]:
    """Samples of the process that lived longest, its first quarter (the warm-up) left out."""
    life = max(server.lives, key=len, default=[])
    return life[len(life) // 4 :]


def rss_growth(server: Server) -> int:
    """Bytes between the means of the first and the last tenth of the longest life."""
    life = longest_life(server)
    tenth = max(1, len(life) // 10)
    if len(life) < 4:
        return 0
    first, last = life[:tenth], life[-tenth:]
    return sum(s.rss for s in last) // tenth - sum(s.rss for s in first) // tenth
