"""Bytes that a client receives for a long answer, counted at a socket of its own."""

from __future__ import annotations

import itertools

import zmq
from mlx_bulkhead.protocol import codec
from mlx_bulkhead.protocol.commands import Generate
from mlx_bulkhead.protocol.events import Done, Failed, Snapshot

from .. import streams
from ..bench import Bench
from ..measure import Figure, at_most
from ..work import text_prompt

GOAL_BYTES = 80.0


def wire(bench: Bench) -> list[Figure]:
    marks = (256, 512, 1024) if bench.quick else (2048, 4096, 8192, 16_384)
    passed = _count(bench, marks)
    pairs = itertools.pairwise((0, *marks))
    shares = [(passed[mark] - passed.get(before, 0)) / (mark - before) for before, mark in pairs]
    told = ", ".join(f"{mark:,}: {passed[mark]:,} B" for mark in marks)
    what = f"bytes received a token, answer of {marks[-1]:,} tokens, the worst part of it"
    return [at_most(what, [max(shares)], GOAL_BYTES, "B", digits=1, beside=f"after {told}")]


def _count(bench: Bench, marks: tuple[int, ...]) -> dict[int, int]:
    """Bytes of all frames up to each of some numbers of tokens."""
    passed: dict[int, int] = {}
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(f"ipc://{bench.daemon.run_dir}/daemon.sock")
        request = Generate(
            model=streams.MODEL, prompt=text_prompt(bench.seed()), max_tokens=marks[-1], temperature=0.0
        )
        socket.send_multipart(codec.encode(request, codec.new_request_id()))
        received = tokens = 0
        while True:
            parts = socket.recv_multipart()
            received += sum(len(part) for part in parts)
            message = codec.decode(parts).message
            if isinstance(message, Snapshot):
                tokens += len(message.tokens)
            for mark in marks:
                if tokens >= mark:
                    passed.setdefault(mark, received)
            if isinstance(message, Failed):
                raise RuntimeError(message.message)
            if isinstance(message, Done):
                passed[marks[-1]] = received
                return passed
