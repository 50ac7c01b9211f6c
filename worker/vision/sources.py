"""Reads the bytes of a picture: given, from an allowed directory, or from the network if that is allowed.

Nothing is decoded here. What is refused says which limit, and how to lift it. No more than the limit is ever read.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ...protocol.commands import Load
from ...protocol.errors import ErrorCode
from ...protocol.values import Part
from ..engines.base import Refused
from .fetch import SECONDS, fetch


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """What the load says about pictures."""

    count: int
    size: int
    """Bytes of a file."""
    pixels: int
    max_side: int | None
    folders: tuple[str, ...]
    """Real paths."""
    urls: bool

    @classmethod
    def of(cls, load: Load) -> ImageLimits:
        folders = tuple(os.path.realpath(folder) for folder in load.image_dirs)
        return cls(
            load.max_images,
            load.max_image_bytes,
            load.max_image_pixels,
            load.image_max_side,
            folders,
            load.image_urls,
        )


def check_count(count: int, limits: ImageLimits) -> None:
    """Raises `Refused` for more pictures than a request may have."""
    if count > limits.count:
        raise Refused(
            ErrorCode.TOO_LARGE,
            f"the request has {count} images and this model takes {limits.count}; send fewer, or load it with a "
            "larger max_images",
        )


def read_all(parts: Sequence[Part], limits: ImageLimits) -> list[bytes]:
    """The files of all pictures. Raises `Refused`. Fetches share one time, since the worker waits for them."""
    until = time.monotonic() + SECONDS
    return [read(part, f"image {index + 1}", limits, until) for index, part in enumerate(parts)]


def read(part: Part, where: str, limits: ImageLimits, until: float | None = None) -> bytes:
    """The file of a picture, fetched `until` then. Raises `Refused`."""
    if part.path is not None:
        return _read_path(part.path, where, limits)
    if part.url is not None:
        if not limits.urls:
            raise Refused(
                ErrorCode.UNSUPPORTED,
                f"{where} is a URL, and fetching is off; send its bytes, or load the model with image_urls",
            )
        return fetch(part.url, where, limits.size, until=until)
    data = part.data or b""
    if len(data) > limits.size:
        raise too_large(where, f"{len(data)}", limits.size)
    return data


def too_large(where: str, size: str, limit: int) -> Refused:
    return Refused(
        ErrorCode.TOO_LARGE,
        f"{where} has {size} bytes and the limit is {limit}; send a smaller file, or load the model with a larger "
        "max_image_bytes",
    )


def _read_path(path: str, where: str, limits: ImageLimits) -> bytes:
    real = os.path.realpath(path)
    if not any(os.path.commonpath((folder, real)) == folder for folder in limits.folders):
        allowed = f"image_dirs allows {', '.join(limits.folders)}" if limits.folders else "image_dirs is empty"
        shown = path if real == path else f"{path} (really {real})"
        raise Refused(ErrorCode.BAD_REQUEST, f"{where}: {shown} may not be read: {allowed}; or send its bytes")
    try:
        # O_NOFOLLOW: what was a file when its path was resolved may have become a link. O_NONBLOCK: a pipe.
        descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise Refused(ErrorCode.BAD_REQUEST, f"{where}: cannot read {path}: {error.strerror or error}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "no regular file"
            raise Refused(ErrorCode.BAD_REQUEST, f"{where}: {path} is {kind}; an image is a file")
        if status.st_size > limits.size:
            raise too_large(where, f"{status.st_size}", limits.size)
        with open(descriptor, "rb", closefd=False) as stream:
            data = stream.read(limits.size + 1)
    except OSError as error:
        raise Refused(ErrorCode.BAD_REQUEST, f"{where}: cannot read {path}: {error.strerror or error}") from None
    finally:
        os.close(descriptor)
    if len(data) > limits.size:
        raise too_large(where, f"over {limits.size}", limits.size)
    return data
