"""How an error ends the `bulkhead` command: one line on stderr and an exit code."""

from __future__ import annotations

import sys

from ...protocol.errors import BadRequest, BulkheadError, Disconnected, LoadError, UnknownModel
from ...protocol.exit_codes import CliExit


def exit_for(error: BulkheadError) -> CliExit:
    """The exit code of an error."""
    from ..run_dir import RunDirBusy

    match error:
        case RunDirBusy():
            return CliExit.ALREADY_RUNNING
        case BadRequest():
            return CliExit.USAGE
        case Disconnected():
            return CliExit.NO_DAEMON
        case LoadError():
            return CliExit.LOAD_FAILED
        case UnknownModel():
            return CliExit.UNKNOWN_MODEL
        case _:
            return CliExit.FAILED


def say_error(message: object) -> None:
    """One line on stderr, whatever the message holds."""
    print("error:", " ".join(str(message).split()), file=sys.stderr, flush=True)


def report(error: BulkheadError) -> CliExit:
    """Say what went wrong; gives the exit code."""
    say_error(error.message)
    return exit_for(error)
