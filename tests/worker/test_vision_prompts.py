"""Which prompt a chat with pictures gets: places of pictures, the recovery table row by row, keys of the cache."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from mlx_bulkhead.protocol.commands import Generate
from mlx_bulkhead.protocol.errors import ErrorCode
from mlx_bulkhead.protocol.values import ChatMessage, Part
from mlx_bulkhead.worker.engines.base import Refused
from mlx_bulkhead.worker.vision.places import has_images, place
from mlx_bulkhead.worker.vision.prepare import media_keys
from mlx_bulkhead.worker.vision.recovery import Asked, Attempt, has_tool_history, is_bad, settle

IMAGE = {"type": "image"}
TEXT = {"type": "text", "text": "what?"}
TURNS = [{"role": "user", "content": [IMAGE, TEXT]}]
PLAIN = [{"role": "user", "content": "what?"}]
TOOL_TURNS = [*TURNS, {"role": "tool", "content": "7", "tool_call_id": "a"}]
ERROR = ValueError("the template's own words")
DUMP = f"<user>{[IMAGE, TEXT]}"


def unused() -> str | None:
    raise AssertionError("the library's prompt is not to be asked for")


# The recovery table.


def test_a_good_text_is_used() -> None:
    for turns, images in ((TURNS, 1), (PLAIN, 0), (TOOL_TURNS, 1)):
        assert settle(Attempt("<user><image>what?"), Asked(turns, images, True), unused) == "<user><image>what?"


def test_an_error_without_pictures_or_tool_history_is_the_templates() -> None:
    with pytest.raises(ValueError, match="own words"):
        settle(Attempt(error=ERROR), Asked(PLAIN, 0, True), unused)


BAD = [Attempt(""), Attempt("  \n"), Attempt(None), Attempt(7), Attempt(DUMP), Attempt(error=ERROR)]


@pytest.mark.parametrize("attempt", BAD)
@pytest.mark.parametrize("images", [0, 1])
@pytest.mark.parametrize("turns", [TOOL_TURNS, [*TURNS, {"role": "assistant", "tool_calls": [{}]}]])
def test_a_history_of_tools_is_never_lost(attempt: Attempt, images: int, turns: Any) -> None:
    with pytest.raises(Refused, match="without losing the history of tools"):
        settle(attempt, Asked(turns, images), unused)


@pytest.mark.parametrize("attempt", BAD)
def test_tools_and_controls_are_never_dropped(attempt: Attempt) -> None:
    expected = "own words" if attempt.error else "would drop the tools or the controls of reasoning"
    with pytest.raises((Refused, ValueError), match=expected):
        settle(attempt, Asked(TURNS, 1, extras=True), unused)


@pytest.mark.parametrize("attempt", BAD)
def test_with_pictures_alone_the_librarys_prompt_is_used(attempt: Attempt) -> None:
    assert settle(attempt, Asked(TURNS, 1), lambda: "<img>what?") == "<img>what?"


def fails() -> str | None:
    raise KeyError("no such model")


@pytest.mark.parametrize("attempt", BAD)
@pytest.mark.parametrize(
    ("registered", "words"),
    [(fails, "fails too: 'no such model'"), (lambda: None, "has no prompt of its own"), (lambda: " ", "is as bad")],
)
def test_where_that_does_not_help_the_first_error_stands(attempt: Attempt, registered: Any, words: str) -> None:
    with pytest.raises((Refused, ValueError), match="own words" if attempt.error else words):
        settle(attempt, Asked(TURNS, 1), registered)


@pytest.mark.parametrize("attempt", [attempt for attempt in BAD if attempt.error is None])
def test_a_bad_text_without_pictures_is_an_error(attempt: Attempt) -> None:
    if attempt.text == DUMP:
        return  # nothing of pictures is in these turns
    with pytest.raises(Refused, match="gives no usable prompt") as caught:
        settle(attempt, Asked(PLAIN, 0), unused)
    assert caught.value.code is ErrorCode.UNSUPPORTED


# What is a bad text.


@pytest.mark.parametrize(
    "text",
    [
        str(IMAGE),
        str([IMAGE, TEXT]),
        json.dumps(IMAGE),
        json.dumps([IMAGE, TEXT]),
        json.dumps(IMAGE, separators=(",", ":")),
    ],
)
def test_media_written_as_data_is_bad(text: str) -> None:
    assert is_bad(f"<user>{text}</user>", TURNS)


def test_media_that_the_user_quotes_is_not() -> None:
    quoted = [{"role": "user", "content": [IMAGE, {"type": "text", "text": f"why {IMAGE}?"}]}]
    assert not is_bad(f"<user><image>why {IMAGE}?", quoted)
    assert is_bad(f"<user>{IMAGE}why {IMAGE}?", quoted)
    assert not is_bad(f"<user>why {IMAGE}?", [{"role": "user", "content": f"why {IMAGE}?"}])


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        (PLAIN, False),
        ([{"role": "tool", "content": "7"}], True),
        ([{"role": "assistant", "tool_calls": [{"id": "a"}]}], True),
        ([{"role": "assistant", "tool_calls": []}], False),
        ([{"role": "user", "content": "x", "tool_call_id": "a"}], True),
    ],
)
def test_history_of_tools(turns: Any, expected: bool) -> None:
    assert has_tool_history(turns) is expected


# Places of pictures.


def chat(*contents: Any, images: list[Part] | None = None) -> Generate:
    return Generate("m", messages=[ChatMessage(role, content) for role, content in contents], images=images or [])


ONE, TWO = Part("image", data=b"1"), Part("image", data=b"2")
PLACE = Part("image")


def test_pictures_without_places_go_before_the_last_user_message() -> None:
    request = chat(
        ("user", "first"), ("assistant", "yes"), ("user", "what?"), ("assistant", "well"), images=[ONE, TWO]
    )
    before = copy.deepcopy(request)
    assert request.messages is not None
    messages, pictures = place(request.messages, request.images)
    assert pictures == [ONE, TWO]
    assert messages[2].content == [PLACE, PLACE, Part("text", "what?")]
    assert [message.content for message in messages[:2]] == ["first", "yes"]
    assert request == before
    parts = chat(("user", [Part("text", "a"), Part("text", "b")]), images=[ONE])
    assert parts.messages is not None
    assert place(parts.messages, parts.images)[0][0].content == [PLACE, Part("text", "a"), Part("text", "b")]


def test_pictures_and_places_in_their_order() -> None:
    own = Part("image", data=b"own")
    request = chat(("user", [PLACE, own]), ("user", [Part("text", "x"), PLACE]), images=[ONE, TWO])
    assert request.messages is not None
    messages, pictures = place(request.messages, request.images)
    assert pictures == [ONE, own, TWO]
    assert messages == request.messages


def test_requests_with_pictures() -> None:
    assert has_images(chat(("user", "x"), images=[ONE]))
    assert has_images(chat(("user", [ONE])))
    assert not has_images(chat(("user", [Part("text", "image")])))
    assert not has_images(Generate("m", prompt="x"))


# Keys of the prompt cache.

EYE = 9
A, B = b"a" * 32, b"b" * 32


def keys(ids: list[int], *digests: bytes) -> list[int]:
    return media_keys(ids, frozenset((EYE,)), digests)


def test_keys_tell_pictures_apart_and_leave_text() -> None:
    one, other = keys([1, EYE, EYE, 2], A), keys([1, EYE, EYE, 2], B)
    assert one[0] == other[0] == 1
    assert one[3] == other[3] == 2
    assert not {*one[1:3]} & {*other[1:3]}
    assert all(2**31 <= key < 2**32 for key in one[1:3])
    assert keys([1, EYE, EYE, 2], A) == one


def test_keys_of_a_longer_chat_begin_alike() -> None:
    assert keys([1, EYE, EYE, 2, 3, EYE, 4], A, B)[:4] == keys([1, EYE, EYE, 2], A)
    assert keys([1, EYE, EYE, 2, 3, EYE, 4], A, B)[5] != keys([1, EYE, EYE, 2, 3, EYE, 4], A, A)[5]


def test_keys_of_tiles_hold_all_pictures() -> None:
    """Two runs of one picture, or three of two: which is whose is not known."""
    assert keys([1, EYE, 2, EYE, 3], A) != keys([1, EYE, 2, EYE, 3], B)
    first, second = keys([EYE, 1, EYE, 1, EYE, 1], A, A), keys([EYE, 1, EYE, 1, EYE, 1], A, B)
    assert first[0] != second[0]
    assert len({first[0], first[2], first[4]}) == 3


def test_prompts_without_a_place_or_without_an_end() -> None:
    with pytest.raises(Refused, match="no place for the images"):
        keys([1, 2], A)
    with pytest.raises(Refused, match="ends with an image"):
        keys([1, EYE], A)
