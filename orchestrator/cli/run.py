"""`bulkhead run`: one answer to one prompt, streamed."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ...protocol.errors import BadRequest
from ...protocol.exit_codes import CliExit
from .common import Json, RunDir, note, print_json
from .target import serving

if TYPE_CHECKING:
    from ..client_streams import Stream
    from ..options import GenerateOptions
    from ..views import Result

ModelArgument = Annotated[str, typer.Argument(metavar="NAME_OR_PATH", help="A model of the daemon, or a directory.")]
MaxTokens = Annotated[int | None, typer.Option(help="Tokens of the answer, at most.")]
Temperature = Annotated[float | None, typer.Option(help="0: always the likeliest token.")]
Seed = Annotated[int | None, typer.Option(help="For the same answer again.")]
System = Annotated[str | None, typer.Option(help="The system message.")]


def run(
    model: ModelArgument,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The prompt; - reads it from stdin.")],
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    system: System = None,
    raw: Annotated[bool, typer.Option("--raw", help="Give the prompt as it is, without the chat template.")] = False,
    json: Json = False,
    run_dir: RunDir = None,
) -> int:
    """Answer one prompt: text on stdout as it comes, usage and timings on stderr."""
    if raw and system is not None:
        raise BadRequest("--raw takes no --system: there is no template to put it in")
    text = sys.stdin.read() if prompt == "-" else prompt
    turns = [{"role": "system", "content": system}] if system is not None else []
    options: GenerateOptions = {
        "prompt": text if raw else None,
        "messages": None if raw else [*turns, {"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
    }
    with serving(model, run_dir) as (client, name), client.generate(name, **options) as stream:
        if json:
            print_json(asdict(stream.result()))
            return CliExit.OK
        result = show_answer(stream)
    note(summary(result))
    return CliExit.OK


def show_answer(stream: Stream) -> Result:
    """Write the text as it comes, and reasoning dimmed on a terminal."""
    dim = sys.stderr.isatty()
    for snap in stream:
        if dim and snap.new_reasoning:
            print(f"\x1b[2m{snap.new_reasoning}\x1b[0m", end="", file=sys.stderr, flush=True)
        if snap.new_text:
            sys.stdout.write(snap.new_text)
            sys.stdout.flush()
    result = stream.result()
    if not result.text.endswith("\n"):
        print(flush=True)
    return result


def summary(result: Result) -> str:
    """Usage, speed and engine in one line."""
    usage, timings = result.usage, result.timings
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    parts = [
        f"{usage.prompt_tokens} prompt tokens{cached} at {timings.prompt_per_second:.0f}/s",
        f"{usage.completion_tokens} tokens at {timings.predicted_per_second:.1f}/s",
        f"engine {result.engine}" + (f" ({result.fallback_reason})" if result.fallback_reason else ""),
        result.finish_reason,
    ]
    if result.restarts:
        parts.append(f"survived {result.restarts} worker restarts")
    return f"[{'; '.join(parts)}]"
