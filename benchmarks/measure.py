"""Numbers of a figure: what was measured, its goal, and medians with their spread. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table."""

    what: str
    values: Sequence[float]
    """One a round, or one a sample."""
    goal: str
    """In words; empty when there is none."""
    met: bool | None
    unit: str = ""
    digits: int = 2
    beside: str = ""
    """What helps to read it: absolute figures, the normal case."""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def shown(self) -> str:
        """Median, and smallest to largest when there are several."""
        unit = f" {self.unit}" if self.unit else ""
        middle = f"{self.median:,.{self.digits}f}{unit}"
        if len(self.values) < 2:
            return middle
        return f"{middle} ({min(self.values):,.{self.digits}f} to {max(self.values):,.{self.digits}f})"


def at_least(what: str, values: Sequence[float], goal: float, beside: str = "") -> Figure:
    """A ratio that is to be high; judged by its median."""
    return Figure(what, values, f"at least {goal:g}", statistics.median(values) >= goal, beside=beside)


def at_most(
    what: str,
    values: Sequence[float],
    goal: float,
    unit: str = "ms",
    *,
    digits: int = 2,
    goal_text: str = "",
    beside: str = "",
) -> Figure:
    """A figure that is to be low; judged by its median."""
    text = goal_text or f"at most {goal:g} {unit}".rstrip()
    return Figure(what, values, text, statistics.median(values) <= goal, unit, digits, beside)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of all lie, by nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def spread(values: Sequence[float], digits: int = 0) -> str:
    """Median and range in words, for remarks."""
    middle = f"{statistics.median(values):,.{digits}f}"
    if len(values) < 2:
        return middle
    return f"{middle} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


@dataclass(slots=True)
class Pairs:
    """Measurements of two sides that took turns; the ratio of each round is its own sample."""

    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        return [a / b for a, b in zip(self.ours, self.theirs, strict=True)]

    @property
    def differences(self) -> list[float]:
        return [a - b for a, b in zip(self.ours, self.theirs, strict=True)]
