"""Decides from files alone whether DFlash can speed up a model, and whether a draft belongs to it. No MLX here."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ...model_check import read_config, read_header
from ..base import LoadProblem

_GEMMA: Final = ("gemma4", "gemma4_text")
_QUANT: Final = re.compile(r"w(2|4|8)(?:a(?:16|32))?(?::gs(?:32|64|128))?", re.IGNORECASE)
_TARGET: Final = {"hidden_size": "hidden size", "vocab_size": "vocabulary", "num_hidden_layers": "layers"}


class Unfit(Exception):
    """DFlash cannot be used, and why. The model serves without it."""


@dataclass(frozen=True, slots=True)
class DraftFiles:
    """A draft whose files fit its target."""

    path: Path
    block_tokens: int
    context: int
    """Layers of the target whose hidden states it reads."""


def check_target(config: dict[str, Any]) -> None:
    """Raise `Unfit` unless the library knows the architecture. The top-level `model_type` alone counts.

    A drafter of another kind, such as gemma4_assistant, has a nested text type that the library would take.
    """
    kind = str(config.get("model_type", "")).lower()
    if "qwen" not in kind and kind not in _GEMMA:
        raise Unfit(f"DFlash knows qwen models and {', '.join(_GEMMA)}; this one's model_type is {kind!r}")


def check_quant(spec: str) -> None:
    """Raise `Unfit` for a spec of the draft's quantisation that the library does not read."""
    if spec and spec != "none" and not _QUANT.fullmatch(spec):
        raise Unfit(
            f"draft.quant {spec!r} is none; it is w2, w4 or w8, then a16 or a32, then :gs32, :gs64 or :gs128, "
            "such as w4a16:gs64"
        )


def check_draft(path: Path, target: dict[str, Any]) -> DraftFiles:
    """The draft in `path`, checked against the config of its target. Raises `Unfit` with the numbers."""
    try:
        config = read_config(path)
        weights = sorted(path.glob("model*.safetensors"))
        headers = [read_header(file) for file in weights]
    except LoadProblem as problem:
        raise Unfit(f"the draft cannot be loaded: {problem.message}") from None
    if not weights:
        raise Unfit(f"the draft cannot be loaded: there is no model*.safetensors in {path}")
    _check_index(path, {file.name for file in weights})
    heads = sorted(name for header in headers for name in header if name.startswith("lm_head."))
    if heads:
        raise Unfit(f"the draft in {path} has an output head of its own ({heads[0]}); DFlash uses the target's")
    text = _text_config(target)
    _compare(path, config, text)
    layers = [read for read in _layer_ids(config) if not 0 <= read < text["num_hidden_layers"]]
    if layers:
        raise Unfit(
            f"the draft in {path} reads layer {layers[0]} of its target, which has layers 0 to "
            f"{text['num_hidden_layers'] - 1}"
        )
    block = config.get("block_size")
    if not isinstance(block, int) or isinstance(block, bool) or not 2 <= block <= 256:
        raise Unfit(f"the draft in {path} has block_size {block!r}; 2 to 256 tokens are expected")
    mask = (config.get("dflash_config") or {}).get("mask_token_id", 0)
    if not isinstance(mask, int) or not 0 <= mask < text["vocab_size"]:
        raise Unfit(f"the draft in {path} has mask_token_id {mask!r}, outside the vocabulary of {text['vocab_size']}")
    return DraftFiles(path, block, len(_layer_ids(config)) or config["num_hidden_layers"])


def _compare(path: Path, draft: dict[str, Any], target: dict[str, Any]) -> None:
    """What draft and target must have in common."""
    for key, words in _TARGET.items():
        if not _is_count(target.get(key)):
            raise Unfit(f"the model's config.json does not say its {words} ({key})")
    for key, words in (("hidden_size", "hidden size"), ("vocab_size", "vocabulary")):
        if draft.get(key) != target[key]:
            raise Unfit(
                f"the draft in {path} is for a {words} of {draft.get(key)!r}, and this target has {target[key]}"
            )
    made_for = draft.get("num_target_layers")
    if made_for != target["num_hidden_layers"]:
        raise Unfit(
            f"the draft in {path} is for {made_for!r} layers, and this target has {target['num_hidden_layers']}"
        )
    if not _is_count(draft.get("num_hidden_layers")):
        raise Unfit(f"the draft in {path} has num_hidden_layers {draft.get('num_hidden_layers')!r}")


def _check_index(path: Path, present: set[str]) -> None:
    index = path / "model.safetensors.index.json"
    if not index.exists():
        return
    try:
        named = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise Unfit(f"the draft cannot be loaded: {index} is damaged") from None
    if missing := sorted(str(name) for name in named - present):
        raise Unfit(f"the draft cannot be loaded: {path / missing[0]} is missing")


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, dict) else config


def _layer_ids(config: dict[str, Any]) -> list[int]:
    ids = (config.get("dflash_config") or {}).get("target_layer_ids") or []
    return [item for item in ids if isinstance(item, int)]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
