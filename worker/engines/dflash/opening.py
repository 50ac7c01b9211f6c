"""Adds a draft to a loaded model: finds it, checks it, tries it, and makes the engine; or says why not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ....protocol.commands import Load
from ....protocol.values import Draft, SpeculationInfo
from ...cache.identity import default_folder, model_key
from ...model_check import resolve_model
from ..base import LoadProblem, Report
from ..live import Facts
from ..reasons import short
from .gain import Gain
from .gate import Unfit, check_quant, check_target

_log = logging.getLogger(__name__)
_AUTO = "auto"


WITH_ADAPTER = "the request has an adapter"
"""Why rows of an adapter are decoded plainly: the draft was made for the base model."""


class Opened:
    """What a load got of its draft: the pair with its measured gain, or none, and in any case the tale."""

    def __init__(self, info: SpeculationInfo, pair: Any = None, gain: Gain | None = None) -> None:
        self.info = info
        self.pair = pair
        self.gain = gain


def open_draft(
    load: Load,
    directory: Path,
    facts: Facts,
    config: dict[str, Any],
    backend: str,
    report: Report,
    fetch: Callable[[str], Path],
) -> Opened | None:
    """The draft of a load for its model, loaded from `directory`; None if it has none.

    Raises `LoadProblem` where it is required. `fetch` gives the directory of a Hugging Face id.
    """
    settings = load.draft
    if settings is None:
        return None
    report("draft", 0, 0)
    try:
        return _open(load, directory, settings, facts, config, backend, fetch)
    except Unfit as unfit:
        if settings.required:
            raise LoadProblem(f"the draft is required: {unfit}") from unfit
        _log.warning("no speculation: %s", str(unfit))
        return Opened(SpeculationInfo(active=False, reason=str(unfit), draft=settings.model))


def _open(
    load: Load,
    directory: Path,
    settings: Draft,
    facts: Facts,
    config: dict[str, Any],
    backend: str,
    fetch: Callable[[str], Path],
) -> Opened:
    for option in ("kv_bits", "max_kv_size"):
        if getattr(load, option) is not None:
            raise Unfit(f"{option} and a draft cannot be used together: dflash-mlx has KV caches of its own")
    check_target(config)
    check_quant(settings.quant)
    try:
        from .pair import load_pair
        from .trial import try_pair
        from .twin import text_twin
    except Exception as error:
        raise Unfit(f"dflash-mlx cannot be used: {short(error)}") from error
    name, quant = _choose(load.model, settings)
    path = resolve_model(name)
    if path is None:
        try:
            path = fetch(name)
        except LoadProblem as problem:
            raise Unfit(f"the draft cannot be loaded: {problem.message}") from problem
    target = facts.model
    if facts.sight is not None:
        target = text_twin(directory, facts.sight.language, load.trust_remote_code)
    pair = load_pair(settings, path, facts, target, config, backend, quant)
    gain = try_pair(pair)
    cost = gain.cycle_seconds / gain.plain_seconds if gain.cycle_seconds and gain.plain_seconds else 0.0
    info = SpeculationInfo(
        active=True,
        draft=name,
        family=pair.family,
        block_tokens=pair.block_tokens,
        layers=pair.files.context,
        dtype=pair.dtype,
        quant=quant,
        verify_mode=settings.verify_mode,
        bytes=pair.bytes,
        cycle_cost=cost,
    )
    return Opened(info, pair, gain)


def _choose(target: str, settings: Draft) -> tuple[str, str]:
    """The draft, and how it is quantised. Raises `Unfit` for `auto` with a target that the library does not know."""
    from dflash_mlx.runtime.registry import (
        resolve_effective_draft_quant,
        resolve_model_support_spec,
        supported_base_models,
    )

    spec = resolve_model_support_spec(target.rstrip("/"))
    name = settings.model
    if name == _AUTO:
        if spec is None:
            raise Unfit(f"dflash-mlx knows no draft for {target}; it knows those of {supported_base_models()}")
        name = spec.draft_ref
    quant = resolve_effective_draft_quant(
        draft_quant=settings.quant or None, resolved_draft_ref=name, support_spec=spec
    )
    return name, quant or ""


def make_engine(opened: Opened, text: Any, facts: Facts, load: Load, path: Path, tokenizer: Any) -> Any:
    """The engine over a text engine and an opened pair."""
    from .engine import Speculating
    from .prefixes import Prefixes

    prefixes = None
    if opened.pair.settings.cache_entries and opened.pair.settings.cache_bytes:
        versions = text.info.versions
        try:
            identity = model_key(path, versions, ["dflash", versions.get("dflash-mlx", "")])
        except OSError as error:
            _log.warning("no prefixes for speculation: %s", error)
        else:
            base = Path(load.cache_dir) if load.cache_dir is not None else default_folder()
            folder = base / f"dflash-{identity}" if opened.pair.settings.disk_bytes else None
            prefixes = Prefixes(opened.pair, tokenizer, identity, folder)
    return Speculating(text, facts, opened.pair, opened.gain or Gain(opened.pair.block_tokens), prefixes)
