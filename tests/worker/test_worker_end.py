"""All the ways in which a worker ends, in each phase: no orphan, the right exit code, in time."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from mlx_bulkhead.protocol.commands import Load
from mlx_bulkhead.protocol.events import Exiting, LoadProgress
from mlx_bulkhead.protocol.exit_codes import WorkerExit

from tests.support.worker_harness import NAME, WorkerHarness, loaded_worker

BIG_EVAL = """
def big_eval():
    import mlx.core as mx
    array = mx.ones((3000, 3000))
    for _ in range(200):
        array = array @ array * 1e-4
    mx.eval(array)
"""
PLANTED = (
    BIG_EVAL
    + """
import mlx_bulkhead.worker.engines.loader as loader
original = loader.open_engine
def planted(load, report):
    {at_load}
    engine = original(load, report)
    step, made = engine.step, []
    def stepped():
        outs = step()
        made.extend(outs)
        if len(made) > 3:
            {at_step}
        return outs
    engine.step = stepped
    return engine
loader.open_engine = planted
"""
)


def plant(at_load: str = "pass", at_step: str = "pass") -> str:
    """A prelude that runs code in a load, or in each step after some tokens."""
    return PLANTED.format(at_load=at_load, at_step=at_step)


def idle(worker: WorkerHarness, model: Path) -> None:
    worker.load(model)


def unloaded(worker: WorkerHarness, model: Path) -> None:
    worker.hello()


def importing(worker: WorkerHarness, model: Path) -> None:
    worker.hello()
    worker.send(Load(name=NAME, model=str(model)))
    while worker.expect(LoadProgress).phase != "importing":
        pass


def loading(worker: WorkerHarness, model: Path) -> None:
    worker.hello()
    worker.send(Load(name=NAME, model=str(model)))
    worker.until(lambda: "IN_LOAD" in worker.log())


def decoding(worker: WorkerHarness, model: Path) -> None:
    worker.load(model)
    worker.first_tokens(worker.generate(prompt="a long answer", max_tokens=5000), 3)


def stuck(worker: WorkerHarness, model: Path) -> None:
    worker.load(model)
    worker.generate(prompt="a step that never ends", max_tokens=100)
    worker.until(lambda: "IN_STEP" in worker.log())


IN_LOAD = plant(at_load="print('IN_LOAD', flush=True); big_eval()")
IN_STEP = plant(at_step="print('IN_STEP', flush=True); big_eval()")
PHASES = [
    pytest.param(unloaded, "", id="before-load"),
    pytest.param(importing, "", id="importing"),
    pytest.param(loading, IN_LOAD, id="loading"),
    pytest.param(idle, "", id="idle"),
    pytest.param(decoding, "", id="decoding"),
    pytest.param(stuck, IN_STEP, id="in-a-long-call"),
]
Phase = Callable[[WorkerHarness, Path], None]


@pytest.mark.parametrize(("phase", "prelude"), PHASES)
def test_death_of_the_orchestrator_ends_it_at_once(
    short_tmp: Path, tiny_model: Path, phase: Phase, prelude: str
) -> None:
    with WorkerHarness(short_tmp, prelude=prelude) as worker:
        phase(worker, tiny_model)
        began = time.monotonic()
        worker.drop_lifeline()
        assert worker.wait_exit(2) == WorkerExit.PARENT_GONE
        assert time.monotonic() - began < 2
        assert "the orchestrator is gone" in worker.log()


@pytest.mark.parametrize(("phase", "prelude"), [PHASES[0], PHASES[5]])
def test_loss_of_the_run_directory_ends_it(short_tmp: Path, tiny_model: Path, phase: Phase, prelude: str) -> None:
    run_dir = short_tmp / "r"
    run_dir.mkdir()
    with WorkerHarness(run_dir, prelude=prelude) as worker:
        phase(worker, tiny_model)
        shutil.rmtree(run_dir)
        assert worker.wait_exit(2) == WorkerExit.RUN_DIR_GONE


@pytest.mark.parametrize(("phase", "prelude"), PHASES)
def test_sigterm_ends_it_within_two_seconds(short_tmp: Path, tiny_model: Path, phase: Phase, prelude: str) -> None:
    with WorkerHarness(short_tmp, prelude=prelude) as worker:
        phase(worker, tiny_model)
        began = time.monotonic()
        worker.process.send_signal(signal.SIGTERM)
        assert worker.wait_exit(4) == WorkerExit.TERMINATED
        assert time.monotonic() - began < 2.2
        assert worker.exiting(1).exit_code == WorkerExit.TERMINATED
        for outcome in worker.requests.values():
            if phase is decoding:
                assert outcome.done is not None
                assert outcome.done.finish_reason == "cancelled"


def test_sigint_is_ignored(short_tmp: Path, tiny_model: Path) -> None:
    with loaded_worker(short_tmp, tiny_model) as worker:
        worker.process.send_signal(signal.SIGINT)
        assert worker.run(prompt="unmoved", max_tokens=3).done


def test_sigterm_ends_it_although_nobody_reads(short_tmp: Path, tiny_model: Path) -> None:
    with loaded_worker(short_tmp, tiny_model) as worker:
        worker.socket.close(0)
        worker.process.send_signal(signal.SIGTERM)
        assert worker.process.wait(3) == WorkerExit.TERMINATED


def test_an_error_of_the_executor_ends_the_process(short_tmp: Path, tiny_model: Path) -> None:
    """Field report B01: no process that looks fine and answers nothing."""
    with WorkerHarness(short_tmp, prelude=plant(at_step="raise RuntimeError('planted')")) as worker:
        worker.load(tiny_model)
        ids = [worker.generate(prompt=f"row {number}", max_tokens=50) for number in range(4)]
        exiting = worker.exiting()
        assert exiting == Exiting("RuntimeError: planted", WorkerExit.EXECUTOR_DIED)
        assert worker.wait_exit() == WorkerExit.EXECUTOR_DIED
        assert "Traceback" in worker.log()
        assert not any(worker.requests[i].is_over for i in ids), "resume or fail is not for a worker to say"


@pytest.mark.parametrize(
    "error",
    ["MemoryError()", "RuntimeError('[metal::malloc] Attempting to allocate 99 bytes')"],
)
def test_lack_of_memory_has_its_own_code(short_tmp: Path, tiny_model: Path, error: str) -> None:
    with WorkerHarness(short_tmp, prelude=plant(at_step=f"raise {error}")) as worker:
        worker.load(tiny_model)
        worker.generate(prompt="row", max_tokens=50)
        assert worker.wait_exit(10) == WorkerExit.OUT_OF_MEMORY


def test_an_error_of_the_io_thread_ends_the_process(short_tmp: Path) -> None:
    prelude = """
from mlx_bulkhead.worker.channel import Channel
def planted(self, now):
    raise RuntimeError("planted")
Channel._beat = planted
"""
    with WorkerHarness(short_tmp, prelude=prelude) as worker:
        assert worker.wait_exit() == WorkerExit.IO_THREAD_DIED
        assert "planted" in worker.log()


def test_shutdown_cancels_what_runs(short_tmp: Path, tiny_model: Path) -> None:
    with loaded_worker(short_tmp, tiny_model, max_running=1) as worker:
        running = worker.generate(prompt="runs", max_tokens=5000)
        waiting = worker.generate(prompt="waits", max_tokens=5000)
        worker.first_tokens(running, 2)
        worker.shutdown()
        assert worker.exiting().exit_code == WorkerExit.CLEAN
        assert worker.wait_exit() == WorkerExit.CLEAN
        for request_id in (running, waiting):
            done = worker.requests[request_id].done
            assert done is not None
            assert done.finish_reason == "cancelled"


def test_shutdown_with_drain_lets_them_finish(short_tmp: Path, tiny_model: Path) -> None:
    with loaded_worker(short_tmp, tiny_model, max_running=1) as worker:
        ids = [worker.generate(prompt=f"row {number}", max_tokens=40) for number in range(2)]
        worker.first_tokens(ids[0])
        worker.shutdown(drain=True, grace_s=20)
        late = worker.generate(prompt="too late", max_tokens=40)
        for request_id in ids:
            done = worker.result(request_id).done
            assert done is not None
            assert done.finish_reason == "length"
        failed = worker.result(late).failed
        assert failed is not None
        assert (failed.code, failed.retryable) == ("shutting_down", True)
        assert worker.wait_exit() == WorkerExit.CLEAN


def test_the_grace_of_a_drain_ends(short_tmp: Path, tiny_model: Path) -> None:
    with loaded_worker(short_tmp, tiny_model) as worker:
        request_id = worker.generate(prompt="long", max_tokens=8000)
        worker.first_tokens(request_id)
        worker.shutdown(drain=True, grace_s=0.2)
        done = worker.result(request_id).done
        assert done is not None
        assert done.finish_reason == "cancelled"
        assert worker.wait_exit() == WorkerExit.CLEAN


def test_an_abort_leaves_the_stacks_in_the_log(short_tmp: Path, tiny_model: Path) -> None:
    """What a failing GPU command does; field report A02."""
    with WorkerHarness(short_tmp, prelude=IN_STEP) as worker:
        stuck(worker, tiny_model)
        worker.process.send_signal(signal.SIGABRT)
        assert worker.wait_exit() == -signal.SIGABRT
        assert "Fatal Python error: Aborted" in worker.log()
        assert "executor.py" in worker.log()
