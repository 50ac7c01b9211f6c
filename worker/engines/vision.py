"""Opens a vision model through mlx-vlm: decides whether a directory is one, loads model and processor."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...protocol.commands import Load
from ...protocol.errors import ErrorCode
from ..faults import is_out_of_memory
from ..model_check import read_header
from .base import LoadProblem
from .reasons import short

_log = logging.getLogger(__name__)
_CONFIGS = ("vision_config", "vision_tower", "mm_vision_tower", "vision_tower_config")
_WEIGHTS = ("vision", "visual", "image", "vit.", "siglip")


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
    return "max_images is 0" if load.max_images == 0 else ""


def check_options(load: Load) -> None:
    """Raise `LoadProblem` for what this engine does not do."""
    for option, given in (
        ("kv_bits", load.kv_bits is not None),
        ("max_kv_size", load.max_kv_size is not None),
        ("adapters", bool(load.adapters)),
    ):
        if given:
            raise LoadProblem(
                f"{option} cannot be used with a vision model; load it without, or with max_images 0 as a text model",
                ErrorCode.UNSUPPORTED,
            )


def load_vision(path: Path, load: Load, settle: Callable[[Any], int]) -> tuple[Any, int]:
    """The model's `Sight`, and the bytes of its weights. Raises `LoadProblem`.

    settle: brings the weights into memory, and gives their bytes.
    """
    try:
        from mlx_vlm.utils import load_image_processor, load_model, load_processor

        from .sight import Sight

        model: Any = load_model(path, lazy=True, trust_remote_code=load.trust_remote_code)
        size = settle(model)
        model.eval()
    except LoadProblem:
        raise
    except Exception as error:
        code = ErrorCode.OUT_OF_MEMORY if is_out_of_memory(error) else ErrorCode.LOAD_FAILED
        raise LoadProblem(f"cannot load the weights in {path} with mlx-vlm: {short(error)}", code) from error
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
    return sight, size


def vision_preparer(
    load: Load, tokenizer: Any, vocabulary: int, context_limit: int, eos: frozenset[int], sight: Any
) -> Any:
    """What prepares the requests of a vision model."""
    from ..vision.prepare import VisionPreparer
    from ..vision.sources import ImageLimits

    return VisionPreparer(tokenizer, vocabulary, context_limit, eos, sight, ImageLimits.of(load))
