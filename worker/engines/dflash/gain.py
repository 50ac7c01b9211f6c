"""What speculation costs and gains, and when it is worth another try. Pure: seconds come in as arguments."""

from __future__ import annotations

from typing import Final

WINDOW: Final = 8
"""Cycles of a row that its gain is judged by."""
FEWEST: Final = 4
"""Before so many cycles a row is not judged."""
CLEAR_LOSS: Final = 0.7
"""Below this the fewest are enough; between it and 1 a whole window is needed."""
FIRST_PAUSE: Final = 512
LAST_PAUSE: Final = 16_384
"""Tokens decoded plainly before speculation is tried again."""
_WEIGHT: Final = 0.3
"""Of a row against those before it."""
_STEP_WEIGHT: Final = 0.2
"""Of a plain step against those before it."""
_HICCUP: Final = 3.0
"""A step counts as at most so many times the mean before it."""


class Cycles:
    """Cycles of a row: tokens and seconds of all of them, and of the newest."""

    __slots__ = ("_recent", "count", "seconds", "tokens")

    def __init__(self) -> None:
        self.count = 0
        self.tokens = 0
        self.seconds = 0.0
        self._recent: list[tuple[int, float]] = []

    def add(self, tokens: int, seconds: float, count: int = 1) -> None:
        """A cycle is over, or several of which the earlier ones showed nothing."""
        self.count += count
        self.tokens += tokens
        self.seconds += seconds
        self._recent.append((tokens, seconds))
        del self._recent[:-WINDOW]

    def rate(self) -> float:
        """Tokens a second in the window; 0.0 before the first cycle."""
        seconds = sum(second for _, second in self._recent)
        return sum(tokens for tokens, _ in self._recent) / seconds if seconds > 0 else 0.0


class Gain:
    """What is known of this worker: seconds of a plain token and of a cycle, tokens a cycle, and whether to try."""

    def __init__(self, block_tokens: int) -> None:
        self.plain_seconds: float | None = None
        self.cycle_seconds: float | None = None
        self.tokens_a_cycle = block_tokens / 2
        """Assumed, until the first row has shown it."""
        self.paused_for = 0
        """Tokens to be decoded plainly before the next try."""
        self._pause = FIRST_PAUSE
        self._rows = 0

    @property
    def gain(self) -> float | None:
        """Times as fast as plain decoding; None while nothing is measured."""
        if not self.plain_seconds or not self.cycle_seconds:
            return None
        return self.plain_seconds * self.tokens_a_cycle / self.cycle_seconds

    def calibrate(self, plain_seconds: float, cycle_seconds: float) -> None:
        """The costs, from a trial at load. Hopeless ones pause at once."""
        self.plain_seconds, self.cycle_seconds = plain_seconds, cycle_seconds
        self._judge()

    def plain_step(self, seconds: float) -> None:
        """A lone row was decoded plainly for one token."""
        before = self.plain_seconds
        if before is None:
            self.plain_seconds = seconds
        else:
            self.plain_seconds = before + _STEP_WEIGHT * (min(seconds, _HICCUP * before) - before)

    def plain_token(self) -> None:
        """A token was decoded plainly, while speculation pauses."""
        self.paused_for = max(0, self.paused_for - 1)

    def loses(self, cycles: Cycles) -> bool:
        """Whether a row would be faster without speculation, as far as its last cycles tell."""
        if self.plain_seconds is None or cycles.count < FEWEST:
            return False
        gain = cycles.rate() * self.plain_seconds
        return gain < (1.0 if cycles.count >= WINDOW else CLEAR_LOSS)

    def row_done(self, cycles: Cycles) -> None:
        """A row is over or has left; rows with too few cycles say nothing."""
        if cycles.count < FEWEST:
            return
        tokens, seconds = cycles.tokens / cycles.count, cycles.seconds / cycles.count
        weight = _WEIGHT if self._rows else 1.0
        self._rows += 1
        self.tokens_a_cycle += weight * (tokens - self.tokens_a_cycle)
        self.cycle_seconds = (
            seconds
            if self.cycle_seconds is None or weight == 1.0
            else (self.cycle_seconds + weight * (seconds - self.cycle_seconds))
        )
        self._judge()

    def _judge(self) -> None:
        gain = self.gain
        if gain is None or gain >= 1.0:
            self.paused_for, self._pause = 0, FIRST_PAUSE
        else:
            self.paused_for = self._pause
            self._pause = min(2 * self._pause, LAST_PAUSE)
