"""What a worker answers to `Generate`: text, tokens, counts, intervals, refusals, resumption."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from mlx_bulkhead.protocol.codec import new_request_id
from mlx_bulkhead.protocol.commands import Generate
from mlx_bulkhead.protocol.events import Failed

from tests.support.worker_harness import NAME, Outcome, WorkerHarness, loaded_worker

PROMPT = "Please describe the weather"
COUNT = 60


@pytest.fixture(scope="module")
def worker(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerHarness]:
    """One worker for all tests here: they leave it idle."""
    import shutil
    import tempfile

    run_dir = Path(tempfile.mkdtemp(prefix="bh-", dir="/tmp"))
    with loaded_worker(run_dir, tiny_model, max_running=8, max_queued=4) as worker:
        yield worker
    shutil.rmtree(run_dir, ignore_errors=True)


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Any:
    """Tokens and text of mlx-lm itself, greedy, for a prompt."""
    import mlx_lm

    model, tokenizer = mlx_lm.load(str(tiny_model))[:2]

    @cache
    def generate(prompt: str, max_tokens: int) -> tuple[list[int], str]:
        parts = list(mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=max_tokens))
        return [part.token for part in parts], "".join(part.text for part in parts).replace("\ufffd", "")

    return generate


def ended(outcome: Outcome, reason: str) -> Outcome:
    assert outcome.done is not None, outcome.failed
    assert outcome.done.finish_reason == reason
    return outcome


def test_greedy_text_equals_the_library(worker: WorkerHarness, reference: Any) -> None:
    tokens, text = reference(PROMPT, COUNT)
    outcome = ended(worker.run(prompt=PROMPT, max_tokens=COUNT), "length")
    assert outcome.tokens == tokens
    assert outcome.text == text
    assert outcome.done is not None
    usage, timings = outcome.done.usage, outcome.done.timings
    assert usage.completion_tokens == timings.predicted_n == COUNT
    assert usage.prompt_tokens == timings.prompt_n == outcome.progress[-1].total
    assert timings.prompt_ms > 0
    assert timings.predicted_ms > 0
    assert timings.predicted_per_second == pytest.approx(COUNT / timings.predicted_ms * 1000)
    assert outcome.done.engine == "text"
    assert outcome.snapshots[0].tokens == tokens[:1], "the first token leaves alone and at once"


def test_several_at_once_equal_the_library(worker: WorkerHarness, reference: Any) -> None:
    prompts = [PROMPT, "the name of the river", "close the doors", "a", "Kolik stojí lístek do města?"]
    ids = [worker.generate(prompt=prompt, max_tokens=30) for prompt in prompts]
    for prompt, request_id in zip(prompts, ids, strict=True):
        outcome = ended(worker.result(request_id), "length")
        assert (outcome.tokens, outcome.text) == reference(prompt, 30)
        assert outcome.done is not None
        assert outcome.done.engine in ("text", "batch")


@pytest.mark.parametrize("interval", [1, 8, 4096])
def test_the_interval_changes_the_snapshots_not_the_text(
    worker: WorkerHarness, reference: Any, interval: int
) -> None:
    outcome = worker.run(prompt=PROMPT, max_tokens=COUNT, stream_interval=interval)
    assert (outcome.tokens, outcome.text) == reference(PROMPT, COUNT)
    assert [snapshot.seq for snapshot in outcome.snapshots] == list(range(len(outcome.snapshots)))
    assert all(len(snapshot.tokens) >= interval for snapshot in outcome.snapshots[1:-1])
    if interval == 4096:
        assert len(outcome.snapshots) == 2


def test_a_stop_string_cuts_text_and_work(worker: WorkerHarness, reference: Any) -> None:
    _, text = reference(PROMPT, COUNT)
    stop = text[40:43]
    outcome = ended(worker.run(prompt=PROMPT, max_tokens=COUNT, stop=[stop, "never there"]), "stop")
    assert outcome.text == text[: text.index(stop)]
    assert len(outcome.tokens) < COUNT
    assert outcome.done is not None
    assert outcome.done.usage.completion_tokens == len(outcome.tokens)
    assert worker.stats().running == 0


def test_the_end_of_sequence_token_counts_and_has_no_text(worker: WorkerHarness, tiny_model: Path) -> None:
    import json

    eos = json.loads((tiny_model / "config.json").read_text())["eos_token_id"]
    outcome = ended(worker.run(prompt=PROMPT, max_tokens=COUNT, logit_bias={eos: 1000.0}), "stop")
    assert (outcome.tokens, outcome.text) == ([eos], "")
    assert outcome.done is not None
    assert outcome.done.usage.completion_tokens == 1
    assert outcome.done.timings.predicted_per_second == 0


@pytest.mark.parametrize("cut", [1, 2, 17, COUNT - 1])
@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "seed": 7}], ids=["greedy", "seeded"])
def test_resumption_gives_the_same_whole(worker: WorkerHarness, cut: int, fields: dict[str, Any]) -> None:
    """What an orchestrator does after a crash: it sends again what it has, cut at a snapshot."""
    fields = {**fields, "cache": False}  # what is reused differs, and with it the usage
    whole = worker.run(prompt=PROMPT, max_tokens=COUNT, **fields)
    sent = Outcome(b"")
    for snapshot in whole.snapshots:
        if len(sent.tokens) < cut:
            sent.add(snapshot)
    rest = worker.run(
        prompt=PROMPT,
        max_tokens=COUNT,
        resume_tokens=sent.tokens,
        resume_chars=len(sent.text),
        resume_seq=len(sent.snapshots),
        **fields,
    )
    assert sent.tokens + rest.tokens == whole.tokens
    assert sent.text + rest.text == whole.text
    if rest.snapshots:
        assert (rest.snapshots[0].seq, rest.snapshots[0].offset) == (len(sent.snapshots), len(sent.text))
    assert rest.done is not None
    assert whole.done is not None
    assert rest.done.chars == whole.done.chars
    assert rest.done.usage == whole.done.usage


def test_resumption_after_the_last_token_only_ends(worker: WorkerHarness, reference: Any) -> None:
    tokens, text = reference(PROMPT, COUNT)
    rest = worker.run(prompt=PROMPT, max_tokens=COUNT, resume_tokens=tokens, resume_chars=len(text), resume_seq=9)
    assert (rest.tokens, rest.text) == ([], "")
    done = ended(rest, "length").done
    assert done is not None
    assert (done.usage.completion_tokens, done.chars, done.timings.predicted_n) == (COUNT, len(text), 0)


def test_resumption_sends_text_that_was_lost(worker: WorkerHarness, reference: Any) -> None:
    tokens, text = reference(PROMPT, COUNT)
    for resumed in (tokens[:20], tokens):
        rest = worker.run(prompt=PROMPT, max_tokens=COUNT, resume_tokens=resumed, resume_chars=10, resume_seq=1)
        assert rest.text == text[10:]


def test_resumption_after_the_end_of_sequence_only_ends(worker: WorkerHarness, tiny_model: Path) -> None:
    import json

    eos = json.loads((tiny_model / "config.json").read_text())["eos_token_id"]
    head = worker.run(prompt=PROMPT, max_tokens=5)
    rest = worker.run(
        prompt=PROMPT,
        max_tokens=COUNT,
        resume_tokens=[*head.tokens, eos],
        resume_chars=len(head.text),
        resume_seq=2,
    )
    done = ended(rest, "stop").done
    assert done is not None
    assert (rest.tokens, rest.text, done.usage.completion_tokens) == ([], "", 6)


def test_resumption_after_a_stop_string_only_ends(worker: WorkerHarness, reference: Any) -> None:
    _, text = reference(PROMPT, COUNT)
    stop = text[40:43]
    whole = worker.run(prompt=PROMPT, max_tokens=COUNT, stop=stop)
    rest = worker.run(
        prompt=PROMPT,
        max_tokens=COUNT,
        stop=stop,
        resume_tokens=whole.tokens,
        resume_chars=len(whole.text),
        resume_seq=3,
    )
    ended(rest, "stop")
    assert (rest.tokens, rest.text) == ([], "")


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"model": "other", "prompt": "x"}, "unknown_model", "'other'"),
        ({"prompt": " "}, "bad_request", "blank"),
        ({"prompt": "x", "max_tokens": 0}, "bad_request", "max_tokens"),
        ({"prompt": "x", "temperature": float("nan")}, "bad_request", "temperature"),
        ({"prompt": "x", "logit_bias": {10**6: 1.0}}, "bad_request", "logit_bias"),
        ({"tokens": [10**6]}, "bad_request", "1000000"),
        ({"tokens": [5] * 9000}, "context_overflow", "9000"),
        ({"messages": []}, "bad_request", "messages"),
    ],
)
def test_refusals_are_typed_and_harm_nobody(
    worker: WorkerHarness, fields: dict[str, Any], code: str, words: str
) -> None:
    failed = worker.run(**fields).failed
    assert failed is not None
    assert (failed.code, failed.retryable) == (code, False)
    assert words in failed.message
    ended(worker.run(prompt=PROMPT, max_tokens=2), "length")


def test_a_full_queue_refuses_and_can_be_tried_again(worker: WorkerHarness) -> None:
    ids = [worker.generate(prompt=f"row {number}", max_tokens=40) for number in range(20)]
    outcomes = [worker.result(request_id) for request_id in ids]
    refused = [outcome.failed for outcome in outcomes if outcome.failed]
    assert refused
    assert {(failed.code, failed.retryable) for failed in refused} == {("queue_full", True)}
    assert all(outcome.done for outcome in outcomes[:12]), "8 run and 4 wait"
    ended(worker.run(prompt=PROMPT, max_tokens=2), "length")


def test_a_repeated_id_leaves_the_first_stream_intact(worker: WorkerHarness, reference: Any) -> None:
    request_id = worker.generate(prompt=PROMPT, max_tokens=COUNT)
    worker.send(Generate(model=NAME, prompt="something else", max_tokens=3), request_id)
    outcome = worker.result(request_id)
    assert (outcome.tokens, outcome.text) == reference(PROMPT, COUNT)
    ended(worker.run(prompt=PROMPT, max_tokens=2), "length")  # and nothing more came for the first


def test_statistics_count_what_was_done(worker: WorkerHarness) -> None:
    before = worker.until_stats(lambda stats: stats.phase == "idle")
    outcome = worker.run(prompt=PROMPT, max_tokens=20)
    after = worker.until_stats(lambda stats: stats.phase == "idle")
    assert outcome.done is not None
    assert after.requests_done == before.requests_done + 1
    assert after.completion_tokens == before.completion_tokens + 20
    assert after.prompt_tokens == before.prompt_tokens + outcome.done.usage.prompt_tokens
    assert after.steps > before.steps
    assert (after.running, after.queued, after.oldest_request_age_s) == (0, 0, None)
    assert after.memory.footprint > 0


def test_a_fault_in_preparing_fails_one_request(short_tmp: Path, tiny_model: Path) -> None:
    prelude = """
import mlx_bulkhead.worker.engines.loader as loader
original = loader.open_engine
def planted(load, report):
    engine = original(load, report)
    prepare, insert = engine.prepare, engine.insert
    def preparing(request_id, request):
        if request.prompt == "bad prepare":
            raise KeyError("planted")
        prepared = prepare(request_id, request)
        if request.prompt == "bad text":
            def push(token):
                raise ValueError("planted")
            prepared.text.push = push
        return prepared
    def inserting(row):
        if row.max_tokens == 77:
            raise ValueError("planted")
        insert(row)
    engine.prepare, engine.insert = preparing, inserting
    return engine
loader.open_engine = planted
"""
    with WorkerHarness(short_tmp, prelude=prelude) as worker:
        worker.load(tiny_model)
        other = worker.generate(prompt="a neighbour", max_tokens=200)
        for fields in ({"prompt": "bad prepare"}, {"prompt": "bad text"}, {"prompt": "x", "max_tokens": 77}):
            failed = worker.run(**fields).failed
            assert isinstance(failed, Failed)
            assert failed.code == "internal"
            assert "planted" in failed.message
            assert failed.timings.queued_ms > 0
            assert failed.usage.completion_tokens == failed.timings.predicted_n
        ended(worker.result(other), "length")
        stats = worker.until_stats(lambda stats: stats.phase == "idle")
        assert (stats.requests_failed, stats.running) == (3, 0)


def test_unprepared_requests_end_too(short_tmp: Path, tiny_model: Path) -> None:
    """A cancel that arrives together with its request, behind others."""
    with loaded_worker(short_tmp, tiny_model, max_running=1) as worker:
        ids = [worker.generate(new_request_id(), prompt=f"row {n}", max_tokens=30) for n in range(20)]
        for request_id in ids[1::2]:
            worker.cancel(request_id, "deadline")
        for number, request_id in enumerate(ids):
            ended(worker.result(request_id), "deadline" if number % 2 else "length")
