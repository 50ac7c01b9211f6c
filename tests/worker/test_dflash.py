"""Speculative decoding: the text is the target's greedy text, wherever a block is cut."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from mlx_bulkhead.protocol.commands import Generate

from tests.support.speculation import ARCHITECTURES, LOOP, MODES, Hand, Oracle, greedy, open_pair

from .test_engine import PROMPTS


@pytest.mark.parametrize(
    ("architecture", "mode"),
    [
        *(("qwen3", mode) for mode in MODES),
        ("qwen3_5", "adaptive"),
        ("qwen3_5", "ddtree"),
        ("gemma4_text", "adaptive"),
    ],
)
def test_text_is_the_targets(architecture: str, mode: str) -> None:
    hand = Hand(engine := open_pair(architecture, verify_mode=mode))
    try:
        for index, prompt in enumerate((PROMPTS[0], PROMPTS[2], LOOP)):
            hand.insert(str(index), prompt, max_tokens=24)
            hand.finish_all()
            assert engine.served(str(index).encode()).engine == "dflash"
            assert hand.finish[str(index)] == "length"
        hand.check(architecture)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("wrong", "mode"), [(2, "dflash"), (3, "dflash"), (5, "dflash"), (100, "dflash"), (3, "ddtree")]
)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_accepted_blocks_of_any_length(architecture: str, wrong: int, mode: str) -> None:
    """A draft that is right for a while and then wrong: blocks are cut anywhere, and rolled back."""
    hand = Hand(engine := open_pair(architecture, verify_mode=mode, copy_drafting=False))
    try:
        Oracle(engine, wrong)
        for index, prompt in enumerate(PROMPTS[:3]):
            hand.insert(str(index), prompt)
            hand.finish_all()
            speculation = engine.served(str(index).encode()).speculation
            assert speculation is not None
            assert speculation.tokens == 40
            assert speculation.accepted == 40 - speculation.cycles >= 40 - 40 / min(wrong, 8) - 3
        hand.check(architecture)
    finally:
        engine.close()


@pytest.mark.parametrize("count", [1, 2, 5, 17])
def test_the_budget_cuts_a_block(pairs: Any, count: int) -> None:
    hand = Hand(engine := pairs(verify_mode="dflash"))
    hand.insert("a", LOOP, max_tokens=count)
    hand.finish_all()
    assert len(hand.tokens["a"]) == count
    assert hand.finish["a"] == "length"
    assert engine.served(b"a").engine == "dflash"
    hand.check("qwen3")


@pytest.mark.parametrize("place", [3, 6, 11])
def test_an_end_token_within_a_block_ends_the_row(place: int) -> None:
    """What the library generates after the end of the answer is not seen."""
    engine = open_pair("qwen3", verify_mode="dflash")
    try:
        Oracle(engine, 1000)
        hand = Hand(engine)
        ids = tuple(engine.prepare(b"x", Generate(model="tiny", prompt=PROMPTS[0])).row.prompt)
        tokens = greedy("qwen3", ids, 40)
        facts = dataclasses.replace(engine._facts, eos=frozenset({tokens[place]}))
        engine._facts = facts
        engine._pair = dataclasses.replace(engine._pair, facts=facts)
        hand.insert("a", PROMPTS[0])
        hand.finish_all()
        first = tokens.index(tokens[place])
        assert hand.tokens["a"] == tokens[: first + 1]
        assert hand.finish["a"] == "stop"
    finally:
        engine.close()
