"""The `bulkhead` command against a scripted daemon: output, exit codes, and errors of one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from mlx_bulkhead.orchestrator.cli.answer import restarts
from mlx_bulkhead.orchestrator.cli.app import run
from mlx_bulkhead.orchestrator.cli.common import mib, mib_of, span
from mlx_bulkhead.orchestrator.cli.ps import listing
from mlx_bulkhead.orchestrator.cli.tap import veiled
from mlx_bulkhead.orchestrator.cli.target import _short as short_name
from mlx_bulkhead.orchestrator.run_dir import log_path
from mlx_bulkhead.protocol.commands import Cancel, Generate, Load, Restart, Shutdown, Stats, Unload
from mlx_bulkhead.protocol.errors import ErrorCode
from mlx_bulkhead.protocol.events import (
    Accepted,
    Exiting,
    Failed,
    Loaded,
    LoadFailed,
    LoadProgress,
    Snapshot,
    StatsReply,
    Unloaded,
)
from mlx_bulkhead.protocol.exit_codes import CliExit
from mlx_bulkhead.protocol.values import Memory, ModelStatus, WorkerInfo, WorkerStats

from tests.support.fake_daemon import FakeDaemon, answer_with, done

INFO = WorkerInfo(engine="text", load_seconds=1.25)
MODELS = [
    ModelStatus(
        name="a", state="READY", model="/m/a", pid=77, engine="text", in_flight=2, uptime_s=65.0, footprint=2**20
    ),
    ModelStatus(name="b", state="BACKOFF", problem="SIGABRT: aborted", next_retry_s=2.0, restarts=1),
]


@pytest.fixture(autouse=True)
def where(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BULKHEAD_RUN_DIR", str(short_tmp))


@pytest.fixture
def daemon(short_tmp: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(short_tmp) as fake:
        fake.models = MODELS
        yield fake


def process(*arguments: str, **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mlx_bulkhead.orchestrator.cli", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, **options)  # pyright: ignore


# ---- errors and codes


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["ps"], CliExit.NO_DAEMON, "bulkhead serve --run-dir"),
        (["run", "name", "hi"], CliExit.NO_DAEMON, "bulkhead serve"),
        (["nonsense"], CliExit.USAGE, "nonsense"),
        (["load", "a"], CliExit.USAGE, "--model"),
        (["run", "a", "hi", "--max-tokens", "many"], CliExit.USAGE, "--max-tokens"),
        (["run", "a", "hi", "--raw", "--system", "s"], CliExit.USAGE, "--raw"),
        (["logs", "none"], CliExit.UNKNOWN_MODEL, "no log"),
        (["serve", "--config", "/nonexistent.toml"], CliExit.USAGE, "cannot read"),
    ],
)
def test_an_error_is_one_line_and_a_code(
    capfd: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    assert run(arguments) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert words in err


@pytest.mark.parametrize(
    ("arguments", "failed", "code"),
    [
        (["load", "a", "-m", "x/y"], ErrorCode.LOAD_FAILED, CliExit.LOAD_FAILED),
        (["load", "a", "-m", "x/y"], ErrorCode.WORKER_CRASHED, CliExit.LOAD_FAILED),
        (["load", "a", "-m", "x/y"], ErrorCode.BAD_REQUEST, CliExit.USAGE),
        (["restart", "a"], ErrorCode.UNKNOWN_MODEL, CliExit.UNKNOWN_MODEL),
        (["unload", "a"], ErrorCode.UNKNOWN_MODEL, CliExit.UNKNOWN_MODEL),
        (["run", "a", "hi"], ErrorCode.WORKER_CRASHED, CliExit.FAILED),
        (["run", "a", "hi"], ErrorCode.CONTEXT_OVERFLOW, CliExit.USAGE),
    ],
)
def test_codes_of_what_the_daemon_refuses(
    daemon: FakeDaemon, capfd: pytest.CaptureFixture[str], arguments: list[str], failed: ErrorCode, code: int
) -> None:
    for command in (Load, Restart):
        daemon.answers[command] = lambda r: r.reply(LoadFailed(failed, "it\nfailed"))
    for command in (Unload, Generate):
        daemon.answers[command] = lambda r: r.reply(Failed(failed, "it\nfailed"))
    assert run(arguments) == code
    assert capfd.readouterr().err == "error: it failed\n"


# ---- commands


def test_load_prints_plain_lines_without_a_terminal(daemon: FakeDaemon, capfd: pytest.CaptureFixture[str]) -> None:
    steps = [LoadProgress("weights", n, 10) for n in (0, 1, 1, 10)]
    daemon.answers[Load] = lambda r: r.reply(LoadProgress("importing"), *steps, Loaded("a", INFO))
    assert run(["load", "a", "--model", "x/y", "--max-running", "3", "--env", "A=b=c", "--deterministic"]) == 0
    assert capfd.readouterr().err.splitlines() == [
        "a: importing",
        "a: weights 0 %",
        "a: weights 10 %",
        "a: weights 100 %",
        "a: ready in 1.2 s, engine text, -",
    ]
    wanted = Load("a", "x/y", max_running=3, env={"A": "b=c"}, deterministic=True)
    assert daemon.expect(Load).message == wanted


def test_restart_and_unload(daemon: FakeDaemon, capfd: pytest.CaptureFixture[str]) -> None:
    info = msgspec.structs.replace(INFO, memory_after=Memory(footprint=3 * 2**20))
    daemon.answers[Restart] = lambda r: r.reply(Loaded("a", info))
    daemon.answers[Unload] = lambda r: r.reply(Unloaded("a"))
    assert run(["restart", "a"]) == run(["unload", "a"]) == 0
    assert capfd.readouterr().err.splitlines() == ["a: ready in 1.2 s, engine text, 3 MiB", "a: unloaded"]


def test_ps(daemon: FakeDaemon, capfd: pytest.CaptureFixture[str]) -> None:
    daemon.answers[Stats] = lambda r: r.reply(StatsReply())
    assert run(["ps"]) == 0
    first, second, third = capfd.readouterr().out.splitlines()
    assert first.split()[:4] == ["NAME", "STATE", "PID", "MEMORY"]
    assert second.split() == ["a", "READY", "77", "1", "MiB", "text", "2", "0", "1m05s"]
    assert third.endswith("SIGABRT: aborted (again in 2 s)")
    assert run(["ps", "--json"]) == 0
    listed = json.loads(capfd.readouterr().out)
    assert [model["name"] for model in listed] == ["a", "b"]
    assert listed[0]["restarts"] == 0


def test_a_note_is_whole_in_a_pipe_and_fits_a_terminal() -> None:
    model = ModelStatus(name="b", state="BACKOFF", problem="word " * 60, next_retry_s=2.0)
    assert listing([model], None).endswith("word word (again in 2 s)")
    line = listing([model], 120).splitlines()[1]
    assert len(line) == 120
    assert line.endswith("… (again in 2 s)")
    short = ModelStatus(name="b", state="BACKOFF", problem="short")
    assert listing([short], 120).endswith("  short")
    assert listing([model], 10).splitlines()[1].endswith("… (again in 2 s)")


def test_stats(daemon: FakeDaemon, capfd: pytest.CaptureFixture[str]) -> None:
    figures = WorkerStats(running=3, completion_tokens=99)
    model = ModelStatus(name="a", state="READY", stats=figures)
    daemon.answers[Stats] = lambda r: r.reply(StatsReply([model], daemon={"uptime_s": 7200.0, "clients": 2.0}))
    assert run(["stats", "a"]) == 0
    out = capfd.readouterr().out
    assert "up 2h00m" in out
    assert "clients 2" in out
    assert "99" in out
    assert daemon.expect(Stats).message == Stats(model="a")
    assert run(["stats", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["models"][0]["stats"]["running"] == 3


def test_run_streams_text_to_stdout_and_figures_to_stderr(
    daemon: FakeDaemon, capfd: pytest.CaptureFixture[str]
) -> None:
    daemon.answers[Generate] = answer_with("Příliš žluťoučký")
    assert run(["run", "a", "hi", "--system", "be brief", "--max-tokens", "7", "--seed", "1"]) == 0
    out, err = capfd.readouterr()
    assert out == "Příliš žluťoučký\n"
    assert "engine text" in err
    message = daemon.expect(Generate).message
    assert isinstance(message, Generate)
    assert [(turn.role, turn.content) for turn in message.messages or []] == [("system", "be brief"), ("user", "hi")]
    assert (message.max_tokens, message.seed) == (7, 1)


def test_run_finds_a_loaded_path_and_prints_json(daemon: FakeDaemon, capfd: pytest.CaptureFixture[str]) -> None:
    daemon.answers[Generate] = answer_with("yes")
    assert run(["run", "/m/a", "hi", "--raw", "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert (result["text"], result["finish_reason"], result["usage"]["prompt_tokens"]) == ("yes", "stop", 4)
    assert daemon.expect(Generate).message == Generate(model="a", prompt="hi")


def test_run_of_an_unknown_name(daemon: FakeDaemon, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "zz", "hi"]) == CliExit.UNKNOWN_MODEL
    assert "bulkhead ps" in capfd.readouterr().err


def test_run_reads_stdin(daemon: FakeDaemon) -> None:
    daemon.answers[Generate] = answer_with("ok")
    with process("run", "a", "-", "--raw") as child:
        out, _ = child.communicate("from a pipe", timeout=30)
    assert (child.returncode, out) == (0, "ok\n")
    assert daemon.expect(Generate).message == Generate(model="a", prompt="from a pipe")


def test_ctrl_c_in_run_cancels_the_request(daemon: FakeDaemon) -> None:
    with process("run", "a", "hi") as child:
        request = daemon.expect(Generate)
        request.reply(Accepted(), Snapshot(0, 0, "a"))
        assert child.stdout is not None
        assert child.stdout.read(1) == "a"
        child.send_signal(signal.SIGINT)
        assert daemon.expect(Cancel).request_id == request.request_id
        _, err = child.communicate(timeout=30)
    assert child.returncode == CliExit.INTERRUPTED
    assert "Traceback" not in err


def test_ctrl_c_in_chat_ends_the_answer_and_not_the_chat(daemon: FakeDaemon) -> None:
    with process("chat", "a") as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write("one\n")
        child.stdin.flush()
        request = daemon.expect(Generate)
        request.reply(Accepted(), Snapshot(0, 0, "first"))
        assert child.stdout.read(len("first")) == "first"
        child.send_signal(signal.SIGINT)
        daemon.expect(Cancel)
        request.reply(done("first", reason="cancelled"))
        child.stdin.write("two\n")
        child.stdin.flush()
        again = daemon.expect(Generate)
        assert isinstance(again.message, Generate)
        assert [turn.content for turn in again.message.messages or []] == ["one", "first", "two"]
        again.reply(Failed("queue_full", "full"))
        out, err = child.communicate("/exit\n", timeout=30)
    assert child.returncode == 0
    assert "error: full" in err
    assert ">" not in out
    assert "Traceback" not in out + err


def test_stop_waits_for_the_process(daemon: FakeDaemon, capfd: pytest.CaptureFixture[str]) -> None:
    daemon.answers[Stats] = lambda r: r.reply(StatsReply())
    daemon.answers[Shutdown] = lambda r: r.reply(Exiting())
    assert run(["stop", "--drain", "--grace", "2"]) == 0
    assert daemon.expect(Shutdown).message == Shutdown(grace_s=2.0, drain=True)


def test_logs_shows_the_end_and_follows(short_tmp: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = log_path(short_tmp, "a/b")
    path.parent.mkdir()
    path.write_text("one\ntwo\nthree\n")
    assert run(["logs", "a/b", "-n", "2"]) == 0
    assert capfd.readouterr().out == "two\nthree\n"
    with process("logs", "a/b", "-f", "-n", "1") as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "three\n"
        with path.open("a") as file:
            file.write("four\n")
        assert child.stdout.readline() == "four\n"
        path.write_text("new\n")
        assert child.stdout.readline() == "new\n"
        child.send_signal(signal.SIGINT)
        child.communicate(timeout=30)
    assert child.returncode == CliExit.INTERRUPTED


def test_doctor_reports_and_its_code_says_whether_something_is_broken(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], short_tmp: Path
) -> None:
    from mlx_bulkhead.orchestrator.cli import doctor

    monkeypatch.setattr(doctor, "PROBE", "print('Device(cpu, 0)')")
    code = run(["doctor", "--json"])
    report = {finding["check"]: finding for finding in json.loads(capfd.readouterr().out)}
    assert report["mlx"]["verdict"] == "ok"
    assert report["run dir"]["words"].startswith(str(short_tmp))
    assert code == (1 if report["mlx-lm"]["verdict"] == "broken" else 0)
    monkeypatch.setattr(doctor, "PROBE", "import os; os.abort()")
    assert run(["doctor"]) == 1
    assert "broken  mlx" in capfd.readouterr().out


def test_doctor_knows_a_stale_socket_and_a_long_path(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_bulkhead.orchestrator.cli import doctor

    FakeDaemon(short_tmp).close(keep_socket_file=True)
    assert doctor._daemon(short_tmp).verdict == "hint"
    found = {finding.check: finding for finding in doctor._run_dir(short_tmp / ("x" * 120))}
    assert found["path"].verdict == "hint"


def test_numbers_for_people() -> None:
    assert [mib(0), mib(3 * 2**20), mib(5 * 2**30)] == ["-", "3 MiB", "5.0 GiB"]
    assert [span(5), span(65), span(3700), span(200_000)] == ["5s", "1m05s", "1h01m", "2d7h"]
    assert [mib_of(0, 0), mib_of(2**20, 0), mib_of(2**20, 5 * 2**30)] == ["", "1 MiB", "1/5120 MiB"]
    assert [restarts(1), restarts(2)] == ["1 worker restart", "2 worker restarts"]
    assert [short_name("/m/x/"), short_name("org/name"), short_name("./a")] == ["x", "name", "a"]


def test_the_tap_veils_what_people_and_models_wrote_and_nothing_else() -> None:
    turn = {"role": "user", "content": "secret", "tool_calls": [{"arguments": "secret"}]}
    frame = {"engine": "text", "n": 1, "prompt": "secret", "messages": [turn], "tokens": [7, 8], "tools": None}
    assert veiled(frame) == {
        "engine": "text",
        "n": 1,
        "prompt": "<6 characters>",
        "messages": "<1 items>",
        "tokens": "<2 items>",
        "tools": None,
    }
    assert veiled([turn]) == [
        {"role": "user", "content": "<6 characters>", "tool_calls": [{"arguments": "<6 characters>"}]}
    ]


def test_the_example_says_how_it_is_used() -> None:
    example = Path(__file__).parents[2] / "docs" / "client_example.py"
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("usage: ")
    assert done.stderr.count("\n") == 1


def test_help_names_every_command_and_loads_no_sockets(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    out = capfd.readouterr().out
    for command in (
        *("serve", "load", "unload", "restart", "ps", "stats", "run"),
        *("chat", "logs", "tap", "stop", "doctor", "demo", "adapter"),
    ):
        assert f" {command} " in out
    code = (
        "import sys; from mlx_bulkhead.orchestrator.cli import app;"
        "print(sorted({'zmq', 'asyncio', 'psutil', 'mlx'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.strip() == "[]"


def test_importing_the_package_imports_nothing_else() -> None:
    code = (
        "import sys; before = set(sys.modules); import mlx_bulkhead;"
        "print(sorted(m for m in set(sys.modules) - before if not m.startswith(('mlx_bulkhead', '_'))));"
        "print([n for n in mlx_bulkhead.__all__ if getattr(mlx_bulkhead, n) is None])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported, missing = done.stdout.splitlines()
    assert "zmq" not in imported
    assert "msgspec" not in imported
    assert missing == "[]"
