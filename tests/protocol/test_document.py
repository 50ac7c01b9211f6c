"""docs/protocol.md says what the code does: kinds, fields, types, defaults, codes, limits and bytes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from mlx_bulkhead.protocol import codec, limits
from mlx_bulkhead.protocol.errors import RETRYABLE, ErrorCode
from mlx_bulkhead.protocol.exit_codes import CliExit, WorkerExit, may_restart

from .describe import described, rows
from .make_golden import PATH

DOCUMENT = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")


def table(heading: str, which: int = 0) -> list[tuple[str, ...]]:
    """Rows of a table below a heading, without the two header lines. Empty if there is none."""
    found = re.search(rf"^(#+) {re.escape(heading)}\n(.*?)(?=^##|\Z)", DOCUMENT, re.DOTALL | re.MULTILINE)
    assert found, f"no heading {heading!r}"
    tables = re.findall(r"(?:^\|.*\|\n)+", found[2], re.MULTILINE)
    if which >= len(tables):
        return []
    lines = tables[which].strip().split("\n")[2:]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]


def _number(text: str) -> float:
    return int(text) if text.isdigit() else float(text)


def test_kinds() -> None:
    documented = [(row[0], row[1]) for row in table("Kinds")]
    assert documented == [(f"0x{kind:02x}", f"`{cls.__name__}`") for kind, cls in sorted(codec.KINDS.items())]


@pytest.mark.parametrize("name", list(described()))
def test_fields(name: str) -> None:
    documented = [row[:3] for row in table(name)]
    assert documented == rows(described()[name])
    assert all(row[3] for row in table(name)), "each field has a meaning"


def test_no_message_is_documented_that_is_not_there() -> None:
    assert sorted(re.findall(r"^### ([A-Z]\w+)$", DOCUMENT, re.MULTILINE)) == sorted(described())


def test_error_codes() -> None:
    documented = [row[:2] for row in table("Errors")]
    assert documented == [(f"`{code}`", "yes" if code in RETRYABLE else "no") for code in ErrorCode]


def test_limits() -> None:
    numbers = {name: value for name, value in vars(limits).items() if name.startswith(("MAX_", "MIN_"))}
    assert {row[0].strip("`"): _number(row[1]) for row in table("Bounds")} == numbers


def test_exit_codes() -> None:
    assert [row[:3] for row in table("Exit codes", 0)] == [
        (str(code.value), f"`{code.name}`", "yes" if may_restart(code) else "no") for code in WorkerExit
    ]
    assert [row[:2] for row in table("Exit codes", 1)] == [(str(code.value), f"`{code.name}`") for code in CliExit]


def test_example_bytes() -> None:
    golden = json.loads(PATH.read_text(encoding="ascii"))
    block = re.search(r"```frames\n(.*?)```", DOCUMENT, re.DOTALL)
    assert block
    examples = re.findall(r"^(\S+)\n  head (\w+)\n  body (\w+)$", block[1], re.MULTILINE)
    assert len(examples) == block[1].count("head")
    for name, head, body in examples:
        assert golden[name] == {"head": head, "body": body}


def test_numbers_in_the_text() -> None:
    assert f"Version {codec.PROTOCOL_VERSION}." in DOCUMENT
    assert f"up to {limits.MAX_FRAME_BYTES} " in DOCUMENT
    assert f"Null: {limits.DEFAULT_MAX_TOKENS}, " in DOCUMENT
    assert f"has {limits.SOCKET_PATH_BYTES} bytes or more" in DOCUMENT
