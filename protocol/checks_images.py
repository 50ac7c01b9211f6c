"""Checks of the pictures of a request and of the limits for them. Pure; part of `checks`."""

from __future__ import annotations

import os

from . import limits
from .commands import Generate, Load
from .problem import Problem, bad
from .values import Part


def check_image(part: Part, where: str, *, attached: bool = False) -> Problem | None:
    """A part of type image. `attached`: of `Generate.images`, where it must hold a picture."""
    given = [name for name in ("data", "path", "url") if getattr(part, name) is not None]
    if len(given) > 1 or (attached and not given):
        return bad(f"{where} needs exactly one of data (bytes), path and url, got {' and '.join(given) or 'none'}")
    if part.text is not None:
        return bad(f"{where} is an image and has a text; give that as a part of its own")
    if part.data is not None and not part.data:
        return bad(f"{where}.data is empty (0 bytes)")
    if part.path is not None and (
        not 1 <= len(part.path) <= limits.MAX_PATH_CHARS or "\0" in part.path or not os.path.isabs(part.path)
    ):
        return bad(f"{where}.path must be an absolute path of 1 to {limits.MAX_PATH_CHARS} characters without NUL")
    if part.url is not None and not (
        len(part.url) <= limits.MAX_URL_CHARS and part.url.lower().startswith(("http://", "https://"))
    ):
        return bad(f"{where}.url must be http:// or https:// and have at most {limits.MAX_URL_CHARS} characters")
    return None


def check_images(request: Generate) -> Problem | None:
    """Attached pictures, and that they match the places for them in the messages."""
    for index, part in enumerate(request.images):
        if part.type != "image":
            return bad(f"images[{index}].type must be image, got {part.type[:60]!r}")
        if problem := check_image(part, f"images[{index}]", attached=True):
            return problem
    if request.messages is None:
        return bad("images need messages, not prompt or tokens") if request.images else None
    parts = [
        part
        for message in request.messages
        if isinstance(message.content, list)
        for part in message.content
        if part.type == "image"
    ]
    places = sum(part.data is part.path is part.url is None for part in parts)
    if parts and places != len(request.images):
        return bad(
            f"the messages have {places} image parts without a picture, and images has {len(request.images)}: "
            "they must be as many, or the messages must have no image part at all"
        )
    if request.images and not parts and all(message.role != "user" for message in request.messages):
        return bad("images go to the last user message, and there is none")
    return None


def check_image_limits(load: Load) -> Problem | None:
    """What a load says about pictures."""
    for field, value, low, high in (
        ("max_images", load.max_images, 0, limits.MAX_IMAGES),
        ("max_image_bytes", load.max_image_bytes, 1, limits.MAX_FRAME_BYTES),
        ("max_image_pixels", load.max_image_pixels, 1, limits.MAX_IMAGE_PIXELS),
        ("image_max_side", load.image_max_side, limits.MIN_IMAGE_SIDE, limits.MAX_IMAGE_SIDE),
    ):
        if value is not None and not low <= value <= high:
            return bad(f"{field} must be {low} to {high}, got {value}")
    if len(load.image_dirs) > limits.MAX_IMAGE_DIRS:
        return bad(f"image_dirs holds at most {limits.MAX_IMAGE_DIRS} directories, got {len(load.image_dirs)}")
    for index, folder in enumerate(load.image_dirs):
        if not 1 <= len(folder) <= limits.MAX_PATH_CHARS or "\0" in folder or not os.path.isabs(folder):
            return bad(
                f"image_dirs[{index}] must be an absolute path of 1 to {limits.MAX_PATH_CHARS} characters without NUL"
            )
    return None
