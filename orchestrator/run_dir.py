"""The run directory: where it is, who holds it, what it may contain, and how a dead one is swept.

One live process holds a run directory, by an flock that the kernel drops when the process ends. Socket paths
stay under the limit of Unix sockets whatever the directory is called: see `socket_path`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ..protocol.errors import BadRequest, BulkheadError
from ..protocol.limits import SOCKET_PATH_BYTES
from .spawn import created_at, reap_stale

DAEMON_SOCKET = "daemon.sock"
TAP_SOCKET = "tap.sock"
_LOCK = "lock"
_WORKERS = "workers"
_LOGS = "logs"


class RunDirBusy(BulkheadError):
    """Another live process holds the run directory."""

    def __init__(self, path: Path, pid: int | None) -> None:
        who = f"process {pid}" if pid else "another process"
        super().__init__(
            f"run directory {path} is in use by {who}; stop it (bulkhead stop) or choose another --run-dir"
        )
        self.pid = pid


def short_base() -> Path:
    """The per-user directory for short paths. Not under TMPDIR, which is long on macOS."""
    return Path("/tmp") / f"bulkhead-{os.getuid()}"


def default_run_dir() -> Path:
    """`$BULKHEAD_RUN_DIR`, else a short per-user directory. Nothing is created."""
    if given := os.environ.get("BULKHEAD_RUN_DIR"):
        return Path(given)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and sys.platform.startswith("linux") and Path(runtime).is_dir():
        return Path(runtime) / "bulkhead"
    return short_base() / "daemon"


def _digest(text: str, length: int) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()[:length]


def socket_path(run_dir: Path, name: str) -> Path:
    """Where the socket `name` of a run directory lies: inside it, or under `short_base()` if that is too long.

    Both ends compute it alike, from the run directory's absolute path.
    """
    inside = run_dir.absolute() / name
    if len(os.fsencode(inside)) < SOCKET_PATH_BYTES:
        return inside
    return short_base() / f"s-{_digest(str(run_dir.absolute()), 16)}" / name


def worker_socket_name(model: str, incarnation: int) -> str:
    """A short, unique socket name for one incarnation of one model; model names can have 256 characters."""
    return f"w-{_digest(model, 8)}-{incarnation}.sock"


def log_path(run_dir: Path, model: str) -> Path:
    """The log file of a model's workers: readable where the name allows, always unique and short."""
    readable = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in model)[:40]
    return run_dir / _LOGS / f"{readable}-{_digest(model, 8)}.log"


def _private_dir(path: Path) -> None:
    """Make a directory that only its owner can enter. Raises `BadRequest` if it is somebody else's."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = path.stat()
    if not path.is_dir() or info.st_uid != os.getuid():
        raise BadRequest(
            f"{path} belongs to user {info.st_uid}, not to user {os.getuid()}; choose another run directory"
        )
    if info.st_mode & 0o077:
        path.chmod(0o700)


class RunDir:
    """A run directory held by this process. `close` gives it back and removes what was made in it."""

    def __init__(self, path: Path, lock: IO[str], *, temporary: bool) -> None:
        self.path = path
        self._lock = lock
        self._temporary = temporary

    @classmethod
    def hold(cls, path: Path) -> RunDir:
        """Make (0700) and lock a directory, and sweep what a dead holder left.

        Raises `RunDirBusy`, or `BadRequest` for a path that cannot be used or holds what is not ours."""
        try:
            path = path.expanduser().absolute()
            _refuse_foreign(path)
            _private_dir(path)
            lock = _try_lock(path)
            if lock is None:
                raise RunDirBusy(path, _holder(path))
            return cls._held(path, lock, temporary=False)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            shown = os.fsencode(str(path).encode("utf-8", "replace").decode())[:200].decode("utf-8", "replace")
            raise BadRequest(f"{shown!r} cannot be a run directory: {reason}") from None

    @classmethod
    def temporary(cls) -> RunDir:
        """A fresh directory under `short_base()`, for an embedded orchestrator. Sweeps those of the dead."""
        base = short_base()
        _private_dir(base)
        with _exclusive(base / "sweep.lock"):  # nobody sweeps between our mkdir and our lock
            for old in base.glob("e-*"):
                _sweep_if_dead(old)
            path = base / f"e-{secrets.token_hex(4)}"
            _private_dir(path)
            lock = _try_lock(path)
        if lock is None:
            raise RunDirBusy(path, None)
        return cls._held(path, lock, temporary=True)

    @classmethod
    def _held(cls, path: Path, lock: IO[str], *, temporary: bool) -> RunDir:
        held = cls(path, lock, temporary=temporary)
        try:
            lock.seek(0)
            lock.truncate()
            lock.write(json.dumps({"pid": os.getpid()}))
            lock.flush()
            reap_stale(path / _WORKERS)
            held._remove_sockets()
            _private_dir(path / _WORKERS)
            _private_dir(path / _LOGS)
            _private_dir(socket_path(path, DAEMON_SOCKET).parent)
        except BaseException:
            held.close()
            raise
        return held

    @property
    def daemon_socket(self) -> Path:
        return socket_path(self.path, DAEMON_SOCKET)

    def worker_socket(self, model: str, incarnation: int) -> Path:
        return socket_path(self.path, worker_socket_name(model, incarnation))

    def note_worker(self, pid: int, token: str) -> None:
        """Leave a note by which a later start can find, and verify, a worker that outlived us."""
        created = created_at(pid)
        if created is not None:
            note = {"pid": pid, "token": token, "created": created}
            with contextlib.suppress(OSError):  # a full disk: then a later start cannot find it, but its lifeline can
                (self.path / _WORKERS / f"{pid}.json").write_text(json.dumps(note))

    def forget_worker(self, pid: int) -> None:
        (self.path / _WORKERS / f"{pid}.json").unlink(missing_ok=True)

    def _remove_sockets(self) -> None:
        for folder in {self.path, socket_path(self.path, DAEMON_SOCKET).parent}:
            if folder.is_dir():
                for entry in folder.iterdir():
                    if _is_our_socket(entry):
                        entry.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the sockets, or the whole directory if it was temporary; drop the lock. Idempotent."""
        if self._lock.closed:
            return
        self._remove_sockets()
        aside = socket_path(self.path, DAEMON_SOCKET).parent
        if aside != self.path:
            shutil.rmtree(aside, ignore_errors=True)
        if self._temporary:
            shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _refuse_foreign(path: Path) -> None:
    """A directory that holds something, and was never a run directory, is somebody's: it is not taken over."""
    if path.is_dir() and not (path / _LOCK).is_file() and any(path.iterdir()):
        raise BadRequest(f"{path} is not empty and not a run directory of mlx-bulkhead; choose another one")


def _is_our_socket(entry: Path) -> bool:
    name = entry.name
    return entry.is_socket() and (name in (DAEMON_SOCKET, TAP_SOCKET) or (name[:2] == "w-" and name[-5:] == ".sock"))


def _try_lock(path: Path) -> IO[str] | None:
    lock = open(path / _LOCK, "a+", encoding="utf-8")  # noqa: SIM115 - held for the life of the process
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        return None
    return lock


def _holder(path: Path) -> int | None:
    try:
        return int(json.loads((path / _LOCK).read_text())["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    with open(path, "a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _sweep_if_dead(path: Path) -> None:
    """Remove a temporary run directory whose holder is gone; leave a live one alone."""
    if not (path / _LOCK).exists():
        shutil.rmtree(path, ignore_errors=True)
        return
    lock = _try_lock(path)
    if lock is None:
        return
    with lock:
        reap_stale(path / _WORKERS)
        shutil.rmtree(path, ignore_errors=True)
