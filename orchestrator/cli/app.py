"""The command line but for `serve`'s short cut: finds the command, and turns every error into a line and a code."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from ...protocol.errors import BulkheadError
from ...protocol.exit_codes import CliExit
from .adapter import adapter
from .chat import chat
from .common import RunDir
from .demo import demo
from .doctor import doctor
from .errors import report, say_error
from .load import load
from .logs import logs
from .plan import plan
from .ps import ps
from .restart import restart
from .run import run as run_command
from .stats import stats
from .stop import stop
from .tap import tap
from .unload import unload

UsageError: type[Exception] = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")
"""Base of all complaints about the command line. Typer brings its own copy of click, or needs click: by version."""

app = typer.Typer(
    name="bulkhead",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def bulkhead(run_dir: RunDir = None) -> None:
    """Run MLX models in processes of their own: what goes wrong in one stays there."""
    if run_dir is not None:
        os.environ["BULKHEAD_RUN_DIR"] = str(run_dir.expanduser().absolute())


@app.command()
def serve(
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="TOML file with models, defaults, limits.")
    ] = None,
    run_dir: RunDir = None,
) -> int:
    """Run the daemon in the foreground."""
    from .serve import serve as serve_now

    return serve_now(config, run_dir)


for command in (load, unload, restart, ps, stats, plan, run_command, chat, logs, tap, stop, doctor, demo):
    app.command(name=command.__name__)(command)
app.add_typer(adapter)


def run(arguments: list[str]) -> int:
    """Run one command. Returns its exit code."""
    try:
        code = typer.main.get_command(app).main(arguments, prog_name="bulkhead", standalone_mode=False)
        sys.stdout.flush()
        return int(code or 0)
    except UsageError as error:
        words: str = error.format_message()  # pyright: ignore[reportAttributeAccessIssue]
        if type(error).__name__ == "NoArgsIsHelpError":
            print(words)
        else:
            say_error(words)
        return CliExit.USAGE
    except BulkheadError as error:
        return report(error)
    except (KeyboardInterrupt, typer.Abort):
        return CliExit.INTERRUPTED
    except BrokenPipeError:  # the reader of our output had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CliExit.OK
    except OSError as error:
        say_error(error)
        return CliExit.FAILED
