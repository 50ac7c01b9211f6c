"""`bulkhead tap`: a live copy of the frames between the daemon and its workers, for looking into trouble."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from ...protocol import codec
from ...protocol.events import Heartbeat
from ...protocol.exit_codes import CliExit
from .common import Json, RunDir, connect, note, run_dir_of

MAX_LINE_CHARS = 300
HEARTBEAT = bytes([codec.kind_of(Heartbeat)])
VEILED = frozenset(
    {"prompt", "text", "content", "messages", "tokens", "resume_tokens", "template_args", "tools", "arguments"}
    | {"data", "path", "url", "images"}
)
"""Fields, at any depth, that hold what people and models wrote."""


def tap(
    model: Annotated[str | None, typer.Option("--model", help="Only frames of this model.")] = None,
    text: Annotated[bool, typer.Option("--text", help="Show prompts and answers too.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Show heartbeats too.")] = False,
    json: Json = False,
    run_dir: RunDir = None,
) -> int:
    """Print frames as they pass, until Ctrl-C or the daemon's end.

    Of prompts and answers only the sizes, unless --text is given. Heartbeats are left out, unless --all is given.
    """
    from ..client_io import watch_tap
    from ..run_dir import socket_path
    from ..tap import TAP_SOCKET

    connect(run_dir).close()  # for the words that say there is no daemon
    path = socket_path(run_dir_of(run_dir), TAP_SOCKET)
    note(f"watching {path}; Ctrl-C ends")
    for direction, name, head, body in watch_tap(path):
        whose = name.decode("utf-8", "replace")
        if model not in (None, whose) or (head[:1] == HEARTBEAT and not everything):
            continue
        _show(direction.decode(), whose, head, body, text=text, json=json)
    return CliExit.OK


def _show(direction: str, model: str, head: bytes, body: bytes, *, text: bool, json: bool) -> None:
    import msgspec

    fields = _fields(body)
    if not text:
        fields = veiled(fields)
    kind = head[0] if head else 0
    cls = codec.KINDS.get(kind)
    record = {
        "time": time.time(),
        "direction": direction,
        "model": model,
        "kind": cls.__name__ if cls is not None else f"0x{kind:02x}",
        "request": head[1:].hex(),
        "bytes": len(body),
        "body": fields,
    }
    if json:
        line = msgspec.json.encode(record, enc_hook=repr).decode()
    else:
        clock = time.strftime("%H:%M:%S") + f"{record['time'] % 1:.3f}"[1:]
        line = f"{clock} {direction:<3} {model} {record['kind']} {head[1:5].hex()} {len(body)}B {fields}"
        line = line if len(line) <= MAX_LINE_CHARS else line[:MAX_LINE_CHARS] + "…"
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _fields(body: bytes) -> dict[str, Any]:
    """A body of any version, read by the reference library without our types."""
    import msgpack

    try:
        value = msgpack.unpackb(body, strict_map_key=False, raw=False, unicode_errors="replace")
    except Exception as error:  # a junk frame is what one looks for here
        return {"unreadable": str(error)}
    if not isinstance(value, Mapping):
        return {"content": value}  # nobody knows what; never shown without --text
    return {str(key): item for key, item in value.items() if key != "type"}


def veiled(value: Any) -> Any:
    """A value with the texts in it reduced to their sizes; all else as it is."""
    if isinstance(value, Mapping):
        return {str(key): _size(item) if key in VEILED else veiled(item) for key, item in value.items()}
    return [veiled(item) for item in value] if isinstance(value, list) else value


def _size(value: Any) -> Any:
    for kind, unit in ((str, "characters"), (bytes, "bytes"), ((list, Mapping), "items")):
        if isinstance(value, kind):
            return f"<{len(value)} {unit}>"
    return value if value is None else "<a value>"
