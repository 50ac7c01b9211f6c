"""Cancelling: in each phase, soon, idempotent, and with every slot given back."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from mlx_bulkhead.protocol.codec import new_request_id

from tests.support.worker_harness import Outcome, WorkerHarness, loaded_worker

LONG = [7, 8, 9, 10] * 1700


def cancelled(outcome: Outcome) -> Outcome:
    assert outcome.done is not None, outcome.failed
    assert outcome.done.finish_reason == "cancelled"
    return outcome


def test_cancel_in_decode(short_tmp: Path, tiny_model: Path) -> None:
    with loaded_worker(short_tmp, tiny_model) as worker:
        request_id = worker.generate(prompt="go on and on", max_tokens=8000)
        worker.first_tokens(request_id, 3)
        worker.cancel(request_id)
        worker.cancel(request_id)
        outcome = cancelled(worker.result(request_id, 5))
        assert outcome.done is not None
        assert outcome.done.usage.completion_tokens == len(outcome.tokens) < 1000
        worker.cancel(request_id)  # a finished one
        worker.cancel(new_request_id())  # an unknown one
        stats = worker.until_stats(lambda stats: stats.phase == "idle")
        assert (stats.running, stats.requests_cancelled) == (0, 1)


def test_cancel_in_prefill(short_tmp: Path, tiny_model: Path) -> None:
    with loaded_worker(short_tmp, tiny_model) as worker:
        request_id = worker.generate(tokens=LONG, max_tokens=10)
        outcome = worker.requests[request_id]
        worker.until(lambda: bool(outcome.progress))
        assert outcome.progress[0].processed < len(LONG)
        began = time.monotonic()
        worker.cancel(request_id)
        cancelled(worker.result(request_id, 5))
        assert time.monotonic() - began < 1.5, "within a chunk"
        assert outcome.tokens == []
        assert outcome.done is not None
        assert 0 < outcome.done.timings.prompt_n < len(LONG)
        assert worker.run(prompt="next", max_tokens=2).done


def test_cancel_while_queued(short_tmp: Path, tiny_model: Path) -> None:
    with loaded_worker(short_tmp, tiny_model, max_running=1) as worker:
        running = worker.generate(prompt="runs", max_tokens=8000)
        worker.first_tokens(running)
        waiting = worker.generate(prompt="waits", max_tokens=10)
        worker.cancel(waiting)
        outcome = cancelled(worker.result(waiting, 5))
        assert outcome.done is not None
        assert (outcome.tokens, outcome.done.timings.prompt_n) == ([], 0)
        assert not worker.requests[running].is_over
        worker.cancel(running)
        cancelled(worker.result(running, 5))


def test_five_hundred_random_cancels_leak_no_slot(short_tmp: Path, tiny_model: Path) -> None:
    """Field report F04."""
    chance = random.Random(4)
    with loaded_worker(short_tmp, tiny_model, max_running=4, max_queued=1000) as worker:
        ids: list[bytes] = []
        for number in range(500):
            ids.append(worker.generate(prompt=f"row {number}", max_tokens=chance.choice((1, 30, 8000))))
            for _ in range(chance.randrange(3)):
                worker.cancel(chance.choice(ids[-20:]))
            if chance.random() < 0.1:
                oldest = next((i for i in ids if not worker.requests[i].is_over), ids[-1])
                worker.first_tokens_or_end(oldest)
                worker.cancel(oldest)
        for request_id in ids:
            worker.cancel(request_id)
        for request_id in ids:
            assert worker.result(request_id, 20).done, worker.requests[request_id]
        stats = worker.until_stats(lambda stats: stats.phase == "idle")
        assert (stats.running, stats.queued) == (0, 0)
        assert stats.requests_done + stats.requests_cancelled == 500
        check_it_still_serves(worker)


def check_it_still_serves(worker: WorkerHarness) -> None:
    ids = [worker.generate(prompt=f"again {number}", max_tokens=10) for number in range(4)]
    for request_id in ids:
        done = worker.result(request_id).done
        assert done is not None
        assert done.finish_reason == "length"


@pytest.mark.parametrize("end", ["length", "cancelled", "deadline"])
def test_every_end_has_its_figures(short_tmp: Path, tiny_model: Path, end: str) -> None:
    with loaded_worker(short_tmp, tiny_model) as worker:
        request_id = worker.generate(prompt="counts", max_tokens=8 if end == "length" else 8000)
        worker.first_tokens(request_id)
        if end != "length":
            worker.cancel(request_id, end)
        done = worker.result(request_id).done
        assert done is not None
        assert done.finish_reason == end
        usage, timings = done.usage, done.timings
        assert timings.prompt_n + timings.cache_n == usage.prompt_tokens > 0
        assert timings.predicted_n == usage.completion_tokens > 0
        assert timings.prompt_per_token_ms == pytest.approx(timings.prompt_ms / timings.prompt_n)
        assert timings.predicted_per_token_ms == pytest.approx(timings.predicted_ms / timings.predicted_n)
