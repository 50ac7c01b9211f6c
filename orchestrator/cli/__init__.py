"""The `bulkhead` command. `serve` runs without the command-line library, which a daemon has no use for."""

from __future__ import annotations

import sys


def main(arguments: list[str] | None = None) -> None:
    """Run the command and end the process with its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    ahead = _before_serve(arguments)
    if ahead is not None:
        from .serve import main as serve

        sys.exit(serve(arguments[ahead + 1 :], arguments[:ahead]))
    from .app import run

    sys.exit(run(arguments))


def _before_serve(arguments: list[str]) -> int | None:
    """How many arguments, all of the global --run-dir, stand before `serve`; None: another command."""
    ahead = 0
    while ahead < len(arguments) and arguments[ahead].startswith("--run-dir"):
        ahead += 1 if "=" in arguments[ahead] else 2
    return ahead if arguments[ahead : ahead + 1] == ["serve"] else None
