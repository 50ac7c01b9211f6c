"""Reads how large a model is: bytes of tensors from safetensors headers, dimensions from `config.json`.

Never a weight, and never the network. A Hugging Face id is looked for in the local cache of downloads.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, cast

from ..protocol.commands import Load
from .policy.prediction import Dims, Prediction, predict

MAX_HEADER_BYTES = 100_000_000
"""Largest header that the safetensors format allows."""

DRAFT_SHARE = 0.2
"""Of the weights, for a draft whose size cannot be told."""

_KNOWN = 64
_cache: dict[tuple[str, int], int] = {}
"""(file, its time of change in ns) → bytes of its tensors."""


class UnknownSize(Exception):
    """The size of a model cannot be told; the message says why and what to do."""


def predict_load(load: Load, working_context: int) -> Prediction:
    """What a worker for this load will take. Raises `UnknownSize`."""
    folder = find(load.model)
    weights = tensor_bytes(folder, "model*.safetensors")
    adapters = sum(tensor_bytes(Path(path), "adapters*.safetensors") for path in load.adapters.values())
    return predict(
        load,
        read_dims(folder),
        weights=weights + _draft_bytes(load, weights),
        adapters=adapters,
        working_context=working_context,
        fused=sys.platform == "darwin",
    )


def _draft_bytes(load: Load, weights: int) -> int:
    """Bytes of a draft model's weights. One that is not here yet, or is found by the worker, is a guess."""
    if load.draft is None:
        return 0
    try:
        return tensor_bytes(find(load.draft.model), "*.safetensors")
    except UnknownSize:
        return int(weights * DRAFT_SHARE)


def find(model: str) -> Path:
    """The directory of a model. Raises `UnknownSize`."""
    path = Path(os.path.expanduser(model))
    if path.is_dir():
        return path
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise UnknownSize(f"there is no directory {model}")
    snapshots = _hub_cache() / f"models--{model.replace('/', '--')}" / "snapshots"
    try:
        found = [one for one in snapshots.iterdir() if any(one.glob("model*.safetensors"))]
        return max(found, key=lambda one: one.stat().st_mtime)
    except (OSError, ValueError):
        raise UnknownSize(f"{model} is neither a directory here nor a downloaded model") from None


def tensor_bytes(folder: Path, pattern: str) -> int:
    """Bytes of all tensors in some files of a directory. Raises `UnknownSize` where there are none."""
    files = sorted(folder.glob(pattern))
    if not files:
        raise UnknownSize(f"{folder} has no {pattern}")
    return sum(_file_bytes(file) for file in files)


def _file_bytes(file: Path) -> int:
    try:
        info = file.stat()
        key = (str(file), info.st_mtime_ns)
        if key not in _cache:
            if len(_cache) >= _KNOWN * 16:
                _cache.clear()
            _cache[key] = _header_bytes(file, info.st_size)
        return _cache[key]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise UnknownSize(f"the header of {file} cannot be read") from None


def _header_bytes(file: Path, size: int) -> int:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 0 < length <= min(MAX_HEADER_BYTES, size):
            raise ValueError
        header = json.loads(stream.read(length))
    if not isinstance(header, dict):
        raise ValueError
    offsets = [tensor["data_offsets"] for name, tensor in header.items() if name != "__metadata__"]
    return sum(int(end) - int(begin) for begin, end in offsets)


def _hub_cache() -> Path:
    home = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub"))


# ---- dimensions -----------------------------------------------------------------------------------------


def read_dims(folder: Path) -> Dims | None:
    """The dimensions in `config.json`; None when it does not tell them."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return dims_of(config) if isinstance(config, dict) else None


def dims_of(config: dict[str, Any]) -> Dims | None:
    """The dimensions of a configuration; those of the text part of a model with several. None: not told."""
    whole = config
    for key in ("text_config", "language_config", "llm_config"):
        nested = config.get(key)
        if isinstance(nested, dict) and _whole(nested, "num_hidden_layers"):
            config = cast("dict[str, Any]", nested)
            break
    layers, hidden = _whole(config, "num_hidden_layers"), _whole(config, "hidden_size")
    heads = _whole(config, "num_attention_heads")
    if not (layers and hidden and heads):
        return None
    head_dim = _whole(config, "head_dim") or hidden // heads
    kv_heads = _whole(config, "num_key_value_heads") or heads
    window = _whole(config, "sliding_window")
    kinds = _kinds(config, layers, bool(window))
    full, windowed, states = (sum(kind == one for kind in kinds) for one in ("full", "window", "state"))
    dtype = str(config.get("torch_dtype") or config.get("dtype") or whole.get("torch_dtype") or "")
    value_bytes = 4 if dtype.endswith("float32") else 2
    experts = _whole(config, "num_experts_per_tok") * _whole(config, "moe_intermediate_size")
    latent = _whole(config, "kv_lora_rank")
    return Dims(
        hidden=hidden,
        inner=max(_whole(config, "intermediate_size"), experts, hidden),
        vocabulary=_whole(config, "vocab_size") or _whole(whole, "vocab_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        full_layers=full,
        window_layers=windowed,
        window=window,
        state_bytes=states * _state_bytes(config, value_bytes),
        latent=latent + _whole(config, "qk_rope_head_dim") if latent else 0,
        context=_whole(config, "max_position_embeddings") or _whole(whole, "max_position_embeddings"),
        value_bytes=value_bytes,
    )


def _kinds(config: dict[str, Any], layers: int, has_window: bool) -> list[str]:
    """What each layer keeps: `full`, `window` or `state`."""
    types = config.get("layer_types")
    if isinstance(types, list) and len(cast("list[Any]", types)) == layers:
        words = [str(one) for one in cast("list[Any]", types)]
        return [
            "window" if "sliding" in word or "chunked" in word else "full" if "full" in word else "state"
            for word in words
        ]
    if every := _whole(config, "full_attention_interval"):
        return ["full" if (index + 1) % every == 0 else "state" for index in range(layers)]
    if has_window and (every := _whole(config, "sliding_window_pattern")):
        return ["full" if (index + 1) % every == 0 else "window" for index in range(layers)]
    if has_window and str(config.get("model_type", "")).startswith("gemma3"):
        return ["full" if (index + 1) % 6 == 0 else "window" for index in range(layers)]
    return ["full"] * layers  # many configurations name a window that their code does not use


def _state_bytes(config: dict[str, Any], value_bytes: int) -> int:
    """Of one recurrent layer and row: its matrix in float32, and the tail of its convolution."""
    keys = _whole(config, "linear_num_key_heads") * _whole(config, "linear_key_head_dim")
    value_heads, width = _whole(config, "linear_num_value_heads"), _whole(config, "linear_value_head_dim")
    matrix = value_heads * _whole(config, "linear_key_head_dim") * width * 4
    return matrix + _whole(config, "linear_conv_kernel_dim") * (2 * keys + value_heads * width) * value_bytes


def _whole(config: dict[str, Any], key: str) -> int:
    """A positive whole number, or 0."""
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
