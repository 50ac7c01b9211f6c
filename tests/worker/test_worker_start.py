"""A worker's start: command line, handshake, and loads that end well or badly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mlx_bulkhead.protocol.codec import PROTOCOL_VERSION
from mlx_bulkhead.protocol.commands import Load
from mlx_bulkhead.protocol.events import Loaded, LoadFailed, LoadProgress
from mlx_bulkhead.protocol.exit_codes import WorkerExit

from tests.support.tiny_models import break_model
from tests.support.worker_harness import NAME, WorkerHarness, loaded_worker

NO_MLX_BEFORE_LOAD = """
import sys, threading
def audit(event, args):
    if event == "import" and args[0].partition(".")[0] in ("mlx", "mlx_lm", "transformers", "tokenizers"):
        name = threading.current_thread().name
        if name != "executor":
            print("IMPORTED", args[0], "on", name, flush=True)
sys.addaudithook(audit)
"""

SAY_IF_ONLINE = """
import os
real = os._exit
def leaving(code):
    print("OFFLINE", sys.modules["huggingface_hub"].is_offline_mode(), flush=True)
    real(code)
os._exit = leaving
"""


def test_handshake_comes_before_heavy_imports(short_tmp: Path) -> None:
    with WorkerHarness(short_tmp, prelude=NO_MLX_BEFORE_LOAD) as worker:
        hello = worker.hello()
        assert (hello.protocol, hello.incarnation) == (PROTOCOL_VERSION, worker.incarnation)
        assert hello.pid == worker.process.pid
        worker.until(lambda: len(worker.heartbeats) > 1)
        assert worker.heartbeats[-1].busy_since_s is None
        assert worker.stats().phase == "idle"
        assert "IMPORTED" not in worker.log()


def test_load_reports_what_is_in_force(short_tmp: Path, tiny_model: Path) -> None:
    with WorkerHarness(short_tmp, prelude=NO_MLX_BEFORE_LOAD) as worker:
        worker.hello()
        loaded = worker.try_load(tiny_model, max_running=3, max_queued=5)
        assert isinstance(loaded, Loaded)
        assert loaded.name == NAME
        assert loaded.info.limits.max_running == 3
        assert loaded.info.memory_after.footprint > 0
        assert "IMPORTED" not in worker.log()
        worker.shutdown()
        assert worker.exiting().exit_code == WorkerExit.CLEAN
        assert worker.wait_exit() == WorkerExit.CLEAN


def test_progress_comes_while_loading(short_tmp: Path, tiny_model: Path) -> None:
    with WorkerHarness(short_tmp) as worker:
        worker.hello()
        worker.send(Load(name=NAME, model=str(tiny_model)))
        phases = []
        while "tokenizer" not in phases:
            phases.append(worker.expect(LoadProgress).phase)
        assert "importing" in phases
        worker.expect(Loaded)


def test_a_spare_imports_before_its_load(short_tmp: Path, tiny_model: Path) -> None:
    prelude = NO_MLX_BEFORE_LOAD + SAY_IF_ONLINE
    with WorkerHarness(short_tmp, prelude=prelude, arguments=["--prewarm"]) as worker:
        worker.hello()
        worker.until(lambda: "libraries imported" in worker.log())
        loaded = worker.try_load(tiny_model)
        assert isinstance(loaded, Loaded)
        assert loaded.info.import_seconds < 0.1
        assert worker.run(prompt="quick", max_tokens=3).done
        assert "IMPORTED" not in worker.log()
        worker.shutdown()
        assert worker.wait_exit() == WorkerExit.CLEAN
        assert "OFFLINE True" in worker.log()


def test_a_second_load_of_the_same_is_answered_and_another_refused(short_tmp: Path, tiny_model: Path) -> None:
    with loaded_worker(short_tmp, tiny_model) as worker:
        assert isinstance(worker.try_load(tiny_model), Loaded)
        refused = worker.try_load("/somewhere/else")
        assert isinstance(refused, LoadFailed)
        assert "one process, one model" in refused.message
        assert worker.run(prompt="still here", max_tokens=2).done


@pytest.mark.parametrize("kind", ["truncated", "bad_config_json", "unknown_architecture", "missing"])
def test_a_failed_load_leaves_no_process(short_tmp: Path, tiny_model: Path, tmp_path: Path, kind: str) -> None:
    model = tmp_path / "no-such-model" if kind == "missing" else break_model(tiny_model, kind)
    with WorkerHarness(short_tmp) as worker:
        worker.hello()
        answer = worker.try_load(model)
        assert isinstance(answer, LoadFailed), answer
        assert str(model.name) in answer.message
        assert worker.wait_exit() == WorkerExit.LOAD_FAILED


def test_an_unexpected_error_of_a_load_is_told(short_tmp: Path, tiny_model: Path) -> None:
    prelude = """
import mlx_bulkhead.worker.engines.loader as loader
def planted(load, report):
    raise KeyError("planted")
loader.open_engine = planted
"""
    with WorkerHarness(short_tmp, prelude=prelude) as worker:
        worker.hello()
        answer = worker.try_load(tiny_model)
        assert isinstance(answer, LoadFailed)
        assert "KeyError: 'planted'" in answer.message
        assert worker.exiting().exit_code == WorkerExit.LOAD_FAILED
        assert worker.wait_exit() == WorkerExit.LOAD_FAILED
        assert "Traceback" in worker.log()


def test_a_load_out_of_range_is_refused(short_tmp: Path, tiny_model: Path) -> None:
    with WorkerHarness(short_tmp) as worker:
        worker.hello()
        answer = worker.try_load(tiny_model, max_running=0)
        assert isinstance(answer, LoadFailed)
        assert "max_running" in answer.message
        assert worker.wait_exit() == WorkerExit.LOAD_FAILED


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"--endpoint": None}, "--endpoint"),
        ({"--endpoint": "tcp://1.2.3.4:5"}, "ipc://"),
        ({"--lifeline-fd": "77"}, "--lifeline-fd 77 is not open"),
        ({"--lifeline-fd": "x"}, "--lifeline-fd"),
        ({"--run-dir": "/no/such/dir"}, "/no/such/dir"),
        ({"--incarnation": ""}, "--incarnation"),
        ({"--wat": "1"}, "--wat"),
    ],
)
def test_bad_arguments_are_one_sentence(short_tmp: Path, change: dict[str, str | None], words: str) -> None:
    read, write = os.pipe()
    arguments: dict[str, str | None] = {
        "--endpoint": f"ipc://{short_tmp}/w",
        "--incarnation": "abc",
        "--lifeline-fd": str(read),
        "--run-dir": str(short_tmp),
        "--parent": "1",
        "--name": "n",
        "--model": "m",
        **change,
    }
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "mlx_bulkhead.worker"]
            + [part for key, value in arguments.items() if value is not None for part in (key, value)],
            pass_fds=(read,),
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    finally:
        os.close(read)
        os.close(write)
    assert done.returncode == WorkerExit.BAD_ARGUMENTS
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
