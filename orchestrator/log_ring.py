"""The last lines of a worker's stdout and stderr, bounded, and the same on disk, bounded too."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from pathlib import Path

MAX_LINES = 400
MAX_LINE_BYTES = 4096
MAX_FILE_BYTES = 4 * 1024 * 1024


class LogRing:
    """Takes raw bytes of a pipe, keeps whole lines. A line over 4 KiB is cut and marked so."""

    def __init__(self, path: Path | None = None) -> None:
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._partial = bytearray()
        self._dropping = False
        self._path = path

    def feed(self, data: bytes) -> None:
        """Add what was read from the pipe."""
        *ended, rest = data.split(b"\n")
        for piece in ended:
            self._extend(piece)
            self._end_line()
        self._extend(rest)

    def close(self) -> None:
        """End the last line, if the process ended within one."""
        if self._partial:
            self._end_line()

    def tail(self, count: int = 10) -> list[str]:
        """The last lines, oldest first."""
        lines = list(self._lines)
        if self._partial:
            lines.append(self._partial.decode("utf-8", "replace"))
        return lines[-count:]

    def _extend(self, piece: bytes) -> None:
        room = MAX_LINE_BYTES - len(self._partial)
        self._partial += piece[:room]
        self._dropping = self._dropping or len(piece) > room

    def _end_line(self) -> None:
        line = self._partial.decode("utf-8", "replace") + (" …[cut]" if self._dropping else "")
        self._partial.clear()
        self._dropping = False
        self._lines.append(line)
        self._write(line)

    def _write(self, line: str) -> None:
        if self._path is None:
            return
        with contextlib.suppress(OSError):  # a full disk must not stop the orchestrator
            if self._path.exists() and self._path.stat().st_size > MAX_FILE_BYTES:
                os.replace(self._path, self._path.with_suffix(".old.log"))
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(line + "\n")
