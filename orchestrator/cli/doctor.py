"""`bulkhead doctor`: looks for what would keep models from running here. MLX is only imported in a child process."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, NamedTuple

from ...protocol.exit_codes import CliExit
from ...protocol.limits import SOCKET_PATH_BYTES
from .common import Json, RunDir, mib, print_json, run_dir_of

PROBE_S = 120.0
PROBE = "import mlx.core as mx; (mx.ones(8) + 1).sum().item(); print(mx.default_device())"
BLAS_PLACES = ("usr/lib/*/libopenblas.so.0", "usr/lib*/libopenblas*.so.0", "usr/local/lib/libopenblas*.so.0")
LOW_MEMORY = 2 * 1024**3
LOW_FILES = 1024


class Finding(NamedTuple):
    """One line of the report. Only `broken` makes the exit code 1."""

    check: str
    verdict: Literal["ok", "hint", "broken"]
    words: str


def doctor(json: Json = False, run_dir: RunDir = None) -> int:
    """Check Python, MLX, the run directory, sockets, BLAS and memory. Exit code 1 if something is broken."""
    findings = list(examine(run_dir_of(run_dir)))
    if json:
        print_json([finding._asdict() for finding in findings])
    else:
        for finding in findings:
            print(f"{finding.verdict:<7} {finding.check:<9} {finding.words}")
    return CliExit.FAILED if any(finding.verdict == "broken" for finding in findings) else CliExit.OK


def examine(run_dir: Path) -> Iterator[Finding]:
    """All checks, in the order of the report."""
    yield _python()
    yield _platform()
    yield _mlx()
    yield _package("mlx-lm")
    yield from _run_dir(run_dir)
    yield _daemon(run_dir)
    yield from _blas(Path("/"), os.environ.get("LD_PRELOAD", ""))
    yield _memory()
    yield _files()


def _python() -> Finding:
    words = f"{platform.python_implementation()} {platform.python_version()} at {sys.executable}"
    return Finding("python", "ok", words)  # too old a Python cannot have installed this


def _platform() -> Finding:
    words = f"{platform.system()} {platform.release()} on {platform.machine()}"
    if sys.platform == "darwin" and platform.machine() != "arm64":
        return Finding("platform", "broken", f"{words}: MLX needs Apple silicon")
    if not sys.platform.startswith(("darwin", "linux")):
        return Finding("platform", "broken", f"{words}: macOS and Linux are supported")
    return Finding("platform", "ok", words)


def _mlx() -> Finding:
    """Import and use MLX where a crash does no harm."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", PROBE], capture_output=True, text=True, timeout=PROBE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding("mlx", "broken", f"importing it takes more than {PROBE_S:g} s")
    if done.returncode != 0:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Finding("mlx", "broken", f"cannot be used: {why}")
    return Finding("mlx", "ok", f"{_version('mlx')}, {done.stdout.strip()}")


def _package(name: str) -> Finding:
    found = _version(name)
    return Finding(name, "ok", found) if found else Finding(name, "broken", f"not installed: pip install {name}")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _run_dir(run_dir: Path) -> Iterator[Finding]:
    from ..run_dir import DAEMON_SOCKET, socket_path

    if not run_dir.exists():
        yield Finding("run dir", "ok", f"{run_dir}, not made yet")
    else:
        info = run_dir.stat()
        if info.st_uid != os.getuid():
            yield Finding("run dir", "broken", f"{run_dir} belongs to user {info.st_uid}; choose another one")
        elif info.st_mode & 0o077:
            yield Finding("run dir", "hint", f"{run_dir} has mode {info.st_mode & 0o777:o}; serve makes it 700")
        else:
            yield Finding("run dir", "ok", f"{run_dir}, mode 700")
    inside = os.fsencode(run_dir.absolute() / DAEMON_SOCKET)
    if len(inside) >= SOCKET_PATH_BYTES:
        elsewhere = socket_path(run_dir, DAEMON_SOCKET)
        words = f"{len(inside)} bytes, too long for a socket; sockets are made in {elsewhere.parent}"
        yield Finding("path", "hint", words)


def _daemon(run_dir: Path) -> Finding:
    from ..client_io import why_not_there
    from ..run_dir import DAEMON_SOCKET, socket_path

    path = socket_path(run_dir, DAEMON_SOCKET)
    why = why_not_there(path)
    if not why:
        return Finding("daemon", "ok", f"listens on {path}")
    if path.exists():
        return Finding("daemon", "hint", f"{why}: a dead daemon left it, and the next serve removes it")
    return Finding("daemon", "ok", "none runs; start one with bulkhead serve")


def _blas(root: Path, preloaded: str) -> Iterator[Finding]:
    """MLX's CPU wheel has a reference BLAS inside; another one preloaded makes fp32 prefill about 3 times faster."""
    if not sys.platform.startswith("linux"):
        return
    if "blas" in preloaded.lower():
        yield Finding("blas", "ok", f"preloaded: {preloaded}")
        return
    found = next((path for place in BLAS_PLACES for path in sorted(root.glob(place))), None)
    gain = "on a CPU this makes fp32 prefill about 3 times faster"
    if found is None:
        yield Finding("blas", "hint", f"install OpenBLAS (libopenblas0) and preload it in a model's env; {gain}")
    else:
        yield Finding("blas", "hint", f'set env = {{ LD_PRELOAD = "{found}" }} for a model; {gain}')


def _memory() -> Finding:
    import psutil

    from ..host_memory import unsupported

    memory = psutil.virtual_memory()
    words = f"{mib(memory.available)} of {mib(memory.total)} free"
    if why := unsupported():
        words += f"; a memory budget is not tightened by pressure of the host: {why}"
    return Finding("memory", "hint" if memory.available < LOW_MEMORY else "ok", words)


def _files() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < LOW_FILES:
        return Finding(
            "files", "hint", f"the limit of open files is {soft}; with many clients raise it: ulimit -n 4096"
        )
    return Finding("files", "ok", f"limit of open files: {soft}")
