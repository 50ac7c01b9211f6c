"""Decodes a lone row: the model's forward pass, pipelined one token ahead, and little else.

The operations on the logits are those of mlx-lm's `generate_step`, so greedy tokens are the same.
"""

from __future__ import annotations

import traceback

import mlx.core as mx
from mlx_lm.generate import generation_stream

from ..faults import is_out_of_memory, say
from .base import PrefillOut, RowFailed, TokenOut
from .live import Keep, Live

_TOKENS_A_CLEANUP = 256


class Solo:
    """Holds at most one row. `pending` is its next token, being computed, not yet known."""

    def __init__(self, keep: Keep) -> None:
        self._keep = keep
        self.live: Live | None = None
        self._pending: mx.array | None = None
        self._logprobs: mx.array | None = None  # the distribution that `pending` comes from, if the row asks for it
        self._steps = 0

    @property
    def prefilling(self) -> bool:
        """Whether the row's next token is not even being computed."""
        return self.live is not None and self._pending is None

    def start(self, live: Live) -> None:
        """Take a row; its cache, if it has one, covers `cached` of its tokens."""
        if live.cache is None:
            live.cache = live.facts.make_cache()
            live.cached = 0
        self.live, self._pending, self._logprobs, self._steps = live, None, None, 0

    def drop(self) -> None:
        """Forget the row. What is still being computed for it is discarded."""
        self.live, self._pending, self._logprobs = None, None, None

    def prefill(self, chunk: int) -> PrefillOut | RowFailed:
        """Process a chunk of the prompt; with the last one, start on the first token."""
        live = self._row()
        ids, total = live.ids, len(live.ids)
        with mx.stream(generation_stream):
            if live.cached < total - 1:
                end = min(live.cached + chunk, total - 1)
                if live.marks and live.marks[0][0] > live.cached:
                    end = min(end, live.marks[0][0])
                if live.facts.sight is None:
                    live.facts.model(mx.array([ids[live.cached : end]]), cache=live.cache)
                else:
                    try:
                        end = live.facts.sight.advance(live, end)
                    except Exception as error:
                        return self._blind(live, error)
                mx.eval([layer.state for layer in live.cache or ()])
                live.cached = end
                mx.clear_cache()
                if (durable := live.reached()) is not None:
                    self._keep(live, live.cache, end, True, durable)
            if live.cached >= total - 1:
                self._pending, self._logprobs = self._forward(live, mx.array(ids[-1:]))
                live.cached = total
                return PrefillOut(live.row.request_id, total, total, live.hit)
        return PrefillOut(live.row.request_id, live.cached, total, live.hit)

    def decode(self, ahead: bool = True) -> TokenOut | RowFailed:
        """The pending token, or why it could not be chosen.

        The one after it is set going first, unless not wanted (`ahead` False).
        """
        live, pending = self._row(), self._pending
        assert pending is not None, "decode before the end of prefill"
        if (failed := live.failed()) is not None:
            self.drop()
            return failed
        following = distribution = None
        if ahead and live.left > 1:
            with mx.stream(generation_stream):
                following, distribution = self._forward(live, pending)
        if self._logprobs is not None:
            mx.eval(pending, self._logprobs)
        out = live.take(pending.item(), self._logprobs)  # pyright: ignore[reportArgumentType]
        if following is not None:
            live.cached += 1
        self._pending, self._logprobs = following, distribution
        self._steps += 1
        if self._steps % _TOKENS_A_CLEANUP == 0:
            mx.clear_cache()
        if out.finish is not None:
            self.drop()
            self._keep(live, live.cache, live.cached, False, True)
        return out

    def _forward(self, live: Live, token: mx.array) -> tuple[mx.array, mx.array | None]:
        """Set the token after `token` going; with the distribution that it comes from, if the row asks for that."""
        logits = live.facts.model(token[None], cache=live.cache)[:, -1, :]
        for processor in live.chooser.processors:
            logits = processor(token, logits)
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        following = live.chooser.sampler(logprobs)
        if live.row.logprobs:
            mx.async_eval(following, logprobs)
            return following, logprobs
        mx.async_eval(following)
        return following, None

    def _blind(self, live: Live, error: Exception) -> RowFailed:
        """The pictures of a row could not be taken in. That is its own fault, but for a lack of memory."""
        if is_out_of_memory(error) or live.row.media is None:
            raise error
        traceback.print_exception(error)
        self.drop()
        return RowFailed(live.row.request_id, f"the model failed on the images: {say(error)}")

    def _row(self) -> Live:
        assert self.live is not None, "no row here"
        return self.live
