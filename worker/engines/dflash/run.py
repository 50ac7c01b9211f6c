"""One row in DFlash's hands: the library's generator, advanced by a prefill chunk or a cycle a step.

The generator is advanced and closed on the executor thread only.
"""

from __future__ import annotations

import time
from typing import Any

import mlx.core as mx
from dflash_mlx.engine.events import PrefillCompleteEvent, PrefillProgressEvent, TokenEvent
from dflash_mlx.recurrent_rollback_cache import RecurrentRollbackCache
from dflash_mlx.runtime import stream_dflash_generate
from mlx_lm.models.cache import KVCache, trim_prompt_cache

from ..base import PrefillOut, StepOut
from ..live import Live
from .gain import Cycles
from .pair import Pair
from .prefixes import Found
from .watch import Watch


class Run:
    """Decodes one row. It is over when `live` is None; `keep` or `close` then ends the generator."""

    def __init__(self, pair: Pair, live: Live, chunk: int, found: Found | None) -> None:
        """`chunk`: tokens of a prefill step. `found`: kept prefixes, None to use and leave none."""
        self._pair = pair
        self.live: Live | None = live
        self.request_id = live.row.request_id
        self.cycles = Cycles()
        self._watch = Watch(pair.ops, len(live.ids), pair.hooks.own_call)
        self._keeps = found is not None
        self._whole = False  # whether the row's last token is the last that was computed
        self._events: Any = stream_dflash_generate(
            target_model=pair.target,
            target_ops=self._watch,  # pyright: ignore[reportArgumentType]
            draft_model=pair.draft,
            draft_backend=pair.backend,
            max_new_tokens=live.left,
            stop_token_ids=sorted(pair.facts.eos),
            suppress_token_ids=list(pair.facts.banned),
            prompt_tokens_override=list(live.ids),
            prefix_snapshot=None if found is None else found.snapshot,
            snapshot_service=None if found is None else found.service,
            stable_prefix_len=None if found is None else found.stable,
            prefix_cache_active=found is not None,
            publish_generation_snapshot=found is not None,
            runtime_context=pair.context(chunk),
        )

    @property
    def prefilling(self) -> bool:
        """Whether no token was generated yet."""
        return self.live is not None and self.live.prefilling

    def step(self, outs: list[StepOut]) -> None:
        """A prefill chunk, the first token, or a cycle. What comes of it is appended, also when it then raises."""
        live, watch = self._row(), self._watch
        before, began = (watch.covered, watch.cycles), time.perf_counter()
        self._pair.choose_copying()
        for event in self._events:
            if isinstance(event, PrefillProgressEvent):
                if event.tokens_processed < live.start:
                    live.cached = event.tokens_processed
                    outs.append(PrefillOut(self.request_id, live.cached, live.start, live.hit))
                    return
            elif isinstance(event, PrefillCompleteEvent):
                live.hit, live.cached = event.prefill_tokens_restored, live.start
                outs.append(PrefillOut(self.request_id, live.start, live.start, live.hit))
            elif isinstance(event, TokenEvent):
                first = live.prefilling
                out = live.take(event.token_id)
                outs.append(out)
                if out.finish is not None:
                    self._note(before, began)
                    self._whole = self._keeps and len(live.ids) == watch.covered
                    self.live = None
                    return
                if first or len(live.ids) >= watch.covered:
                    self._note(before, began)
                    return
        raise RuntimeError("DFlash ended before its row")

    def part(self, outs: list[StepOut]) -> Live | None:
        """Give the row up where a step ended; None if that was its last token.

        It has a cache over all of its tokens but the last, or, where that cannot be, none.
        """
        live, watch = self._row(), self._watch
        cache = _plain(watch.cache, live.facts.make_cache())
        if cache is None:
            live.restart()
        elif live.prefilling:
            live.cache = cache
        else:
            covered = watch.covered
            if covered == len(live.ids) and watch.next_logits is not None:
                outs.append(live.take(_likeliest(watch.next_logits, live.facts.banned)))
            elif covered == len(live.ids) and all(type(layer) is KVCache for layer in cache):
                trim_prompt_cache(cache, 1)
                covered -= 1
            if covered == len(live.ids) - 1:
                live.cache, live.cached = cache, covered
                live.rechoose()
            else:
                live.restart()
        if live.cache is not None:
            mx.eval([layer.state for layer in live.cache])
        self.close()
        return live if live.left > 0 and live.ids[-1] not in live.facts.eos else None

    def close(self) -> None:
        """Drop the row; what the library holds for it is released."""
        self.live = None
        self._events.close()
        self._watch.cache = []

    def keep(self) -> None:
        """Once the row is over, let the library keep prompt and answer, where nothing was computed past the end."""
        if self._whole:
            for _ in self._events:
                pass
        self.close()

    def _note(self, before: tuple[int, int], began: float) -> None:
        covered, cycles = before
        if self._watch.cycles > cycles:
            seconds = time.perf_counter() - began
            self.cycles.add(self._watch.covered - covered, seconds, self._watch.cycles - cycles)

    def _row(self) -> Live:
        assert self.live is not None, "no row here"
        return self.live


def _plain(layers: list[Any], empty: list[Any]) -> list[Any] | None:
    """The library's caches as the model's own; None where they cannot be."""
    if not layers or len(layers) > len(empty):
        return None
    # What a vision model has beyond its layers is the shift of positions by pictures: none for a text.
    plain: list[Any] = []
    for layer, own in zip(layers, empty[: len(layers)], strict=True):
        if isinstance(layer, RecurrentRollbackCache):
            own.cache = list(layer.cache)
            plain.append(own)
        elif type(layer) is type(own):
            plain.append(layer)
        else:
            return None
    return [*plain, *empty[len(layers) :]]


def _likeliest(logits: mx.array, banned: tuple[int, ...]) -> int:
    if banned:
        logits = mx.put_along_axis(logits, mx.array(banned), mx.array(-mx.inf, dtype=logits.dtype), axis=-1)
    token: Any = mx.argmax(logits).item()
    return int(token)
