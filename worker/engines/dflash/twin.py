"""The language side of a vision model as mlx-lm has it, over the very same weights: no second copy.

dflash-mlx knows mlx-lm's classes, and pictures need mlx-vlm's. Both lay a model out from the same files, so the
arrays of the one go into the other by their names. Where they do not fit, there is no twin.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import load_model

from ..reasons import short
from .gate import Unfit

_OUTER = "language_model."


def text_twin(path: Path, language: Any, trust_remote_code: bool) -> Any:
    """mlx-lm's model of the directory, with the weights of `language`, mlx-vlm's. Raises `Unfit`."""
    try:
        twin: Any = load_model(path, lazy=True, trust_remote_code=trust_remote_code)[0]
    except Exception as error:
        raise Unfit(f"mlx-lm has no text model of {path} to speculate with: {short(error)}") from error
    there: Any = tree_flatten(language.parameters())
    shared = {_inner(name): value for name, value in there}
    own: Any = tree_flatten(twin.parameters())
    taken: list[tuple[str, Any]] = []
    for name, value in own:
        other = shared.get(_inner(name))
        if other is None or other.shape != value.shape or other.dtype != value.dtype:
            found = "nothing" if other is None else f"{list(other.shape)} {other.dtype}"
            raise Unfit(
                f"mlx-lm and mlx-vlm lay this model out differently: {name} is {list(value.shape)} {value.dtype} "
                f"and {found}; a second copy of the weights is not made"
            )
        taken.append((name, other))
    twin.update(tree_unflatten(taken))
    twin.eval()
    return twin


def _inner(name: str) -> str:
    return name.removeprefix(_OUTER)
