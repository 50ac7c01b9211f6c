"""Heads, limits, evolution: what the codec takes, refuses and skips."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_bulkhead.protocol import codec, limits
from mlx_bulkhead.protocol.commands import Cancel, Generate, Models
from mlx_bulkhead.protocol.errors import ErrorCode
from mlx_bulkhead.protocol.events import Snapshot

from .samples import NAMED, REQUEST_ID
from .strategies import plain


def pack(message_type: str, **fields: Any) -> list[bytes]:
    """A frame made by the reference package."""
    kind = next(kind for kind, cls in codec.KINDS.items() if cls.__name__ == message_type)
    return [bytes([kind]) + REQUEST_ID, msgpack.packb({"type": kind, **fields})]


def test_encode_and_decode_agree() -> None:
    frame = codec.decode(codec.encode(Cancel(), REQUEST_ID))
    assert frame == (0x03, REQUEST_ID, Cancel())


def test_request_ids_are_fresh_and_never_the_empty_one() -> None:
    ids = {codec.new_request_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert {len(one) for one in ids} == {codec.ID_BYTES}
    assert codec.NO_REQUEST not in ids


@pytest.mark.parametrize("length", [0, 1, 15, 17])
def test_encode_refuses_an_id_of_another_length(length: int) -> None:
    with pytest.raises(ValueError, match=f"16 bytes, this one has {length}"):
        codec.encode(Models(), bytes(length))


@pytest.mark.parametrize("count", [0, 1, 3, 10])
def test_wrong_part_counts(count: int) -> None:
    with pytest.raises(codec.FrameError, match=f"2 parts, this one has {count}") as caught:
        codec.decode([bytes(codec.HEAD_BYTES)] * count)
    assert caught.value.request_id is None


@pytest.mark.parametrize("length", [0, 1, 16, 18, 1000])
def test_wrong_head_lengths(length: int) -> None:
    with pytest.raises(codec.FrameError, match=f"17 bytes, this one has {length}"):
        codec.decode([bytes(length), b"\x80"])


def test_unknown_kinds_can_be_told_from_junk() -> None:
    for kind in set(range(256)) - set(codec.KINDS):
        with pytest.raises(codec.UnknownKind, match=f"0x{kind:02x}") as caught:
            codec.decode([bytes([kind]) + REQUEST_ID, b"\xc1 not MessagePack"])
        assert caught.value.kind == kind
        assert caught.value.request_id == REQUEST_ID
        assert caught.value.code is ErrorCode.PROTOCOL


@given(st.dictionaries(st.text(min_size=1).map("new_".__add__), plain, max_size=4))
def test_unknown_fields_are_skipped(extra: dict[str, Any]) -> None:
    frame = codec.decode(pack("Snapshot", **extra, seq=1, offset=2, text="x"))
    assert frame.message == Snapshot(seq=1, offset=2, text="x")


def test_a_newer_message_is_understood() -> None:
    """Fields that a later version adds, at the top and inside nested values, change nothing here."""
    newer = msgpack.unpackb(codec.encode_body(NAMED["Done.full"]))
    newer["acceptance"] = {"ratio": 0.5, "cycles": 10}
    newer["usage"]["drafted_tokens"] = 7
    newer["timings"]["draft_ms"] = 1.5
    frame = codec.decode(pack("Done", **{key: value for key, value in newer.items() if key != "type"}))
    assert frame.message == NAMED["Done.full"]


def test_an_older_message_is_understood() -> None:
    """A peer that knows required fields only gets defaults for the rest."""
    frame = codec.decode(pack("Generate", model="tiny", prompt="Hello"))
    assert frame.message == Generate(model="tiny", prompt="Hello")


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"max_tokens": "10"}, "max_tokens"),
        ({"max_tokens": 10.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 2**64 - 1, "seed": "x"}, "seed"),
        ({"temperature": "0.7"}, "temperature"),
        ({"temperature": False}, "temperature"),
        ({"stop": 5}, "stop"),
        ({"stop": [5]}, r"stop\[0\]"),
        ({"tokens": [1, "2"]}, r"tokens\[1\]"),
        ({"logit_bias": {"7": 1.0}}, "logit_bias"),
        ({"logit_bias": {7: None}}, "logit_bias"),
        ({"messages": [{"role": "user", "content": 5}]}, r"messages\[0\].content"),
        ({"messages": [{"role": None, "content": "x"}]}, r"messages\[0\].role"),
        ({"messages": [{"content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, r"messages\[0\].content\[0\]"),
        ({"messages": "Hi"}, "messages"),
        ({"on_crash": "retry"}, "on_crash"),
        ({"model": 5}, "model"),
    ],
)
def test_an_ill_typed_field_is_named(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(codec.FrameError, match=where) as caught:
        codec.decode(pack("Generate", **{"model": "tiny", **fields}))
    assert caught.value.request_id == REQUEST_ID, "it can be answered"
    assert caught.value.code is ErrorCode.BAD_REQUEST


@pytest.mark.parametrize(
    "request_",
    [
        Generate(model="tiny", prompt="a\ud800b"),
        Generate(model="\udfff"),
        Generate(model="tiny", stop=["\ud83d"]),
        Generate(model="tiny", template_args={"x": ["\ud800"]}),
    ],
)
def test_lone_surrogates_are_refused_by_the_sender(request_: Generate) -> None:
    with pytest.raises(codec.FrameError, match="lone surrogate at character"):
        codec.encode(request_)


@pytest.mark.parametrize("bad", [b"\xed\xa0\x80", b"\xff", b"\xc3(", b"\xf0\x9f\x92"])
def test_invalid_utf8_is_refused_by_the_receiver(bad: bytes) -> None:
    body = b"\x81\xa5model" + bytes([0xA0 + len(bad)]) + bad
    with pytest.raises(codec.FrameError, match="UTF-8"):
        codec.decode([b"\x05" + REQUEST_ID, body])


def test_what_cannot_be_encoded_is_a_frame_error() -> None:
    endless: dict[str, Any] = {}
    endless["self"] = endless
    for value in (object(), endless, 2**70):
        with pytest.raises(codec.FrameError, match="cannot encode Generate"):
            codec.encode(Generate(model="tiny", template_args={"x": value}))


def test_the_frame_limit_holds_at_both_ends() -> None:
    whole = limits.MAX_FRAME_BYTES
    empty = len(codec.encode_body(Generate(model="tiny", prompt="x" * 100_000))) - 100_000
    fitting = Generate(model="tiny", prompt="x" * (whole - empty))
    body = codec.encode_body(fitting)
    assert len(body) == whole
    assert codec.decode_body(0x02, REQUEST_ID, body) == fitting
    with pytest.raises(codec.FrameTooLarge, match=f"{whole + 1} bytes; the limit of a frame is {whole}"):
        codec.encode_body(Generate(model="tiny", prompt="x" * (whole - empty + 1)))
    with pytest.raises(codec.FrameTooLarge, match=f"{whole + 1} bytes is over the limit of {whole}") as caught:
        codec.decode([b"\x02" + REQUEST_ID, bytes(whole + 1)])
    assert caught.value.request_id == REQUEST_ID
    assert caught.value.code is ErrorCode.TOO_LARGE
