"""Makes the keeper of a loaded text model: what it looks at, and what it may give back."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ...protocol.commands import Load
from .caps import Caps
from .device import measure, this_device
from .dims import read_dims
from .keeper import Keeper, Means

if TYPE_CHECKING:
    from ..cache.store import PrefixStore

_log = logging.getLogger(__name__)


def make_keeper(
    load: Load, caps: Caps, model: Any, fresh: list[Any], filled: list[Any], store: PrefixStore | None
) -> Keeper:
    """The keeper of a model with `fresh` caches, and `filled` ones that hold a token."""
    try:
        # Metal and CUDA have fused attention; the quantised one of mlx-lm never is.
        fused = caps.backend != "cpu" and load.kv_bits is None
        dims = read_dims(model, fresh, filled, fused=fused)
    except Exception as error:  # a model of another make
        _log.warning("prompts are not estimated: %s: %s", type(error).__name__, error)
        dims = None
    if dims is None and caps.memory:
        _log.warning("the dimensions of this model are not known: prompts are admitted without an estimate")
    device = caps.device or this_device()
    return Keeper(caps.memory, load, Means(measure, device.clear), dims, [] if store is None else [store])
