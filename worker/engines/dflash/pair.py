"""Owns target and draft together: the loaded draft, the library's operations, and what a run is configured with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from dflash_mlx.draft_backend import EagerDraftBackend
from dflash_mlx.engine import spec_epoch
from dflash_mlx.engine.copyspec import CopySpecIndex
from dflash_mlx.engine.target_ops import bind_draft_to_target, resolve_target_ops
from dflash_mlx.runtime.config import runtime_config_from_defaults
from dflash_mlx.runtime.context import RuntimeContext, build_runtime_context
from dflash_mlx.runtime.loading import load_draft_bundle
from dflash_mlx.verify_linear import install_verify_linears
from mlx.utils import tree_flatten

from ....protocol.values import Draft
from ..live import Facts
from ..reasons import short
from .gate import DraftFiles, Unfit, check_draft, check_quant, check_target
from .hooks import Hooks

LONGEST_SNAPSHOT: Final = 32_000
"""Tokens of the longest prefix that is kept; the library's own bound."""


@dataclass(frozen=True, slots=True)
class Pair:
    """What runs share. The hooks are off."""

    facts: Facts
    """Of the model that serves."""
    target: Any
    """That model, or what mlx-lm has for the text of it, over the same weights."""
    files: DraftFiles
    settings: Draft
    ops: Any
    draft: Any
    backend: Any
    hooks: Hooks
    family: str
    dtype: str
    quant: str
    bytes: int

    @property
    def block_tokens(self) -> int:
        """Tokens that a cycle checks at most."""
        return self.files.block_tokens

    def context(self, chunk: int) -> RuntimeContext:
        """The library's configuration of a run. Every field is given: its defaults would use the user's home."""
        settings = self.settings
        return build_runtime_context(
            runtime_config_from_defaults(
                prefill_step_size=chunk,
                draft_sink_size=settings.sink,
                draft_window_size=settings.window,
                verify_len_cap=0,
                # The library's own caches stay off: `prefixes.py` hands kept prefixes over.
                prefix_cache=False,
                prefix_cache_max_entries=1,
                prefix_cache_max_bytes=0,
                clear_cache_boundaries=True,
                max_snapshot_tokens=LONGEST_SNAPSHOT,
                prefix_cache_l2=False,
                prefix_cache_l2_dir="",
                prefix_cache_l2_max_bytes=0,
                target_fa_window=0,
                dflash_max_ctx=0,
                verify_mode=settings.verify_mode,
            )
        )

    def choose_copying(self) -> None:
        """Say whether the library may draft by copying repeated text. It has no switch for that."""
        spec_epoch.CopySpecIndex = _NoCopies if self.settings.copy_drafting is False else CopySpecIndex


class _NoCopies(CopySpecIndex):
    """Finds nothing to copy."""

    def draft_after(self, staged_first: int, **_: Any) -> tuple[int, ...] | None:
        return None

    def append_committed(self, token_ids: Sequence[int]) -> None:
        pass

    def _build(self) -> None:
        pass


def load_pair(
    settings: Draft, path: Path, facts: Facts, target: Any, config: dict[str, Any], backend: str, quant: str
) -> Pair:
    """The draft in `path` for a loaded model. Raises `Unfit`; the model is then as before."""
    check_target(config)
    check_quant(quant)
    files = check_draft(path, config)
    try:
        ops = _operations(target)
    except NotImplementedError as error:
        raise Unfit(f"DFlash does not know this model: {short(error)}") from error
    try:
        draft, _ = load_draft_bundle(path, lazy=True, draft_quant=None if quant == "none" else quant or None)
        dtype = _cast(draft, settings.dtype, backend, quantised=quant not in ("", "none"))
        mx.eval(draft.parameters())
        bind_draft_to_target(draft, target, target_ops=ops)
    except Exception as error:
        raise Unfit(f"the draft in {path} cannot be loaded: {short(error)}") from error
    hooks = Hooks(target, lambda: _install(ops, target, settings.verify_mode, backend), exact=backend != "metal")
    size = sum(value.nbytes for _, value in _flat(draft.parameters()))
    family = ops.family(target)
    return Pair(facts, target, files, settings, ops, draft, EagerDraftBackend(), hooks, family, dtype, quant, size)


def _operations(model: Any) -> Any:
    """The library's operations on a target.

    A qwen3_5 model holds its text model within, and the library reads from the outer one whether the output head is
    tied to the embeddings: wrongly, since only the inner one says so.
    """
    ops: Any = resolve_target_ops(model)
    inner = getattr(model, "language_model", None)
    if inner is not None and hasattr(inner, "model") and hasattr(inner, "args"):
        ops.text_wrapper = lambda _: inner
    return ops


def _install(ops: Any, model: Any, verify_mode: str, backend: str) -> None:
    ops.install_speculative_hooks(model)
    if backend == "metal" and verify_mode != "off" and ops.capabilities_for(model).supports_verify_linear:
        install_verify_linears(model, enable_qmm=True)


def _cast(draft: Any, wanted: str, backend: str, *, quantised: bool) -> str:
    """Bring the draft into the type that it computes in; gives its name.

    On a CPU float32 is the fast one: 28 ms a cycle against 63 in bfloat16, measured with a draft of 16 million.
    """
    if wanted == "auto":
        wanted = "float32" if backend == "cpu" and not quantised else "own"
    if wanted != "own":
        draft.set_dtype(getattr(mx, wanted))
    return str(draft.norm.weight.dtype).removeprefix("mlx.core.")


def _flat(tree: Any) -> list[tuple[str, Any]]:
    flat: Any = tree_flatten(tree)
    return flat
