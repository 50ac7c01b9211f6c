"""The text engine: a lone row through `solo`, several through `batch`.

It owns which rows there are and where each of them is. A newcomer beside rows that decode is a guest first: it is
prefilled alone, chunk by chunk, and joins them in the batch once it has its first token. Several newcomers at once
go into the batch as they are, as far as it has room for prompts; of those that wait for room, a short one is a guest.
Models whose caches cannot be merged serve their rows one after the other.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream

from ...protocol.commands import Generate
from ...protocol.values import CacheStats, SpeculationStats, WorkerInfo
from ..cache.store import PrefixStore
from ..memory.caps import Caps
from ..memory.keeper import Keeper
from .adapter_files import pick_adapter
from .base import Prepared, Row, RowFailed, Served, StepOut, TokenOut
from .batch import Batch, can_part
from .live import Facts, Live
from .prepare import Preparer
from .schedule import MAX_ALONE_CHUNK, chunk_size, smooth
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
    """Implements `base.Engine` for the rows of one adapter, or of none; `grouped` has the adapters."""

    def __init__(
        self,
        info: WorkerInfo,
        facts: Facts,
        preparer: Preparer,
        caps: Caps,
        keeper: Keeper,
        store: PrefixStore | None = None,
    ) -> None:
        self.info = info
        self.keeper = keeper
        self._facts = facts
        self._caps = caps
        self._store = store
        self._preparer = preparer
        self.beside = False
        """Rows of others decode between its steps: its prefill keeps to short chunks for them."""
        self._rows: dict[bytes, Live] = {}
        self._waiting: deque[Live] = deque()
        self._solo = Solo(self._keep)
        self._guest = Solo(self._keep)
        self._batch: Batch | None = None
        if info.limits.max_running > 1:
            self._batch = Batch(facts, info.limits.max_running, caps, self._keep)
        self._may_part = can_part(facts.make_cache())
        self._alone = 0
        self._served: OrderedDict[bytes, str] = OrderedDict()
        self._token_seconds: float | None = None
        self._decode_seconds: float | None = None
        self.plain_because = ""
        """Why it serves rows without speculation, in a load with a draft."""
        self.on_lone_step: Callable[[float], None] | None = None
        """Told the seconds of each step of a lone row."""

    def prepare(self, request_id: bytes, request: Generate) -> Prepared:
        pick_adapter(request.adapter, (), "")
        return self._preparer.prepare(request_id, request)

    def insert(self, row: Row) -> None:
        live = Live(row, self._facts)
        live.caching = row.caching and self._store is not None
        self._rows[row.request_id] = live
        self._waiting.append(live)
        self._note(live, self.info.engine)

    def adopt(self, live: Live) -> None:
        """Take a row in the middle of its way, with the cache that it has. A lone one decodes at once."""
        quiet = not self._rows
        live.caching = live.row.caching and self._store is not None
        self._rows[live.row.request_id] = live
        self._note(live, self.info.engine)
        if quiet and live.cached == len(live.ids) - 1:
            self._solo.start(live)
            self._solo.prefill(1)  # its neighbours then wait for it no more than for any that decodes
        else:
            self._waiting.append(live)

    @property
    def prefill_chunk(self) -> int:
        # While rows decode the chunks are shorter, but those may end at any step.
        return MAX_ALONE_CHUNK

    def remove(self, request_id: bytes, *, keep: bool = True) -> bool:
        live = self._rows.pop(request_id, None)
        if live is None:
            return False
        live.caching = live.caching and keep
        if self._solo.live is live:
            self._solo.drop()
            self._keep(live, live.cache, live.cached, False, True)
        elif self._guest.live is live:
            self._guest.drop()
            self._keep(live, live.cache, live.cached, False, True)
        elif live in self._waiting:
            self._waiting.remove(live)
            if live.cached > live.hit:  # it was a guest already
                self._keep(live, live.cache, live.cached, False, True)
        elif self._batch is not None:
            self._batch.remove(live)
        return True

    def step(self) -> list[StepOut]:
        outs = self._place()
        if self._guest.live is not None:
            outs += self._receive_guest()
        if self._batch is not None and len(self._batch):
            outs += self._step_batch(self._batch)
        elif self._solo.prefilling:
            outs += self._prefill(self._solo, decoding=self.beside)
        elif self._solo.live is not None:
            began = time.perf_counter()
            outs.append(self._solo.decode())
            seconds = time.perf_counter() - began
            self._decode_seconds = smooth(self._decode_seconds, seconds)
            if self.on_lone_step is not None:
                self.on_lone_step(seconds)
        for out in outs:
            if isinstance(out, RowFailed) or (isinstance(out, TokenOut) and out.finish is not None):
                self._rows.pop(out.request_id, None)
        if self._store is not None:
            self._store.tend(busy=True)
        return outs

    @property
    def busy(self) -> bool:
        return bool(self._rows)

    def next_is_prefill(self) -> bool:
        in_batch = self._batch is not None and self._batch.prefilling
        return bool(self._waiting) or self._solo.prefilling or self._guest.live is not None or in_batch

    def served(self, request_id: bytes) -> Served:
        return Served(self._served.get(request_id, self.info.engine), self.plain_because)

    def cache_stats(self) -> CacheStats:
        return CacheStats() if self._store is None else self._store.stats()

    def speculation_stats(self) -> SpeculationStats | None:
        if not self.plain_because:
            return None
        return SpeculationStats(mode="plain" if self._rows else "idle", reason=self.plain_because)

    def tend(self) -> bool:
        return self._store is not None and self._store.tend()

    def release(self) -> None:
        """Let all rows go. What others share stays."""
        self._rows.clear()
        self._waiting.clear()
        self._solo.drop()
        self._guest.drop()
        if self._batch is not None:
            self._batch.close()
            self._batch = None
            self._caps.reassert()  # the generator has put back what it found

    def close(self) -> None:
        self.release()
        if self._store is not None:
            self._store.close()
            self._store = None
        mx.synchronize(generation_stream)
        mx.clear_cache()
        self._caps.release()

    def _place(self) -> list[StepOut]:
        """Give waiting rows a place; a solo row gives up its own if that is in the batch."""
        if not self._waiting:
            return []
        batch, solo = self._batch, self._solo
        if batch is not None and self._facts.sight is not None:
            self._place_one(batch)
            return []
        if batch is None:
            if solo.live is None:
                live = self._waiting.popleft()
                self._fetch(live)
                solo.start(live)
            return []
        for live in self._waiting:
            self._fetch(live)
        if len(self._waiting) == 1 and self._guest.live is None:
            if solo.live is None and not len(batch):
                solo.start(self._waiting.popleft())
                return []
            if not solo.prefilling and not batch.prefilling:
                self._guest.start(self._waiting.popleft())
                return []
        room = batch.room - solo.prefilling
        if (guest := self._guest.live) is not None and room > 0:
            self._guest.drop()
            self._waiting.appendleft(guest)
        newcomers = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
        outs = self._join(batch, newcomers) if newcomers else []
        if self._waiting:
            self._overtake(batch)
        return outs

    def _overtake(self, batch: Batch) -> None:
        """Let the shortest prompt that waits be the guest, if all that are before it are longer.

        Room in the batch still goes by order of arrival, so no prompt waits for ever.
        """
        shortest = min(self._waiting, key=lambda live: live.unread)
        guest = self._guest.live
        if shortest.unread >= (batch.least_unread if guest is None else guest.unread):
            return
        self._waiting.remove(shortest)
        if guest is not None:
            self._guest.drop()
            self._waiting.appendleft(guest)
        self._guest.start(shortest)

    def _place_one(self, batch: Batch) -> None:
        """Prompts with pictures are prefilled alone, whatever their company; so here only one starts at a time."""
        alone = self._solo.live is None and not len(batch)
        if self._guest.live is not None or self._solo.prefilling or batch.prefilling:
            return
        live = self._waiting.popleft()
        self._fetch(live)
        (self._solo if alone else self._guest).start(live)

    def _join(self, batch: Batch, newcomers: list[Live]) -> list[StepOut]:
        """Move newcomers, and the solo row if there is one, into the batch, with what is in their caches."""
        outs: list[StepOut] = []
        live = self._solo.live
        if live is not None:
            if not self._solo.prefilling:
                outs.append(self._solo.decode(ahead=False))  # what is being computed belongs to the row
            if self._solo.live is not None:
                self._solo.drop()
                newcomers.insert(0, live)
        if len(newcomers) == 1 and not len(batch):
            self._solo.start(newcomers[0])  # the solo row has just ended
            return outs
        for one in newcomers:
            self._note(one, "batch" if self._facts.sight is None else "vision_batch")
        batch.insert(newcomers)
        return outs

    def _receive_guest(self) -> list[StepOut]:
        """A chunk of the guest's prompt. With its first token it joins those that decode, or takes over from them."""
        guest, batch = self._guest, self._batch
        if batch is None or (self._solo.live is None and not len(batch)):
            self._solo, self._guest = guest, self._solo  # nobody else is left
            return []
        outs = self._prefill(guest, decoding=True)
        live = guest.live
        if live is not None and not guest.prefilling:
            outs.append(guest.decode(ahead=False))
            if guest.live is not None:
                guest.drop()
                outs += self._join(batch, [live])
        return outs

    def _fetch(self, live: Live) -> None:
        """Look for a prefix of a row that is to start. Without one it starts from nothing."""
        store = self._store
        if store is None or not live.caching or live.sought:
            return
        live.sought = True
        try:
            live.cache, live.cached = store.fetch(live.row.salt, live.keys())
            if live.cache is not None and self._facts.sight is not None:
                live.cache = self._facts.sight.dressed(live.cache, live.row.media)
            live.marks = store.marks(live.cached, len(live.ids))
        except _BATCH_FAULTS:
            _log.exception("the prompt cache failed; the prompt is computed")
            live.cache, live.cached = None, 0
        live.hit = live.cached

    def _keep(self, live: Live, cache: Sequence[Any] | None, tokens: int, copy: bool, durable: bool) -> None:
        """Leave what a row has computed to later ones."""
        if self._store is None or not live.caching:
            return
        try:
            if cache is not None and self._facts.sight is not None:
                cache = self._facts.sight.bare(cache)
            self._store.keep(live.row.salt, live.keys()[:tokens], cache, copy=copy, durable=durable)
        except _BATCH_FAULTS:
            _log.exception("a prefix could not be kept")

    def _prefill(self, solo: Solo, *, decoding: bool) -> list[StepOut]:
        live = solo.live
        assert live is not None
        prompts = 2 if self._batch is not None and self._batch.prefilling else 1  # one here, some there
        chunk = chunk_size(
            self._token_seconds,
            prompts=prompts,
            decoding=decoding,
            decode_seconds=self._decode_seconds or 0.0,
            most=self.keeper.chunk,
        )
        before = live.cached
        began = time.perf_counter()
        out = solo.prefill(chunk)
        if isinstance(out, RowFailed):
            return [out]
        if live.cached - before > 1:
            per_token = (time.perf_counter() - began) / (live.cached - before)
            self._token_seconds = smooth(self._token_seconds, per_token)
        # A row that was here before has told its progress already.
        return [out] if live.prefilling else []

    def _step_batch(self, batch: Batch) -> list[StepOut]:
        try:
            outs = batch.step(self.beside, self.keeper.chunk)
        except _BATCH_FAULTS:
            _log.exception("this model cannot be batched; its requests are served one after the other from now on")
            self._batch = None
            if (guest := self._guest.live) is not None:
                self._guest.drop()
                guest.restart()
                self._waiting.appendleft(guest)
            for live in reversed(batch.surrender()):
                self._note(live, self.info.engine)
                self._waiting.appendleft(live)
            return self.step()
        if not batch.prefilling:
            self._decode_seconds = batch.decode_seconds or self._decode_seconds
        live = batch.lone if self._may_part and self._guest.live is None else None
        self._alone = self._alone + 1 if live is not None else 0
        if live is not None and self._alone >= _STEPS_ALONE and live.left >= _TOKENS_WORTH_IT:
            self._alone = 0
            batch.part(live)
            self._note(live, self.info.engine)
            self._solo.start(live)
        return outs

    def _note(self, live: Live, engine: str) -> None:
        self._served[live.row.request_id] = engine
        self._served.move_to_end(live.row.request_id)
        while len(self._served) > max(_REMEMBERED, 2 * len(self._rows)):
            self._served.popitem(last=False)
