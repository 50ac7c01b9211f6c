"""What `run`, `chat` and `demo` say while an answer comes: restarts, prefill, a daemon that goes away."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from mlx_bulkhead.orchestrator.cli import chat, demo
from mlx_bulkhead.orchestrator.cli.app import run
from mlx_bulkhead.orchestrator.client import Client
from mlx_bulkhead.protocol.codec import Message
from mlx_bulkhead.protocol.commands import Generate
from mlx_bulkhead.protocol.events import Accepted, Progress, Snapshot
from mlx_bulkhead.protocol.exit_codes import CliExit
from mlx_bulkhead.protocol.values import ModelStatus

from tests.support.fake_daemon import FakeDaemon, Received, answer_with, done

COMMAND = [sys.executable, "-m", "mlx_bulkhead.orchestrator.cli"]
DIED = "[the worker died; restarting]"
RESTARTED: list[Message] = [
    Accepted(),
    Progress("prefill", 3, 10),
    Snapshot(0, 0, "one ", [1]),
    Progress("restarting"),
    Snapshot(1, 4, "two ", [2]),  # of the dead worker, late
    Progress("restarting"),  # a sign of life
    Progress("prefill", 10, 10),
    Snapshot(2, 8, "three", [3]),
    msgspec.structs.replace(done("one two three", tokens=3), restarts=1),
]


@pytest.fixture(autouse=True)
def where(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BULKHEAD_RUN_DIR", str(short_tmp))


@pytest.fixture
def daemon(short_tmp: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(short_tmp) as fake:
        fake.models = [ModelStatus(name="a", state="READY", pid=77)]
        yield fake


def test_a_restart_is_one_line(daemon: FakeDaemon, capfd: pytest.CaptureFixture[str]) -> None:
    daemon.answers[Generate] = lambda r: r.reply(*RESTARTED)
    assert run(["run", "a", "hi"]) == 0
    out, err = capfd.readouterr()
    assert out == "one two three\n"
    first, second = err.splitlines()
    assert first == DIED
    assert second.endswith("survived 1 worker restart]")
    assert run(["run", "a", "hi", "--json"]) == 0
    assert capfd.readouterr().err == DIED + "\n"


def test_an_answer_that_is_only_reasoning_is_no_silent_success(
    daemon: FakeDaemon, capfd: pytest.CaptureFixture[str]
) -> None:
    thoughts = Snapshot(0, 0, "let me see", [1, 2, 3], "reasoning")
    daemon.answers[Generate] = lambda r: r.reply(Accepted(), thoughts, done("", tokens=3))
    assert run(["run", "a", "hi"]) == 0
    assert "the answer ended within its reasoning, after 3 tokens" in capfd.readouterr().err
    assert run(["run", "a", "hi", "--json"]) == 0
    assert '"reasoning":"let me see"' in capfd.readouterr().out


def test_a_line_for_people_never_joins_one_of_the_answer(daemon: FakeDaemon) -> None:
    daemon.answers[Generate] = lambda r: r.reply(*RESTARTED)
    command = [*COMMAND, "run", "a", "hi"]
    out = subprocess.check_output(command, stderr=subprocess.STDOUT, text=True, timeout=30)
    assert out.splitlines()[:3] == ["one ", DIED, "two three"]


def test_a_terminal_shows_prefill_and_wipes_it(
    daemon: FakeDaemon, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.answers[Generate] = lambda r: r.reply(*RESTARTED)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert run(["run", "a", "hi"]) == 0
    out, err = capfd.readouterr()
    assert out == "one two three\n"
    assert err.startswith(f"\r\x1b[Kprefill 3/10 tokens\r\x1b[K{DIED}\n\r\x1b[Kprefill 10/10 tokens\r\x1b[K[")


def test_a_daemon_that_goes_away_in_mid_answer(daemon: FakeDaemon) -> None:
    with subprocess.Popen([*COMMAND, "run", "a", "hi"], stdout=-1, stderr=-1, text=True) as child:
        daemon.expect(Generate).reply(Accepted(), Snapshot(0, 0, "some"))
        assert child.stdout is not None
        assert child.stdout.read(4) == "some"
        daemon.close()
        _, err = child.communicate(timeout=30)
    assert child.returncode == CliExit.NO_DAEMON
    assert err.startswith("error: the daemon went away in mid-answer: ")
    assert "bulkhead serve" in err
    assert err.count("\n") == 1


def test_ctrl_c_at_the_prompt_of_chat_says_how_to_leave(
    daemon: FakeDaemon, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.answers[Generate] = answer_with("yes")
    typed = iter([KeyboardInterrupt(), "hello", EOFError()])

    def ask() -> str:
        one = next(typed)
        if isinstance(one, str):
            return one
        raise one

    monkeypatch.setattr(chat, "_ask", ask)
    assert run(["chat", "a"]) == 0
    out, err = capfd.readouterr()
    assert out == "yes\n"
    assert "/exit or Ctrl-D leaves\n" in err


def test_the_demo_kills_its_worker_in_mid_answer(
    daemon: FakeDaemon, short_tmp: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = "".join(f"{number} " for number in range(demo.KILL_AFTER))
    text = before + "and on"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as worker:
        daemon.models = [ModelStatus(name=demo.NAME, state="READY", pid=worker.pid)]

        def restart(request: Received) -> None:
            worker.wait(30)
            ended = msgspec.structs.replace(done(text), restarts=1)
            rest = [Snapshot(1, len(before), "and "), Progress("prefill"), Snapshot(2, len(before) + 4, "on")]
            request.reply(Progress("restarting"), *rest, ended)

        def answer(request: Received) -> None:
            request.reply(Accepted(), Snapshot(0, 0, before, list(range(demo.KILL_AFTER))))
            threads.append(threading.Thread(target=restart, args=(request,)))
            threads[0].start()

        threads: list[threading.Thread] = []
        daemon.answers[Generate] = answer
        with Client(short_tmp) as client:
            assert demo.kill_in_mid_answer(client)
        threads[0].join(30)
    assert worker.returncode == -signal.SIGKILL
    out, err = capfd.readouterr()
    assert out == text + "\n"
    lines = err.splitlines()
    assert lines[1:3] == [f"[worker {worker.pid} killed on purpose]", "[restarting]"]
    assert lines[-1].startswith("the answer is whole and survived 1 worker restart")
