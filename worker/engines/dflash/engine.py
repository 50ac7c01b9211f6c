"""The engine of a model with a draft: a text engine, and DFlash beside it. It owns which of them has a row.

DFlash has one row at most, and only while the text engine has none. Rows that come meanwhile wait until its row is
over or has moved, which takes a cycle or two.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from typing import Final

from ....protocol.commands import Generate
from ....protocol.values import CacheStats, Speculation, SpeculationStats
from ...faults import is_out_of_memory, say
from ..base import Prepared, Row, Served, StepOut, TokenOut
from ..live import Facts, Live
from ..schedule import chunk_size, smooth
from ..text import TextEngine
from .gain import Cycles, Gain
from .pair import Pair
from .policy import TOO_LONG, ineligible, leaves, unsuitable
from .prefixes import Prefixes
from .run import Run

_log = logging.getLogger(__name__)
_REMEMBERED: Final = 1024
"""Rows of which it is remembered what speculation did for them."""


@dataclass(slots=True)
class _Story:
    """What is to be told of a row."""

    reason: str = ""
    cycles: Cycles | None = None


class Speculating:
    """Implements `base.Engine`."""

    def __init__(self, text: TextEngine, facts: Facts, pair: Pair, gain: Gain, prefixes: Prefixes | None) -> None:
        self._text = text
        self._facts = facts
        self._pair = pair
        self._gain = gain
        self._prefixes = prefixes
        self.info = text.info
        self.keeper = text.keeper
        if prefixes is not None:
            self.keeper.holders.append(prefixes)
        self._waiting: deque[Row] = deque()
        self._run: Run | None = None
        self._ended: Run | None = None  # its row is over; the library may still keep a prefix
        self._broken = ""
        self._stories: OrderedDict[bytes, _Story] = OrderedDict()
        self._token_seconds: float | None = None
        self._requests = self._switches = 0
        self._switch_seconds = 0.0
        self._totals = Cycles()
        self._fallbacks: Counter[str] = Counter()
        text.on_lone_step = gain.plain_step

    @property
    def beside(self) -> bool:
        """Rows of others decode between its steps."""
        return self._text.beside

    @beside.setter
    def beside(self, value: bool) -> None:
        self._text.beside = value

    def prepare(self, request_id: bytes, request: Generate) -> Prepared:
        return self._text.prepare(request_id, request)

    def insert(self, row: Row) -> None:
        self._waiting.append(row)

    @property
    def prefill_chunk(self) -> int:
        return self._text.prefill_chunk

    def remove(self, request_id: bytes, *, keep: bool = True) -> bool:
        if self._run is not None and self._run.request_id == request_id:
            self._leave(self._run)
            self._run.close()
            self._run = None
            return True
        for row in self._waiting:
            if row.request_id == request_id:
                self._waiting.remove(row)
                return True
        return self._text.remove(request_id, keep=keep)

    def step(self) -> list[StepOut]:
        self._settle()
        outs: list[StepOut] = []
        self._place(outs)
        if self._run is not None:
            self._speculate(self._run, outs)
        elif self._text.busy:
            new = self._text.step()
            if self._gain.paused_for:
                for _ in filter(lambda out: isinstance(out, TokenOut), new):
                    self._gain.plain_token()
            outs += new
        return outs

    @property
    def busy(self) -> bool:
        return self._run is not None or bool(self._waiting) or self._text.busy

    def next_is_prefill(self) -> bool:
        if self._run is not None:
            return self._run.prefilling
        return bool(self._waiting) or self._text.next_is_prefill()

    def served(self, request_id: bytes) -> Served:
        story = self._stories.get(request_id)
        if story is None:  # it never had a place
            return Served(self._text.served(request_id).engine)
        speculation = None
        if (cycles := story.cycles) is not None:
            speculation = Speculation(cycles.count, cycles.tokens, cycles.tokens - cycles.count)
        if not story.reason:
            return Served("dflash", "", speculation)
        return Served(self._text.served(request_id).engine, story.reason, speculation)

    def cache_stats(self) -> CacheStats:
        return self._text.cache_stats()

    def speculation_stats(self) -> SpeculationStats:
        gain, totals = self._gain, self._totals
        return SpeculationStats(
            mode="dflash" if self._run is not None else "plain" if self.busy else "idle",
            reason=self._broken or unsuitable(alone=True, forced=False, paused_for=gain.paused_for, gain=gain.gain),
            requests=self._requests,
            fallbacks=dict(self._fallbacks),
            switches=self._switches,
            switch_seconds=self._switch_seconds,
            cycles=totals.count,
            tokens=totals.tokens,
            accepted=totals.tokens - totals.count,
            tokens_a_cycle=gain.tokens_a_cycle,
            gain=gain.gain or 0.0,
            cache=CacheStats() if self._prefixes is None else self._prefixes.stats(),
        )

    def tend(self) -> bool:
        self._settle()
        return self._text.tend()

    def close(self) -> None:
        if self._run is not None:
            self._run.close()
            self._run = None
        self._settle()
        self._waiting.clear()
        if self._prefixes is not None:
            self._prefixes.close()
            self._prefixes = None
        self._pair.hooks.set(False)
        self._text.close()

    def _place(self, outs: list[StepOut]) -> None:
        """Give waiting rows a place, and let DFlash's row make way for them if it has to."""
        if not self._waiting:
            return
        if (run := self._run) is not None:
            if not (why := self._leaves(run, others_wait=True)):
                return
            self._part(run, why, outs)
        rows, alone = [*self._waiting], len(self._waiting) == 1 and not self._text.busy
        self._waiting.clear()
        for row in rows:
            self._stories.pop(row.request_id, None)
            forced = row.speculative == "on"
            gain = self._gain
            reason = (
                self._broken
                or ineligible(row, self._pair.settings.max_ctx)
                or unsuitable(alone=alone, forced=forced, paused_for=gain.paused_for, gain=gain.gain)
            )
            if reason:
                self._story(row.request_id, reason)
                self._text.insert(row)
            else:
                self._run = self._start(row)

    def _start(self, row: Row) -> Run:
        self._requests += 1
        live = Live(row, self._facts)
        chunk = chunk_size(
            self._token_seconds, prompts=1, decoding=self.beside, decode_seconds=0.0, most=self.keeper.chunk
        )
        found = None
        if row.caching and self._prefixes is not None:
            found = self._prefixes.find(live.ids, row.salt)
        run = Run(self._pair, live, chunk, found)
        self._story(row.request_id, "").cycles = run.cycles
        return run

    def _speculate(self, run: Run, outs: list[StepOut]) -> None:
        live, began = run.live, time.perf_counter()
        assert live is not None
        prefilled = live.cached if live.prefilling else None
        self._pair.hooks.set(True)
        try:
            run.step(outs)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            _log.exception("DFlash failed; its row goes on without, and so do all others")
            self._give_up(run, live, f"DFlash failed: {say(error)}")
            return
        finally:
            self._pair.hooks.set(False)
        if run.live is None:
            self._leave(run)
            self._run, self._ended = None, run
            return
        if prefilled is not None and live.prefilling and live.cached - prefilled > 1:
            per_token = (time.perf_counter() - began) / (live.cached - prefilled)
            self._token_seconds = smooth(self._token_seconds, per_token)
        if why := self._leaves(run, others_wait=False):
            self._part(run, why, outs)

    def _leaves(self, run: Run, *, others_wait: bool) -> str:
        assert run.live is not None
        return leaves(
            others_wait=others_wait,
            tokens_left=run.live.left,
            tokens_a_cycle=self._gain.tokens_a_cycle,
            forced=run.live.row.speculative == "on",
            loses=self._gain.loses(run.cycles),
        )

    def _part(self, run: Run, why: str, outs: list[StepOut]) -> None:
        """Move DFlash's row to the text engine, with its KV cache."""
        began = time.perf_counter()
        self._leave(run)
        self._run = None
        live = run.part(outs)
        if live is not None:
            self._switches += 1
            self._story(run.request_id, why)
            self._text.adopt(live)
            self._switch_seconds += time.perf_counter() - began

    def _give_up(self, run: Run, live: Live, why: str) -> None:
        """DFlash cannot be trusted any more: its row goes on from its last token, computed anew."""
        self._broken = why
        self._leave(run)
        self._run = None
        run.close()
        if live.left > 0 and live.ids[-1] not in self._facts.eos:
            live.restart()
            self._story(run.request_id, why)
            self._text.adopt(live)

    def _leave(self, run: Run) -> None:
        """Learn from a row that DFlash has no more."""
        self._gain.row_done(run.cycles)
        self._totals.count += run.cycles.count
        self._totals.tokens += run.cycles.tokens

    def _settle(self) -> None:
        """What can wait until the end of a row has been told."""
        if (run := self._ended) is None:
            return
        self._ended = None
        try:
            run.keep()
        except Exception as error:
            if is_out_of_memory(error):
                raise
            _log.exception("a prefix could not be kept")
            run.close()

    def _story(self, request_id: bytes, reason: str) -> _Story:
        story = self._stories.setdefault(request_id, _Story())
        if reason:
            story.reason = reason
            self._fallbacks[_kind(reason)] += 1
        while len(self._stories) > _REMEMBERED:
            self._stories.popitem(last=False)
        return story


def _kind(reason: str) -> str:
    """A reason without its numbers, to be counted by."""
    return TOO_LONG if reason.startswith(TOO_LONG) else reason.split(":")[0]
