"""What the system says of memory: the one seam between the platforms and placement. Acts, but only reads.

Linux has `/proc`; macOS has sysctl and `proc_pid_rusage`, by ctypes. What a platform does not tell is None, 0 or
NORMAL, and said so in `unsupported`.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import psutil

from .policy.placement_values import Pressure

PSI = Path("/proc/pressure/memory")
CGROUP_MAX = Path("/sys/fs/cgroup/memory.max")

SOME_WARN = 10.0
"""Percent of the last ten seconds in which some task waited for memory."""
FULL_CRITICAL = 5.0
"""The same in which no task could do anything else."""

_MAC_LEVELS = {1: Pressure.NORMAL, 2: Pressure.WARN, 4: Pressure.CRITICAL}
# <sys/resource.h>: flavour 4 of proc_pid_rusage is a UUID of 16 bytes and 64-bit counters, the eighth the footprint.
_RUSAGE_FLAVOUR = 4
_RUSAGE_BYTES = 512
_FOOTPRINT_OFFSET = 16 + 8 * 7


def total() -> int:
    """Bytes of memory that this process and its children may ever have: the machine's, or its container's."""
    machine = int(psutil.virtual_memory().total)
    try:
        return min(machine, int(CGROUP_MAX.read_text()))
    except (OSError, ValueError):  # no such file, or "max"
        return machine


def usable() -> int:
    """Bytes that models may take of it together: on a Mac the GPU takes up to about three quarters."""
    return int(total() * 0.85 * (0.75 if sys.platform == "darwin" else 1.0))


def free() -> int | None:
    """Bytes that the host can give away now without swapping, as the system estimates it."""
    return int(psutil.virtual_memory().available)


def pressure() -> Pressure:
    """How short of memory the system says that it is."""
    if sys.platform == "darwin":
        return _mac_pressure()
    try:
        return psi_level(PSI.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return Pressure.NORMAL


def unsupported() -> str:
    """Why the system tells no pressure; empty if it does."""
    if sys.platform == "darwin" or PSI.exists():
        return ""
    return f"{PSI} does not exist: this kernel tells no memory pressure"


def footprint(pid: int) -> int:
    """Bytes that the system charges a process with, also one that answers nobody; 0 when it cannot say."""
    if sys.platform == "darwin":
        return _mac_footprint(pid)
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:  # a line of numbers, whatever the size of the process
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def psi_level(text: str) -> Pressure:
    """The level in what `/proc/pressure/memory` says. Raises `ValueError` for what is no such text."""
    figures: dict[str, float] = {}
    for line in text.splitlines():
        kind, _, rest = line.partition(" ")
        fields = dict(field.split("=", 1) for field in rest.split())
        figures[kind] = float(fields.get("avg10", "nan"))
    if not figures:
        raise ValueError("no pressure figures")
    if figures.get("full", 0.0) >= FULL_CRITICAL:
        return Pressure.CRITICAL
    return Pressure.WARN if figures.get("some", 0.0) >= SOME_WARN else Pressure.NORMAL


def _mac_pressure() -> Pressure:
    level, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    try:
        failed = ctypes.CDLL(None).sysctlbyname(
            b"kern.memorystatus_vm_pressure_level", ctypes.byref(level), ctypes.byref(size), None, ctypes.c_size_t(0)
        )
    except (OSError, AttributeError):
        return Pressure.NORMAL
    return Pressure.NORMAL if failed else _MAC_LEVELS.get(level.value, Pressure.NORMAL)


def _mac_footprint(pid: int) -> int:
    buffer = (ctypes.c_uint8 * _RUSAGE_BYTES)()
    try:
        failed = ctypes.CDLL(None).proc_pid_rusage(pid, _RUSAGE_FLAVOUR, ctypes.byref(buffer))
    except (OSError, AttributeError):
        return 0
    return 0 if failed else ctypes.c_uint64.from_buffer(buffer, _FOOTPRINT_OFFSET).value
