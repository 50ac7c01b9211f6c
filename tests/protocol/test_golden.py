"""The bytes on the wire do not change, and no field is left out of the samples that prove it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from mlx_bulkhead.protocol import codec

from .describe import described
from .make_golden import PATH, golden
from .samples import FULL, MINIMAL, NAMED, REQUEST_ID

GOLDEN: dict[str, dict[str, str]] = json.loads(PATH.read_text(encoding="ascii"))

KINDS_OF_VERSION_1 = {
    0x01: "Load",
    0x02: "Generate",
    0x03: "Cancel",
    0x04: "Stats",
    0x05: "Unload",
    0x06: "Shutdown",
    0x07: "Models",
    0x08: "Attach",
    0x09: "Restart",
    0x0A: "AddAdapter",
    0x0B: "DropAdapter",
    0x41: "Hello",
    0x42: "LoadProgress",
    0x43: "Loaded",
    0x44: "LoadFailed",
    0x45: "Accepted",
    0x46: "Progress",
    0x47: "Snapshot",
    0x48: "Done",
    0x49: "Failed",
    0x4A: "StatsReply",
    0x4B: "Heartbeat",
    0x4C: "Exiting",
    0x4D: "Unloaded",
    0x4E: "ModelsReply",
    0x4F: "AdaptersReply",
}

REQUIRED_IN_VERSION_1 = {
    "Load": ("name", "model"),
    "Generate": ("model",),
    "Unload": ("model",),
    "Attach": ("request",),
    "Restart": ("model",),
    "AddAdapter": ("model", "name", "path"),
    "DropAdapter": ("model", "name"),
    "Hello": ("protocol", "incarnation", "pid"),
    "LoadProgress": ("phase",),
    "Loaded": ("name", "info"),
    "LoadFailed": ("code", "message"),
    "Progress": ("phase",),
    "Snapshot": ("seq", "offset"),
    "Done": ("finish_reason", "usage", "timings", "engine"),
    "Failed": ("code", "message"),
    "Heartbeat": ("steps", "stats"),
    "Unloaded": ("name",),
    "AdaptersReply": ("model",),
}


@pytest.mark.parametrize("name", list(NAMED))
def test_bytes_are_the_checked_in_ones(name: str) -> None:
    assert golden()[name] == GOLDEN.get(name), "see tests/protocol/make_golden.py"


@pytest.mark.parametrize("name", list(GOLDEN))
def test_checked_in_bytes_decode_to_the_sample(name: str) -> None:
    parts = [bytes.fromhex(GOLDEN[name]["head"]), bytes.fromhex(GOLDEN[name]["body"])]
    kind, request_id, message = codec.decode(parts)
    assert message == NAMED[name]
    assert kind == codec.kind_of(type(message))
    assert request_id == REQUEST_ID


@pytest.mark.parametrize("samples", [MINIMAL, FULL])
def test_samples_cover_each_kind_once(samples: tuple[codec.Message, ...]) -> None:
    assert sorted(codec.kind_of(type(message)) for message in samples) == sorted(codec.KINDS)


@pytest.mark.parametrize("message", FULL, ids=lambda message: type(message).__name__)
def test_full_samples_set_every_field(message: codec.Message) -> None:
    sent = msgspec.to_builtins(message, builtin_types=(bytes,))
    assert sorted(sent) == sorted(["type", *type(message).__struct_fields__])


def structs_in(value: Any) -> Iterator[msgspec.Struct]:
    """A value and all Structs within it."""
    if isinstance(value, msgspec.Struct):
        yield value
        for name in value.__struct_fields__:
            yield from structs_in(getattr(value, name))
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from structs_in(one)


def test_full_samples_set_every_field_of_every_nested_value() -> None:
    missing = {cls: set(cls.__struct_fields__) for cls in described().values()}
    for struct in structs_in(FULL):
        missing[type(struct)] -= set(msgspec.to_builtins(struct, builtin_types=(bytes,)))
    assert not {cls.__name__: fields for cls, fields in missing.items() if fields}


def test_kinds_are_those_of_version_1() -> None:
    """A kind is never renumbered or used again. A new one is added to the table above."""
    assert codec.PROTOCOL_VERSION == 1
    assert {kind: cls.__name__ for kind, cls in codec.KINDS.items()} == KINDS_OF_VERSION_1
    assert len(codec.KINDS) == len(MINIMAL), "two messages share a kind"


def test_no_field_became_required() -> None:
    """A new field has a default, or old peers could not be understood any more."""
    required = {
        cls.__name__: tuple(field.name for field in msgspec.structs.fields(cls) if field.required)
        for cls in codec.KINDS.values()
    }
    assert {name: fields for name, fields in required.items() if fields} == REQUIRED_IN_VERSION_1


def test_commands_are_below_0x40_and_events_above() -> None:
    for kind, cls in codec.KINDS.items():
        assert (kind < 0x40) == issubclass(cls, codec.Command)
        assert 0 < kind < 0x80
