"""A short run of everything, with a fixed seed, so that CI has it."""

from __future__ import annotations

import pytest

from .fuzz import fuzz
from .report import table, verdict
from .run import Plan, run

pytestmark = pytest.mark.timeout(150)


def test_a_short_run_keeps_every_promise() -> None:
    outcome = run(Plan(seconds=8.0, faults=30, seed=20, prompts=3, lengths=(8, 30), sessions=(2, 2)))
    assert not outcome.record.violations, f"{table(outcome)}\n{verdict(outcome)}"
    assert outcome.record.faults.total() >= 20
    assert outcome.record.resumed > 0


def test_a_short_fuzz_ends_no_process() -> None:
    assert not [finding.line() for finding in fuzz(12_000, seed=20) if finding.wrong]
