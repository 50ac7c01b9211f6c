"""Why a command is refused. A value; the checks make it."""

from __future__ import annotations

from typing import NamedTuple

from .errors import ErrorCode


class Problem(NamedTuple):
    """Why a command is refused."""

    code: ErrorCode
    message: str


def bad(message: str) -> Problem:
    """A refusal of the most common kind."""
    return Problem(ErrorCode.BAD_REQUEST, message)
