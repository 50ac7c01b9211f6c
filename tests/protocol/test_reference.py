"""Frames are plain MessagePack: the reference package reads what we write, and we read what it writes."""

from __future__ import annotations

from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given
from mlx_bulkhead.protocol import codec

from .samples import NAMED
from .strategies import messages


def as_map(message: codec.Message) -> dict[str, Any]:
    """The plain map that a message stands for."""
    return msgspec.to_builtins(message, builtin_types=(bytes,))


def check_both_ways(message: codec.Message) -> None:
    kind = codec.kind_of(type(message))
    body = codec.encode_body(message)
    plain = msgpack.unpackb(body, strict_map_key=False)
    assert plain == as_map(message)
    assert plain["type"] == kind
    assert codec.decode_body(kind, codec.NO_REQUEST, msgpack.packb(plain)) == message
    assert codec.decode_body(kind, codec.NO_REQUEST, body) == message


@pytest.mark.parametrize("name", list(NAMED))
def test_samples_round_trip_with_the_reference_package(name: str) -> None:
    check_both_ways(NAMED[name])


@given(messages)
def test_any_message_round_trips_with_the_reference_package(message: codec.Message) -> None:
    check_both_ways(message)


def test_the_type_may_be_left_out() -> None:
    """The head already says it; but a type that contradicts the head is refused."""
    kind = codec.kind_of(type(NAMED["Unload.minimal"]))
    plain = as_map(NAMED["Unload.minimal"])
    del plain["type"]
    assert codec.decode_body(kind, codec.NO_REQUEST, msgpack.packb(plain)) == NAMED["Unload.minimal"]
    with pytest.raises(codec.FrameError, match="type"):
        codec.decode_body(kind, codec.NO_REQUEST, msgpack.packb({**plain, "type": kind + 1}))
