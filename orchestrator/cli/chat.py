"""`bulkhead chat`: a conversation on the terminal. Ctrl-C ends the answer, not the chat."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from ...protocol.errors import BulkheadError, Disconnected
from ...protocol.exit_codes import CliExit
from .answer import show_answer, summary
from .common import RunDir, note
from .errors import report
from .run import AdapterOption, MaxTokens, ModelArgument, Seed, System, Temperature
from .target import serving

if TYPE_CHECKING:
    from ..client import Client
    from ..options import GenerateOptions
    from ..views import Result

MARK = "> "


def chat(
    model: ModelArgument,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    system: System = None,
    adapter: AdapterOption = None,
    run_dir: RunDir = None,
) -> int:
    """Chat with a model. /exit or end of input leaves, /clear starts anew."""
    with suppress(ImportError):
        import readline  # noqa: F401 - line editing for input()
    options: GenerateOptions = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "adapter": adapter,
    }
    start: list[dict[str, str]] = [{"role": "system", "content": system}] if system is not None else []
    turns = list(start)
    with serving(model, run_dir) as (client, name):
        while True:
            try:
                text = _ask().strip()
            except EOFError:
                if sys.stdin.isatty():
                    note("")
                return CliExit.OK
            except KeyboardInterrupt:
                note("\n/exit or Ctrl-D leaves")
                continue
            if text == "/exit":
                return CliExit.OK
            if text == "/clear":
                turns = list(start)
                continue
            if not text:
                continue
            turns.append({"role": "user", "content": text})
            answer = _answer(client, name, turns, options)
            if answer is None:
                turns.pop()
            else:
                turns.append({"role": "assistant", "content": answer.text})
                note(summary(answer))


def _ask() -> str:
    """The next line. The mark that asks for it is for a person at a terminal, and no part of the output."""
    if not sys.stdin.isatty():
        return input()
    if sys.stdout.isatty():
        return input(MARK)  # so that line editing knows of the mark
    print(MARK, end="", file=sys.stderr, flush=True)
    return input()


def _answer(client: Client, name: str, turns: list[dict[str, str]], options: GenerateOptions) -> Result | None:
    """Stream one answer. None, and a line on stderr, if it failed; a lost daemon ends the chat."""
    asked: GenerateOptions = {**options, "messages": turns}
    try:
        with client.generate(name, **asked) as stream:
            try:
                return show_answer(stream)
            except KeyboardInterrupt:
                stream.cancel()
                return show_answer(stream)
    except Disconnected:
        raise
    except BulkheadError as error:
        report(error)
        return None
