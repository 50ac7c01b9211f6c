"""The memory budget in words, for `ps` and `stats`."""

from __future__ import annotations

from ...protocol.values import PlaceInfo, PlacementInfo
from .common import mib, span, table

HEADINGS = ["NAME", "PLACE", "SHARE", "PREDICTED", "PEAK", "IDLE", "NOTE"]
SHOWN = 5
"""Decisions that `stats` shows; all are in its JSON."""


def headline(placement: PlacementInfo) -> str:
    """One line: what is held, what is free, who would make room next."""
    parts: list[str] = []
    if placement.budget:
        parts.append(f"memory budget: {mib(placement.held)} of {mib(placement.budget)} held")
    loaded = sum(place.phase != "waiting" for place in placement.places)
    bound = f" of {placement.max_loaded}" if placement.max_loaded else ""
    parts.append(f"{loaded}{bound} loaded, {len(placement.places) - loaded} waiting")
    for group, most in placement.groups.items():
        inside = sum(place.phase != "waiting" and place.group == group for place in placement.places)
        parts.append(f"{inside} of {most} of group {group}")
    parts.append(f"host {mib(placement.host_free)} free, pressure {placement.pressure}")
    parts.append(f"next to make room: {placement.next_eviction or 'none'}")
    return ", ".join(parts)


def report(placement: PlacementInfo) -> str:
    """The whole: the line, the ledger, the last decisions."""
    lines = [headline(placement)]
    if placement.places:
        lines.append(table([_row(place) for place in placement.places], HEADINGS))
    lines += [f"  {words}" for words in placement.decisions[-SHOWN:]]
    return "\n".join(lines)


def _row(place: PlaceInfo) -> list[str]:
    notes = [word for word, on in (("pinned", place.pinned), ("busy", place.busy)) if on]
    if place.group:
        notes.append(f"group {place.group}")
    if place.waiting_s is not None:
        notes.append(f"for {span(place.waiting_s)}")
    return [
        place.name,
        place.phase,
        mib(place.share),
        mib(place.predicted),
        mib(place.peak),
        span(place.idle_s) if place.idle_s is not None else "-",
        ", ".join(notes),
    ]
