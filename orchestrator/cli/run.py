"""`bulkhead run`: one answer to one prompt, streamed."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ...protocol.errors import BadRequest
from ...protocol.exit_codes import CliExit
from .answer import show_answer, summary
from .common import Json, RunDir, note, print_json
from .target import serving

if TYPE_CHECKING:
    from ..options import GenerateOptions

ModelArgument = Annotated[str, typer.Argument(metavar="NAME_OR_PATH", help="A model of the daemon, or a directory.")]
MaxTokens = Annotated[int | None, typer.Option(help="Tokens of the answer, at most.")]
Temperature = Annotated[float | None, typer.Option(help="0: always the likeliest token.")]
Seed = Annotated[int | None, typer.Option(help="For the same answer again.")]
AdapterOption = Annotated[str | None, typer.Option(help="An adapter of the model; base for none.")]
System = Annotated[str | None, typer.Option(help="The system message.")]


def run(
    model: ModelArgument,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The prompt; - reads it from stdin.")],
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    system: System = None,
    adapter: AdapterOption = None,
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
        "adapter": adapter,
    }
    with serving(model, run_dir) as (client, name), client.generate(name, **options) as stream:
        result = show_answer(stream, text=not json)
    if json:
        print_json(asdict(result))
    else:
        note(summary(result))
    return CliExit.OK
