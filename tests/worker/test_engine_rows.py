"""Owns the checks of what is a row's own: seeds, penalties, bans, its end by cancel, its bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from mlx_bulkhead.protocol.errors import ErrorCode
from mlx_bulkhead.worker.engines.base import Refused

from .test_engine import CHUNKED, PROMPTS, Driver, expected, library, open_tiny, shared_engine

WARM: dict[str, Any] = {"temperature": 1.0, "seed": 7}
FILTERED: dict[str, Any] = {"temperature": 0.8, "seed": 11, "top_p": 0.9, "top_k": 50, "min_p": 0.01}


def alone(prompt: str | list[int], max_tokens: int, **options: Any) -> list[int]:
    driver = Driver(shared_engine())
    driver.add("alone", prompt, max_tokens, **options)
    driver.run()
    return driver.tokens["alone"]


# Seeds.


@pytest.mark.parametrize("options", [WARM, FILTERED])
def test_a_seed_gives_the_same_tokens_alone_in_company_and_after_a_resume(
    drive: Driver, options: dict[str, Any]
) -> None:
    reference = alone(PROMPTS[0], 40, **options)
    assert len(set(reference)) > 10
    assert alone(PROMPTS[0], 40, **options) == reference
    drive.add("other", PROMPTS[1], 60, temperature=1.3, seed=1)
    drive.until(drive.generated("other", 4))
    drive.add("seeded", PROMPTS[0], 40, **options)
    drive.until(drive.generated("seeded", 9))
    drive.add("late", PROMPTS[2], 20)
    drive.run()
    assert drive.tokens["seeded"] == reference
    for cut in (1, 20, 39):
        drive.add(f"resumed {cut}", PROMPTS[0], 40, resume_tokens=reference[:cut], **options)
        drive.run()
        assert drive.tokens[f"resumed {cut}"] == reference


def test_a_seed_survives_every_move_between_solo_and_batch(drive: Driver) -> None:
    reference = alone(PROMPTS[0], 120, repetition_penalty=1.2, frequency_penalty=0.5, **FILTERED)
    drive.add("seeded", PROMPTS[0], 120, repetition_penalty=1.2, frequency_penalty=0.5, **FILTERED)
    drive.until(drive.generated("seeded", 6))
    drive.add("short", PROMPTS[1], 3)
    drive.until(drive.generated("seeded", 40))
    assert drive.engine.served(b"seeded").engine == "text"
    drive.add("late", PROMPTS[1], 3)
    drive.run()
    assert drive.tokens["seeded"] == reference


def test_no_seed_is_fresh_and_another_seed_is_another_text() -> None:
    assert len({tuple(alone(PROMPTS[0], 10, temperature=1.0)) for _ in range(5)}) > 1
    assert alone(PROMPTS[0], 10, temperature=1.0, seed=1) != alone(PROMPTS[0], 10, temperature=1.0, seed=2)


def test_the_global_random_state_is_left_alone(drive: Driver) -> None:
    import mlx.core as mx

    mx.random.seed(3)
    before = mx.random.uniform(shape=(4,)).tolist()
    mx.random.seed(3)
    drive.add("a", PROMPTS[0], 5, **FILTERED)
    drive.add("b", PROMPTS[1], 5, **WARM)
    drive.run()
    assert mx.random.uniform(shape=(4,)).tolist() == before


def test_a_tiny_temperature_is_greedy() -> None:
    for temperature in (1e-3, 1e-45):
        assert alone(PROMPTS[0], 10, temperature=temperature, seed=1) == expected("qwen3", PROMPTS[0], 10)


def test_one_candidate_is_greedy() -> None:
    greedy = expected("qwen3", PROMPTS[0], 10)
    assert alone(PROMPTS[0], 10, temperature=1.0, top_k=1) == greedy
    assert alone(PROMPTS[0], 10, temperature=1.0, top_p=1e-6) == greedy
    assert alone(PROMPTS[0], 10, temperature=1.0, min_p=1.0) == greedy


# Penalties and bias, against plain Python on the logits of the library.


def reference_tokens(prompt: list[int], count: int, change: Callable[[list[float], list[int]], None]) -> list[int]:
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    model, _ = library()
    cache, generated, fed = make_prompt_cache(model), [], prompt
    for _ in range(count):
        logits = model(mx.array([fed]), cache=cache)[0, -1].tolist()
        change(logits, generated)
        generated.append(max(range(len(logits)), key=logits.__getitem__))
        fed = generated[-1:]
    return generated


PROMPT = list(range(320, 345))


@pytest.mark.parametrize("company", [False, True])
@pytest.mark.parametrize(("presence", "frequency"), [(2.0, 0.0), (0.0, 1.5), (1.0, 1.0), (-3.0, -1.0)])
def test_presence_and_frequency_count_the_whole_answer_and_only_it(
    drive: Driver, company: bool, presence: float, frequency: float
) -> None:
    def change(logits: list[float], generated: list[int]) -> None:
        for token in set(generated):
            logits[token] -= presence + frequency * generated.count(token)

    wanted = reference_tokens(PROMPT, 30, change)
    if company:
        drive.add("other", PROMPTS[1], 40)
    options = {"presence_penalty": presence, "frequency_penalty": frequency}
    drive.add("a", PROMPT, 30, **options)
    drive.run()
    drive.add("resumed", PROMPT, 30, resume_tokens=wanted[:11], **options)
    drive.run()
    assert drive.tokens["a"] == wanted
    assert drive.tokens["resumed"] == wanted


@pytest.mark.parametrize("window", [1, 5, 20, 64, 2**31 - 1])
def test_repetition_looks_back_over_its_window_prompt_included(drive: Driver, window: int) -> None:
    def change(logits: list[float], generated: list[int]) -> None:
        for token in set((PROMPT + generated)[-window:]):
            logits[token] = logits[token] * 1.5 if logits[token] < 0 else logits[token] / 1.5

    wanted = reference_tokens(PROMPT, 30, change)
    drive.add("a", PROMPT, 30, repetition_penalty=1.5, repetition_window=window)
    drive.add("resumed", PROMPT, 30, repetition_penalty=1.5, repetition_window=window, resume_tokens=wanted[:4])
    drive.run()
    assert drive.tokens["a"] == wanted
    assert drive.tokens["resumed"] == wanted


def test_a_window_of_nothing_penalises_nothing() -> None:
    tokens = alone(PROMPTS[0], 20, repetition_penalty=5.0, repetition_window=0)
    assert tokens == expected("qwen3", PROMPTS[0], 20)


def test_token_0_counts_too() -> None:
    # Token 0 is forced by its bias; the frequency penalty outweighs that after three times.
    tokens = alone(PROMPTS[0], 8, logit_bias={0: 100.0}, frequency_penalty=31.0)
    assert tokens[:3] == [0, 0, 0]
    assert 0 not in tokens[4:]


def test_a_bias_forbids_and_forces(drive: Driver) -> None:
    greedy = expected("qwen3", PROMPTS[0], 20)
    drive.add("forbidden", PROMPTS[0], 20, logit_bias={greedy[3]: -1000.0})
    drive.add("forced", PROMPTS[0], 5, logit_bias={500: 1000.0})
    drive.run()
    assert drive.tokens["forbidden"][:3] == greedy[:3]
    assert greedy[3] not in drive.tokens["forbidden"]
    assert drive.tokens["forced"] == [500] * 5


def test_banned_tokens_of_the_checkpoint(tmp_path: Any) -> None:
    import json
    import shutil

    from mlx_bulkhead.protocol.commands import Load
    from mlx_bulkhead.worker.engines.loader import open_engine

    from .test_engine import model_directory

    greedy = expected("qwen3", PROMPTS[0], 10)
    copy = shutil.copytree(model_directory("qwen3"), tmp_path / "model")
    config = json.loads((copy / "generation_config.json").read_text())
    config["suppress_tokens"] = [greedy[2], True, "x", 10**9, -1]
    (copy / "generation_config.json").write_text(json.dumps(config))
    engine = open_engine(Load(name="tiny", model=str(copy)), lambda *_: None)
    driver = Driver(engine)
    driver.add("a", PROMPTS[0], 10)
    driver.run()
    engine.close()
    assert driver.tokens["a"][:2] == greedy[:2]
    assert greedy[2] not in driver.tokens["a"]


# Cancel: in each phase, and the next request is right.


def test_cancel_before_the_first_step(drive: Driver) -> None:
    drive.add("a", PROMPTS[0])
    assert drive.drop("a")
    assert not drive.drop("a")
    assert not drive.engine.busy
    check_next(drive)


def test_cancel_in_a_prefill_alone(drive: Driver) -> None:
    drive.add("a", CHUNKED * 3)
    drive.step()
    assert drive.prefill["a"][-1][0] < len(CHUNKED) * 3
    assert drive.drop("a")
    check_next(drive)


def test_cancel_in_a_prefill_in_company(drive: Driver) -> None:
    drive.add("stream", PROMPTS[0], 60)
    drive.until(drive.generated("stream", 3))
    drive.add("a", CHUNKED * 3)
    drive.step()
    drive.step()
    assert drive.prefill["a"][-1][0] < len(CHUNKED) * 3
    assert drive.drop("a")
    drive.run()
    assert drive.tokens["stream"] == expected("qwen3", PROMPTS[0], 60)
    check_next(drive)


def test_cancel_while_decoding_alone_and_in_company(drive: Driver) -> None:
    drive.add("a", PROMPTS[0])
    drive.until(drive.generated("a", 3))
    assert drive.drop("a")
    check_next(drive)
    drive.add("b", PROMPTS[0])
    drive.add("c", PROMPTS[1])
    drive.until(drive.generated("c", 3))
    assert drive.drop("b")
    assert drive.drop("c")
    assert not drive.engine.busy
    check_next(drive)


def check_next(drive: Driver) -> None:
    drive.add("next", PROMPTS[1], 10)
    drive.run()
    assert drive.tokens["next"] == expected("qwen3", PROMPTS[1], 10)


# Bounds that need the model.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": 1.0, "top_k": 2048}, ("top_k", "2048", "2047")),
        ({"top_k": 10**6}, ("top_k", "1000000")),
        ({"logit_bias": {2048: 1.0}}, ("logit_bias", "2048", "2047")),
        ({"logit_bias": {10**9: 1.0}}, ("logit_bias", "1000000000")),
    ],
)
def test_numbers_beyond_the_vocabulary_are_refused_and_do_no_harm(
    drive: Driver, options: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(Refused) as refused:
        drive.add("bad", PROMPTS[0], **options)
    assert refused.value.code is ErrorCode.BAD_REQUEST
    assert all(word in refused.value.message for word in words)
    drive.add("largest", PROMPTS[0], 3, temperature=1.0, top_k=2047)
    drive.run()
    check_next(drive)


def test_token_ids_beyond_the_vocabulary_are_refused(drive: Driver) -> None:
    for tokens in ([1, 2048], [2**40], [-1]):
        with pytest.raises(Refused, match="token id"):
            drive.add("bad", tokens)


def test_the_context_is_filled_to_the_last_token() -> None:
    engine = open_tiny(context_limit=50)
    assert engine.info.limits.context_tokens == 50
    driver = Driver(engine)
    for length, room in ((49, 1), (40, 10), (10, 20)):
        driver.add("a", CHUNKED[:length], 20)
        driver.run()
        assert driver.tokens["a"] == expected("qwen3", tuple(CHUNKED[:length]), room)
        assert driver.finish["a"] == "length"
    with pytest.raises(Refused) as refused:
        driver.add("a", CHUNKED[:50], 20)
    assert refused.value.code is ErrorCode.CONTEXT_OVERFLOW
    assert refused.value.message.count("50") == 2
    engine.close()


def test_a_row_whose_last_token_was_lost_with_its_end(drive: Driver) -> None:
    greedy = expected("qwen3", PROMPTS[0], 10)
    drive.add("a", PROMPTS[0], 10, resume_tokens=greedy)
    drive.run()
    assert drive.tokens["a"] == greedy
    assert drive.finish["a"] == "length"


# Engines that do not batch.


def test_deterministic_serves_one_row_after_the_other() -> None:
    engine = open_tiny(deterministic=True)
    assert engine.info.limits.max_running == 1
    driver = Driver(engine)
    for number in range(3):
        driver.add(str(number), PROMPTS[number], 12)
    driver.run()
    assert driver.log == ["0"] * 12 + ["1"] * 12 + ["2"] * 12
    for number in range(3):
        assert driver.tokens[str(number)] == expected("qwen3", PROMPTS[number], 12)
        assert engine.served(str(number).encode()).engine == "text"
    engine.close()


class OneRowOnly:
    """A model that cannot take a batch, as some cannot, and says so in the middle of a step."""

    def __init__(self, model: Any) -> None:
        self.layers = model.layers
        self._model = model

    def __call__(self, inputs: Any, cache: Any = None) -> Any:
        if inputs.shape[0] > 1:
            raise ValueError("[broadcast_shapes] (2,1,4) and (1,1,2) cannot be broadcast")
        return self._model(inputs, cache=cache)


def test_a_model_that_fails_in_a_batch_is_served_row_by_row() -> None:
    from dataclasses import replace

    from mlx_bulkhead.worker.engines.text import TextEngine

    shared: Any = shared_engine()
    whole = shared._base
    facts = replace(whole._facts, model=OneRowOnly(whole._facts.model))
    engine = TextEngine(whole.info, facts, whole._preparer, whole._caps, whole.keeper)
    driver = Driver(engine)
    driver.add("a", PROMPTS[0], 40, **WARM)
    driver.until(driver.generated("a", 5))
    driver.add("b", CHUNKED, 10)
    driver.add("c", PROMPTS[2], 10)
    driver.run()
    assert driver.tokens["a"] == alone(PROMPTS[0], 40, **WARM)
    assert driver.tokens["b"] == expected("qwen3", tuple(CHUNKED), 10)
    assert driver.tokens["c"] == expected("qwen3", PROMPTS[2], 10)
    assert engine.served(b"b").engine == "text"
    engine.close()


def test_a_closed_engine_forgets_its_rows() -> None:
    engine = open_tiny()
    driver = Driver(engine)
    driver.add("a", PROMPTS[0])
    driver.add("b", PROMPTS[1])
    for _ in range(5):
        driver.step()
    engine.close()
    assert not engine.busy
    engine = open_tiny()
    driver = Driver(engine)
    driver.add("a", PROMPTS[0], 5)
    driver.run()
    assert driver.tokens["a"] == expected("qwen3", PROMPTS[0], 5)
    assert engine.keeper.look().mlx_active > 0
    assert engine.keeper.memory.footprint > 0
    engine.close()
