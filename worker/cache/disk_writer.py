"""Owns the thread that writes prefixes: whole files under their names or none, and room made for them first.

Nothing of MLX runs here: the bytes were copied into host memory before.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from .disk_file import Draft

TEMPORARY: Final = ".part"


class Writer:
    """Writes one draft after the other into a folder of at most `max_bytes`."""

    def __init__(self, folder: Path, max_bytes: int, fault: Callable[[str, Path, Exception], None]) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._fault = fault
        self._drafts: queue.SimpleQueue[tuple[Draft, str, list[str]] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread: threading.Thread | None = None
        self._written = 0
        self.changed = False
        """Set after a file was written; the reader of the folder clears it."""

    def wait(self, seconds: float) -> bool:
        """Whether nothing is being written, at the latest in so many seconds."""
        return self._idle.wait(seconds)

    def hand_over(self, draft: Draft, name: str, replaced: list[str]) -> None:
        """Write a draft under a name; the files that it replaces go afterwards."""
        self._idle.clear()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="prefixes", daemon=True)
            self._thread.start()
        self._drafts.put((draft, name, replaced))

    def close(self, seconds: float) -> None:
        """Let what was handed over be written, if it takes no longer than so many seconds."""
        if self._thread is not None:
            self._drafts.put(None)
            self._thread.join(seconds)

    def _run(self) -> None:
        while (job := self._drafts.get()) is not None:
            try:
                self._write(*job)
            except Exception as error:
                self._fault("cannot write a prefix to", self._folder, error)
            finally:
                del job  # a draft is as large as a cache
                self._idle.set()

    def _write(self, draft: Draft, name: str, replaced: list[str]) -> None:
        self._written += 1
        aside = self._folder / f".{name}.{os.getpid()}.{self._written}{TEMPORARY}"
        try:
            header = draft.header()
            size = len(header) + draft.size
            if size > self._max_bytes:
                return
            self._make_room(size)
            draft.write(aside, header)
            os.replace(aside, self._folder / name)
            self._sync_folder()
        finally:
            with contextlib.suppress(FileNotFoundError):
                aside.unlink()
        for other in replaced:
            with contextlib.suppress(OSError):
                (self._folder / other).unlink()
        self.changed = True

    def _make_room(self, size: int) -> None:
        """Remove the files that were used longest ago, until so many bytes fit."""
        files: list[tuple[int, int, str]] = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    files.append((status.st_mtime_ns, status.st_size, entry.name))
        total = sum(file[1] for file in files)
        for _, freed, name in sorted(files):
            if total + size <= self._max_bytes:
                return
            if name.endswith((".safetensors", TEMPORARY)):
                with contextlib.suppress(FileNotFoundError):
                    (self._folder / name).unlink()
                total -= freed

    def _sync_folder(self) -> None:
        descriptor = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
