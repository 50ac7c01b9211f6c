"""`bulkhead demo`: everything once, with a small model: load, stream, kill the worker in mid-answer, clean up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ...protocol.errors import LoadError
from ...protocol.exit_codes import CliExit
from .answer import AnswerView, restarts, show_answer, summary
from .common import mib, note
from .errors import say_error

if TYPE_CHECKING:
    from ..client import Client

NAME = "demo"
QUESTION = "What is the capital of France?"
LONG_QUESTION = "Count from 1 to 10."
LONG_TOKENS = 60
KILL_AFTER = 12
"""Tokens of the long answer; more than half of it is still to come."""
QUIET_S = 3.0
"""To find a model that was made before takes less, to make it more."""


def demo(
    prompt: Annotated[str, typer.Argument(metavar="[PROMPT]", help="What to ask first.")] = QUESTION,
    max_tokens: Annotated[int, typer.Option(help="Tokens of the first answer, at most.")] = 64,
    dtype: Annotated[str, typer.Option(help="fp32 or 4bit.")] = "fp32",
) -> int:
    """Run a small model in a worker of its own, stream an answer, and kill the worker in the midst of another."""
    code, words = _model(dtype)
    if code:
        say_error(words)
        return code
    from .local import local_client
    from .progress import load_progress

    with local_client() as client:
        with load_progress(NAME) as show:
            info = client.load(NAME, words, on_progress=show)
        note(f"orchestrator: process {os.getpid()}, which has no MLX")
        note(
            f"worker: process {_pid(client)} has the model: {info.model_type} on {info.backend}, loaded in "
            f"{info.load_seconds:.1f} s, {mib(info.memory_after.footprint)}"
        )
        note(f"model: {words}")
        note(f"> {prompt}")
        with client.generate(NAME, messages=_asked(prompt), max_tokens=max_tokens) as stream:
            note(summary(show_answer(stream)))
        survived = kill_in_mid_answer(client)
        client.unload(NAME)
    note("unloaded; nothing is left running")
    return CliExit.OK if survived else CliExit.FAILED


def kill_in_mid_answer(client: Client) -> bool:
    """Ask something long, kill the worker in the midst of it, and say whether the answer is whole."""
    note(f"> {LONG_QUESTION}")
    view = AnswerView(died="[restarting]")
    killed, before, rest = 0, "", ""
    with client.generate(NAME, messages=_asked(LONG_QUESTION), max_tokens=LONG_TOKENS) as stream:
        for snap in stream.snapshots(progress=True):
            view.show(snap)
            if killed:
                rest += snap.new_text
            elif snap.usage.completion_tokens >= KILL_AFTER:
                killed, before = _pid(client), snap.text
                os.kill(killed, signal.SIGKILL)
                view.say(f"[worker {killed} killed on purpose]")
        result = stream.result()
    view.end(result)
    note(summary(result))
    if not killed or not result.restarts:
        note("the answer had ended before its worker could be killed")
        return True
    if result.text != before + rest:
        say_error("the answer is not what was said before the kill plus the rest")
        return False
    note(
        f"the answer is whole and survived {restarts(result.restarts)}: its text is what was said before the kill "
        f"({len(before)} characters) plus the rest ({len(rest)}), from process {_pid(client)}"
    )
    return True


def _asked(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def _pid(client: Client) -> int:
    """The process that has the model."""
    for status in client.models():
        if status.name == NAME and status.pid:
            return status.pid
    raise LoadError("the demo's worker is not running")


def _model(dtype: str) -> tuple[int, str]:
    """Exit code 0 and the directory of the demo model, made if need be; or another code and what went wrong."""
    command = [sys.executable, "-P", "-m", "mlx_bulkhead.worker.demo_model", "--dtype", dtype]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as maker:
        try:
            try:
                out, err = maker.communicate(timeout=QUIET_S)
            except subprocess.TimeoutExpired:
                note("making the demo model (a minute at the first time)")
                out, err = maker.communicate()
        except BaseException:
            maker.kill()
            raise
    if maker.returncode != 0:
        words = (err.strip().splitlines() or [f"the converter ended with {maker.returncode}"])[-1]
        return CliExit.USAGE if maker.returncode == CliExit.USAGE else CliExit.FAILED, words
    return CliExit.OK, out.strip().splitlines()[-1]
