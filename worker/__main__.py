"""Command line of a worker, as the orchestrator writes it. Bad arguments end it with one sentence, code 2."""

from __future__ import annotations

import argparse
import os
import stat
import sys
from pathlib import Path
from typing import NoReturn

from ..protocol.exit_codes import WorkerExit
from .process import Options, run


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(WorkerExit.BAD_ARGUMENTS, f"worker: bad arguments: {message}\n")


def parse(argv: list[str]) -> Options:
    """Options of a command line. Ends the process with `BAD_ARGUMENTS` when they cannot be used."""
    parser = _Parser(prog="mlx_bulkhead.worker", allow_abbrev=False)
    parser.add_argument("--endpoint", required=True, help="ipc:// address that the orchestrator bound")
    parser.add_argument("--incarnation", required=True, help="token that Hello repeats")
    parser.add_argument("--lifeline-fd", required=True, type=int, help="read end of the orchestrator's pipe")
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--parent", required=True, type=int, help="pid of the orchestrator, for people")
    parser.add_argument("--name", required=True, help="name of the model, for people")
    parser.add_argument("--model", required=True, help="path of the model, for people")
    parser.add_argument("--prewarm", action="store_true", help="import the libraries before the load")
    given = parser.parse_args(argv)
    if not given.endpoint.startswith("ipc://"):
        parser.error(f"--endpoint must start with ipc://, got {given.endpoint!r}")
    if not given.incarnation:
        parser.error("--incarnation is empty")
    try:
        mode = os.fstat(given.lifeline_fd).st_mode
    except OSError as error:
        parser.error(f"--lifeline-fd {given.lifeline_fd} is not open here: {error.strerror}")
    if not stat.S_ISFIFO(mode) and not stat.S_ISSOCK(mode):
        parser.error(f"--lifeline-fd {given.lifeline_fd} is not a pipe")
    if not given.run_dir.is_dir():
        parser.error(f"--run-dir {given.run_dir} is not a directory")
    return Options(
        endpoint=given.endpoint,
        incarnation=given.incarnation,
        lifeline_fd=given.lifeline_fd,
        run_dir=given.run_dir,
        parent=given.parent,
        name=given.name,
        model=given.model,
        prewarm=given.prewarm,
    )


def main() -> NoReturn:
    """Run the worker until it ends."""
    run(parse(sys.argv[1:]))


if __name__ == "__main__":
    main()
