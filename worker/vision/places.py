"""Decides which picture stands where in a chat. Pure: the caller's messages stay as they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...protocol.commands import Generate
from ...protocol.values import ChatMessage, Part
from ..text.turns import is_place


def has_images(request: Generate) -> bool:
    """Whether a request has pictures, or places for them."""
    return bool(request.images) or any(True for _ in _image_parts(request.messages or ()))


def place(messages: Sequence[ChatMessage], images: Sequence[Part]) -> tuple[list[ChatMessage], list[Part]]:
    """Messages with an image part for each picture, and the pictures in the order of these parts.

    `checks_images.check_images` has seen to it that they match.
    """
    if not any(True for _ in _image_parts(messages)):
        return _in_front(messages, images), list(images)
    attached = iter(images)
    pictures = [next(attached) if is_place(part) else part for part in _image_parts(messages)]
    return list(messages), pictures


def _in_front(messages: Sequence[ChatMessage], images: Sequence[Part]) -> list[ChatMessage]:
    """A copy in which the last user message begins with the pictures."""
    out = list(messages)
    if not images:
        return out
    index = max(index for index, message in enumerate(out) if message.role == "user")
    message = out[index]
    content = message.content
    rest = [Part(type="text", text=content)] if isinstance(content, str) else list(content or ())
    fields = {name: getattr(message, name) for name in message.__struct_fields__}
    out[index] = ChatMessage(**{**fields, "content": [*(Part(type="image") for _ in images), *rest]})
    return out


def _image_parts(messages: Sequence[ChatMessage]) -> Iterator[Part]:
    for message in messages:
        if isinstance(message.content, list):
            yield from (part for part in message.content if part.type == "image")
