"""Makes the model of the benchmarks, in a process of its own: `python -m benchmarks.tiny DIR ARCHITECTURE`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CONTEXT = 32_768


def make(directory: Path, architecture: str = "qwen3") -> Path:
    """Write the model into `directory`. This process never imports MLX."""
    subprocess.run([sys.executable, "-m", "benchmarks.tiny", str(directory), architecture], check=True)
    return directory


if __name__ == "__main__":
    from tests.support.tiny_models import make_tiny

    make_tiny(Path(sys.argv[1]), architecture=sys.argv[2], max_position_embeddings=CONTEXT)
