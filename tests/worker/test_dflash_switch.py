"""Which engine has a row: eligibility, moves in mid-answer, gain, faults. No move changes a token or loses a row."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from mlx_bulkhead.protocol.commands import Generate
from mlx_bulkhead.protocol.values import ResponseFormat

from tests.support.speculation import ARCHITECTURES, LOOP, Hand, greedy, open_pair

from .test_engine import PROMPTS


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("after", [0, 1, 2, 9])
def test_a_second_row_sends_the_first_to_the_batch(pairs: Any, architecture: str, after: int) -> None:
    """With its KV cache: nothing is computed again. Both texts are mlx-lm's."""
    hand = Hand(engine := pairs(architecture, verify_mode="dflash"))
    switches = engine.speculation_stats().switches
    hand.insert("first", LOOP, max_tokens=60)
    if after:
        hand.until("first", after)
    else:
        hand.step()
    hand.prefills.clear()
    hand.insert("second", PROMPTS[2], max_tokens=30)
    hand.finish_all()
    hand.check(architecture)
    assert engine.speculation_stats().switches == switches + 1
    assert engine.served(b"first").fallback_reason == "other requests run"
    assert engine.served(b"second").fallback_reason == "other requests run"
    if after:
        assert not [out for out in hand.prefills if out.request_id == b"first"]
    assert engine.speculation_stats().mode == "idle"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_switching_a_hundred_times_changes_nothing(architecture: str) -> None:
    """Nor does it leave anything behind: memory is as after the first switches."""
    import mlx.core as mx

    rounds = 100 if architecture == "qwen3" else 20
    hand = Hand(engine := open_pair(architecture, verify_mode="dflash"))
    sizes: list[int] = []
    try:
        for number in range(rounds):
            one, two = f"one {number}", f"two {number}"
            hand.insert(one, PROMPTS[number % 3], max_tokens=12)
            hand.until(one, 2)
            hand.insert(two, PROMPTS[1], max_tokens=4)
            hand.finish_all()
            mx.clear_cache()
            sizes.append(mx.get_active_memory())
        hand.check(architecture)
        assert engine.speculation_stats().switches == rounds
        assert max(sizes[rounds // 2 :]) <= max(sizes[rounds // 10 : rounds // 2]) + 65_536
    finally:
        engine.close()


def test_batches_do_not_see_the_librarys_hooks(pairs: Any) -> None:
    """They break in the library's version of attention; eight rows beside each other are as without a draft."""
    hand = Hand(engine := pairs(verify_mode="dflash"))
    hand.insert("alone", PROMPTS[0])
    hand.finish_all()
    for index in range(8):
        hand.insert(f"row {index}", PROMPTS[index % len(PROMPTS)], max_tokens=10 + index)
    hand.finish_all()
    assert all(engine.served(f"row {index}".encode()).engine in ("batch", "text") for index in range(8))
    hand.check("qwen3")
    assert engine._pair.hooks.count > 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"speculative": "off"}, "speculation is off for this request"),
        ({"temperature": 1.2, "seed": 1}, "the request is sampled"),
        ({"repetition_penalty": 1.3}, "the request has penalties"),
        ({"presence_penalty": 0.5}, "the request has penalties"),
        ({"frequency_penalty": 0.5}, "the request has penalties"),
        ({"logit_bias": {5: 1.0}}, "the request has a logit bias"),
        ({"logprobs": True}, "the request asks for log probabilities"),
        ({"response_format": ResponseFormat("regex", "[a-z]+")}, "the request has a response_format"),
    ],
)
def test_what_dflash_cannot_honour_goes_to_the_text_engine(pairs: Any, options: dict[str, Any], reason: str) -> None:
    hand = Hand(engine := pairs(verify_mode="dflash"))
    before = engine.speculation_stats().fallbacks.get(reason, 0)
    hand.insert("a", PROMPTS[0], max_tokens=8, **options)
    hand.finish_all()
    assert engine.served(b"a") == ("text", reason, None)
    assert engine.speculation_stats().fallbacks[reason] == before + 1


def test_sampled_requests_are_sampled(pairs: Any) -> None:
    hand = Hand(pairs(verify_mode="dflash"))
    for seed in range(3):
        hand.insert(str(seed), PROMPTS[0], temperature=1.2, seed=seed)
        hand.finish_all()
    assert len({tuple(tokens) for tokens in hand.tokens.values()}) == 3


@pytest.mark.parametrize(("length", "engine_name"), [(15, "dflash"), (16, "text"), (17, "text")])
def test_long_prompts_are_decoded_plainly(pairs: Any, length: int, engine_name: str) -> None:
    hand = Hand(engine := pairs(verify_mode="dflash", max_ctx=16))
    row = engine.prepare(b"a", Generate(model="tiny", tokens=list(range(300, 300 + length)), max_tokens=4)).row
    hand.tokens["a"] = []
    engine.insert(dataclasses.replace(row, speculative="on"))
    hand.finish_all()
    served = engine.served(b"a")
    assert served.engine == engine_name
    if engine_name == "text":
        assert served.fallback_reason == (
            f"the prompt is too long for the draft: {length} tokens, and dflash_max_ctx is 16"
        )


def test_a_row_that_has_two_cycles_to_go_finishes_first(pairs: Any) -> None:
    hand = Hand(engine := pairs(verify_mode="dflash"))
    hand.insert("first", PROMPTS[0], max_tokens=3)
    hand.until("first", 1)
    hand.insert("second", PROMPTS[1], max_tokens=6)
    hand.finish_all()
    assert engine.served(b"first")[:2] == ("dflash", "")
    assert engine.served(b"second")[:2] == ("dflash", "")
    hand.check("qwen3")


@pytest.mark.parametrize("moment", ["waiting", "prefill", "decode"])
def test_a_removed_row_is_gone_and_the_next_one_is_right(pairs: Any, moment: str) -> None:
    hand = Hand(engine := pairs(verify_mode="dflash"))
    hand.insert("gone", LOOP)
    if moment == "prefill":
        hand.step()
    elif moment == "decode":
        hand.until("gone", 3)
    assert engine.remove(b"gone")
    assert not engine.remove(b"gone")
    assert not engine.busy
    del hand.tokens["gone"]
    hand.insert("next", PROMPTS[0])
    hand.finish_all()
    hand.check("qwen3")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_resumed_row_goes_on_in_dflash(pairs: Any, architecture: str) -> None:
    """The tokens of an earlier worker are prefilled, and the rest is what mlx-lm goes on with."""
    engine = pairs(architecture, verify_mode="dflash")
    row = engine.prepare(b"a", Generate(model="tiny", prompt=PROMPTS[0], max_tokens=40)).row
    tokens = greedy(architecture, tuple(row.prompt), 40)
    hand = Hand(engine)
    hand.tokens["a"] = []
    engine.insert(dataclasses.replace(row, emitted=tokens[:13], speculative="on"))
    hand.finish_all()
    assert hand.tokens["a"] == tokens[13:]
    assert engine.served(b"a").engine == "dflash"


def test_a_fault_of_the_library_costs_no_request() -> None:
    """It raises in mid-answer: the row goes on plainly, with the reason, and so do later ones."""
    engine = open_pair("qwen3", verify_mode="dflash")
    try:
        hand = Hand(engine)
        hand.insert("first", PROMPTS[0])
        hand.until("first", 5)

        def broken(*_: Any, **__: Any) -> None:
            raise TypeError("speculative_call() got an unexpected keyword argument 'position'")

        assert engine._run is not None
        engine._run._watch.verify_block = broken  # type: ignore[method-assign]
        while engine._run is not None:
            hand.step()
        hand.insert("second", PROMPTS[1])
        hand.finish_all()
        hand.insert("third", PROMPTS[2])
        hand.finish_all()
        hand.check("qwen3")
        assert all(len(tokens) == 40 for tokens in hand.tokens.values())
        assert engine.served(b"first").engine in ("text", "batch")
        assert engine.served(b"third")[0] == "text"
        assert engine.served(b"third").fallback_reason == (
            "DFlash failed: TypeError: speculative_call() got an unexpected keyword argument 'position'"
        )
        assert engine.speculation_stats().reason.startswith("DFlash failed")
    finally:
        engine.close()


def test_what_does_not_pay_is_left_and_tried_again_later() -> None:
    engine = open_pair("qwen3", verify_mode="dflash")
    try:
        gain, hand = engine._gain, Hand(engine)
        gain.paused_for, gain.plain_seconds = 0, 1e-9  # no draft can be worth it
        hand.insert("a", PROMPTS[0], speculative="auto")
        hand.finish_all()
        served = engine.served(b"a")
        assert served[:2] == ("text", "speculation does not pay")
        assert served.speculation is not None
        assert served.speculation.cycles >= 4
        assert gain.paused_for > 0
        before = gain.paused_for
        hand.insert("b", PROMPTS[1], speculative="auto")
        hand.finish_all()
        assert engine.served(b"b").fallback_reason.startswith("speculation does not pay: measured gain 0.")
        assert gain.paused_for == before - 40
        hand.insert("forced", PROMPTS[1])
        hand.finish_all()
        assert engine.served(b"forced").engine == "dflash"
        gain.paused_for, gain.plain_seconds = 0, 1e9
        engine._text.on_lone_step = None
        hand.insert("again", PROMPTS[2], speculative="auto")
        hand.finish_all()
        assert engine.served(b"again").engine == "dflash"
        assert gain.paused_for == 0
        hand.check("qwen3")
    finally:
        engine.close()


def test_rows_between_switches_are_all_answered(pairs: Any) -> None:
    """Rows that come at every step of a switch; none is lost, and each text is right."""
    hand = Hand(pairs(verify_mode="dflash"))
    names = itertools.count()
    for _ in range(6):
        hand.insert(str(next(names)), PROMPTS[next(names) % 3], max_tokens=9)
        hand.step()
    hand.finish_all()
    hand.check("qwen3")
    assert all(len(tokens) == 9 for tokens in hand.tokens.values())
