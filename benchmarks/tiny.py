"""Makes the model of the benchmarks, in a process of its own: `python -m benchmarks.tiny model|draft DIR OF`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CONTEXT = 32_768


def make(directory: Path, architecture: str = "qwen3") -> Path:
    """Write the model into `directory`. This process never imports MLX."""
    subprocess.run([sys.executable, "-m", "benchmarks.tiny", "model", str(directory), architecture], check=True)
    return directory


def make_draft(directory: Path, target: Path) -> Path:
    """Write a random DFlash draft for the model in `target` into `directory`."""
    subprocess.run([sys.executable, "-m", "benchmarks.tiny", "draft", str(directory), str(target)], check=True)
    return directory


if __name__ == "__main__":
    what, where, of = sys.argv[1:]
    if what == "model":
        from tests.support.tiny_models import make_tiny

        make_tiny(Path(where), architecture=of, max_position_embeddings=CONTEXT)
    else:
        from tests.support import tiny_drafts

        tiny_drafts.make_draft(Path(where), Path(of))
