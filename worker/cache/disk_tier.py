"""Owns the prefixes on disk: one folder a model, a file a prefix, oldest out first.

The executor copies layer after layer into host memory when it has time; `disk_writer` writes
the file. Another worker may use the same folder at the same time. Nothing that goes wrong here ends a
request: it is counted, and the prefix is computed.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from . import disk_file
from .coverage import covered, layout, leaves
from .disk_file import BadFile, Draft
from .disk_writer import TEMPORARY, Writer
from .prompt_cache import Entry, count, usable

LEAST_TOKENS: Final = 32
"""Shorter prefixes are not worth a file."""

MOST_PENDING: Final = 8
"""Entries that wait to be written; older ones are given up, since each holds its cache in memory."""

LATE_S: Final = 2.0
"""After so long in the queue an entry is copied between the steps of running requests."""

_SUFFIX: Final = ".safetensors"
_STALE_S: Final = 600.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """A file that is known, without its arrays."""

    salt: str
    tokens: bytes
    plain: bool


class DiskTier:
    """The folder of one model. Executor thread only."""

    def __init__(
        self, folder: Path, key: str, max_bytes: int, make: Callable[[], list[Any]], wanted: list[Any]
    ) -> None:
        """Raises `OSError` when the folder cannot be made.

        Args:
            make: fresh caches of the model.
            wanted: the layout that they have once they are filled.
        """
        self.folder = folder / key
        self._key = key
        self._max_bytes = max_bytes
        self._make = make
        self._wanted = wanted
        self._known: dict[str, Found] = {}
        self._pending: deque[tuple[float, Entry]] = deque()
        self._draft: tuple[Draft, deque[Any]] | None = None
        self._writer = Writer(self.folder, max_bytes, self._fault)
        self.hits = self.errors = self.bytes = 0
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.chmod(self.folder, 0o700)
        self._clean()
        self.refresh()

    def stats(self) -> tuple[int, int, int, int]:
        """Files, bytes, hits and errors."""
        if self._writer.changed:
            self._writer.changed = False
            self.refresh()
        return len(self._known), self.bytes, self.hits, self.errors

    # Reading.

    def refresh(self) -> None:
        """See which files there are now: another worker may write and remove some."""
        total, names = 0, set[str]()
        try:
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    if not entry.name.endswith(_SUFFIX):
                        continue
                    with contextlib.suppress(FileNotFoundError):
                        total += entry.stat(follow_symlinks=False).st_size
                        names.add(entry.name)
        except OSError as error:
            self._fault("cannot list", self.folder, error)
            return
        self.bytes = total
        for name in self._known.keys() - names:
            del self._known[name]
        for name in names - self._known.keys():
            self._learn(name)

    def best(self, salt: str, prompt: bytes) -> tuple[str | None, int]:
        """The file that saves a prompt most, and how many tokens."""
        self.refresh()
        hashed = _hash(salt)
        best, most = None, 0
        for name, found in self._known.items():
            if found.salt == hashed and (saved := usable(found.tokens, found.plain, prompt)) > most:
                best, most = name, saved
        return best, most

    def read(self, name: str) -> tuple[list[Any], bytes] | None:
        """The cache in a file and its tokens; None when it is not to be trusted, and then it is gone."""
        path = self.folder / name
        found = self._known[name]
        cache = self._make()
        try:
            head = disk_file.read_into(path, list(leaves(cache)))
            if (head.key, head.salt, head.tokens) != (self._key, found.salt, found.tokens):
                raise BadFile("it is another prefix than a moment ago")
            if layout(cache) != self._wanted or covered(cache, count(head.tokens)) != count(head.tokens):
                raise BadFile("its caches are not this model's")
        except FileNotFoundError:  # another worker made room
            del self._known[name]
            return None
        except BadFile as error:
            self._discard(path, error)
            return None
        except OSError as error:
            self._fault("cannot read", path, error)
            del self._known[name]
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # the oldest use goes first, not the oldest prefix
        self.hits += 1
        return cache, head.tokens

    def _learn(self, name: str) -> None:
        path = self.folder / name
        try:
            head = disk_file.read_head(path)
            if head.key != self._key or name != _name(head.salt, head.tokens):
                raise BadFile("it belongs to another model or prefix")
        except FileNotFoundError:
            return
        except BadFile as error:
            self._discard(path, error)
        except OSError as error:
            self._fault("cannot read", path, error)
        else:
            self._known[name] = Found(head.salt, head.tokens, head.plain)

    def _discard(self, path: Path, error: BadFile) -> None:
        self._fault("removed", path, error)
        self._known.pop(path.name, None)
        with contextlib.suppress(OSError):
            path.unlink()

    # Writing.

    def offer(self, entry: Entry) -> None:
        """Write an entry when there is time."""
        if count(entry.tokens) < LEAST_TOKENS or _name(_hash(entry.salt), entry.tokens) in self._known:
            return
        if entry.nbytes > self._max_bytes and not entry.plain:  # a plain one is smaller once it is cut
            return
        if entry.plain:  # what it goes on from need not be written any more
            shorter = [item for item in self._pending if _continues(entry, item[1])]
            for item in shorter:
                self._pending.remove(item)
        self._pending.append((time.monotonic(), entry))
        while len(self._pending) > MOST_PENDING:
            self._pending.popleft()

    def tend(self, *, late_only: bool = False) -> bool:
        """Copy one layer of what waits; gives whether there is more to do.

        Args:
            late_only: requests run: only for what has waited long.
        """
        if self._draft is None:
            if not self._pending:
                return not late_only and not self._writer.wait(0.002)
            if late_only and time.monotonic() - self._pending[0][0] < LATE_S:
                return True
            if not self._writer.wait(0.0 if late_only else 0.002):  # one file at a time is in host memory
                return True
            _, entry = self._pending.popleft()
            salt = _hash(entry.salt)
            self._draft = Draft(self._key, salt, entry.tokens, entry.plain), deque(leaves(entry.cache))
        draft, rest = self._draft
        try:
            draft.add(rest.popleft())
        except Exception as error:
            self._draft = None
            self._fault("cannot copy a prefix for", self.folder, error)
            return bool(self._pending)
        if draft.size > self._max_bytes:
            self._draft = None
        elif not rest:
            self._draft = None
            self._hand_over(draft)
        return True

    def close(self, seconds: float) -> None:
        """Write what can be written in so many seconds. A file is whole or not there, whatever happens."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.tend():
            pass
        self._pending.clear()
        self._draft = None
        self._writer.close(max(0.0, until - time.monotonic()))

    def _hand_over(self, draft: Draft) -> None:
        """A longer plain prefix serves in place of the shorter ones."""
        name, replaced = _name(draft.salt, draft.tokens), list[str]()
        if draft.plain:
            replaced = [
                other
                for other, found in self._known.items()
                if other != name and found.salt == draft.salt and draft.tokens.startswith(found.tokens)
            ]
        self._writer.hand_over(draft, name, replaced)

    def _clean(self) -> None:
        """Remove what a worker left that ended while it wrote."""
        for path in self.folder.glob(f".*{TEMPORARY}"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _STALE_S:
                    path.unlink()

    def _fault(self, what: str, path: Path, error: Exception) -> None:
        self.errors += 1
        _log.warning("%s %s: %s: %s", what, path, type(error).__name__, error)


def _continues(longer: Entry, shorter: Entry) -> bool:
    return longer.salt == shorter.salt and longer.tokens.startswith(shorter.tokens)


def _hash(salt: str) -> str:
    """Names of tenants do not go to disk."""
    return hashlib.blake2b(salt.encode(), digest_size=16).hexdigest()


def _name(salt: str, tokens: bytes) -> str:
    return hashlib.blake2b(salt.encode() + tokens, digest_size=16).hexdigest() + _SUFFIX
