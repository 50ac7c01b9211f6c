"""Owns what is known of the executor from outside: phase, steps, counters, memory.

Single writer: the executor thread. The io thread reads, also while the executor is stuck.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from ..protocol.values import CacheStats, LadderStats, Memory, SpeculationStats, WorkerStats

RATE_WINDOW_S: Final = 1.0


class WorkerProgress:
    """Plain attributes, written by the executor thread alone. Times are monotonic seconds."""

    def __init__(self) -> None:
        self.phase = "idle"
        """idle, importing, loading, prefill, decode or closing."""
        self.steps = 0
        self.busy_since: float | None = None
        """Last step, or when the present work came if none was made yet; None: idle."""
        self.running = 0
        self.queued = 0
        self.requests_started = 0
        self.requests_done = 0
        self.requests_failed = 0
        self.requests_cancelled = 0
        self.requests_ignored = 0
        """Requests whose id was live already."""
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.last_token_at: float | None = None
        self.oldest_request_at: float | None = None
        self.engine = ""
        self.memory = Memory()
        self.cache = CacheStats()
        self.speculation: SpeculationStats | None = None
        self.ladder = LadderStats()

    @property
    def is_active(self) -> bool:
        """Whether the executor loads or has requests; heartbeats are more frequent then."""
        return self.phase != "idle"


class Observer:
    """The reading side, on the io thread: makes statistics and holds the samples that rates come from."""

    def __init__(self, progress: WorkerProgress) -> None:
        self._progress = progress
        self._samples: deque[tuple[float, int, int]] = deque()
        self.frames_unknown = 0
        self.frames_refused = 0

    def busy_since_s(self, now: float) -> float | None:
        """Seconds since the last step while there is work."""
        since = self._progress.busy_since
        return None if since is None else max(0.0, now - since)

    def stats(self, now: float) -> WorkerStats:
        """One sample. Rates are means over about the last second."""
        p = self._progress
        prefill_rate, decode_rate = self._rates(now)
        return WorkerStats(
            running=p.running,
            queued=p.queued,
            steps=p.steps,
            requests_started=p.requests_started,
            requests_done=p.requests_done,
            requests_failed=p.requests_failed,
            requests_cancelled=p.requests_cancelled,
            prompt_tokens=p.prompt_tokens,
            completion_tokens=p.completion_tokens,
            prefill_tokens_per_second=prefill_rate,
            decode_tokens_per_second=decode_rate,
            last_token_age_s=_age(p.last_token_at, now),
            oldest_request_age_s=_age(p.oldest_request_at, now),
            engine=p.engine,
            phase=p.phase,
            memory=p.memory,
            frames_unknown=self.frames_unknown,
            frames_refused=self.frames_refused,
            cache=p.cache,
            speculation=p.speculation,
            ladder=p.ladder,
        )

    def _rates(self, now: float) -> tuple[float, float]:
        samples = self._samples
        prompt, completion = self._progress.prompt_tokens, self._progress.completion_tokens
        if not samples or now - samples[-1][0] >= RATE_WINDOW_S / 10:  # bounds the deque, however often asked
            samples.append((now, prompt, completion))
        while len(samples) > 2 and now - samples[1][0] >= RATE_WINDOW_S:
            samples.popleft()
        then, prompt_then, completion_then = samples[0]
        span = now - then
        if span <= 0:
            return 0.0, 0.0
        return (prompt - prompt_then) / span, (completion - completion_then) / span


def _age(at: float | None, now: float) -> float | None:
    return None if at is None else max(0.0, now - at)
