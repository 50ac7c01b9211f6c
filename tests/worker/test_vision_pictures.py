"""Files of pictures, good and bad: what is decoded to which pixels, and what is refused with which words."""

from __future__ import annotations

import io
import os
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlx_bulkhead.protocol.errors import ErrorCode
from mlx_bulkhead.protocol.values import Part
from mlx_bulkhead.worker.engines.base import Refused
from mlx_bulkhead.worker.vision.pictures import decode
from mlx_bulkhead.worker.vision.sources import ImageLimits, check_count, read
from PIL import Image

LIMITS = ImageLimits(count=4, size=100_000, pixels=10_000, max_side=None, folders=(), urls=False)
RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


def saved(picture: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, kind, **options)
    return stream.getvalue()


def halves() -> Image.Image:
    """Red above, blue below, 8 x 6 pixels."""
    made = Image.new("RGB", (8, 6), RED)
    made.paste(BLUE, (0, 3, 8, 6))
    return made


def pixels(picture: Image.Image) -> list[Any]:
    return [picture.getpixel((x, y)) for y in range(picture.height) for x in range(picture.width)]


def get(data: bytes, limits: ImageLimits = LIMITS) -> Image.Image:
    return decode(data, "image 1", limits)


def refused(data: bytes, limits: ImageLimits = LIMITS) -> Refused:
    with pytest.raises(Refused) as caught:
        get(data, limits)
    return caught.value


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "WEBP", "GIF"])
def test_formats_without_loss(kind: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    assert pixels(get(saved(halves(), kind, **options))) == pixels(halves())


def test_jpeg_is_turned_the_way_it_was_held() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera stood on its right side
    upright = get(saved(halves(), "JPEG", exif=exif, quality=100, subsampling=0))
    assert upright.size == (6, 8)
    red, blue = upright.getpixel((5, 4)), upright.getpixel((0, 4))
    assert red[0] > 200 > red[2]  # type: ignore[index, operator]
    assert blue[2] > 200 > blue[0]  # type: ignore[index, operator]


def test_transparent_is_white() -> None:
    picture = Image.new("RGBA", (2, 1), (255, 0, 0, 255))
    picture.putpixel((1, 0), (0, 0, 0, 0))
    assert pixels(get(saved(picture))) == [RED, WHITE]
    palette = picture.quantize()
    assert pixels(get(saved(palette)))[1] == WHITE


def test_of_an_animation_the_first_frame() -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in (RED, BLUE)]
    data = saved(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=50, loop=0)
    assert set(pixels(get(data))) == {RED}


def test_sixteen_bits_are_scaled() -> None:
    picture = Image.new("I;16", (2, 1), 0)
    picture.putpixel((1, 0), 65535)
    assert pixels(get(saved(picture))) == [(0, 0, 0), WHITE]
    assert pixels(get(saved(Image.new("L", (1, 1), 7)))) == [(7, 7, 7)]


def test_shrunk_to_its_longer_side_and_never_grown() -> None:
    limits = replace(LIMITS, max_side=40)
    assert get(saved(Image.new("RGB", (80, 20))), limits).size == (40, 10)
    assert get(saved(Image.new("RGB", (20, 80))), limits).size == (10, 40)
    assert get(saved(Image.new("RGB", (100, 1))), limits).size == (40, 1)
    assert get(saved(halves()), limits).size == (8, 6)
    assert max(get(saved(Image.new("RGB", (90, 90)), "JPEG"), limits).size) == 40


def header_of(width: int, height: int) -> bytes:
    """A PNG of that size by its header, with no pixel behind it."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    ihdr = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", ihdr) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


BAD = {
    "truncated": (saved(halves())[:50], ErrorCode.BAD_REQUEST, "(50 bytes) cannot be decoded"),
    "text": (b"hello, this is no picture", ErrorCode.BAD_REQUEST, "is none of PNG, JPEG"),
    "empty": (b"", ErrorCode.BAD_REQUEST, "is empty (0 bytes)"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", ErrorCode.BAD_REQUEST, "is none of"),
    "a program for printers": (b"%!PS-Adobe-3.0 EPSF-3.0\n", ErrorCode.BAD_REQUEST, "is none of"),
    "pixels": (
        saved(Image.new("1", (101, 100))),
        ErrorCode.TOO_LARGE,
        "101 x 100 = 10100 pixels and the limit is",
    ),
    "huge": (header_of(20_000, 20_000), ErrorCode.TOO_LARGE, "20000 x 20000"),
    "no pixels behind the header": (header_of(10, 10), ErrorCode.BAD_REQUEST, "cannot be decoded"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files(name: str) -> None:
    data, code, words = BAD[name]
    error = refused(data)
    assert error.code is code
    assert words in error.message
    assert error.message.startswith("image 1")


def test_a_huge_picture_is_refused_by_its_header() -> None:
    assert refused(header_of(40_000, 40_000), replace(LIMITS, pixels=10**9)).code is ErrorCode.TOO_LARGE


def test_count() -> None:
    check_count(4, LIMITS)
    with pytest.raises(Refused, match="has 20 images and this model takes 4") as caught:
        check_count(20, LIMITS)
    assert caught.value.code is ErrorCode.TOO_LARGE


# Where they come from.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(saved(halves()))
    (tmp_path / "out" / "b.png").write_bytes(saved(halves()))
    (tmp_path / "in" / "link").symlink_to(tmp_path / "out" / "b.png")
    (tmp_path / "in" / "good").symlink_to(tmp_path / "in" / "a.png")
    (tmp_path / "inner").symlink_to(tmp_path / "in")
    os.mkfifo(tmp_path / "in" / "pipe")
    return tmp_path


def from_path(folder: Path, name: str, **limits: Any) -> bytes:
    given = replace(LIMITS, folders=(os.path.realpath(folder / "in"),), **limits)
    return read(Part("image", path=str(folder / name)), "image 1", given)


@pytest.mark.parametrize("name", ["in/a.png", "in/good", "inner/a.png", "out/../in/a.png"])
def test_paths_that_lead_into_an_allowed_folder(folder: Path, name: str) -> None:
    assert from_path(folder, name) == saved(halves())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("in/link", "may not be read: image_dirs allows"),
        ("out/b.png", "may not be read"),
        ("in/../out/b.png", "may not be read"),
        ("in2/a.png", "may not be read"),
        ("in/missing.png", "No such file"),
        ("in", "is a directory"),
        ("in/pipe", "is no regular file"),
    ],
)
def test_paths_that_do_not(folder: Path, name: str, words: str) -> None:
    with pytest.raises(Refused, match=words) as caught:
        from_path(folder, name)
    assert caught.value.code is ErrorCode.BAD_REQUEST


def test_no_folder_no_path(folder: Path) -> None:
    with pytest.raises(Refused, match="image_dirs is empty; or send its bytes"):
        read(Part("image", path=str(folder / "in" / "a.png")), "image 1", LIMITS)


def test_sizes_are_bounded(folder: Path) -> None:
    with pytest.raises(Refused, match=r"image 1 has \d+ bytes and the limit is 10") as caught:
        from_path(folder, "in/a.png", size=10)
    assert caught.value.code is ErrorCode.TOO_LARGE
    with pytest.raises(Refused, match="image 1 has 11 bytes and the limit is 10"):
        read(Part("image", data=b"x" * 11), "image 1", replace(LIMITS, size=10))


def test_urls_are_off_by_default() -> None:
    with pytest.raises(Refused, match="fetching is off") as caught:
        read(Part("image", url="http://example.org/a.png"), "image 1", LIMITS)
    assert caught.value.code is ErrorCode.UNSUPPORTED
