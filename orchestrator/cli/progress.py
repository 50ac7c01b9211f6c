"""Shows a load: a bar on a terminal, plain lines elsewhere, both on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...protocol.events import LoadProgress
from .common import mib_of, note

Show = Callable[[LoadProgress], None]


@contextmanager
def load_progress(name: str) -> Iterator[Show]:
    """Within it, the function shows each progress of a load."""
    if not sys.stderr.isatty():
        yield _plain(name)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"{name}: starting", total=None, count="")

        def show(progress: LoadProgress) -> None:
            bar.update(
                task,
                description=f"{name}: {progress.phase}",
                total=progress.total or None,
                completed=progress.done,
                count=mib_of(progress.done, progress.total),
            )

        yield show


def _plain(name: str) -> Show:
    last = ""

    def show(progress: LoadProgress) -> None:
        nonlocal last
        tenth = 10 * progress.done // progress.total if progress.total else 0
        line = f"{progress.phase} {10 * tenth} %" if progress.total else progress.phase
        if line != last:
            last = line
            note(f"{name}: {line}")

    return show
