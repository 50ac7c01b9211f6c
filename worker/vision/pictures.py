"""Decodes a picture's file to RGB. The limits are checked on the header, before any pixel is decoded.

The way a picture is held (EXIF orientation) is applied. What is transparent stands on white, as on a page. Of an
animation the first frame is taken. Formats are those of photographs and of the web; others, which Pillow reads too,
are refused, since their decoders are seldom used and some start programs.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from typing import Any, Final

from PIL import Image, ImageOps

from ...protocol.errors import ErrorCode
from ..engines.base import Refused
from .sources import ImageLimits

Image.init()
FORMATS: Final = tuple(kind for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF") if kind in Image.OPEN)

Image.MAX_IMAGE_PIXELS = None  # the limit is the load's, and is checked before Pillow decodes anything


def decode_all(files: Sequence[bytes], limits: ImageLimits) -> list[Any]:
    """RGB pictures. Raises `Refused`."""
    return [decode(data, f"image {index + 1}", limits) for index, data in enumerate(files)]


def decode(data: bytes, where: str, limits: ImageLimits) -> Any:
    """One RGB picture, at most `limits.max_side` wide and high if that is set. Raises `Refused`."""
    if not data:
        raise Refused(ErrorCode.BAD_REQUEST, f"{where} is empty (0 bytes)")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of damaged metadata, which does not matter here
            with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
                _check_size(picture.size, where, limits)
                return _plain(picture, limits.max_side)
    except Refused:
        raise
    except Image.UnidentifiedImageError:
        begin = data[:16]
        raise Refused(
            ErrorCode.BAD_REQUEST,
            f"{where} ({len(data)} bytes) is none of {', '.join(FORMATS)}; it begins with {begin!r}",
        ) from None
    except MemoryError:
        raise
    except Exception as error:  # decoders raise whatever they like: OSError, SyntaxError, struct.error, …
        raise Refused(
            ErrorCode.BAD_REQUEST, f"{where} ({len(data)} bytes) cannot be decoded: {error or type(error).__name__}"
        ) from None


def _check_size(size: tuple[int, int], where: str, limits: ImageLimits) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise Refused(ErrorCode.BAD_REQUEST, f"{where} is {width} x {height} pixels")
    if width * height > limits.pixels:
        raise Refused(
            ErrorCode.TOO_LARGE,
            f"{where} is {width} x {height} = {width * height} pixels and the limit is {limits.pixels}; shrink it, "
            "or load the model with a larger max_image_pixels",
        )


def _plain(picture: Any, max_side: int | None) -> Any:
    picture.seek(0)
    if max_side is not None:
        picture.draft("RGB", (max_side, max_side))  # a JPEG is decoded at a fraction of its size then
    picture.load()
    picture = ImageOps.exif_transpose(picture)
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        page = Image.new("RGBA", picture.size, (255, 255, 255, 255))
        picture = Image.alpha_composite(page, picture)
    elif picture.mode in ("I", "I;16", "I;16B", "I;16L", "F"):
        picture = _eight_bits(picture)
    picture = picture.convert("RGB")
    if max_side is not None and max(picture.size) > max_side:
        scale = max_side / max(picture.size)
        width, height = (max(1, round(side * scale)) for side in picture.size)
        picture = picture.resize((width, height), Image.Resampling.LANCZOS)
    return picture


def _eight_bits(picture: Any) -> Any:
    """A picture of 16 bits or more a pixel, which Pillow would cut at 255 instead of scaling it."""
    low, high = picture.convert("F").getextrema()
    top = 1.0 if high <= 1.0 and picture.mode == "F" else 255.0 if high <= 255 and low >= 0 else 65535.0
    return picture.convert("F").point(lambda value: value * (255.0 / top)).convert("L")
