"""What the figures share: the daemon with its client, the library's process, and how long to measure."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mlx_bulkhead import Client

from . import streams, tiny
from .daemon import Daemon
from .library import Library
from .work import text_prompt


class Bench:
    """Two sides, ready to take turns."""

    def __init__(
        self, daemon: Daemon, library: Library, folder: Path, rounds: int, *, quick: bool, draft: Path | None
    ) -> None:
        self.draft = draft
        """A draft for the demo model, if there is one."""
        self.daemon = daemon
        self.library = library
        self.folder = folder
        self.rounds = rounds
        self.quick = quick
        self._seed = 0

    @property
    def client(self) -> Client:
        return self.daemon.client

    def seed(self) -> int:
        """A number not given before, so that no prompt repeats and no cache can help."""
        self._seed += 1
        return self._seed

    def rehearse(self) -> None:
        """Run both sides a little: the first request of a process pays for much that the next ones do not."""
        for _ in range(2):
            prompt = text_prompt(self.seed())
            streams.stream(self.client, prompt, 32)
            self.library.stream(prompt, 32)
            several = [text_prompt(self.seed()) for _ in range(4)]
            streams.batch(self.client, several, 16)
            self.library.batch(several, 16)


@contextlib.contextmanager
def open_bench(rounds: int, *, quick: bool, draft: Path | None = None) -> Iterator[Bench]:
    """Make the model, start both sides, and end them."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        model = tiny.make(folder / "model")
        daemon = Daemon(folder / "run")
        stack.callback(daemon.close)
        daemon.client.load(streams.MODEL, model)
        library = Library(model)
        stack.callback(library.close)
        bench = Bench(daemon, library, folder, rounds, quick=quick, draft=draft)
        bench.rehearse()
        yield bench
