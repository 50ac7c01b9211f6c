"""Owns the checks of log probabilities: they are mlx-lm's, one for each token, whatever happens on the way."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from mlx_bulkhead.protocol.commands import Generate
from mlx_bulkhead.worker.engines.base import Engine, TokenOut

from .test_engine import PROMPTS, library, open_tiny, shared_engine

NEAR = 1e-4
Likely = dict[int, float]


@cache
def theirs(prompt: str, count: int) -> list[tuple[int, float, Likely]]:
    """Of mlx-lm: token, its log probability, and the five likeliest."""
    from mlx_lm import stream_generate

    model, tokenizer = library()
    out = []
    for response in stream_generate(model, tokenizer, prompt, max_tokens=count):
        values: list[float] = response.logprobs.tolist()  # pyright: ignore
        best = sorted(range(len(values)), key=lambda token: -values[token])[:5]
        out.append((response.token, values[response.token], {token: values[token] for token in best}))
    return out


class Rows:
    """Several rows in an engine, with all that comes for each."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.outs: dict[bytes, list[TokenOut]] = {}

    def add(self, name: str, prompt: str, count: int, **options: Any) -> None:
        self.outs[name.encode()] = []
        request = Generate(model="tiny", prompt=prompt, max_tokens=count, **options)
        self.engine.insert(self.engine.prepare(name.encode(), request).row)

    def step(self) -> None:
        for out in self.engine.step():
            if isinstance(out, TokenOut):
                self.outs[out.request_id].append(out)

    def run(self) -> None:
        while self.engine.busy:
            self.step()

    def check(self, name: str, prompt: str, count: int, top: int = 5, skip: int = 0) -> None:
        got, want = self.outs[name.encode()], theirs(prompt, count)[skip:]
        assert [out.token for out in got] == [token for token, _, _ in want]
        for out, (_, own, likely) in zip(got, want, strict=True):
            assert out.logprob == pytest.approx(own, abs=NEAR)
            if top:
                assert out.top is not None
                assert out.top == pytest.approx(dict(list(likely.items())[:top]), abs=NEAR)
                assert list(out.top.values()) == sorted(out.top.values(), reverse=True)
            else:
                assert out.top is None


@pytest.fixture
def rows() -> Iterator[Rows]:
    made = Rows(shared_engine())
    yield made
    assert not made.engine.busy


ASK: dict[str, Any] = {"logprobs": True, "top_logprobs": 5}


def test_alone(rows: Rows) -> None:
    rows.add("a", PROMPTS[0], 40, **ASK)
    rows.run()
    rows.check("a", PROMPTS[0], 40)


def test_in_company_that_comes_and_goes(rows: Rows) -> None:
    rows.add("a", PROMPTS[0], 120, **ASK)
    for _ in range(6):
        rows.step()
    rows.add("short", PROMPTS[1], 4)
    rows.add("own", PROMPTS[2], 12, logprobs=True)
    rows.run()
    rows.check("a", PROMPTS[0], 120)
    rows.check("own", PROMPTS[2], 12, top=0)
    assert all(out.logprob is None and out.top is None for out in rows.outs[b"short"])


def test_after_a_resume(rows: Rows) -> None:
    tokens = [token for token, _, _ in theirs(PROMPTS[0], 30)]
    rows.add("a", PROMPTS[0], 30, resume_tokens=tokens[:11], **ASK)
    rows.run()
    rows.check("a", PROMPTS[0], 30, skip=11)


def test_they_are_of_what_bias_and_penalties_leave_and_not_of_the_filters(rows: Rows) -> None:
    options: dict[str, Any] = {"temperature": 2.0, "top_k": 3, "seed": 1, "logit_bias": {500: 100.0}, **ASK}
    rows.add("a", PROMPTS[0], 5, **options)
    rows.add("b", PROMPTS[1], 5, **options)
    rows.run()
    for out in rows.outs[b"a"] + rows.outs[b"b"]:
        assert out.token == 500
        assert out.logprob == pytest.approx(0.0, abs=NEAR)
    warm = {"temperature": 1.0, "seed": 3, "top_k": 2, "logprobs": True, "top_logprobs": 20}
    rows.add("a", PROMPTS[0], 5, **warm)
    rows.run()
    for out in rows.outs[b"a"]:
        assert out.top is not None
        assert len(out.top) == 20, "top_k does not cut them"
        assert out.logprob == out.top[out.token]
        assert sum(map(math.exp, out.top.values())) < 1.0


def test_impossible_tokens_are_left_out(rows: Rows) -> None:
    from mlx_bulkhead.protocol.values import ResponseFormat

    rows.add("a", PROMPTS[0], 20, response_format=ResponseFormat("regex", pattern="[ab]"), **ASK)
    rows.run()
    first, last = rows.outs[b"a"]
    assert first.top is not None
    assert len(first.top) == 2
    assert last.finish == "stop"
    assert last.top == {last.token: 0.0}


@pytest.mark.parametrize("size", [20, 777, 2048, 16_384, 50_001])
@pytest.mark.parametrize("count", [1, 5, 20])
def test_the_largest_of_any_size(size: int, count: int) -> None:
    import mlx.core as mx
    from mlx_bulkhead.worker.text.logprobs import read_logprobs

    for dtype in (mx.float32, mx.bfloat16):
        array = mx.random.normal((size,), key=mx.random.key(size)).astype(dtype)
        mx.eval(array)
        values = array.astype(mx.float32).tolist()
        own, top = read_logprobs(array, 3, count)
        assert own == values[3]
        assert top is not None
        assert list(top.values()) == sorted(values, reverse=True)[:count]
        assert all(values[token] == value for token, value in top.items())


# Through a worker: snapshots of any size, and a resume in the middle.


@pytest.fixture(scope="module")
def worker(tiny_model: Any) -> Iterator[Any]:
    import shutil
    import tempfile
    from pathlib import Path

    from tests.support.worker_harness import loaded_worker

    run_dir = Path(tempfile.mkdtemp(prefix="bh-", dir="/tmp"))
    with loaded_worker(run_dir, tiny_model, max_running=8, max_queued=4) as worker:
        yield worker
    shutil.rmtree(run_dir, ignore_errors=True)


def flat(outcome: Any) -> tuple[list[int], list[float], list[Likely]]:
    for snapshot in outcome.snapshots:
        assert len(snapshot.tokens) == len(snapshot.logprobs) == len(snapshot.top_logprobs)
    values = [value for snapshot in outcome.snapshots for value in snapshot.logprobs]
    tops = [top for snapshot in outcome.snapshots for top in snapshot.top_logprobs]
    return outcome.tokens, values, tops


@pytest.mark.parametrize("interval", [1, 8])
def test_snapshots_of_any_size_keep_them_beside_their_tokens(worker: Any, interval: int) -> None:
    want = theirs(PROMPTS[0], 40)
    tokens, values, tops = flat(worker.run(prompt=PROMPTS[0], max_tokens=40, stream_interval=interval, **ASK))
    assert tokens == [token for token, _, _ in want]
    assert values == pytest.approx([own for _, own, _ in want], abs=NEAR)
    for got, (_, _, likely) in zip(tops, want, strict=True):
        assert got == pytest.approx(likely, abs=NEAR)


def test_a_worker_that_takes_over_sends_those_of_new_tokens_only(worker: Any) -> None:
    want = theirs(PROMPTS[0], 40)
    resumed = [token for token, _, _ in want[:17]]
    outcome = worker.run(prompt=PROMPTS[0], max_tokens=40, resume_tokens=resumed, resume_chars=0, resume_seq=3, **ASK)
    tokens, values, _ = flat(outcome)
    assert tokens == [token for token, _, _ in want[17:]]
    assert values == pytest.approx([own for _, own, _ in want[17:]], abs=NEAR)


def test_who_does_not_ask_gets_none(worker: Any) -> None:
    outcome = worker.run(prompt=PROMPTS[0], max_tokens=10)
    assert all(not snapshot.logprobs and not snapshot.top_logprobs for snapshot in outcome.snapshots)


def test_a_half_precision_model(tmp_path: Any) -> None:
    from mlx_bulkhead.protocol.commands import Load
    from mlx_bulkhead.worker.engines.loader import open_engine

    from tests.support.tiny_models import make_tiny

    engine = open_engine(Load(name="tiny", model=str(make_tiny(tmp_path / "m", dtype="bfloat16"))), lambda *_: None)
    rows = Rows(engine)
    for name in ("a", "b"):
        rows.add(name, PROMPTS[0], 6, **ASK)
    rows.run()
    for out in rows.outs[b"a"] + rows.outs[b"b"]:
        assert out.top is not None
        assert out.logprob == max(out.top.values())
    engine.close()


def test_an_engine_that_does_not_batch() -> None:
    engine = open_tiny(deterministic=True)
    rows = Rows(engine)
    rows.add("a", PROMPTS[0], 10, **ASK)
    rows.add("b", PROMPTS[1], 10, **ASK)
    rows.run()
    rows.check("a", PROMPTS[0], 10)
    rows.check("b", PROMPTS[1], 10)
    engine.close()
