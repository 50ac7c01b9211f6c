"""Whatever the bytes, `decode` gives a message or a `FrameError`, quickly and in little memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_bulkhead.protocol import codec

from .samples import NAMED, REQUEST_ID
from .strategies import messages

BODIES = {name: codec.encode_body(message) for name, message in NAMED.items()}


def survives(parts: list[bytes]) -> None:
    """Decode; let only a `FrameError` pass, and see that its head was read if it could be."""
    refused: codec.FrameError | None = None
    try:
        frame = codec.decode(parts)
    except codec.FrameError as error:
        refused = error
    else:
        assert isinstance(frame.message, codec.KINDS[frame.kind])
    if refused is not None and len(parts) == 2 and len(parts[0]) == codec.HEAD_BYTES:
        assert refused.kind == parts[0][0]
        assert refused.request_id == parts[0][1:]


@given(st.lists(st.binary(max_size=64), max_size=4))
def test_random_parts(parts: list[bytes]) -> None:
    survives(parts)


@given(st.sampled_from(sorted(codec.KINDS)), st.binary(max_size=200))
def test_random_bodies_under_a_good_head(kind: int, body: bytes) -> None:
    survives([codec.head_of(kind, REQUEST_ID), body])


@pytest.mark.parametrize("name", list(BODIES))
def test_every_truncation(name: str) -> None:
    kind = codec.kind_of(type(NAMED[name]))
    for end in range(len(BODIES[name])):
        with pytest.raises(codec.FrameError):
            codec.decode([codec.head_of(kind, REQUEST_ID), BODIES[name][:end]])


@given(st.data(), messages)
def test_mutated_frames(data: st.DataObject, message: codec.Message) -> None:
    body = bytearray(codec.encode_body(message))
    for _ in range(data.draw(st.integers(1, 4))):
        where = data.draw(st.integers(0, len(body) - 1))
        body[where] = data.draw(st.integers(0, 255))
    survives([codec.head_of(codec.kind_of(type(message)), REQUEST_ID), bytes(body)])


@given(messages, messages)
def test_a_body_under_another_kinds_head(one: codec.Message, other: codec.Message) -> None:
    kind = codec.kind_of(type(other))
    body = codec.encode_body(one)
    if type(one) is type(other):
        assert codec.decode([codec.head_of(kind, REQUEST_ID), body]).message == one
    else:
        with pytest.raises(codec.FrameError):
            codec.decode([codec.head_of(kind, REQUEST_ID), body])


@given(messages, st.binary(min_size=1, max_size=20))
def test_trailing_bytes_are_refused(message: codec.Message, tail: bytes) -> None:
    with pytest.raises(codec.FrameError):
        codec.decode([codec.head_of(codec.kind_of(type(message)), REQUEST_ID), codec.encode_body(message) + tail])


_ARGS = b"\x82\xa5model\xa1x\xadtemplate_args"
_FIELD = b"\x82\xa5model\xa1x\xa7unknown"

NASTY = {
    "deep array": _ARGS + b"\x81\xa1a" + b"\x91" * 1_000_000 + b"\x01",
    "deep map": _ARGS + b"\x81\xa1a" * 1_000_000 + b"\x01",
    "deep unknown field": _FIELD + b"\x91" * 1_000_000 + b"\x01",
    "huge array": _ARGS + b"\x81\xa1a\xdd\xff\xff\xff\xff",
    "huge map": _ARGS + b"\xdf\xff\xff\xff\xff",
    "huge string": _ARGS + b"\x81\xa1a\xdb\xff\xff\xff\xff",
    "huge bytes": _ARGS + b"\x81\xa1a\xc6\xff\xff\xff\xff",
    "huge extension": _ARGS + b"\x81\xa1a\xc9\xff\xff\xff\xff\x01",
    "huge typed array": b"\x82\xa5model\xa1x\xa6tokens\xdd\xff\xff\xff\xff",
    "huge unknown field": _FIELD + b"\xdd\xff\xff\xff\xff",
    "nested huge arrays": _ARGS + b"\x81\xa1a" + b"\xdd\x7f\xff\xff\xff" * 500,
    "map as a key": _ARGS + b"\x81\xa1a\x81\x80\x01",
    "array that holds a map as a key": _ARGS + b"\x81\xa1a\x81\x91\x80\x01",
    "timestamp out of range": _ARGS + b"\x81\xa1a\xc7\x0c\xff\x00\x00\x00\x00\x7f" + b"\xff" * 7,
    "timestamp of wrong length": _ARGS + b"\x81\xa1a\xc7\x03\xff\x00\x00\x00",
    "invalid UTF-8": _ARGS + b"\x81\xa1a\xa3\xed\xa0\x80",
    "reserved byte": _ARGS + b"\x81\xa1a\xc1",
    "an array as the body": b"\x90",
    "a number as the body": b"\x05",
    "nothing": b"",
}


@pytest.mark.parametrize("name", list(NASTY))
@pytest.mark.timeout(5)
def test_nasty_bodies(name: str) -> None:
    with pytest.raises(codec.FrameError):
        codec.decode([codec.head_of(0x02, REQUEST_ID), NASTY[name]])
