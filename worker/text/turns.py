"""Makes the turns that a chat template reads, and the variants of them that pickier templates want."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from ...protocol.commands import Generate
from ...protocol.errors import ErrorCode
from ...protocol.values import ChatMessage, Part
from ..engines.base import Refused


def check_no_images(request: Generate, why: str = "") -> None:
    """Raise `Refused` for a request with pictures. `why` the model takes none, where that is not its nature."""
    contents = [message.content for message in request.messages or ()]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    count = len(request.images) + sum(part.type == "image" and not is_place(part) for part in parts)
    if count:
        said = f": {why}" if why else ""
        raise Refused(ErrorCode.UNSUPPORTED, f"the request has {count} images; this model takes text only{said}")


def is_place(part: Part) -> bool:
    """Whether an image part only says where an attached picture belongs."""
    return part.data is part.path is part.url is None


def variants(turns: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The turns as they are, then with tool arguments as objects, then with one call a turn."""
    yield turns
    if not any(turn.get("tool_calls") for turn in turns):
        return
    parsed = [_parse_arguments(turn) for turn in turns]
    yield parsed
    if any(len(turn.get("tool_calls") or ()) > 1 for turn in parsed):
        yield _one_call_a_turn(parsed)


def _parse_arguments(turn: dict[str, Any]) -> dict[str, Any]:
    turn = copy.deepcopy(turn)
    for call in turn.get("tool_calls") or ():
        function = call.get("function", call)
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"])
            except ValueError:
                pass
    return turn


def _one_call_a_turn(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each of several parallel calls becomes a turn of its own, followed by its result."""
    results = {turn["tool_call_id"]: turn for turn in turns if turn.get("tool_call_id")}
    placed: set[str] = set()
    out: list[dict[str, Any]] = []
    for turn in turns:
        calls = turn.get("tool_calls") or ()
        if len(calls) < 2:
            if turn.get("tool_call_id") not in placed:
                out.append(turn)
            continue
        for number, call in enumerate(calls):
            single = {**turn, "tool_calls": [call]}
            if number:
                single["content"] = ""
            out.append(single)
            name = call.get("id")
            if name in results and name not in placed:
                out.append(results[name])
                placed.add(name)
    return out


def as_dict(message: ChatMessage, index: int, images: bool = False) -> dict[str, Any]:
    """A message as templates read it. Raises `Refused` for what is not text, unless images may be."""
    content: Any = message.content
    if images and isinstance(content, list) and any(part.type == "image" for part in content):
        content = [{"type": "image"} if p.type == "image" else {"type": "text", "text": p.text} for p in content]
    elif isinstance(content, list):
        for number, part in enumerate(content):
            if part.type != "text":
                raise Refused(
                    ErrorCode.UNSUPPORTED,
                    f"messages[{index}].content[{number}] is an {part.type}; this model takes text only",
                )
        content = "".join(part.text or "" for part in content)
    turn: dict[str, Any] = {"role": message.role, "content": content if content is not None else ""}
    for field in ("name", "tool_calls", "tool_call_id", "reasoning_content"):
        value = getattr(message, field)
        if value is not None:
            turn[field] = value
    return turn
