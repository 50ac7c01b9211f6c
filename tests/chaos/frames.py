"""Junk frames: random, truncated, mutated, good ones in the wrong place. None is a valid order to end something."""

from __future__ import annotations

import random

from mlx_bulkhead.protocol import codec
from mlx_bulkhead.protocol.commands import Load, Restart, Shutdown, Unload
from mlx_bulkhead.protocol.events import Heartbeat

from tests.protocol.samples import FULL, MINIMAL

GOOD = [codec.encode(message, bytes(range(16))) for message in (*MINIMAL, *FULL)]
ORDERS = (Load, Restart, Shutdown, Unload, Heartbeat)
"""What would be obeyed if a mutation left it valid; a heartbeat can say that its worker is stuck."""


def junk(dice: random.Random) -> list[bytes]:
    """One frame."""
    while is_order(frame := _make(dice)):
        pass
    return frame


def junk_for(dice: random.Random, request_id: bytes) -> list[bytes]:
    """One frame under the id of a live request."""
    head, body = dice.choice(GOOD)
    return [head[:1] + request_id, dice.choice((body, _mutated(body, dice), body[: dice.randrange(len(body))]))]


def is_order(frame: list[bytes]) -> bool:
    """Whether a receiver would rightly do what it says."""
    try:
        return isinstance(codec.decode(frame).message, ORDERS)
    except codec.FrameError:
        return False


def _make(dice: random.Random) -> list[bytes]:
    head, body = dice.choice(GOOD)
    match dice.randrange(7):
        case 0:
            return [dice.randbytes(dice.randrange(40)) for _ in range(dice.randrange(1, 5))]
        case 1:
            return [head[: dice.randrange(17)], body]
        case 2:
            return [head, body[: dice.randrange(len(body))]]
        case 3:
            return [head, _mutated(body, dice)]
        case 4:
            return [bytes([dice.randrange(256)]) + dice.randbytes(16), body]
        case 5:
            return [head, dice.randbytes(dice.randrange(200))]
        case _:
            return [head[:1] + dice.randbytes(16), _mutated(body, dice)]


def _mutated(body: bytes, dice: random.Random) -> bytes:
    changed = bytearray(body)
    for _ in range(dice.randrange(1, 4)):
        changed[dice.randrange(len(changed))] = dice.randrange(256)
    return bytes(changed)
