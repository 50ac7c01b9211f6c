"""Pictures of a request match the places for them, and hold what a picture is."""

from __future__ import annotations

import pytest
from mlx_bulkhead.protocol import limits
from mlx_bulkhead.protocol.checks import check_generate, check_load
from mlx_bulkhead.protocol.commands import Generate, Load
from mlx_bulkhead.protocol.errors import ErrorCode
from mlx_bulkhead.protocol.values import ChatMessage, Part

PLACE = Part("image")
PNG = Part("image", data=b"\x89PNG")
TEXT = Part("text", "what?")


def chat(*contents: str | list[Part], images: list[Part] | None = None) -> Generate:
    messages = [ChatMessage("user", content) for content in contents]
    return Generate("m", messages=messages, images=images or [])


@pytest.mark.parametrize(
    "request_",
    [
        chat("what?", images=[PNG]),
        chat("what?", images=[PNG] * 20),  # how many is the model's to say
        chat([PLACE, TEXT], images=[PNG]),
        chat([PLACE, TEXT], [TEXT, PLACE, PLACE], images=[PNG] * 3),
        chat([PNG, TEXT]),
        chat([PNG, PLACE, TEXT], images=[PNG]),
        chat([Part("image", path="/p/a.png")]),
        chat([Part("image", url="HTTPS://example.org/a.png")]),
    ],
)
def test_what_matches(request_: Generate) -> None:
    assert check_generate(request_) is None


BAD = {
    "more pictures than places": (
        chat([PLACE, TEXT], images=[PNG, PNG]),
        "1 image parts without .* has 2",
    ),
    "fewer": (chat([PLACE, PLACE, TEXT], images=[PNG]), "2 image parts without a picture, and images has 1"),
    "a place and no picture": (chat([PLACE, TEXT]), "1 image parts without a picture, and images has 0"),
    "pictures beside parts that hold their own": (chat([PNG, TEXT], images=[PNG]), "0 image parts .* images has 1"),
    "attached without content": (chat("what?", images=[PLACE]), r"images\[0\] needs exactly one .* got none"),
    "attached text": (chat("what?", images=[TEXT]), r"images\[0\].type must be image, got 'text'"),
    "two contents": (chat([Part("image", data=b"x", path="/x")]), r"content\[0\] needs exactly one .* data and path"),
    "path and url": (chat([Part("image", url="http://x", path="/x")]), "needs exactly one .* path and url"),
    "no bytes": (chat([Part("image", data=b"")]), r"content\[0\].data is empty \(0 bytes\)"),
    "a relative path": (chat([Part("image", path="a.png")]), r"content\[0\].path must be an absolute path"),
    "NUL": (chat([Part("image", path="/a\0")]), r"content\[0\].path must be an absolute path .* without NUL"),
    "another scheme": (chat([Part("image", url="file:///etc/passwd")]), r"content\[0\].url must be http:// or"),
    "an image with words": (chat([Part("image", text="x", data=b"x")]), r"content\[0\] is an image and has a text"),
    "a plain prompt": (Generate("m", prompt="x", images=[PNG]), "images need messages, not prompt or tokens"),
    "nobody asks": (
        Generate("m", messages=[ChatMessage("system", "x")], images=[PNG]),
        "images go to the last user message, and there is none",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not(name: str) -> None:
    request, words = BAD[name]
    problem = check_generate(request)
    assert problem is not None
    assert problem.code is ErrorCode.BAD_REQUEST
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(problem.message)


LOADS = {
    "max_images": ({"max_images": -1}, "max_images must be 0 to 1024, got -1"),
    "max_image_bytes": ({"max_image_bytes": 2**40}, f"max_image_bytes must be 1 to {limits.MAX_FRAME_BYTES}, got"),
    "max_image_pixels": ({"max_image_pixels": 0}, "max_image_pixels must be 1 to 1000000000, got 0"),
    "image_max_side": ({"image_max_side": 10}, "image_max_side must be 28 to 65536, got 10"),
    "image_dirs": ({"image_dirs": ["pictures"]}, "image_dirs[0] must be an absolute path"),
    "many image_dirs": ({"image_dirs": ["/p"] * 65}, "image_dirs holds at most 64 directories, got 65"),
}


@pytest.mark.parametrize("name", LOADS)
def test_limits_of_a_load(name: str) -> None:
    fields, words = LOADS[name]
    problem = check_load(Load("m", "/m", **fields))
    assert problem is not None
    assert words in problem.message


def test_a_load_may_turn_pictures_off_or_ask_for_a_shrink() -> None:
    assert check_load(Load("m", "/m", max_images=0, image_max_side=800, image_dirs=["/p"], image_urls=True)) is None
