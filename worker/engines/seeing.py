"""The engine of a vision model: that of text models, without adapters at run time."""

from __future__ import annotations

from pathlib import Path

from ...protocol.errors import ErrorCode
from .base import LoadProblem
from .grouped import Groups


class Seeing(Groups):
    """Implements `base.Engine`."""

    def add_adapter(self, name: str, folder: Path) -> None:
        raise LoadProblem(
            f"adapter {name!r}: a vision model takes none; load it with max_images 0 as a text model",
            ErrorCode.UNSUPPORTED,
        )
