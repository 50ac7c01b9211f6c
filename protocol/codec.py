"""Bytes of a frame: `[head, body]`, where head is one kind byte and the 16-byte request id.

The head alone routes a frame. The body is MessagePack, a map whose `type` repeats the kind.
"""

from __future__ import annotations

import secrets
from typing import Final, NamedTuple, get_args

import msgspec

from .commands import AnyCommand, Command
from .errors import ErrorCode
from .events import AnyEvent, Event
from .limits import MAX_FRAME_BYTES

PROTOCOL_VERSION: Final = 1
ID_BYTES: Final = 16
HEAD_BYTES: Final = 1 + ID_BYTES
NO_REQUEST: Final = bytes(ID_BYTES)
"""Request id of frames that belong to no request, such as `Hello` and `Heartbeat`."""

Message = Command | Event

_MESSAGES: tuple[type[Message], ...] = get_args(AnyCommand) + get_args(AnyEvent)
KINDS: Final[dict[int, type[Message]]] = {int(cls.__struct_config__.tag): cls for cls in _MESSAGES}  # pyright: ignore[reportArgumentType]
"""Kind byte → message class."""

_TAGS: Final[dict[type[Message], int]] = {cls: kind for kind, cls in KINDS.items()}
_DECODERS: Final = {kind: msgspec.msgpack.Decoder(cls) for kind, cls in KINDS.items()}
_encoder = msgspec.msgpack.Encoder()


class FrameError(ValueError):
    """A frame that cannot be read. `request_id` is set when the head could be, so that it can be answered."""

    code: ErrorCode = ErrorCode.BAD_REQUEST
    """The code to answer it with."""

    def __init__(self, message: str, *, kind: int | None = None, request_id: bytes | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.request_id = request_id


class UnknownKind(FrameError):
    """A kind of a newer version: to be counted and skipped."""

    code = ErrorCode.PROTOCOL


class FrameTooLarge(FrameError):
    """A body over `MAX_FRAME_BYTES`, to be sent or received."""

    code = ErrorCode.TOO_LARGE


class Frame(NamedTuple):
    """A decoded frame."""

    kind: int
    request_id: bytes
    message: Message


def new_request_id() -> bytes:
    """A fresh random 16-byte request id."""
    return secrets.token_bytes(ID_BYTES)


def kind_of(cls: type[Message]) -> int:
    """The kind byte of a message class."""
    return _TAGS[cls]


def head_of(kind: int, request_id: bytes) -> bytes:
    """The 17-byte head for a kind and a request id."""
    return bytes((kind,)) + request_id


def encode_body(message: Message) -> bytes:
    """The body of a message. Raises `FrameError` for text with lone surrogates or a body over the limit."""
    try:
        body = _encoder.encode(message)
    except UnicodeEncodeError as error:
        raise FrameError(
            f"text is not valid Unicode: lone surrogate at character {error.start}",
            kind=_TAGS[type(message)],
        ) from None
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise FrameError(f"cannot encode {type(message).__name__}: {error}", kind=_TAGS[type(message)]) from None
    if len(body) > MAX_FRAME_BYTES:
        raise FrameTooLarge(
            f"{type(message).__name__} takes {len(body)} bytes; the limit of a frame is {MAX_FRAME_BYTES}",
            kind=_TAGS[type(message)],
        )
    return body


def encode(message: Message, request_id: bytes = NO_REQUEST) -> list[bytes]:
    """Both parts of a frame, ready for `send_multipart`."""
    if len(request_id) != ID_BYTES:
        raise ValueError(f"a request id has {ID_BYTES} bytes, this one has {len(request_id)}")
    return [head_of(_TAGS[type(message)], request_id), encode_body(message)]


def split_head(head: bytes) -> tuple[int, bytes]:
    """Kind and request id of a head. Raises `FrameError` unless it has exactly 17 bytes."""
    if len(head) != HEAD_BYTES:
        raise FrameError(f"a head has {HEAD_BYTES} bytes, this one has {len(head)}")
    return head[0], head[1:]


def decode_body(kind: int, request_id: bytes, body: bytes) -> Message:
    """The message of a body, validated. Raises `UnknownKind` or `FrameError`."""
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise UnknownKind(f"unknown kind 0x{kind:02x}", kind=kind, request_id=request_id)
    if len(body) > MAX_FRAME_BYTES:
        raise FrameTooLarge(
            f"frame of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}",
            kind=kind,
            request_id=request_id,
        )
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise FrameError(f"bad {KINDS[kind].__name__}: {error}", kind=kind, request_id=request_id) from None


def decode(parts: list[bytes]) -> Frame:
    """A frame from its two parts. Raises `FrameError`; never anything else, whatever the bytes."""
    if len(parts) != 2:
        raise FrameError(f"a frame has 2 parts, this one has {len(parts)}")
    kind, request_id = split_head(parts[0])
    return Frame(kind, request_id, decode_body(kind, request_id, parts[1]))
