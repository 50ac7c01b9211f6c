"""`bulkhead tap`: a live copy of the frames between the daemon and its workers, for looking into trouble."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from ...protocol import codec
from ...protocol.exit_codes import CliExit
from .common import Json, RunDir, connect, note, run_dir_of

MAX_LINE_CHARS = 300


def tap(
    model: Annotated[str | None, typer.Option("--model", help="Only frames of this model.")] = None,
    text: Annotated[bool, typer.Option("--text", help="Show prompts and answers too.")] = False,
    json: Json = False,
    run_dir: RunDir = None,
) -> int:
    """Print frames as they pass, until Ctrl-C or the daemon's end. Prompts and answers only with --text."""
    from ..client_io import watch_tap
    from ..run_dir import socket_path
    from ..tap import TAP_SOCKET

    connect(run_dir).close()  # for the words that say there is no daemon
    path = socket_path(run_dir_of(run_dir), TAP_SOCKET)
    note(f"watching {path}; Ctrl-C ends")
    for direction, name, head, body in watch_tap(path):
        if model is None or name.decode("utf-8", "replace") == model:
            _show(direction.decode(), name.decode("utf-8", "replace"), head, body, text=text, json=json)
    return CliExit.OK


def _show(direction: str, model: str, head: bytes, body: bytes, *, text: bool, json: bool) -> None:
    import msgspec

    fields = _fields(body)
    if not text:
        fields = {key: _veiled(value) for key, value in fields.items()}
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
        return {"value": value}
    return {str(key): item for key, item in value.items() if key != "type"}


def _veiled(value: Any) -> Any:
    """A value with its text and lists reduced to their sizes."""
    if isinstance(value, str) and len(value) > 0:
        return f"<{len(value)} characters>"
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if isinstance(value, list):
        return f"<{len(value)} items>"
    if isinstance(value, Mapping):
        return {str(key): _veiled(item) for key, item in value.items()}
    return value
