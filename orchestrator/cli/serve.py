"""`bulkhead serve`: the daemon of a run directory, in the foreground."""

from __future__ import annotations

import argparse
import asyncio
import logging
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from ...protocol.errors import BulkheadError
from ...protocol.exit_codes import CliExit
from .errors import report, say_error


def main(arguments: list[str], ahead: Sequence[str] = ()) -> int:
    """Parse the command's own arguments, and those given ahead of it, and serve. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="bulkhead serve", description="Run the daemon in the foreground until SIGTERM or `bulkhead stop`."
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with models, defaults and limits")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="directory for socket, lock and logs")
    try:
        options = parser.parse_args([*ahead, *arguments])
    except SystemExit as end:  # argparse has said why
        return int(end.code or 0)
    return serve(options.config, options.run_dir)


def serve(config: Path | None, run_dir: Path | None) -> int:
    """Serve until asked to end. Returns the exit code; errors are said on stderr."""
    try:
        return asyncio.run(_serve(config, run_dir))
    except BulkheadError as error:
        return report(error)
    except KeyboardInterrupt:  # a second one, while it was ending
        return CliExit.INTERRUPTED
    except OSError as error:
        say_error(error)
        return CliExit.FAILED


async def _serve(config_file: Path | None, run_dir: Path | None) -> int:
    from ..config import Config, load_config
    from ..embedded import Orchestrator
    from ..run_dir import DAEMON_SOCKET, default_run_dir, socket_path

    config = Config.default() if config_file is None else load_config(config_file)
    logging.basicConfig(
        level=config.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    where = run_dir or config.run_dir or default_run_dir()
    loop = asyncio.get_running_loop()
    async with Orchestrator(config, run_dir=where, front_door=True) as host:

        def end() -> None:
            host.request_shutdown()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)  # a second one ends at once; workers follow by their lifeline

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, end)
        print(f"bulkhead ready: {socket_path(host.run_dir, DAEMON_SOCKET)}", file=sys.stderr, flush=True)
        await host.wait_shutdown()
        gave_up, where = host.gave_up, host.run_dir
        lost = host.lost_run_dir
    if lost:
        say_error(f"the run directory {where} was deleted under the daemon")
        return CliExit.FAILED
    if gave_up:
        logs = [f"bulkhead logs {shlex.quote(name)} --run-dir {shlex.quote(str(where))}" for name in gave_up]
        say_error(f"gave up on {', '.join(gave_up)}; see: {'; '.join(logs)}")
        return CliExit.GAVE_UP
    return CliExit.OK
