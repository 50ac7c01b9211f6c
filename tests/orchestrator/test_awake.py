"""The sleep assertion: the decision as tables, the actor over a fake helper, and real processes in its place."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest
from mlx_bulkhead.orchestrator import awake
from mlx_bulkhead.orchestrator.awake import LINGER_S, RETRY_S, Helper, KeepAwake, Seen, command_for, should_hold
from mlx_bulkhead.orchestrator.config import Config
from mlx_bulkhead.protocol.errors import BulkheadError

from tests.support.hosts import fake_host, until

STUB = (sys.executable, "-c", "import sys; sys.stdin.read()")
REFUSED = (sys.executable, "-c", "import sys; sys.exit('no logind here')")


@pytest.mark.parametrize(
    ("busy_at", "failed_at", "hold"),
    [
        (None, None, False),
        (100.0, None, True),
        (100.0 - LINGER_S + 1.0, None, True),  # lingers
        (100.0 - LINGER_S, None, False),
        (100.0, 99.0, False),
        (100.0, 100.0 - RETRY_S, True),
        (None, 100.0 - RETRY_S, False),
    ],
)
def test_when_it_is_held(busy_at: float | None, failed_at: float | None, hold: bool) -> None:
    assert should_hold(Seen(busy_at, failed_at), 100.0) is hold


def everything(program: str) -> str | None:
    return program if program.startswith("/") else f"/bin/{program}"


def test_the_program_of_each_platform() -> None:
    assert command_for("darwin", 77, everything) == ("/usr/bin/caffeinate", "-i", "-w", "77")
    linux = command_for("linux", 77, everything)
    assert linux is not None
    assert linux[:2] == ("/bin/systemd-inhibit", "--what=idle:sleep")
    assert linux[-1] == "/bin/cat"
    assert command_for("win32", 77, everything) is None


@pytest.mark.parametrize("platform", ["darwin", "linux"])
def test_a_host_without_the_program_is_unsupported(platform: str) -> None:
    assert command_for(platform, 77, lambda _: None) is None


class Fakes:
    """Starts helpers that are none, and ends them when the test says so."""

    def __init__(self) -> None:
        self.started: list[FakeHelper] = []
        self.error: OSError | None = None

    def start(self, command: Sequence[str], on_exit: Callable[[Helper], None]) -> Helper:
        if self.error is not None:
            raise self.error
        self.started.append(FakeHelper(on_exit))
        return self.started[-1]


class FakeHelper:
    """A helper that ends when told by the test."""

    last_words = "exit code 1; it said: Access denied"

    def __init__(self, on_exit: Callable[[Helper], None]) -> None:
        self._on_exit = on_exit
        self.asked_to_end = False

    def end(self) -> None:
        self.asked_to_end = True

    def exit(self) -> None:
        self._on_exit(self)


class Clock:
    """Stands for the module `time`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(awake, "time", self)

    def monotonic(self) -> float:
        return self.now


async def test_one_helper_for_many_requests_and_none_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, fakes = Clock(monkeypatch), Fakes()
    keeper = KeepAwake(True, ("x",), fakes.start)
    keeper.note(busy=False)
    assert (keeper.state, fakes.started) == ("idle", [])
    for busy in (True, True, False, True, False):
        keeper.note(busy)
        clock.now += LINGER_S / 4
    assert keeper.state == "held"
    assert len(fakes.started) == 1
    assert keeper.figures() == {"kept_awake": 1.0}
    clock.now += LINGER_S
    keeper.note(busy=False)
    assert keeper.state == "idle"
    assert fakes.started[0].asked_to_end
    keeper.note(busy=True)  # before the first is reaped
    fakes.started[0].exit()
    assert keeper.state == "held"
    assert len(fakes.started) == 2
    keeper.note(busy=False)
    clock.now += LINGER_S
    keeper.note(busy=False)
    fakes.started[1].exit()
    await keeper.close()
    keeper.note(busy=True)  # a late tick
    assert len(fakes.started) == 2


async def test_a_helper_that_ends_by_itself_costs_one_warning_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, fakes = Clock(monkeypatch), Fakes()
    keeper = KeepAwake(True, ("systemd-inhibit",), fakes.start)
    for tries in range(1, 4):
        keeper.note(busy=True)
        fakes.started[-1].exit()
        keeper.note(busy=True)
        assert (keeper.state, len(fakes.started)) == ("failed", tries)
        clock.now += RETRY_S
    fakes.error = OSError("no more processes")
    keeper.note(busy=True)
    assert keeper.state == "failed"
    assert keeper.figures() == {"kept_awake": 0.0, "keep_awake_failed": 1.0}
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "systemd-inhibit ended: exit code 1; it said: Access denied" in warnings[0]
    await keeper.close()


async def test_unsupported_is_said_once_and_off_is_silent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(awake, "command_for", lambda *_: None)
    keeper, off = KeepAwake(True), KeepAwake(False, STUB)
    for one in (keeper, off):
        one.note(busy=True)
        one.note(busy=True)
        await one.close()
    assert (keeper.state, off.state) == ("unsupported", "off")
    assert keeper.figures() == {"kept_awake": 0.0, "keep_awake_unsupported": 1.0}
    assert off.figures() == {"kept_awake": 0.0}
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "unsupported" in caplog.text


def stubs() -> list[psutil.Process]:
    """The children of this process that run `STUB`."""
    found: list[psutil.Process] = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if tuple(child.cmdline()) == STUB:
                found.append(child)
    return found


@pytest.mark.parametrize("by", ["pidfd", "thread"])
async def test_a_real_helper_is_reaped_at_the_end(monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    if by == "thread":
        monkeypatch.setattr(sys, "platform", "darwin")
    keeper = KeepAwake(True, STUB)
    keeper.note(busy=True)
    (child,) = stubs()
    assert os.getpgid(child.pid) == child.pid
    await keeper.close()
    await keeper.close()
    assert not psutil.pid_exists(child.pid)


async def test_a_real_helper_tells_why_it_ended(caplog: pytest.LogCaptureFixture) -> None:
    keeper = KeepAwake(True, REFUSED)
    keeper.note(busy=True)
    await until(lambda: keeper.state == "failed")
    assert "exit code 1; it said: no logind here" in caplog.text
    await keeper.close()
    missing = KeepAwake(True, ("/nowhere/caffeinate",))
    missing.note(busy=True)
    assert missing.state == "failed"
    await missing.close()


ORPHAN = """
import asyncio, sys
from mlx_bulkhead.orchestrator.spawn import HelperProcess

async def main():
    helper = HelperProcess((sys.executable, "-c", "import sys; sys.stdin.read()"), print)
    print(helper.pid, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


async def test_a_helper_ends_with_an_orchestrator_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        helper = psutil.Process(int(owner.stdout.readline()))
        owner.kill()
    await until(lambda: not alive(helper))


def alive(process: psutil.Process) -> bool:
    """An orphan is not ours to reap: a zombie has ended too."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


async def test_a_host_is_kept_awake_while_a_model_loads(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awake, "command_for", lambda *_: STUB)
    async with fake_host(short_tmp / "r", config=Config(keep_awake=True)) as host:
        load = asyncio.ensure_future(host.load("m", "fake", env={"BULKHEAD_FAKE_LOAD_S": "30"}))
        await until(lambda: bool(stubs()))
        assert not load.done()
    assert not stubs()  # reaped with the rest, though it lingered
    with pytest.raises(BulkheadError):
        await load


@pytest.mark.parametrize("keep_awake", [True, False])
async def test_a_host_is_kept_awake_while_a_request_runs(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch, keep_awake: bool
) -> None:
    monkeypatch.setattr(awake, "command_for", lambda *_: STUB)
    monkeypatch.setattr(awake, "LINGER_S", 0.01)
    async with fake_host(short_tmp / "r", config=Config(keep_awake=keep_awake)) as host:

        def held() -> bool:
            return host.stats_reply(None).daemon["kept_awake"] == 1.0

        await host.load("m", "fake")
        async with host.generate("m", prompt="long", max_tokens=100_000) as stream:
            if not keep_awake:
                async for snap in stream:
                    assert snap is not None
                    break
                assert not held()
                return
            await until(held)
        await until(lambda: not held())
        await until(lambda: not stubs())


async def test_stats_tell_of_a_host_that_cannot_be_kept_awake(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(awake, "command_for", lambda *_: None)
    async with fake_host(short_tmp / "r", config=Config(keep_awake=True)) as host:
        await host.load("m", "fake")
        await host.complete("m", prompt="one", max_tokens=3)
        assert host.stats_reply(None).daemon["keep_awake_unsupported"] == 1.0
