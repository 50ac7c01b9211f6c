"""Rows that come and go at random beside a draft that is sometimes right: no token is other, no row is lost."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.support.speculation import ARCHITECTURES, Hand, Oracle, greedy, open_pair

from .test_engine import PROMPTS

KINDS: tuple[dict[str, Any], ...] = ({}, {}, {}, {"speculative": "off"}, {"speculative": "auto"}, {"logprobs": True})


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_come_and_go(seed: int) -> None:
    choose = random.Random(seed)
    architecture = ARCHITECTURES[seed % 3]
    kept = choose.choice([0, 8])
    engine = open_pair(
        architecture,
        load={"cache_entries": kept},
        cache_entries=kept,
        verify_mode=choose.choice(["dflash", "adaptive"]),
    )
    Oracle(engine, choose.choice([2, 3, 5]))
    hand, gone, made = Hand(engine), set[str](), 0
    while made < 16 or engine.busy:
        event = choose.random()
        if made < 16 and event < 0.1:
            hand.insert(
                str(made), choose.choice(PROMPTS), max_tokens=choose.choice([1, 2, 5, 20, 40]), **choose.choice(KINDS)
            )
            made += 1
        elif event < 0.13 and hand.tokens:
            name = choose.choice(list(hand.tokens))
            if engine.remove(name.encode()):
                gone.add(name)
        else:
            hand.step()
    for name, tokens in hand.tokens.items():
        assert name in gone or hand.finish[name] == "length"
        assert tokens == greedy(architecture, tuple(hand.ids[name]), 40)[: len(tokens)], name
    assert not engine.speculation_stats().reason.startswith("DFlash failed")
    engine.close()
