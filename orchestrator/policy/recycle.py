"""Whether a worker has served long enough and should be replaced on purpose. Pure."""

from __future__ import annotations

from ...protocol.commands import Load


def due(load: Load, *, requests: int, age_s: float, footprint: int) -> str | None:
    """Why a worker should be recycled, in words; None while it should not.

    Args:
        requests: that this incarnation has ended.
        age_s: seconds since its process was started.
        footprint: bytes of its process.
    """
    if load.recycle_requests is not None and requests >= load.recycle_requests:
        return f"{requests} requests served, limit {load.recycle_requests}"
    if load.recycle_age_s is not None and age_s >= load.recycle_age_s:
        return f"{age_s:.0f} s old, limit {load.recycle_age_s:g} s"
    if load.recycle_footprint is not None and footprint >= load.recycle_footprint:
        return f"{footprint / 2**20:.0f} MiB footprint, limit {load.recycle_footprint / 2**20:.0f} MiB"
    return None
