"""`python -m mlx_bulkhead.orchestrator.cli`: the `bulkhead` command where its script is not on the path."""

from . import main

main()
