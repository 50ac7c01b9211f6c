"""Owns the checks that rows of a batch get what they get alone, whatever kinds of choices share its calls."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
from mlx_bulkhead.protocol.values import ResponseFormat

from .test_engine import CACHES, CHUNKED, PROMPTS, Driver, shared_engine

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "repetition": {"repetition_penalty": 1.3},
    "repetition, other value": {"repetition_penalty": 1.1},
    "repetition, other window": {"repetition_penalty": 1.3, "repetition_window": 5},
    "occurrences": {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    "occurrences, other values": {"frequency_penalty": 2.0},
    "bias": {"logit_bias": {500: 4.0, 501: -20.0}},
    "all penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "logit_bias": {400: 3.0}},
    "draw": {"temperature": 1.0, "seed": 1},
    "draw, other seed": {"temperature": 0.6, "seed": 2},
    "filtered": {"temperature": 0.9, "seed": 3, "top_p": 0.9, "min_p": 0.01},
    "filtered, other values": {"temperature": 1.2, "seed": 4, "top_p": 0.7, "min_p": 0.05},
    "top_k": {"temperature": 1.0, "seed": 5, "top_k": 30},
    "xtc": {"temperature": 1.0, "seed": 6, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    "draw with penalties": {"temperature": 0.8, "seed": 7, "frequency_penalty": 1.0, "repetition_penalty": 1.1},
    "form": {"response_format": ResponseFormat("regex", pattern="[a-z ]{40,60}")},
    "form, drawn": {
        "response_format": ResponseFormat("choice", choices=["a long answer of words", "7"]),
        "temperature": 1.0,
        "seed": 8,
    },
    "log probabilities": {"logprobs": True, "top_logprobs": 3, "presence_penalty": 0.3},
}


def prompt_of(number: int) -> str | list[int]:
    return PROMPTS[number % 5] if number % 3 else CHUNKED[number : 20 + 3 * number]


def count_of(number: int) -> int:
    return 8 + 5 * (number % 5)


@cache
def alone(architecture: str, kind: str, number: int) -> tuple[int, ...]:
    driver = Driver(shared_engine(architecture))
    driver.add("alone", prompt_of(number), count_of(number), **KINDS[kind])
    driver.run()
    return tuple(driver.tokens["alone"])


@pytest.mark.parametrize("architecture", CACHES)
def test_each_kind_beside_all_others(architecture: str) -> None:
    driver = Driver(shared_engine(architecture))
    for number, (kind, options) in enumerate(KINDS.items()):
        driver.add(kind, prompt_of(number), count_of(number), **options)
    driver.run()
    for number, kind in enumerate(KINDS):
        assert driver.tokens[kind] == list(alone(architecture, kind, number)), kind


@pytest.mark.parametrize("seed", range(2))
def test_kinds_that_come_and_go(drive: Driver, seed: int) -> None:
    chance = random.Random(seed)
    wanted: dict[str, tuple[str, int]] = {}
    for number in range(24):
        kind = chance.choice(list(KINDS))
        wanted[str(number)] = kind, number
        drive.add(str(number), prompt_of(number), count_of(number), **KINDS[kind])
        for _ in range(chance.randrange(4)):
            drive.step()
        if chance.random() < 0.2:
            gone = chance.choice(list(wanted))
            if drive.drop(gone):
                del wanted[gone]
    drive.run()
    for name, (kind, number) in wanted.items():
        assert drive.tokens[name] == list(alone("qwen3", kind, number)), kind


def test_a_batch_makes_one_call_for_its_rows(drive: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a later mlx-lm takes its steps elsewhere, this tells."""
    from mlx_bulkhead.worker.text.penalties import PenaltyGroup
    from mlx_bulkhead.worker.text.sampling import DrawGroup

    sizes: list[int] = []
    for group in (PenaltyGroup, DrawGroup):
        own = group.__call__

        def counted(self: Any, *given: Any, own: Any = own) -> Any:
            sizes.append(given[-1].shape[0])
            return own(self, *given)

        monkeypatch.setattr(group, "__call__", counted)
    options = {"temperature": 1.0, "frequency_penalty": 1.0}
    for number in range(4):
        drive.add(str(number), PROMPTS[number], 12, **options, seed=number)
    drive.until(lambda: all(len(drive.tokens[str(number)]) >= 2 for number in range(4)))
    sizes.clear()
    drive.step()
    assert sizes == [4, 4]
