"""Decides which rows DFlash serves, and when it gives one up. Pure: every input is an argument."""

from __future__ import annotations

from typing import Final

from ..base import Row

TOO_LONG: Final = "the prompt is too long for the draft"
OTHERS: Final = "other requests run"
NO_GAIN: Final = "speculation does not pay"
FINISH_CYCLES: Final = 2
"""A row with at most so many cycles to go finishes before it gives way."""


def ineligible(row: Row, max_ctx: int | None) -> str:
    """Why DFlash cannot serve a row at all; empty when it can."""
    sampling = row.sampling
    if row.speculative == "off":
        return "speculation is off for this request"
    if row.media is not None:
        return "the request has pictures"
    if sampling.temperature > 0:
        return "the request is sampled"
    if sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty:
        return "the request has penalties"
    if sampling.logit_bias:
        return "the request has a logit bias"
    if row.constrain is not None:
        return "the request has a response_format"
    if row.logprobs:
        return "the request asks for log probabilities"
    length = len(row.prompt) + len(row.emitted)
    if max_ctx is not None and length >= max_ctx:
        return f"{TOO_LONG}: {length} tokens, and dflash_max_ctx is {max_ctx}"
    return ""


def unsuitable(*, alone: bool, forced: bool, paused_for: int, gain: float | None) -> str:
    """Why DFlash should not serve an eligible row now; empty when it should.

    forced: the request wants speculation whatever it gains. paused_for: tokens until it is tried again.
    """
    if not alone:
        return OTHERS
    if paused_for > 0 and not forced and (gain is None or gain < 1.0):
        return NO_GAIN if gain is None else f"{NO_GAIN}: measured gain {gain:.2f}"
    return ""


def leaves(*, others_wait: bool, tokens_left: int, tokens_a_cycle: float, forced: bool, loses: bool) -> str:
    """Why a row that DFlash serves should go on in the text engine; empty when it should stay."""
    if others_wait and tokens_left > FINISH_CYCLES * tokens_a_cycle:
        return OTHERS
    if loses and not forced:
        return NO_GAIN
    return ""
