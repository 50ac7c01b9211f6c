"""The decode step of a batch, with one call for all rows where mlx-lm has a call for each of them.

The library's batch keeps caches, uids and ends; only its step is replaced. A row's first token is still chosen by the
library's step, with the row's own processors and sampler, since it is computed before the row gets here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationBatch

from ..text.together import Together
from .live import Live


class Decoding(GenerationBatch):
    """`rows`: by uid, what is known of each row here."""

    rows: Mapping[int, Live]
    together: Together

    @classmethod
    def take_over(cls, generator: Any, rows: Mapping[int, Live]) -> None:
        """Let a generator without rows step through this class."""
        made = cls.empty(generator.model, generator.sampler)
        made.rows, made.together = rows, Together()
        generator._generation_batch = made

    def _step(self) -> tuple[list[int], list[Any]]:
        """Set the next tokens going, then wait for the present ones: these, and their distributions if asked for."""
        inputs, distributions = self._next_tokens, self._next_logprobs
        self._current_tokens, self._current_logprobs = inputs, distributions
        lives = [self.rows[uid] for uid in self.uids]
        choosers = [live.chooser for live in lives]
        logits = self.model(inputs[:, None], cache=self.prompt_cache)[:, -1, :]
        logits = self.together.process(choosers, inputs, logits)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        self._next_tokens = self.together.sample(choosers, logprobs)
        asked = {index: logprobs[index] for index, live in enumerate(lives) if live.row.logprobs}
        self._next_logprobs = [asked.get(index) for index in range(len(lives))]
        mx.async_eval(self._next_tokens, *asked.values())
        mx.eval(inputs, *(one for one in distributions if one is not None))
        tokens: list[int] = inputs.tolist()  # pyright: ignore[reportAssignmentType]
        for known, token in zip(self.tokens, tokens, strict=True):
            known.append(token)
        return tokens, distributions
