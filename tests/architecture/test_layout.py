"""Sizes of files, the list of packages, and the names that the documents use."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from .source import PACKAGES, ROOT

MAX_LINES = 400
FOLDERS = (*PACKAGES, "tests", "docs", "benchmarks")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def python_files() -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def test_no_file_is_longer_than_400_lines() -> None:
    long = {str(path.relative_to(ROOT)): count for path in python_files() if (count := _lines(path)) > MAX_LINES}
    assert not long, "split them by role"


def _lines(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def test_every_module_says_what_it_owns() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in python_files()
        if (text := path.read_text(encoding="utf-8").lstrip()) and not text.startswith(('"""', 'r"""', "#!"))
    ]
    assert not silent, "these modules have no docstring"


def test_every_package_is_installed() -> None:
    expected: set[str] = set()
    for package in PACKAGES:
        for init in (ROOT / package).rglob("__init__.py"):
            folder = init.parent.relative_to(ROOT).parts
            expected.add(".".join(folder if folder[0] == "mlx_bulkhead" else ("mlx_bulkhead", *folder)))
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == expected


def test_every_folder_with_python_is_a_package() -> None:
    """A folder without `__init__.py` would be left out of the wheel in silence."""
    folders = {path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert not [str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").is_file()]


@pytest.mark.parametrize("document", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_files_that_a_document_names_exist(document: str) -> None:
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:protocol|worker|orchestrator|tests|docs|benchmarks)/[\w/.-]*)`", text))
    assert not sorted(name for name in named if not (ROOT / name).exists())
