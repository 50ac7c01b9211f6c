"""Pictures of a request are let go with its end, and count in what is quarantined."""

from __future__ import annotations

from mlx_bulkhead.orchestrator.requests import RequestTable, _prompt_hash
from mlx_bulkhead.protocol.commands import Generate
from mlx_bulkhead.protocol.errors import ErrorCode
from mlx_bulkhead.protocol.values import ChatMessage, Part


def ask(data: bytes) -> Generate:
    return Generate("m", messages=[ChatMessage("user", "what?")], images=[Part("image", data=data)])


async def test_a_finished_request_keeps_no_picture() -> None:
    table = RequestTable(
        max_requests=8, on_closed=lambda r: None, on_proven=lambda r: None, on_deadline=lambda r: None
    )
    request = table.open(b"a" * 16, ask(b"x" * 1000))
    table.fail(request, ErrorCode.INTERNAL, "over")
    kept = table.find(b"a" * 16)
    assert kept is not None
    assert not kept.message.images
    assert kept.message.messages is None


def test_another_picture_is_another_prompt() -> None:
    assert _prompt_hash(ask(b"a")) == _prompt_hash(ask(b"a")) != _prompt_hash(ask(b"b"))
