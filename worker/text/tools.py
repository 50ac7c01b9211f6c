"""Parses the tool calls of an answer with the parser that mlx-lm has for the model. Never fails an answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from ...protocol.values import ToolCall
from .channels import RawCall

MAX_CALL_CHARS = 256 * 1024
MAX_CALLS = 128

Parser = Callable[[str, Any], Any]
"""mlx-lm's: (text between the marks, tools) → a call, or a list of calls, as dictionaries."""


def parse_calls(
    raw: Sequence[RawCall], parser: Parser | None, tools: list[dict[str, Any]], prefix: str
) -> tuple[list[ToolCall], str]:
    """The calls, and what is wrong with them in words. What cannot be parsed is left out and named there."""
    calls: list[ToolCall] = []
    problems: list[str] = []
    known = {name for tool in tools if (name := _name_of(tool))}
    for number, call in enumerate(raw, 1):
        try:
            found = _parse(call, parser, tools)
        except Exception as error:  # parsers raise whatever they like on what a model writes
            problems.append(f"call {number} could not be parsed: {type(error).__name__}: {error}"[:500])
            continue
        for name, arguments in found:
            if len(calls) >= MAX_CALLS:
                problems.append(f"more than {MAX_CALLS} calls; the others are left out")
                return calls, "; ".join(problems)
            if known and name not in known:
                problems.append(f"call {number} is to {name!r}, which is not among the tools")
            calls.append(ToolCall(f"{prefix}{len(calls)}", name, arguments))
    return calls, "; ".join(problems)


def _parse(call: RawCall, parser: Parser | None, tools: list[dict[str, Any]]) -> list[tuple[str, str]]:
    if len(call.body) > MAX_CALL_CHARS:
        raise ValueError(f"it has {len(call.body)} characters; {MAX_CALL_CHARS} are the limit")
    if not call.whole:
        raise ValueError("it has no end")
    if call.name:  # the body is the arguments
        return [(call.name, _arguments(json.loads(call.body)))]
    if parser is None:
        raise ValueError("there is no parser for this model")
    parsed = parser(call.body, tools)
    return [_checked(one) for one in (parsed if isinstance(parsed, list) else [parsed])]


def _checked(call: Any) -> tuple[str, str]:
    if not isinstance(call, dict) or not isinstance(name := call.get("name"), str) or not name:
        raise ValueError("it names no tool")
    return name, _arguments(call.get("arguments", {}))


def _arguments(value: Any) -> str:
    """Arguments as JSON text."""
    if isinstance(value, str):
        value = json.loads(value) if value.strip() else {}
    if not isinstance(value, dict):
        raise ValueError(f"its arguments are {type(value).__name__}, not an object")
    return json.dumps(value, ensure_ascii=False)


def _name_of(tool: dict[str, Any]) -> str:
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""
