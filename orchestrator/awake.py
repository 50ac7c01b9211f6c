"""Keeps the host from idle sleep while it has work, if the configuration asks for it. One seam for macOS and Linux.

`should_hold` and `command_for` decide (pure); `KeepAwake` acts, through the helper process that `spawn.py` starts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import msgspec

from .spawn import HelperProcess

log = logging.getLogger(__name__)

LINGER_S = 10.0
"""How long an assertion is held after the last work: one request after the other must not start a process each."""

RETRY_S = 60.0
"""After the helper ended by itself, or could not be started, how long before the next try."""

AwakeState = Literal["off", "unsupported", "idle", "held", "failed"]


class Seen(msgspec.Struct, frozen=True):
    """What the decision depends on; times are monotonic seconds, None: never."""

    busy_at: float | None = None
    """When there was work last."""
    failed_at: float | None = None
    """When an assertion was lost last, or could not be had."""


def should_hold(seen: Seen, now: float) -> bool:
    """Whether the host is to be kept awake now."""
    if seen.busy_at is None or now - seen.busy_at >= LINGER_S:
        return False
    return seen.failed_at is None or now - seen.failed_at >= RETRY_S


def command_for(platform: str, pid: int, which: Callable[[str], str | None]) -> tuple[str, ...] | None:
    """The program that keeps the host awake while it runs, and ends when process `pid`, our own, does.

    Args:
        platform: as in `sys.platform`.
        which: `shutil.which`. None: this host has no such program.
    """
    if platform == "darwin":
        program = which("/usr/bin/caffeinate")  # -i: no idle sleep; -w: until that process ends
        return None if program is None else (program, "-i", "-w", str(pid))
    if platform.startswith("linux"):
        program, cat = which("systemd-inhibit"), which("cat")
        if program is None or cat is None:
            return None
        options = ("--what=idle:sleep", "--who=mlx-bulkhead", "--why=requests are running", "--mode=block")
        return (program, *options, cat)  # cat ends with our end of its stdin
    return None


class Helper(Protocol):
    """A process that runs; `HelperProcess`, or a fake of a test."""

    def end(self) -> None:
        """End it soon."""
        ...

    @property
    def last_words(self) -> str:
        """Once it has ended: how, and what it said."""
        ...


Starter = Callable[[Sequence[str], Callable[[Helper], None]], Helper]
"""Starts a command; the function is called on the loop once the process is reaped. Raises `OSError`."""


class KeepAwake:
    """At most one assertion, held by one helper process. Made on the loop; `close` waits until all is reaped."""

    def __init__(self, wanted: bool, command: tuple[str, ...] | None = None, start: Starter = HelperProcess) -> None:
        self._command = (command or command_for(sys.platform, os.getpid(), shutil.which)) if wanted else None
        self._wanted = wanted
        self._start = start
        self._seen = Seen()
        self._helper: Helper | None = None
        self._ending: set[Helper] = set()
        self._all_ended: asyncio.Future[None] | None = None
        self._closed = False
        self._warned = False
        if wanted and self._command is None:
            self._warn(f"unsupported on this host ({sys.platform}): neither caffeinate nor systemd-inhibit is there")

    @property
    def state(self) -> AwakeState:
        """`off`: not asked for. `failed`: the last try did not work; the next one is made while there is work."""
        if not self._wanted:
            return "off"
        if self._command is None:
            return "unsupported"
        if self._helper is not None:
            return "held"
        return "idle" if self._seen.failed_at is None else "failed"

    def figures(self) -> dict[str, float]:
        """For `stats`. Asked for and not to be had is a key of its own: 0 alone could be idleness."""
        figures = {"kept_awake": float(self.state == "held")}
        if self.state in ("unsupported", "failed"):
            figures[f"keep_awake_{self.state}"] = 1.0
        return figures

    def note(self, busy: bool) -> None:
        """Called on a clock: whether there is work now."""
        if self._command is None or self._closed:
            return
        now = time.monotonic()
        if busy:
            self._seen = msgspec.structs.replace(self._seen, busy_at=now)
        hold = should_hold(self._seen, now)
        if hold and self._helper is None:
            self._hold(self._command)
        elif not hold and self._helper is not None:
            self._release()

    async def close(self) -> None:
        """Let the host sleep, and wait until the helper is reaped. Idempotent."""
        self._closed = True
        self._release()
        if self._ending:
            self._all_ended = self._all_ended or asyncio.get_running_loop().create_future()
            await asyncio.shield(self._all_ended)

    def _hold(self, command: tuple[str, ...]) -> None:
        try:
            self._helper = self._start(command, self._gone)
        except OSError as error:
            self._failed(str(error))
        else:
            log.debug("a sleep assertion is asked for: %s", command[0])

    def _release(self) -> None:
        if self._helper is not None:
            helper, self._helper = self._helper, None
            self._seen = msgspec.structs.replace(self._seen, failed_at=None)  # this one did its work
            self._ending.add(helper)
            helper.end()
            log.debug("the host may sleep again")

    def _gone(self, helper: Helper) -> None:
        """A helper is reaped: one that was ended, or the one that should have gone on."""
        if helper is self._helper:
            self._helper = None
            self._failed(f"{self._command and self._command[0]} ended: {helper.last_words}")
            return
        self._ending.discard(helper)
        if not self._ending and self._all_ended is not None:
            self._all_ended.set_result(None)

    def _failed(self, why: str) -> None:
        self._seen = msgspec.structs.replace(self._seen, failed_at=time.monotonic())
        self._warn(why)

    def _warn(self, why: str) -> None:
        """Once, however often it is tried."""
        level = logging.DEBUG if self._warned else logging.WARNING
        self._warned = True
        log.log(level, "keep_awake has no effect, the host may sleep while requests run: %s", why)
