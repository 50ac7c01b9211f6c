"""Puts together what chooses a row's tokens, and keeps its faults to the row.

The library calls samplers and processors in the middle of a step of all rows. What one of them raises there
would end the step for everybody; so it is noted here, the row gets some token, and the engine takes it out.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx

from ..engines.base import Row
from ..faults import is_out_of_memory, say
from .penalties import Penalties
from .sampling import Draw, Processor, Sampler, greedy


class Fault:
    """What went wrong with a row first."""

    __slots__ = ("message",)

    def __init__(self) -> None:
        self.message: str | None = None

    def note(self, error: Exception) -> None:
        """Keep it, unless it concerns more than this row."""
        if is_out_of_memory(error):
            raise error
        traceback.print_exception(error)
        self.message = f"the next token could not be chosen: {say(error)}"


class Chooser(NamedTuple):
    """What picks a row's tokens. Stateful: each part is called exactly once a token.

    `processors` are `penalties` and `constraint`, as far as there are such, for a row that is computed by itself.
    """

    sampler: Sampler
    processors: list[Processor]
    fault: Fault
    penalties: Penalties | None = None
    constraint: Processor | None = None
    draw: Draw | None = None
    """What `sampler` does, unless that is greedy."""


def make_chooser(
    row: Row, emitted: Sequence[int], vocabulary: int, banned: Sequence[int] = (), spared: tuple[int, ...] = ()
) -> Chooser:
    """The sampler and processors of a row of which `emitted` is already generated.

    `banned` tokens are never generated; `spared` ones are never left out by XTC.
    """
    sampling, fault = row.sampling, Fault()
    sampler: Sampler = greedy  # as it is: a batch makes one call for all rows that share it, and it cannot fail
    draw = None
    if sampling.temperature > 0:
        draw = Draw(sampling, len(emitted), _mask(spared, vocabulary))
        sampler = _guarded_sampler(draw, fault)
    penalties = None
    if Penalties.needed(sampling, banned):
        longest = len(row.prompt) + row.max_tokens
        penalties = Penalties(sampling, banned, row.prompt, emitted, vocabulary, longest)
    constraint = None if row.constrain is None else row.constrain(emitted)
    # The constraint is the last one, so that nothing can make up for its mask.
    guarded = [_guarded_processor(one, fault) for one in (penalties, constraint) if one is not None]
    return Chooser(sampler, guarded, fault, penalties, constraint, draw)


def _guarded_sampler(sampler: Sampler, fault: Fault) -> Sampler:
    def sample(logprobs: mx.array) -> mx.array:
        if fault.message is None:
            try:
                return sampler(logprobs)
            except Exception as error:
                fault.note(error)
        return greedy(logprobs)

    return sample


def _guarded_processor(processor: Processor, fault: Fault) -> Processor:
    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        if fault.message is None:
            try:
                return processor(tokens, logits)
            except Exception as error:
                fault.note(error)
        return logits

    return process


@lru_cache(maxsize=8)
def _mask(ids: tuple[int, ...], vocabulary: int) -> mx.array:
    """One bool for each token, true for these."""
    mask = mx.zeros((vocabulary,), dtype=mx.bool_)
    return mask.at[mx.array(ids, dtype=mx.int32)].add(True) if ids else mask
