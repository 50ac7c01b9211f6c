"""docs/failure-modes.md names tests that exist, in every row."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [
    line
    for line in (ROOT / "docs" / "failure-modes.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| failure |")
]


def names_in(path: Path) -> set[str]:
    """Names of the test functions of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_the_table_is_there() -> None:
    assert len(ROWS) > 40


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip()[:50])
def test_a_row_is_whole_and_names_tests_that_exist(row: str) -> None:
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert len(cells) == 5
    assert all(cells)
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", cells[4])
    assert named
    assert re.fullmatch(r"(`[^`]+`(, )?)+", cells[4])
    for path, name in named:
        assert name.startswith("test_")
        assert name in names_in(ROOT / path)
