"""`python -m mlx_bulkhead.orchestrator`: the daemon, as `bulkhead serve`."""

from __future__ import annotations

import sys

from .cli.serve import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
