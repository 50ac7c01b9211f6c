"""`bulkhead stats`: figures of the daemon and of each worker."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from ...protocol.events import StatsReply
from ...protocol.exit_codes import CliExit
from ...protocol.values import ModelStatus, SpeculationStats
from .common import Json, RunDir, connect, mib, print_json, span, table
from .ledger import report

HEADINGS = [
    *("NAME", "STATE", "RUNNING", "QUEUED", "PROMPT TOK", "REUSED TOK", "TOK"),
    *("PREFILL/S", "DECODE/S", "MEMORY", "CRASHES"),
]
EVERY_S = 1.0


def stats(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One model; all without.")] = None,
    json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Again every second, until Ctrl-C.")] = False,
    run_dir: RunDir = None,
) -> int:
    """Show counters and rates."""
    with connect(run_dir) as client:
        while True:
            reply = client.stats(name)
            if watch and sys.stdout.isatty() and not json:
                print("\x1b[H\x1b[2J", end="")
            if json:
                print_json(reply)
            else:
                print(_text(reply))
            sys.stdout.flush()
            if not watch:
                return CliExit.OK
            time.sleep(EVERY_S)


def _text(reply: StatsReply) -> str:
    daemon = dict(reply.daemon)
    head = f"daemon: up {span(daemon.pop('uptime_s', 0.0))}, {mib(daemon.pop('rss_bytes', 0.0))}"
    rest = ", ".join(f"{key} {value:g}" for key, value in daemon.items())
    lines = [f"{head}, {rest}" if rest else head, table([_row(model) for model in reply.models], HEADINGS)]
    lines += [
        f"{model.name}: {speculating(model.stats.speculation)}"
        for model in reply.models
        if model.stats is not None and model.stats.speculation is not None
    ]
    if reply.placement is not None:
        lines += ["", report(reply.placement)]
    return "\n".join(lines)


def speculating(stats: SpeculationStats) -> str:
    """What speculation does, in one line."""
    line = "speculation"
    if stats.cycles:
        drafted = stats.accepted / max(1, stats.tokens)
        line += f" made {stats.tokens} tokens in {stats.cycles} cycles, {drafted:.0%} drafted, gain {stats.gain:.2f}"
    others = ", ".join(f"{count} x {reason}" for reason, count in sorted(stats.fallbacks.items()))
    return "; ".join(part for part in (line, stats.reason, others and f"plain: {others}") if part)


def _row(model: ModelStatus) -> list[str]:
    figures = model.stats
    if figures is None:
        return [model.name, model.state, *["-"] * 7, mib(model.footprint), str(model.crashes)]
    return [
        model.name,
        model.state,
        str(figures.running),
        str(figures.queued),
        str(figures.prompt_tokens),
        str(figures.cache.tokens_reused),
        str(figures.completion_tokens),
        f"{figures.prefill_tokens_per_second:.1f}",
        f"{figures.decode_tokens_per_second:.1f}",
        mib(model.footprint),
        str(model.crashes),
    ]
