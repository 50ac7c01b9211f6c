"""Watches streams of the blocking client from outside, with the clock of whoever reads them."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mlx_bulkhead.orchestrator.client_streams import Stream

from mlx_bulkhead import Client

from .library import Batched, Streamed, per_second

MODEL = "tiny"


def now() -> float:
    return time.perf_counter()


Ask = Callable[[], Stream]
"""Sends a request. What it takes to do so is part of what its caller waits for."""


def of_text(client: Client, prompt: str | list[int], max_tokens: int) -> Ask:
    """One of the tiny text model, greedy."""
    given: Any = {"prompt": prompt} if isinstance(prompt, str) else {"tokens": prompt}
    return partial(client.generate, MODEL, max_tokens=max_tokens, temperature=0.0, **given)


def stream(client: Client, prompt: str | list[int], max_tokens: int) -> Streamed:
    """One request of the tiny text model, read to its end."""
    return read(of_text(client, prompt, max_tokens))


def batch(client: Client, prompts: Sequence[str], max_tokens: int) -> Batched:
    """Several of them at once."""
    return together([of_text(client, prompt, max_tokens) for prompt in prompts])


def read(ask: Ask) -> Streamed:
    """One request, read to its end."""
    began = first = last = now()
    tokens: list[int] = []
    early = 0
    for snap in ask():
        last = now()
        if not tokens:
            first, early = last, len(snap.tokens)
        tokens += snap.tokens
    return Streamed(tokens, first - began, per_second(len(tokens) - early, last - first), early)


def together(asks: Sequence[Ask]) -> Batched:
    """Several requests at once, each with a thread that reads it."""
    began = now()
    readers = [Reader(ask) for ask in asks]
    for reader in readers:
        reader.join()
    last = max(reader.times[-1] for reader in readers)
    first = max(reader.times[0] for reader in readers)
    late = sum(reader.after(first) for reader in readers)
    return Batched([reader.tokens for reader in readers], last - began, first - began, per_second(late, last - first))


class Reader:
    """A thread that reads a stream and notes when its snaps come."""

    def __init__(self, ask: Ask) -> None:
        self.tokens: list[int] = []
        self.times: list[float] = []
        self._counts: list[int] = []
        self._has_text = threading.Event()
        self._stream = ask()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def wait_text(self) -> None:
        """Until the first token is here."""
        self._has_text.wait()

    def cancel(self) -> None:
        self._stream.cancel()

    def join(self) -> None:
        """Until the end. Raises what the stream raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def gaps(self, start: float, end: float) -> list[float]:
        """Times between neighbouring snaps of which any part lies between `start` and `end`."""
        return [b - a for a, b in itertools.pairwise(self.times) if b >= start and a <= end]

    def after(self, moment: float) -> int:
        """How many tokens came after a moment."""
        return sum(count for at, count in zip(self.times, self._counts, strict=True) if at > moment)

    def _read(self) -> None:
        try:
            for snap in self._stream:
                self.times.append(now())
                self._counts.append(len(snap.tokens))
                self.tokens += snap.tokens
                self._has_text.set()
        except Exception as error:
            self._error = error
        finally:
            self._has_text.set()
