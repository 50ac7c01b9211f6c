"""Checks of a load's draft. Pure; part of `checks`. Whether the draft fits its target, the worker knows."""

from __future__ import annotations

from . import limits
from .commands import Load
from .problem import Problem, bad


def check_draft(load: Load) -> Problem | None:
    """Ranges of `Load.draft`."""
    draft = load.draft
    if draft is None:
        return None
    if not draft.model.strip() or len(draft.model) > limits.MAX_PATH_CHARS or "\0" in draft.model:
        return bad(
            f"draft.model must be a path, an id or auto, of 1 to {limits.MAX_PATH_CHARS} characters without NUL, "
            f"got {len(draft.model)} characters"
        )
    for field, value, low, high in (
        ("max_ctx", draft.max_ctx, 1, limits.MAX_TOKENS),
        ("window", draft.window, 1, limits.MAX_TOKENS),
        ("sink", draft.sink, 0, limits.MAX_TOKENS),
        ("cache_entries", draft.cache_entries, 0, 100_000),
        ("cache_bytes", draft.cache_bytes, 0, 2**50),
        ("disk_bytes", draft.disk_bytes, 0, 2**50),
    ):
        if value is not None and not low <= value <= high:
            return bad(f"draft.{field} must be {low} to {high}, got {value}")
    if draft.disk_bytes and not (draft.cache_entries and draft.cache_bytes):
        return bad(
            "draft.disk_bytes needs a cache in memory: set neither draft.cache_entries nor draft.cache_bytes to 0"
        )
    return None
