"""Says which model a kept prefix belongs to: anything that could change its numbers changes the key."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def model_key(directory: Path, versions: Mapping[str, str], layout: Sequence[Any]) -> str:
    """A key over the configuration, the weight files, the libraries and the layout of the model's caches.

    Weight files count by name, size and time of change: reading them whole would take as long as the load.
    Raises `OSError`.
    """
    files = []
    for path in sorted(directory.glob("*.safetensors")):
        status = path.stat()
        files.append([path.name, status.st_size, status.st_mtime_ns])
    libraries = {name: versions[name] for name in ("mlx", "mlx-lm") if name in versions}
    digest = hashlib.blake2b(digest_size=16)
    digest.update((directory / "config.json").read_bytes())
    digest.update(json.dumps([files, libraries, layout], sort_keys=True).encode())
    return digest.hexdigest()


def default_folder() -> Path:
    """Where prefixes go when the load names no folder: the user's own cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and os.path.isabs(base) else Path.home() / ".cache") / "mlx-bulkhead" / "prompts"
