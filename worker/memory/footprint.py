"""Measures the memory of this whole process, as the operating system charges it.

On macOS that is the physical footprint, which counts Metal's buffers; the resident size does not. On Linux it is the
resident size, which takes microseconds to read: the proportional one would walk all pages, while the model waits.
"""

from __future__ import annotations

import ctypes
import os
import sys

import psutil

# <sys/resource.h>: flavour 4 of proc_pid_rusage fills a struct of a 16-byte UUID and 64-bit counters;
# ri_phys_footprint is the eighth counter.
_RUSAGE_FLAVOUR = 4
_UUID_BYTES = 16
_FOOTPRINT_INDEX = 7
_STRUCT_BYTES = 512  # more than any flavour so far; the kernel writes only what flavour 4 has

_process = psutil.Process()


def footprint() -> int:
    """Bytes of this process, 0 when the system does not tell. Cheap enough for once a second."""
    if sys.platform == "darwin":
        return _mac_footprint(os.getpid())
    return _process.memory_info().rss


def give_back() -> None:
    """Let the C library return what it keeps of freed memory, where it can be told to."""
    if sys.platform != "linux":
        return
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):  # another C library than glibc
        return


def _mac_footprint(pid: int) -> int:
    buffer = (ctypes.c_uint8 * _STRUCT_BYTES)()
    try:
        failed = ctypes.CDLL(None).proc_pid_rusage(pid, _RUSAGE_FLAVOUR, ctypes.byref(buffer))
    except (OSError, AttributeError):
        return 0
    if failed:
        return 0
    return ctypes.c_uint64.from_buffer(buffer, _UUID_BYTES + 8 * _FOOTPRINT_INDEX).value
