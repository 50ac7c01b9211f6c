"""The text engine: a lone row through `solo`, several through `batch`.

It owns which rows there are and where each of them is. A solo row moves into the batch when company comes,
with its cache; models whose caches cannot be merged serve their rows one after the other.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream

from ...protocol.commands import Generate
from ...protocol.values import Memory, WorkerInfo
from ..memory.caps import Caps, measure
from .base import Prepared, Row, RowFailed, StepOut, TokenOut
from .batch import Batch, can_part
from .live import Facts, Live
from .prepare import Preparer
from .schedule import chunk_size, smooth
from .solo import Solo

_log = logging.getLogger(__name__)
_REMEMBERED = 1024
"""Rows of which it is remembered where they were."""

_STEPS_ALONE = 8
_TOKENS_WORTH_IT = 64
"""A row that was left alone in the batch for so many steps, with so many tokens to go, moves back to solo."""

_BATCH_FAULTS = (ValueError, TypeError, AttributeError, LookupError, NotImplementedError)
"""What a model that does not fit into a batch raises. Memory and device faults are others."""


class TextEngine:
    """Implements `base.Engine`."""

    def __init__(self, info: WorkerInfo, facts: Facts, tokenizer: Any, caps: Caps) -> None:
        self.info = info
        self._facts = facts
        self._caps = caps
        self._preparer = Preparer(tokenizer, facts.vocabulary, info.limits.context_tokens, facts.eos)
        self._rows: dict[bytes, Live] = {}
        self._waiting: deque[Live] = deque()
        self._solo = Solo()
        self._batch: Batch | None = None
        if info.limits.max_running > 1:
            self._batch = Batch(facts, info.limits.max_running, caps)
        self._may_part = can_part(facts.model)
        self._alone = 0
        self._served: OrderedDict[bytes, str] = OrderedDict()
        self._token_seconds: float | None = None

    def prepare(self, request_id: bytes, request: Generate) -> Prepared:
        return self._preparer.prepare(request_id, request)

    def insert(self, row: Row) -> None:
        live = Live(row, self._facts)
        self._rows[row.request_id] = live
        self._waiting.append(live)
        self._note(live, "text")

    def remove(self, request_id: bytes) -> bool:
        live = self._rows.pop(request_id, None)
        if live is None:
            return False
        if self._solo.live is live:
            self._solo.drop()
        elif live in self._waiting:
            self._waiting.remove(live)
        elif self._batch is not None:
            self._batch.remove(live)
        return True

    def step(self) -> list[StepOut]:
        outs = self._place()
        if self._batch is not None and len(self._batch):
            outs += self._step_batch(self._batch)
        elif self._solo.prefilling:
            outs += self._prefill()
        elif self._solo.live is not None:
            outs.append(self._solo.decode())
        if self._solo.live is not None and (failed := self._solo.live.failed()) is not None:
            self._solo.drop()
            outs.append(failed)
        for out in outs:
            if isinstance(out, RowFailed) or (isinstance(out, TokenOut) and out.finish is not None):
                self._rows.pop(out.request_id, None)
        return outs

    @property
    def busy(self) -> bool:
        return bool(self._rows)

    def next_is_prefill(self) -> bool:
        in_batch = self._batch is not None and self._batch.prefilling
        return bool(self._waiting) or self._solo.prefilling or in_batch

    def engine_for(self, request_id: bytes) -> str:
        return self._served.get(request_id, "text")

    def memory(self) -> Memory:
        return measure()

    def close(self) -> None:
        self._rows.clear()
        self._waiting.clear()
        self._solo.drop()
        if self._batch is not None:
            self._batch.close()
            self._batch = None
        mx.synchronize(generation_stream)
        mx.clear_cache()

    def _place(self) -> list[StepOut]:
        """Give waiting rows a place; a solo row gives up its own if that is in the batch."""
        if not self._waiting:
            return []
        outs: list[StepOut] = []
        batch, solo = self._batch, self._solo
        if batch is None:
            if solo.live is None:
                solo.start(self._waiting.popleft())
            return outs
        moving: list[Live] = []
        if solo.live is not None:
            live = solo.live
            if not solo.prefilling:
                outs.append(solo.decode(ahead=False))  # what is being computed belongs to the row
            if solo.live is not None:
                solo.drop()
                moving.append(live)
        moving += self._waiting
        self._waiting.clear()
        if len(moving) == 1 and not len(batch):
            solo.start(moving[0])
            return outs
        for live in moving:
            self._note(live, "batch")
        batch.insert(moving)
        return outs

    def _prefill(self) -> list[StepOut]:
        live = self._solo.live
        assert live is not None
        chunk = chunk_size(self._token_seconds, prompts=1, decoding=False, decode_seconds=0.0)
        before = live.cached
        began = time.perf_counter()
        out = self._solo.prefill(chunk)
        if live.cached - before > 1:
            per_token = (time.perf_counter() - began) / (live.cached - before)
            self._token_seconds = smooth(self._token_seconds, per_token)
        # A row that was here before has told its progress already.
        return [out] if live.prefilling else []

    def _step_batch(self, batch: Batch) -> list[StepOut]:
        try:
            outs = batch.step()
        except _BATCH_FAULTS:
            _log.exception("this model cannot be batched; its requests are served one after the other from now on")
            self._batch = None
            for live in reversed(batch.surrender()):
                self._note(live, "text")
                self._waiting.appendleft(live)
            return self.step()
        live = batch.lone if self._may_part else None
        self._alone = self._alone + 1 if live is not None else 0
        if live is not None and self._alone >= _STEPS_ALONE and live.left >= _TOKENS_WORTH_IT:
            self._alone = 0
            batch.part(live)
            self._note(live, "text")
            self._solo.start(live)
        return outs

    def _note(self, live: Live, engine: str) -> None:
        self._served[live.row.request_id] = engine
        self._served.move_to_end(live.row.request_id)
        while len(self._served) > max(_REMEMBERED, 2 * len(self._rows)):
            self._served.popitem(last=False)
