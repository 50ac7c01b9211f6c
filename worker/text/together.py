"""Chooses the tokens of all rows of a batch with as few calls as they allow.

Each row gets what its own processors and sampler would give it. Rows whose penalties are of one kind share a compiled
call, the masks of all forms are one, and so is the choice of all greedy rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from .chooser import Chooser
from .masks import Masked
from .penalties import PenaltyGroup
from .sampling import greedy


class Together:
    """Holds the groups of the rows that were here last; made anew when others are."""

    def __init__(self) -> None:
        self._choosers: list[Chooser] = []
        self._groups: list[tuple[list[int], PenaltyGroup]] = []

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
        best = greedy(logprobs)
        if all(chooser.sampler is greedy for chooser in choosers):
            return best
        chosen = [
            best[index : index + 1] if chooser.sampler is greedy else chooser.sampler(logprobs[index : index + 1])
            for index, chooser in enumerate(choosers)
        ]
        return mx.concatenate(chosen)

    def _regroup(self, choosers: Sequence[Chooser]) -> None:
        if [id(one) for one in choosers] == [id(one) for one in self._choosers]:
            return
        for _, group in self._groups:
            group.disband()
        kinds: dict[object, list[int]] = {}
        for index, chooser in enumerate(choosers):
            if chooser.penalties is not None:
                kinds.setdefault(chooser.penalties.kind, []).append(index)
        self._choosers = list(choosers)
        self._groups = [
            (members, PenaltyGroup([p for i in members if (p := choosers[i].penalties) is not None]))
            for members in kinds.values()
        ]

    def _penalise(self, members: list[int], group: PenaltyGroup, tokens: mx.array, logits: mx.array) -> mx.array:
        try:
            if len(members) == len(self._choosers):
                return group(tokens, logits)
            where = mx.array(members)
            changed = group(tokens[where], logits[where])
            return mx.put_along_axis(logits, where[:, None], changed, axis=0)
        except Exception as error:  # nobody's own; the rows that have no part in it go on
            for index in members:
                self._choosers[index].fault.note(error)
            return logits

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
