"""Owns the imports of a spare worker: the libraries come in before it is known what will be loaded.

Runs on the executor thread.
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from pathlib import Path

log = logging.getLogger(__name__)


def import_libraries() -> None:
    """Import MLX and mlx-lm. A failure is only logged: the load meets it again, and can say it to somebody."""
    began = time.monotonic()
    try:
        from .engines import text  # noqa: F401
    except Exception:
        traceback.print_exc()
        return
    log.info("libraries imported in %.2f s; waiting for a model", time.monotonic() - began)


def settle_network(model: str) -> None:
    """Let the hub's library know, if it is here already, whether the model is local.

    It reads `HF_HUB_OFFLINE` when it is imported, and that is too early in a spare.
    """
    constants = sys.modules.get("huggingface_hub.constants")
    if constants is not None and Path(model).expanduser().exists():
        vars(constants)["HF_HUB_OFFLINE"] = True
