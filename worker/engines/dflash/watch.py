"""Sees where the target's KV cache stands within the library's loop, through the operations that the loop is given.

After a cycle the library has trimmed the cache to the tokens that it kept. `covered` counts them, and `next_logits`
is the distribution of the token after them, so a row can go on elsewhere from there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from .rollback import take_back


class Watch:
    """The library's `TargetOps`, with a look at what passes. All else goes through."""

    def __init__(self, ops: Any, covered: int, own_call: Callable[[Any], Callable[..., Any]]) -> None:
        """`own_call` gives the `__call__` of a module as the model has it."""
        self._ops = ops
        self._own_call = own_call
        self.covered = covered
        """Tokens in the cache once the prompt is in it."""
        self.cycles = 0
        self.cache: list[Any] = []
        self.next_logits: mx.array | None = None
        """[vocabulary], after the covered tokens; None when not known."""
        self._verified: mx.array | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def forward_with_hidden_capture(self, target_model: Any, *, cache: Any = None, **rest: Any) -> Any:
        self.cache = cache
        return self._ops.forward_with_hidden_capture(target_model, cache=cache, **rest)

    def verify_block(self, *, target_cache: Any, **rest: Any) -> Any:
        logits, hidden = self._ops.verify_block(target_cache=target_cache, **rest)
        self._verified = logits if logits.shape[0] == 1 else None
        return logits, hidden

    def verify_tree_block(self, **rest: Any) -> Any:
        self._verified = None
        return self._ops.verify_tree_block(**rest)

    def restore_after_acceptance(
        self, cache_entries: Any, *, target_len: int, acceptance_length: int, drafted_tokens: int = 0
    ) -> int:
        if acceptance_length < drafted_tokens:
            take_back(cache_entries, acceptance_length + 1, self._own_call)
        spent = self._ops.restore_after_acceptance(
            cache_entries, target_len=target_len, acceptance_length=acceptance_length, drafted_tokens=drafted_tokens
        )
        verified, self._verified = self._verified, None
        self.cache, self.covered = cache_entries, target_len
        self.cycles += 1
        self.next_logits = None if verified is None else verified[0, acceptance_length]
        return spent

    def restore_after_tree_acceptance(self, cache_entries: Any, *, accepted_tree_indices: Any) -> int:
        spent = self._ops.restore_after_tree_acceptance(cache_entries, accepted_tree_indices=accepted_tree_indices)
        self.cache, self.next_logits = cache_entries, None
        self.covered += len(accepted_tree_indices)
        self.cycles += 1
        return spent
