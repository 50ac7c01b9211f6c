"""Opens a vision model through mlx-vlm: decides whether a directory is one, loads model and processor."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any

from ...protocol.commands import Load
from ...protocol.errors import ErrorCode
from ..model_check import read_header, weight_bytes
from .base import LoadProblem, Report
from .reasons import short

_log = logging.getLogger(__name__)
_CONFIGS = ("vision_config", "vision_tower", "mm_vision_tower", "vision_tower_config")
_WEIGHTS = ("vision", "visual", "image", "vit.", "siglip")
_GROUP_BYTES = 256 * 1024 * 1024
"""Weights evaluated between two progress reports."""


def is_vision(path: Path, config: dict[str, Any]) -> bool:
    """Whether a model has eyes that mlx-vlm can use: its configuration, its weights and the library say so.

    A conversion to text only keeps the configuration and leaves the weights of the tower out.
    """
    if config.get("model_file") is not None or not any(config.get(name) for name in _CONFIGS):
        return False
    names = [name for file in path.glob("model*.safetensors") for name in read_header(file)]
    if not any(word in name.lower() for name in names for word in _WEIGHTS):
        return False
    try:
        from mlx_vlm.utils import get_model_type

        kind = str(get_model_type(dict(config)))
        return kind.isidentifier() and importlib.util.find_spec(f"mlx_vlm.models.{kind}") is not None
    except Exception as error:
        _log.warning("mlx-vlm cannot say whether it knows %s: %s", config.get("model_type"), short(error))
        return False


def why_blind(load: Load) -> str:
    """Why a vision model that mlx-lm can serve as well is to be a text model; empty if it is not."""
    if load.max_images == 0:
        return "max_images is 0"
    return "it is loaded with a draft; load it without one for images" if load.draft is not None else ""


def check_options(load: Load) -> None:
    """Raise `LoadProblem` for what this engine does not do."""
    for option, given in (
        ("kv_bits", load.kv_bits is not None),
        ("max_kv_size", load.max_kv_size is not None),
        ("adapters", bool(load.adapters)),
        ("draft", load.draft is not None),
    ):
        if given:
            raise LoadProblem(
                f"{option} cannot be used with a vision model; load it without, or with max_images 0 as a text model",
                ErrorCode.UNSUPPORTED,
            )


def load_vision(path: Path, load: Load, report: Report) -> Any:
    """The model's `Sight`, all weights in memory. Raises `LoadProblem`."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    total = weight_bytes(path)
    report("weights", 0, total)
    try:
        from mlx_vlm.utils import load_image_processor, load_model, load_processor

        from .sight import Sight

        model: Any = load_model(path, lazy=True, trust_remote_code=load.trust_remote_code)
        done, size, group = 0, 0, []
        flat: Any = tree_flatten(model.parameters())
        for _, value in flat:
            group.append(value)
            size += value.nbytes
            if size >= _GROUP_BYTES:
                mx.eval(group)
                done, size, group = done + size, 0, []
                report("weights", min(done, total), total)
        mx.eval(group, model.parameters())
        model.eval()
    except Exception as error:
        raise LoadProblem(f"cannot load the weights in {path} with mlx-vlm: {short(error)}") from error
    report("weights", total, total)
    try:
        processor: Any = load_processor(path, False, eos_token_ids=None, trust_remote_code=load.trust_remote_code)
        own = load_image_processor(path, trust_remote_code=load.trust_remote_code)
        if own is not None:
            processor.image_processor = own
    except Exception as error:
        raise LoadProblem(f"cannot load the image processor in {path}: {short(error)}") from error
    if getattr(model, "language_model", None) is None or not hasattr(model, "get_input_embeddings"):
        raise LoadProblem(
            f"mlx-vlm's {model.config.model_type} in {path} does not answer in text", ErrorCode.UNSUPPORTED
        )
    sight = Sight(model, processor)
    if not sight.in_parts():
        raise LoadProblem(
            f"mlx-vlm's {model.config.model_type} in {path} takes a prompt only as a whole, and this engine in parts",
            ErrorCode.UNSUPPORTED,
        )
    return sight


def vision_preparer(
    load: Load, tokenizer: Any, vocabulary: int, context_limit: int, eos: frozenset[int], sight: Any
) -> Any:
    """What prepares the requests of a vision model."""
    from ..vision.prepare import VisionPreparer
    from ..vision.sources import ImageLimits

    return VisionPreparer(tokenizer, vocabulary, context_limit, eos, sight, ImageLimits.of(load))
