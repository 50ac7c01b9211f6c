"""Decodes several rows together through mlx-lm's `BatchGenerator`.

Rows come with what they already have: a cache over the first `cached` of their tokens, or nothing. Nothing is
prefilled twice.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

from mlx_lm.generate import BatchGenerator, generation_stream
from mlx_lm.models.cache import CacheList, KVCache, trim_prompt_cache

from ..memory.caps import Caps
from ..text.sampling import greedy
from .base import PrefillOut, RowFailed, StepOut
from .decoding import Decoding
from .live import Facts, Keep, Live
from .schedule import MAX_ALONE_CHUNK, chunk_size, smooth

_PREFILL_ROWS = 8
"""Prompts that are prefilled side by side; more only pad each other."""


def can_batch(caches: Sequence[Any]) -> bool:
    """Whether all caches of a row can be merged into those of a batch."""
    return all(_mergeable(layer) for layer in caches)


def _mergeable(cache: Any) -> bool:
    if isinstance(cache, CacheList):
        return all(_mergeable(part) for part in cache.caches)
    # A batch knows no tokens that a window keeps for ever.
    return hasattr(cache, "merge") and not getattr(cache, "keep", 0)


def can_part(caches: Sequence[Any]) -> bool:
    """Whether a row can leave a batch with its cache one token short: windows and states cannot go back."""
    return all(type(layer) is KVCache for layer in caches)


class Batch:
    """Holds the generator and the rows in it, by the generator's own ids."""

    def __init__(self, facts: Facts, max_running: int, caps: Caps, keep: Keep) -> None:
        self._keep = keep
        self._generator: Any = BatchGenerator(
            facts.model,
            stop_tokens=[[token] for token in sorted(facts.eos)],
            sampler=greedy,
            completion_batch_size=max_running,
            prefill_batch_size=max_running,  # rows that decode already come this way too; prompts wait for `room`
        )
        caps.reassert(generation_stream)  # the generator has just raised the wired limit
        self._rows: dict[int, Live] = {}
        Decoding.take_over(self._generator, self._rows)
        self._prefilling: dict[int, int] = {}  # uid → tokens already in the row's cache when it came
        self._fresh: set[int] = set()  # of these, prompts; the others come in the middle of decoding
        self._token_seconds: float | None = None
        self._decode_seconds = 0.0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def prefilling(self) -> bool:
        """Whether the next step prefills."""
        return bool(self._fresh)

    @property
    def room(self) -> int:
        """How many more prompts may be prefilled here."""
        return _PREFILL_ROWS - len(self._fresh)

    @property
    def least_unread(self) -> int:
        """Of the prompts that are prefilled here, what the shortest still has before it; 0 if there is none."""
        return min((self._rows[uid].unread for uid in self._fresh), default=0)

    def insert(self, lives: Sequence[Live]) -> None:
        """Take rows, in this order."""
        uids = self._generator.insert_segments(
            [_segments(live) for live in lives],
            max_tokens=[live.left for live in lives],
            caches=[live.cache for live in lives],
            all_tokens=[live.ids[: live.cached] for live in lives],
            samplers=[live.chooser.sampler for live in lives],
            logits_processors=[live.chooser.processors for live in lives],
        )
        for uid, live in zip(uids, lives, strict=True):
            self._rows[uid] = live
            self._prefilling[uid] = live.cached
            if live.prefilling:
                self._fresh.add(uid)
            live.cache = None  # the generator has it now

    def remove(self, live: Live) -> None:
        """Drop a row in any phase."""
        uid = self._uid(live)
        if live.caching:
            cache, tokens = self._generator.remove([uid], return_prompt_caches=True)[uid]
            self._keep(live, cache, len(tokens), False, True)
        else:
            self._generator.remove([uid])
        self._forget(uid)

    @property
    def decode_seconds(self) -> float:
        """Of a step that only decodes, measured; 0.0 before the first."""
        return self._decode_seconds

    @property
    def lone(self) -> Live | None:
        """The only row, if it is one and decodes."""
        if len(self._rows) != 1 or self._prefilling:
            return None
        return next(iter(self._rows.values()))

    def part(self, live: Live) -> None:
        """Let a decoding row go, with a cache over all of its tokens but the last.

        The token after it is being computed already; that is discarded, so the row's chooser starts anew.
        """
        uid = self._uid(live)
        cache, tokens = self._generator.remove([uid], return_prompt_caches=True)[uid]
        trim_prompt_cache(cache, 1)
        live.cache, live.cached = cache, len(tokens) - 1
        live.rechoose()
        self._forget(uid)

    def surrender(self) -> list[Live]:
        """All rows, without caches, in the order in which they came. The batch is closed."""
        lives = list(self._rows.values())
        self.close()
        for live in lives:
            live.restart()
        return lives

    def step(self, beside: bool = False, most: int = MAX_ALONE_CHUNK) -> list[StepOut]:
        """A decode step of all rows that are so far, and a prefill chunk of those that are not.

        `beside`: rows elsewhere wait for it. `most`: prompt tokens for which there is memory.
        """
        decoding = len(self._rows) - len(self._prefilling)
        self._generator.prefill_step_size = chunk_size(
            self._token_seconds,
            prompts=len(self._fresh),
            decoding=decoding > 0 or beside,
            decode_seconds=self._decode_seconds,
            most=most,
        )
        began = time.perf_counter()
        prompts, tokens = self._generator.next()
        seconds = time.perf_counter() - began
        outs: list[StepOut] = []
        longest = rows = 0
        for prompt in prompts:
            if (processed := self._progress(prompt, outs)) > 0:
                longest, rows = max(longest, processed), rows + 1
        for token in tokens:
            live = self._rows[token.uid]
            outs.append(live.take(token.token, token.logprobs))
            if token.finish_reason is not None:
                self._forget(token.uid)
                self._keep(live, token.prompt_cache, len(token.all_tokens), False, True)
        outs += self._failed()
        if rows:
            spent = seconds - (self._decode_seconds if decoding else 0.0)
            self._token_seconds = smooth(self._token_seconds, max(spent, 1e-6) / (longest * rows))
        elif decoding and not prompts:
            self._decode_seconds = smooth(self._decode_seconds or None, seconds)
        return outs

    def close(self) -> None:
        """Release the rows and what the generator holds."""
        self._generator.close()
        self._generator = None
        self._rows.clear()

    def _progress(self, prompt: Any, outs: list[StepOut]) -> int:
        """Note how far a prompt is; gives the number of tokens that this step prefilled for it."""
        live = self._rows[prompt.uid]
        base = self._prefilling[prompt.uid]
        done, _ = prompt.progress
        before, live.cached = live.cached, base + done
        if prompt.uid in self._fresh:
            outs.append(PrefillOut(live.row.request_id, live.cached, live.start, live.hit))
        if prompt.end_of_prompt:
            del self._prefilling[prompt.uid]
            self._fresh.discard(prompt.uid)
            return 0
        if (durable := live.reached()) is not None:
            cache, tokens = self._generator.extract_cache([prompt.uid])[prompt.uid]
            self._keep(live, cache, len(tokens), False, durable)
        return live.cached - before

    def _failed(self) -> list[RowFailed]:
        """Take out the rows whose next token could not be chosen."""
        failed = [out for live in self._rows.values() if (out := live.failed()) is not None]
        for out in failed:
            self.remove(next(live for live in self._rows.values() if live.row.request_id == out.request_id))
        return failed

    def _uid(self, live: Live) -> int:
        return next(uid for uid, other in self._rows.items() if other is live)

    def _forget(self, uid: int) -> None:
        del self._rows[uid]
        self._prefilling.pop(uid, None)
        self._fresh.discard(uid)


def _segments(live: Live) -> list[list[int]]:
    """What a row still has to process, cut at its marks: the generator stops at the end of each piece."""
    ends = [position for position, _ in live.marks if live.cached < position < len(live.ids)]
    bounds = [live.cached, *ends, len(live.ids)]
    return [live.ids[a:b] for a, b in itertools.pairwise(bounds)]
