"""Checks of a load's memory lines. Pure; part of `checks`."""

from __future__ import annotations

from . import limits
from .commands import Load
from .problem import Problem, bad


def check_memory(load: Load) -> Problem | None:
    """Shares in order, and only steps that there are."""
    for field, share in (("memory_soft", load.memory_soft), ("memory_hard", load.memory_hard)):
        if not limits.LEAST_MEMORY_SHARE <= share <= 1.0:  # false for NaN too
            return bad(f"{field} must be {limits.LEAST_MEMORY_SHARE:g} to 1 of the memory limit, got {share}")
    if load.memory_soft > load.memory_hard:
        return bad(f"memory_soft must not be over memory_hard, got {load.memory_soft} and {load.memory_hard}")
    for step in load.memory_off:
        if step not in limits.MEMORY_STEPS:
            return bad(f"memory_off takes {', '.join(limits.MEMORY_STEPS)}, got {step[:60]!r}")
    return None
