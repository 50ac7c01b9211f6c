"""Chooses the tokens of all rows of a batch with as few calls as they allow.

Each row gets what its own processors and sampler would give it; where a common call fails, they are asked one by
one, so that a fault stays with its row. Rows whose penalties are of one kind share a compiled
call, so do those whose draws are, the masks of all forms are one call, and so is the choice of all greedy rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from ..faults import is_out_of_memory
from .chooser import Chooser
from .masks import Masked
from .penalties import Penalties, PenaltyGroup
from .sampling import Draw, DrawGroup, greedy

_Part = TypeVar("_Part", Penalties, Draw)


class Together:
    """Holds the groups of the rows that were here last; made anew when others are."""

    def __init__(self) -> None:
        self._choosers: list[Chooser] = []
        self._groups: list[tuple[list[int], PenaltyGroup]] = []
        self._draws: list[tuple[list[int], DrawGroup]] = []

    def process(self, choosers: Sequence[Chooser], tokens: mx.array, logits: mx.array) -> mx.array:
        """`tokens`: the newest of each row. Logits [rows, vocabulary] → logits."""
        self._regroup(choosers)
        for members, group in self._groups:
            logits = self._penalise(members, group, tokens, logits)
        if any(chooser.constraint is not None for chooser in choosers):
            logits = self._constrain(choosers, tokens, logits)
        return logits

    def sample(self, choosers: Sequence[Chooser], logprobs: mx.array) -> mx.array:
        """Log probabilities [rows, vocabulary] → token ids [rows]."""
        chosen = greedy(logprobs)
        for members, group in self._draws:
            whole, where = len(members) == len(choosers), mx.array(members)
            given = logprobs if whole else logprobs[where]
            try:
                drawn = group(given)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                one_by_one = [choosers[index].sampler(given[i : i + 1]) for i, index in enumerate(members)]
                drawn = mx.concatenate(one_by_one)
            chosen = drawn if whole else mx.put_along_axis(chosen, where, drawn, axis=0)
        return chosen

    def _regroup(self, choosers: Sequence[Chooser]) -> None:
        if [id(one) for one in choosers] == [id(one) for one in self._choosers]:
            return
        for _, group in self._groups:
            group.disband()
        self._choosers = list(choosers)
        penalties = _by_kind([one.penalties for one in choosers])
        self._groups = [(members, PenaltyGroup(parts)) for members, parts in penalties]
        draws = _by_kind([one.draw for one in choosers])
        self._draws = [(members, DrawGroup(parts)) for members, parts in draws]

    def _penalise(self, members: list[int], group: PenaltyGroup, tokens: mx.array, logits: mx.array) -> mx.array:
        whole, where = len(members) == len(logits), mx.array(members)
        newest, given = (tokens, logits) if whole else (tokens[where], logits[where])
        try:
            changed = group(newest, given)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            group.disband()
            guarded = [self._choosers[index].processors[0] for index in members]
            self._choosers = []  # so that they are grouped anew
            one_by_one = [one(newest[i : i + 1], given[i : i + 1]) for i, one in enumerate(guarded)]
            changed = mx.concatenate(one_by_one)
        return changed if whole else mx.put_along_axis(logits, where[:, None], changed, axis=0)

    def _constrain(self, choosers: Sequence[Chooser], tokens: mx.array, logits: mx.array) -> mx.array:
        """The masks need the newest tokens; the pass that follows these is sent off first."""
        mx.async_eval(tokens, logits)
        newest: list[int] = tokens.tolist()  # pyright: ignore[reportAssignmentType]
        allowed: Any = np.ones(logits.shape, dtype=np.bool_)
        own: dict[int, mx.array] = {}
        for index, chooser in enumerate(choosers):
            constraint = chooser.constraint
            if constraint is None or chooser.fault.message is not None:
                continue
            try:
                if not isinstance(constraint, Masked):
                    own[index] = constraint(tokens[index : index + 1], logits[index : index + 1])
                elif (mask := constraint.allow(newest[index])) is not None:
                    allowed[index] = mask
            except Exception as error:
                chooser.fault.note(error)
        logits = mx.where(mx.array(allowed), logits, mx.array(-math.inf, dtype=logits.dtype))
        for index, changed in own.items():
            logits[index : index + 1] = changed
        return logits


def _by_kind(parts: Sequence[_Part | None]) -> list[tuple[list[int], list[_Part]]]:
    """Indices and parts of those that can share a call."""
    kinds: dict[object, tuple[list[int], list[_Part]]] = {}
    for index, part in enumerate(parts):
        if part is not None:
            members, group = kinds.setdefault(part.kind, ([], []))
            members.append(index)
            group.append(part)
    return list(kinds.values())
