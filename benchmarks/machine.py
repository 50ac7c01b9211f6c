"""Says on what a table was measured: machine, versions, and the BLAS that the processes really loaded."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from importlib import metadata
from pathlib import Path

import psutil

_OTHERS = ("numpy.libs", "scipy.libs", "opencv_python.libs")


def describe(pid: int) -> list[str]:
    """Lines about this machine. `pid`: a process that runs MLX."""
    versions = ", ".join(f"{name} {_version(name)}" for name in ("mlx", "mlx-lm", "pyzmq", "msgspec"))
    return [
        f"{_cpu()}, {os.cpu_count()} cores, {psutil.virtual_memory().total / 1e9:.0f} GB, "
        f"{platform.system()} {platform.release()}",
        f"Python {platform.python_version()}, mlx-bulkhead {_version('mlx-bulkhead')}, {versions}",
        f"BLAS: {blas(pid)}",
    ]


def blas(pid: int) -> str:
    """The linear algebra library that MLX has loaded in a process. Those that other packages bring are left out."""
    if platform.system() == "Darwin":
        return "Accelerate"
    found = {path.name for path in mapped(pid) if "blas" in path.name and path.parent.name not in _OTHERS}
    return ", ".join(sorted(found)) or "none found"


def mapped(pid: int) -> set[Path]:
    """All files that a process has mapped; empty where the system does not tell."""
    maps = Path(f"/proc/{pid}/maps")
    if not maps.exists():
        return set()
    lines = (line.split(maxsplit=5) for line in maps.read_text().splitlines())
    return {Path(parts[5]) for parts in lines if len(parts) == 6 and "/" in parts[5]}


class Bystanders:
    """How much of the machine processes other than ours have used, since it was made."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._others = self._seconds()

    def cores(self) -> float:
        """On average, in cores. To be asked while our processes still live."""
        return max(0.0, (self._seconds() - self._others) / (time.monotonic() - self._began))

    @staticmethod
    def _seconds() -> float:
        """Processor seconds of everybody since the machine started, less those of this process and its children."""
        everybody = psutil.cpu_times()
        idle = everybody.idle + getattr(everybody, "iowait", 0.0)
        guests = getattr(everybody, "guest", 0.0) + getattr(everybody, "guest_nice", 0.0)
        here = psutil.Process()
        ours = 0.0
        for process in [here, *here.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                ours += times.user + times.system + times.children_user + times.children_system
        return sum(everybody) - idle - guests - ours


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.split(':', 1)[1].strip()} ({platform.machine()})"
    return platform.processor() or platform.machine()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"
