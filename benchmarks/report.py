"""Writes figures as a Markdown table, and puts it between the marks of a page. Pure but for the one write."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from .measure import Figure

BEGIN = "<!-- made by `python -m benchmarks --write`: begin -->"
END = "<!-- end -->"


def table(figures: Sequence[Figure]) -> str:
    """The table, a line a figure."""
    lines = ["| figure | median (range) | goal | met | beside it |", "|---|---|---|---|---|"]
    for figure in figures:
        met = {True: "yes", False: "**no**", None: ""}[figure.met]
        lines.append(f"| {figure.what} | {figure.shown()} | {figure.goal} | {met} | {figure.beside} |")
    return "\n".join(lines)


def block(figures: Sequence[Figure], about: Sequence[str]) -> str:
    """Table and surroundings, as printed and as written."""
    head = "\n".join(f"- {line}" for line in [time.strftime("%Y-%m-%d"), *about])
    return f"{head}\n\n{table(figures)}\n"


def write(page: Path, text: str) -> None:
    """Replace what lies between the marks of a page. Raises ValueError for a page without them."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} lacks the marks {BEGIN!r} and {END!r}")
    page.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}", encoding="utf-8")
