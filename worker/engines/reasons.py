"""Shortens what a library says when it fails. Pure."""

from __future__ import annotations


def short(error: Exception) -> str:
    """One line of a library's error: of a list of parameters, the first three and how many more."""
    lines = [line.strip(" ,.") for line in str(error).splitlines() if line.strip(" ,.")]
    if not lines:
        return type(error).__name__
    if isinstance(error, LookupError):
        return f"{type(error).__name__}: {lines[0]}"[:500]
    head, names = lines[0], lines[1:]
    if not names:
        return head[:500]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{head.rstrip(': ')}: {', '.join(names[:3])}{more}"[:500]
