"""`bulkhead demo`: everything once, with a small model: load, stream, figures, clean up."""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated

import typer

from ...protocol.exit_codes import CliExit
from .common import mib, note
from .errors import say_error

QUESTION = "What is the capital of France?"


def demo(
    prompt: Annotated[str, typer.Argument(metavar="[PROMPT]", help="What to ask.")] = QUESTION,
    max_tokens: Annotated[int, typer.Option(help="Tokens of the answer, at most.")] = 64,
    dtype: Annotated[str, typer.Option(help="fp32 or 4bit.")] = "fp32",
) -> int:
    """Make a demo model, run it in a worker of its own, and stream an answer."""
    note("making the demo model (a minute at the first time)")
    made = subprocess.run(
        [sys.executable, "-P", "-m", "mlx_bulkhead.worker.demo_model", "--dtype", dtype],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode != 0:
        say_error((made.stderr.strip().splitlines() or [f"the converter ended with {made.returncode}"])[-1])
        return CliExit.USAGE if made.returncode == CliExit.USAGE else CliExit.FAILED
    from .local import local_client
    from .progress import load_progress
    from .run import show_answer, summary

    with local_client() as client:
        with load_progress("demo") as show:
            info = client.load("demo", made.stdout.strip().splitlines()[-1], on_progress=show)
        status = client.models()[0]
        note(
            f"process {status.pid} has the model: {info.model_type} on {info.backend}, loaded in "
            f"{info.load_seconds:.1f} s, {mib(info.memory_after.footprint)}; this process has no MLX"
        )
        note(f"> {prompt}")
        with client.generate("demo", messages=[{"role": "user", "content": prompt}], max_tokens=max_tokens) as stream:
            result = show_answer(stream)
        note(summary(result))
        client.unload("demo")
    note("unloaded; nothing is left running")
    return CliExit.OK
