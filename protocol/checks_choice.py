"""Checks of what a request says about its tokens and its form. Pure; part of `checks`."""

from __future__ import annotations

import msgspec

from . import limits
from .commands import Generate
from .errors import ErrorCode
from .problem import Problem, bad
from .values import FORMATS, ResponseFormat


def check_logprobs(request: Generate) -> Problem | None:
    """Counts of log probabilities."""
    count = request.top_logprobs
    if not 0 <= count <= limits.MAX_TOP_LOGPROBS:
        return bad(f"top_logprobs must be 0 to {limits.MAX_TOP_LOGPROBS}, got {count}")
    if count and not request.logprobs:
        return bad(f"top_logprobs {count} needs logprobs true")
    return None


def check_format(form: ResponseFormat | None) -> Problem | None:
    """Exactly the field that the type needs, and its size. Whether it makes sense is seen in the worker."""
    if form is None:
        return None
    if form.type not in FORMATS:
        return bad(f"response_format.type must be one of {', '.join(FORMATS)}, got {form.type[:60]!r}")
    wanted = FORMATS[form.type]
    for field in ("schema", "pattern", "choices", "grammar"):
        given = getattr(form, field) is not None
        if given and field != wanted:
            return bad(f"response_format.{field} does not belong to type {form.type}")
        if not given and field == wanted:
            return bad(f"response_format.{field} is missing; type {form.type} needs it")
    if wanted is None:
        return None
    if form.choices is not None and not all(form.choices):
        return bad("response_format.choices must be one or more strings, none of them empty")
    if form.choices == [] or form.pattern == "" or (form.grammar is not None and not form.grammar.strip()):
        return bad(f"response_format.{wanted} is empty")
    try:
        size = len(msgspec.json.encode(getattr(form, wanted)))
    except (msgspec.MsgspecError, RecursionError, TypeError, ValueError, OverflowError) as error:
        return bad(f"response_format.{wanted} is not something that JSON can hold: {error}")
    if size > limits.MAX_FORMAT_BYTES:
        return Problem(
            ErrorCode.TOO_LARGE, f"response_format.{wanted} has {size} bytes, at most {limits.MAX_FORMAT_BYTES} fit"
        )
    return None
