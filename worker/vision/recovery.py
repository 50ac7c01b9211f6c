"""Decides what happens when a chat template does badly with pictures. Pure.

A text is bad if it is blank, or if it shows a picture's part as data, as Python or JSON would write it, more often
than the messages themselves say those words.

| situation | result |
|---|---|
| the template raised; neither pictures nor a history of tools | its error |
| bad, and a history of tools (a result, calls, or their ids) | error: the history would be lost |
| bad, pictures, and tools or controls of reasoning | its error, else: they would be dropped |
| bad, pictures, none of these | the library's own prompt for the model, if it has one |
| that fails, is missing, or is bad too | the first error, else an explanation |
| bad, no pictures | error |
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...protocol.errors import ErrorCode
from ..engines.base import Refused

MEDIA_TYPES = ("image", "image_url", "input_image")


@dataclass(frozen=True, slots=True)
class Attempt:
    """What came of rendering a chat: a text, or an error."""

    text: Any = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """What about a chat matters for recovery."""

    turns: Sequence[Mapping[str, Any]]
    images: int
    extras: bool = False
    """Tools, or a control of reasoning, are set."""


def settle(attempt: Attempt, asked: Asked, registered: Callable[[], str | None]) -> str:
    """The text to use. Raises the template's own error, or `Refused`.

    registered: the library's own prompt for these turns; None if it has none for this model.
    """
    first = attempt.error
    history = has_tool_history(asked.turns)
    if first is not None and not asked.images and not history:
        raise first
    if first is None and not is_bad(attempt.text, asked.turns):
        return attempt.text
    if history:
        raise _refused("it cannot be rendered another way without losing the history of tools", first)
    if not asked.images:
        raise _refused("", first)
    if asked.extras:
        raise first or _refused("another way would drop the tools or the controls of reasoning", None)
    try:
        text = registered()
    except Exception as error:
        raise first or _refused(f"mlx-vlm's own prompt for this model fails too: {error}", None) from error
    if text is None:
        raise first or _refused("mlx-vlm has no prompt of its own for this model", None)
    if is_bad(text, asked.turns):
        raise first or _refused("mlx-vlm's own prompt for this model is as bad", None)
    return text


def _refused(why: str, first: Exception | None) -> Refused:
    said = f": {first}" if first is not None else ""
    text = f"the chat template gives no usable prompt for these messages{said}"
    return Refused(ErrorCode.UNSUPPORTED, f"{text}; {why}" if why else text)


def has_tool_history(turns: Sequence[Mapping[str, Any]]) -> bool:
    """Whether tools were called before."""
    return any(
        turn.get("role") == "tool" or bool(turn.get("tool_calls")) or turn.get("tool_call_id") is not None
        for turn in turns
    )


def is_bad(text: Any, turns: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a rendered text cannot be a prompt."""
    if not isinstance(text, str) or not text.strip():
        return True
    said = list(_said(turns))
    return any(
        text.count(dump) > sum(words.count(dump) for words in said)
        for dump in {dump for media in _media(turns) for dump in _dumps(media)}
    )


def _media(value: Any) -> Iterator[Any]:
    """Parts of pictures, and lists that hold one."""
    if isinstance(value, Mapping):
        kind = value.get("type")
        if isinstance(kind, str) and kind.lower() in MEDIA_TYPES:
            yield value
        for item in value.values():
            yield from _media(item)
    elif isinstance(value, (list, tuple)):
        inner = [found for item in value for found in _media(item)]
        if inner and not any("role" in item for item in value if isinstance(item, Mapping)):
            yield value
        yield from inner


def _dumps(value: Any) -> Iterator[str]:
    plain = _plain(value)
    yield str(plain)
    for separators in (None, (",", ":")):
        for ascii_only in (True, False):
            try:
                yield json.dumps(plain, separators=separators, ensure_ascii=ascii_only)
            except (TypeError, ValueError):
                continue


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _said(value: Any) -> Iterator[str]:
    """All text that the messages themselves hold."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key != "type":
                yield from _said(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _said(item)
