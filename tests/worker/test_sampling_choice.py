"""Owns the checks of XTC, of faults that stay with their row, and of what users missed elsewhere in sampling."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from mlx_bulkhead.worker.engines.base import RowFailed, Sampling, TokenOut

from .test_engine import PROMPTS, Driver, expected, library, shared_engine

XTC: dict[str, Any] = {"temperature": 1.0, "seed": 9, "xtc_probability": 0.5, "xtc_threshold": 0.05}


def alone(prompt: str, count: int, **options: Any) -> list[int]:
    driver = Driver(shared_engine())
    driver.add("alone", prompt, count, **options)
    driver.run()
    return driver.tokens["alone"]


# XTC.

MASSES = [0.42, 0.27, 0.16, 0.1, 0.04, 0.01]


def drawn(count: int, spared: tuple[int, ...] = (), **options: Any) -> Counter[int]:
    import mlx.core as mx
    from mlx_bulkhead.worker.text.chooser import _mask
    from mlx_bulkhead.worker.text.sampling import Draw

    draw = Draw(Sampling(temperature=1.0, seed=4, **options), 0, _mask(spared, len(MASSES)))
    logprobs = mx.log(mx.array([MASSES]))
    return Counter(int(draw(logprobs).item()) for _ in range(count))  # pyright: ignore


@pytest.mark.parametrize("threshold", [0.005, 0.05, 0.1, 0.2, 0.3, 0.5])
@pytest.mark.parametrize("spared", [(), (0,), (1, 4)])
def test_xtc_leaves_in_what_mlx_lm_leaves_in(threshold: float, spared: tuple[int, ...]) -> None:
    import mlx.core as mx
    from mlx_lm.sample_utils import apply_xtc

    left = apply_xtc(mx.log(mx.array([MASSES])), 1.0, threshold, list(spared))
    wanted = {token for token, value in enumerate(left[0].tolist()) if value > float("-inf")}  # pyright: ignore
    assert set(drawn(1200, spared, xtc_probability=1.0, xtc_threshold=threshold)) == wanted


def test_xtc_acts_as_often_as_asked_and_independently_of_the_draw() -> None:
    counts = drawn(4000, xtc_probability=0.25, xtc_threshold=0.2)
    # It takes token 0 away a quarter of the time.
    assert counts[0] / 4000 == pytest.approx(0.75 * MASSES[0], abs=0.03)
    assert counts[1] / 4000 == pytest.approx(0.75 * MASSES[1] + 0.25 * MASSES[1] / (1 - MASSES[0]), abs=0.03)


def test_xtc_comes_after_top_p_and_min_p_and_before_top_k() -> None:
    # Filters leave 0.42 and 0.27, which become 0.61 and 0.39: only then are both over 0.35.
    assert set(drawn(200, xtc_probability=1.0, xtc_threshold=0.35, top_p=0.6)) == {1}
    assert set(drawn(200, xtc_probability=1.0, xtc_threshold=0.35, min_p=0.5)) == {1}
    # The best of what XTC leaves, not XTC on the best alone.
    assert set(drawn(200, xtc_probability=1.0, xtc_threshold=0.2, top_k=1)) == {1}


def test_xtc_with_a_seed_alone_in_company_and_after_a_resume(drive: Driver) -> None:
    reference = alone(PROMPTS[0], 40, **XTC)
    assert reference != alone(PROMPTS[0], 40, **{**XTC, "xtc_probability": 0.0})
    drive.add("other", PROMPTS[1], 50, temperature=1.0, seed=2)
    drive.add("a", PROMPTS[0], 40, **XTC)
    drive.run()
    assert drive.tokens["a"] == reference
    drive.add("resumed", PROMPTS[0], 40, resume_tokens=reference[:13], **XTC)
    drive.run()
    assert drive.tokens["resumed"] == reference


def test_ends_and_new_lines_are_spared(drive: Driver) -> None:
    whole: Any = shared_engine()
    tokenizer = library()[1]
    newline = tokenizer.encode("\n", add_special_tokens=False)
    assert set(whole._base._facts.spared) == {*tokenizer.eos_token_ids, *newline}
    [eos] = tokenizer.eos_token_ids
    options = {**XTC, "xtc_probability": 1.0, "logit_bias": {eos: 60.0, 400: 59.0}}
    assert alone(PROMPTS[0], 3, **options)[-1] in (eos, 400)
    counts = {alone(PROMPTS[0], 1, **{**options, "seed": seed})[0] for seed in range(8)}
    assert eos in counts, "the likeliest token of all stays, since it ends the answer"


# Faults.


class Broken:
    """Works for some calls, then does not."""

    def __init__(self, calls: int, error: Exception) -> None:
        self.left, self.error = calls, error

    def __call__(self, *arrays: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return arrays[-1]


def stepped(drive: Driver) -> tuple[dict[str, list[int]], list[RowFailed]]:
    tokens: dict[str, list[int]] = {}
    failed: list[RowFailed] = []
    while drive.engine.busy:
        for out in drive.engine.step():
            if isinstance(out, TokenOut):
                tokens.setdefault(out.request_id.decode(), []).append(out.token)
            elif isinstance(out, RowFailed):
                failed.append(out)
    return tokens, failed


@pytest.mark.parametrize("company", [False, True])
@pytest.mark.parametrize("calls", [0, 1, 7])
def test_what_fails_for_one_row_fails_it_alone(drive: Driver, company: bool, calls: int) -> None:
    from dataclasses import replace

    from mlx_bulkhead.protocol.commands import Generate

    if company:
        for number in (1, 2):
            drive.add(f"good {number}", PROMPTS[number], 30)
    request = Generate(model="tiny", prompt=PROMPTS[0], max_tokens=30)
    row = drive.engine.prepare(b"bad", request).row
    drive.engine.insert(replace(row, constrain=lambda emitted: Broken(calls, RuntimeError("a bad day"))))
    tokens, [failed] = stepped(drive)
    assert failed.request_id == b"bad"
    assert "RuntimeError: a bad day" in failed.message
    assert tokens.get("bad", []) == expected("qwen3", PROMPTS[0], 30)[:calls]
    for number in (1, 2) if company else ():
        assert tokens[f"good {number}"] == expected("qwen3", PROMPTS[number], 30)
    drive.add("next", PROMPTS[0], 10)
    drive.run()
    assert drive.tokens["next"] == expected("qwen3", PROMPTS[0], 10)


@pytest.mark.parametrize("guest", [False, True])
def test_a_fault_in_the_only_token_is_no_answer(drive: Driver, guest: bool) -> None:
    from dataclasses import replace

    from mlx_bulkhead.protocol.commands import Generate

    if guest:
        drive.add("good", PROMPTS[1], 30)
        drive.until(lambda: len(drive.tokens["good"]) > 2)
    began = len(drive.tokens.get("good", []))
    row = drive.engine.prepare(b"bad", Generate(model="tiny", prompt=PROMPTS[0], max_tokens=1)).row
    drive.engine.insert(replace(row, constrain=lambda emitted: Broken(0, RuntimeError("a bad day"))))
    tokens, [failed] = stepped(drive)
    assert failed.request_id == b"bad"
    assert tokens == ({"good": expected("qwen3", PROMPTS[1], 30)[began:]} if guest else {})


@pytest.mark.parametrize("company", [False, True])
@pytest.mark.parametrize("calls", [0, 5])
def test_a_sampler_that_fails(drive: Driver, company: bool, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_bulkhead.worker.text.sampling import Draw

    like_it = alone(PROMPTS[2], 20, temperature=1.0, seed=1)
    dice = Draw.dice

    def some_dice(draw: Draw) -> tuple[int, bool]:
        if draw._seed == 5 and draw.position >= calls:
            raise ValueError("no dice")
        return dice(draw)

    monkeypatch.setattr(Draw, "dice", some_dice)
    if company:
        drive.add("good", PROMPTS[1], 20)
        drive.add("like it", PROMPTS[2], 20, temperature=1.0, seed=1)
    drive.add("bad", PROMPTS[0], 20, temperature=1.0, seed=5)
    tokens, [failed] = stepped(drive)
    assert "no dice" in failed.message
    assert len(tokens.pop("bad", [])) == calls
    assert tokens == ({"good": expected("qwen3", PROMPTS[1], 20), "like it": like_it} if company else {})


def test_a_penalty_that_fails(drive: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the call of all rows that have some: it is found out whose fault it is."""
    from mlx_bulkhead.worker.text import penalties

    options = {"frequency_penalty": 1.0, "repetition_penalty": 1.1}
    wanted = alone(PROMPTS[1], 20, **options)
    change = penalties._changer

    def changer(*kind: bool) -> Any:
        def some(logits: Any, newest: Any, numbers: Any, *state: Any) -> Any:
            if newest.size and 3.0 in numbers[:, 2].tolist():
                raise ValueError("no numbers")
            return change(*kind)(logits, newest, numbers, *state)

        return some

    monkeypatch.setattr(penalties, "_changer", changer)
    drive.add("good", PROMPTS[1], 20, **options)
    drive.add("free", PROMPTS[2], 20)
    drive.add("bad", PROMPTS[0], 20, **{**options, "frequency_penalty": 3.0})
    tokens, [failed] = stepped(drive)
    assert failed.request_id == b"bad"
    assert "no numbers" in failed.message
    del tokens["bad"]
    assert tokens == {"good": wanted, "free": expected("qwen3", PROMPTS[2], 20)}


def test_a_lack_of_memory_is_no_rows_own_fault(drive: Driver) -> None:
    from mlx_bulkhead.worker.text.chooser import Fault

    fault = Fault()
    with pytest.raises(MemoryError):
        fault.note(MemoryError())
    assert fault.message is None


# What users missed elsewhere.


def test_a_loop_longer_than_twenty_tokens_is_broken_by_a_larger_window() -> None:
    loop = list(range(400, 450))
    driver = Driver(shared_engine())
    # Each step of the loop is made likely; only a window that holds all of it can speak against that.
    bias = dict.fromkeys(loop, 30.0)
    tokens: dict[int, list[int]] = {}
    for window in (20, 256):
        options = {"logit_bias": bias, "repetition_penalty": 1.3, "repetition_window": window}
        driver.add("a", loop * 2, 60, **options)
        driver.run()
        tokens[window] = driver.tokens["a"]
    assert max(Counter(tokens[20]).values()) >= 2
    assert set(tokens[20]) <= set(loop)
    assert tokens[256] != tokens[20]


def test_a_frequency_penalty_ends_ten_times_banana() -> None:
    banana = 600
    plain = alone("say banana ten times", 10, logit_bias={banana: 20.0})
    assert plain == [banana] * 10
    assert alone("say banana ten times", 10, logit_bias={banana: 20.0}, frequency_penalty=2.0).count(banana) < 10


def test_five_calls_without_a_seed_are_not_all_equal() -> None:
    assert len({tuple(alone(PROMPTS[0], 8, temperature=1.0)) for _ in range(5)}) > 1


def test_a_seed_gives_the_same_alone_and_in_a_batch(drive: Driver) -> None:
    reference = alone(PROMPTS[0], 30, temperature=1.0, seed=5)
    for number in range(4):
        drive.add(f"other {number}", PROMPTS[number], 30, temperature=1.0)
    drive.add("a", PROMPTS[0], 30, temperature=1.0, seed=5)
    drive.run()
    assert drive.tokens["a"] == reference


def test_deterministic_text_of_a_half_precision_model_never_depends_on_company(tmp_path: Any) -> None:
    from mlx_bulkhead.protocol.commands import Load
    from mlx_bulkhead.worker.engines.loader import open_engine

    from tests.support.tiny_models import make_tiny

    directory = make_tiny(tmp_path / "m", dtype="bfloat16")
    engine = open_engine(Load(name="tiny", model=str(directory), deterministic=True), lambda *_: None)
    options = [{}, {"temperature": 1.0, "seed": 3}, {"repetition_penalty": 1.2, "logprobs": True}]
    references = []
    for number, choice in enumerate(options):
        driver = Driver(engine)
        driver.add("a", PROMPTS[number], 40, **choice)
        driver.run()
        references.append(driver.tokens["a"])
    driver = Driver(engine)
    for number, choice in enumerate(options):
        driver.add(f"a {number}", PROMPTS[number], 40, **choice)
        driver.add(f"neighbour {number}", PROMPTS[4], 30, temperature=1.0)
    driver.run()
    assert [driver.tokens[f"a {number}"] for number in range(3)] == references
    engine.close()
