"""The misbehaving worker misbehaves as it says, so that tests that use it mean something."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from mlx_bulkhead.protocol.codec import PROTOCOL_VERSION, FrameError
from mlx_bulkhead.protocol.commands import Load
from mlx_bulkhead.protocol.events import LoadFailed, LoadProgress
from mlx_bulkhead.protocol.exit_codes import WorkerExit

from tests.support import misbehaving_worker
from tests.support.misbehaving_worker import MODES, expected_text, expected_tokens
from tests.support.worker_harness import NAME, Outcome, WorkerHarness

SCRIPT = Path(misbehaving_worker.__file__)
SIGNALS = {"abort": signal.SIGABRT, "segfault": signal.SIGSEGV, "kill": signal.SIGKILL}


def start(run_dir: Path, mode: str = "", **env: str) -> WorkerHarness:
    return WorkerHarness(run_dir, script=SCRIPT, env={"BULKHEAD_MISBEHAVE": mode, **env})


def test_it_behaves_unless_told_otherwise(short_tmp: Path) -> None:
    with start(short_tmp, BULKHEAD_FAKE_RATE="0") as worker:
        worker.load("none")
        ids = [worker.generate(prompt=f"row {number}", max_tokens=50) for number in range(3)]
        for number, request_id in enumerate(ids):
            outcome = worker.result(request_id)
            assert outcome.text == expected_text(f"row {number}", 50)
            assert outcome.tokens == expected_tokens(f"row {number}", 50)
        assert worker.stats().requests_done == 3
        worker.shutdown()
        assert worker.wait_exit() == WorkerExit.CLEAN


def test_it_resumes(short_tmp: Path) -> None:
    with start(short_tmp, BULKHEAD_FAKE_RATE="0") as worker:
        worker.load("none")
        whole = worker.run(prompt="go on", max_tokens=30)
        head = whole.snapshots[:12]
        sent = "".join(snapshot.text for snapshot in head)
        rest = worker.run(
            prompt="go on",
            max_tokens=30,
            resume_tokens=[token for snapshot in head for token in snapshot.tokens],
            resume_chars=len(sent),
            resume_seq=len(head),
        )
        assert sent + rest.text == whole.text
        assert rest.done is not None
        assert whole.done is not None
        assert (rest.done.chars, rest.done.usage) == (whole.done.chars, whole.done.usage)


def test_it_cancels_and_ends_on_sigterm(short_tmp: Path) -> None:
    with start(short_tmp) as worker:
        worker.load("none")
        ids = [worker.generate(prompt="long", max_tokens=10_000) for _ in range(2)]
        worker.first_tokens(ids[0])
        worker.cancel(ids[0])
        done = worker.result(ids[0]).done
        assert done is not None
        assert done.finish_reason == "cancelled"
        worker.process.send_signal(signal.SIGTERM)
        assert worker.wait_exit() == WorkerExit.TERMINATED
        assert worker.requests[ids[1]].is_over


@pytest.mark.parametrize("mode", SIGNALS)
def test_it_dies_by_a_signal_in_mid_stream(short_tmp: Path, mode: str) -> None:
    with start(short_tmp, f"{mode}:7") as worker:
        worker.load("none")
        request_id = worker.generate(prompt="row", max_tokens=100)
        assert worker.wait_exit() == -SIGNALS[mode]
        assert len(worker.requests[request_id].tokens) <= 7
        assert not worker.requests[request_id].is_over


def test_it_misbehaves_only_once_if_asked(short_tmp: Path) -> None:
    once = {"BULKHEAD_MISBEHAVE_ONCE": str(short_tmp / "once"), "BULKHEAD_FAKE_RATE": "0"}
    with start(short_tmp, "exit:2", **once) as worker:
        worker.load("none")
        worker.generate(prompt="row", max_tokens=9)
        assert worker.wait_exit() == 0
    with start(short_tmp, "exit:2", **once) as worker:
        worker.load("none")
        assert worker.run(prompt="row", max_tokens=9).done


@pytest.mark.parametrize(
    ("mode", "code"), [("crash_on_load", -signal.SIGABRT), ("crash_on_load:43", 43), ("load_fails", 42)]
)
def test_it_ends_in_the_load(short_tmp: Path, mode: str, code: int) -> None:
    with start(short_tmp, mode) as worker:
        worker.hello()
        worker.send(Load(NAME, "none"))
        if code == WorkerExit.LOAD_FAILED:
            worker.expect(LoadFailed)
        assert worker.wait_exit() == code


def test_it_is_slow_to_load(short_tmp: Path) -> None:
    with start(short_tmp, "load_slow:0.3") as worker:
        worker.hello()
        worker.send(Load(NAME, "none"))
        assert worker.expect(LoadProgress).total > 1


@pytest.mark.parametrize("mode", ["never_hello", "load_freezes", "silent", "load_hangs"])
def test_it_falls_silent(short_tmp: Path, mode: str) -> None:
    with start(short_tmp, mode) as worker:
        if mode == "silent":
            worker.load("none")
        elif mode != "never_hello":
            worker.hello()
            worker.send(Load(NAME, "none"))
            worker.until(lambda: not worker.pump(0.4) or mode == "load_hangs")
        beats = len(worker.heartbeats)
        if mode == "load_hangs":
            worker.until(lambda: len(worker.heartbeats) > beats + 1)
        else:
            assert not worker.pump(0.5)
        worker.drop_lifeline()
        assert worker.wait_exit(2) == WorkerExit.PARENT_GONE


def test_it_hangs_with_a_pulse(short_tmp: Path) -> None:
    with start(short_tmp, "hang:4") as worker:
        worker.load("none")
        worker.first_tokens(worker.generate(prompt="row", max_tokens=100), 4)
        worker.heartbeats.clear()
        worker.until(lambda: len(worker.heartbeats) > 2)
        assert {beat.steps for beat in worker.heartbeats[1:]} == {4}
        assert worker.heartbeats[-1].busy_since_s


def test_its_hello_can_be_wrong(short_tmp: Path) -> None:
    with start(short_tmp, "wrong_version") as worker:
        assert worker.hello().protocol != PROTOCOL_VERSION
    with start(short_tmp, "wrong_incarnation") as worker:
        assert worker.hello().incarnation != worker.incarnation


def test_it_sends_garbage_and_goes_on(short_tmp: Path) -> None:
    with start(short_tmp, "garbage:3", BULKHEAD_FAKE_RATE="0") as worker:
        worker.load("none")
        request_id = worker.generate(prompt="row", max_tokens=20)
        junk = 0
        outcome = worker.requests[request_id]
        while not outcome.is_over:
            try:
                worker.pump(1)
            except FrameError:
                junk += 1
        assert junk > 100
        assert outcome.text == expected_text("row", 20)


def test_it_ends_a_request_twice(short_tmp: Path) -> None:
    with start(short_tmp, "duplicate_done", BULKHEAD_FAKE_RATE="0") as worker:
        worker.load("none")
        request_id = worker.generate(prompt="row", max_tokens=3)
        with pytest.raises(AssertionError, match="after the terminal event"):
            worker.until(lambda: False, 3)
        assert worker.requests[request_id].done


def test_it_ignores_sigterm(short_tmp: Path) -> None:
    with start(short_tmp, "ignore_sigterm", BULKHEAD_FAKE_RATE="0") as worker:
        worker.load("none")
        worker.process.send_signal(signal.SIGTERM)
        worker.shutdown()
        assert worker.run(prompt="row", max_tokens=3).done


def test_it_dies_on_a_marker(short_tmp: Path) -> None:
    with start(short_tmp, "die_on:XYZZY", BULKHEAD_FAKE_RATE="0") as worker:
        worker.load("none")
        assert worker.run(prompt="harmless", max_tokens=3).done
        worker.generate(prompt="say XYZZY", max_tokens=3)
        assert worker.wait_exit() == -signal.SIGABRT


def test_its_other_faults(short_tmp: Path) -> None:
    with start(short_tmp, "long_line:1", BULKHEAD_FAKE_RATE="0") as worker:
        worker.load("none")
        assert worker.run(prompt="row", max_tokens=3).done
        assert len(worker.log()) == 6000
    with start(short_tmp, "balloon:30") as worker:
        worker.load("none")
        assert worker.stats().memory.footprint == 30 * 2**20
    with start(short_tmp, "lost_request") as worker:
        worker.load("none")
        request_id = worker.generate(prompt="row", max_tokens=3)
        worker.until_stats(lambda stats: stats.steps > 5)
        assert worker.requests[request_id].tokens == []
    with start(short_tmp, "executor_died:2") as worker:
        worker.load("none")
        worker.generate(prompt="row", max_tokens=9)
        assert worker.exiting().exit_code == WorkerExit.EXECUTOR_DIED
    with start(short_tmp, "crash_on_start:7") as worker:
        assert worker.wait_exit() == 7
    with start(short_tmp, "no_such_mode") as worker:
        assert worker.wait_exit() == 1
        assert all(mode in worker.log() for mode in MODES)


def test_outcome_checks_the_grammar() -> None:
    outcome = Outcome(b"a" * 16)
    with pytest.raises(AssertionError, match="no event of a request"):
        outcome.add(LoadFailed("x", "y"))
