"""What travels between clients, orchestrator and worker: messages, bytes, limits, codes.

This package imports the standard library and msgspec only. `docs/protocol.md` is its prose twin.
"""

from .codec import PROTOCOL_VERSION, Frame, FrameError, decode, encode

__all__ = ["PROTOCOL_VERSION", "Frame", "FrameError", "decode", "encode"]
