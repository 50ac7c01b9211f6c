"""Who gets a place in the memory budget, who makes room, and who is refused. Pure.

`advance(ledger, event, now, rules)` gives the next ledger and the effects, in order. What holds after every event:
the shares held never add up to more than the budget; a busy or pinned model is never evicted; a share is free only
once its process is gone; whoever waits is granted or refused by its deadline.
"""

from __future__ import annotations

import msgspec

from .placement_values import (
    Asked,
    Busy,
    Effect,
    Event,
    Evict,
    Gone,
    Grant,
    Idle,
    Leaves,
    Ledger,
    Loaded,
    Phase,
    Place,
    Pressure,
    Refuse,
    Rules,
    Sampled,
    Starts,
)

Decision = tuple[Ledger, tuple[Effect, ...]]


def advance(ledger: Ledger, event: Event, now: float, rules: Rules) -> Decision:
    """The next ledger and what to do."""
    ledger = _ease(_take(ledger, event, now), now, rules)
    effects: list[Effect] = []
    for step in (_expire, _relieve, _serve):
        ledger, more = step(ledger, now, rules)
        effects += more
    return ledger, tuple(effects)


def next_at(ledger: Ledger, now: float, rules: Rules) -> float | None:
    """When `Tick` may have something to do; None: not by time alone."""
    times: list[float] = []
    waiting = any(p.phase is Phase.WAITING for p in ledger.places)
    for place in ledger.places:
        if place.phase is Phase.WAITING:
            times.append(place.since + rules.queue_s)
        elif _may_leave(place):
            if place.ttl_s is not None:
                times.append(place.used_at + place.ttl_s)
            if waiting and place.since + rules.min_residency_s > now:
                times.append(place.since + rules.min_residency_s)
    if ledger.easing_since is not None:
        times.append(ledger.easing_since + rules.calm_s)
    return min(times, default=None)


def candidates(ledger: Ledger) -> list[Place]:
    """The models that may make room, the least recently used first."""
    return sorted((p for p in ledger.places if _may_leave(p)), key=lambda p: p.used_at)


def never_fits(place: Place, ledger: Ledger, rules: Rules) -> str | None:
    """Why a model could not be placed even if all that may leave had left; None if it could."""
    pinned = [p for p in ledger.holding if p.pinned and p.name != place.name]
    for bound, most, group in bounds(place.group, rules):
        if len(holders := [p for p in pinned if group in ("", p.group)]) >= most:
            return (
                f"model {place.name!r} has no place: {bound} is {most}, and pinned models hold all of it "
                f"({', '.join(p.name for p in holders)}); raise it, or unload one of them"
            )
    if rules.budget is None:
        return None
    taken = sum(p.share for p in pinned)
    if place.share <= rules.budget - taken:
        return None
    beside = f", and pinned models hold {size(taken)} of it ({_names(pinned)})" if pinned else ""
    return (
        f"model {place.name!r} needs {size(place.share)}, and memory.budget is {size(rules.budget)}{beside}; "
        "raise the budget, or make it smaller by a context_limit, a memory_limit, kv_bits or a quantised checkpoint"
    )


def bounds(group: str, rules: Rules) -> list[tuple[str, int, str]]:
    """What bounds the number of workers beside one of this group: its key, the bound, and whose they are; "": all."""
    found: list[tuple[str, int, str]] = []
    if rules.max_loaded is not None:
        found.append(("memory.max_loaded", rules.max_loaded, ""))
    if group in rules.groups:
        found.append((f"memory.groups.{group}.max_loaded", rules.groups[group], group))
    return found


def size(count: int) -> str:
    """Bytes for a person."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


# ---- what happened --------------------------------------------------------------------------------------


def _take(ledger: Ledger, event: Event, now: float) -> Ledger:
    match event:
        case Asked(place):
            if ledger.place(place.name) is not None:
                return ledger
            asked = msgspec.structs.replace(place, phase=Phase.WAITING, since=now)
            return msgspec.structs.replace(ledger, places=(*ledger.places, asked))
        case Starts(name):
            place = ledger.place(name)
            if place is None or place.phase is not Phase.RESIDENT:
                return ledger
            return _change(ledger, name, phase=Phase.LOADING, since=now)
        case Loaded(name):
            return _change(ledger, name, phase=Phase.RESIDENT, since=now, used_at=now)
        case Leaves(name):
            place = ledger.place(name)
            if place is None or place.phase in (Phase.WAITING, Phase.LEAVING):
                return ledger
            return _change(ledger, name, phase=Phase.LEAVING, since=now)
        case Gone(name):
            return msgspec.structs.replace(ledger, places=tuple(p for p in ledger.places if p.name != name))
        case Busy(name):
            return _change(ledger, name, busy=True)
        case Idle(name):
            return _change(ledger, name, busy=False, used_at=now)
        case Sampled(free, pressure):
            return _sampled(msgspec.structs.replace(ledger, free=free), pressure, now)
        case _:
            return ledger


def _change(ledger: Ledger, name: str, **changes: object) -> Ledger:
    places = tuple(msgspec.structs.replace(p, **changes) if p.name == name else p for p in ledger.places)
    return msgspec.structs.replace(ledger, places=places)


def _sampled(ledger: Ledger, pressure: Pressure, now: float) -> Ledger:
    """Pressure rises at once, and falls when it has been lower for a while (`_ease`)."""
    if pressure > ledger.pressure:
        ceiling = ledger.held if ledger.pressure is Pressure.NORMAL else ledger.ceiling
        return msgspec.structs.replace(ledger, pressure=pressure, easing_since=None, ceiling=ceiling)
    if pressure == ledger.pressure:
        return msgspec.structs.replace(ledger, easing_since=None)
    return msgspec.structs.replace(ledger, easing_since=now) if ledger.easing_since is None else ledger


def _ease(ledger: Ledger, now: float, rules: Rules) -> Ledger:
    """One level less, once the host has said so long enough."""
    if ledger.easing_since is None or now < ledger.easing_since + rules.calm_s:
        return ledger
    lower = Pressure(ledger.pressure - 1)
    again = now if lower is not Pressure.NORMAL else None
    return msgspec.structs.replace(ledger, pressure=lower, easing_since=again)


# ---- what follows ---------------------------------------------------------------------------------------


def _expire(ledger: Ledger, now: float, rules: Rules) -> tuple[Ledger, list[Effect]]:
    """Idle models whose time is up leave; waiting ones whose time is up are refused."""
    effects: list[Effect] = []
    for place in ledger.places:
        if _may_leave(place) and place.ttl_s is not None and now >= place.used_at + place.ttl_s:
            ledger = _leave(ledger, place, now, f"idle for {now - place.used_at:.0f} s", effects)
        elif place.phase is Phase.WAITING and now >= place.since + rules.queue_s:
            ledger = _take(ledger, Gone(place.name), now)
            effects.append(Refuse(place.name, why_waiting(place, ledger, now, rules)))
    return ledger, effects


def _relieve(ledger: Ledger, now: float, rules: Rules) -> tuple[Ledger, list[Effect]]:
    """Under critical pressure idle models leave, one after the other, residency or not."""
    effects: list[Effect] = []
    leaving = any(p.phase is Phase.LEAVING for p in ledger.places)
    if ledger.pressure is Pressure.CRITICAL and not leaving and (idle := candidates(ledger)):
        ledger = _leave(ledger, idle[0], now, "the host is critically short of memory", effects)
    return ledger, effects


def _serve(ledger: Ledger, now: float, rules: Rules) -> tuple[Ledger, list[Effect]]:
    """Those who wait, the first first. Who can only wait lets others pass that need no room made."""
    effects: list[Effect] = []
    reserved: list[Place] = []
    for place in ledger.places:
        if place.phase is not Phase.WAITING:
            continue
        if (message := never_fits(place, ledger, rules)) is not None:
            ledger = _take(ledger, Gone(place.name), now)
            effects.append(Refuse(place.name, message))
        elif ledger.pressure is Pressure.CRITICAL:
            continue
        elif _fits(_lacks(place, ledger, rules, reserved, ())):
            ledger = _change(ledger, place.name, phase=Phase.LOADING, since=now)
            effects.append(Grant(place.name))
        elif place.busy and (victims := _victims(place, ledger, now, rules, reserved)) is not None:
            reserved.append(place)  # what is being freed is for this one
            for victim in victims:
                ledger = _leave(ledger, victim, now, f"{place.name} needs its room", effects)
    return ledger, effects


_Lack = tuple[int, int, int]
"""Bytes of the budget, workers, bytes of the host that are missing; nothing if not above 0."""


def _lacks(place: Place, ledger: Ledger, rules: Rules, reserved: list[Place], without: tuple[Place, ...]) -> _Lack:
    """What a model lacks to be placed beside those that hold a place, and the reserved ones, if some were gone."""
    names = {p.name for p in without}
    holding = [p for p in ledger.holding if p.name not in names] + reserved
    held = sum(p.share for p in holding)
    budget = slots = host = 0
    for _, most, group in bounds(place.group, rules):
        slots = max(slots, sum(group in ("", p.group) for p in holding) + 1 - most)
    if rules.budget is not None:
        budget = held + place.share - rules.budget
    if ledger.pressure is not Pressure.NORMAL:
        budget = max(budget, held + place.share - ledger.ceiling)
    if ledger.free is not None:
        promised = sum(p.need for p in holding if p.phase in (Phase.LOADING, Phase.WAITING))
        freed = sum(p.need for p in without)
        host = place.need + promised - ledger.free - freed
    return budget, slots, host


def _fits(lack: _Lack) -> bool:
    return max(lack) <= 0


def _victims(
    place: Place, ledger: Ledger, now: float, rules: Rules, reserved: list[Place]
) -> tuple[Place, ...] | None:
    """Whom to evict beside those that leave already, the least recently used first; None: it would not be enough."""
    gone = tuple(p for p in ledger.places if p.phase is Phase.LEAVING)
    chosen: tuple[Place, ...] = ()
    for candidate in candidates(ledger):
        if _fits(_lacks(place, ledger, rules, reserved, gone + chosen)):
            break
        if now >= candidate.since + rules.min_residency_s:
            chosen = (*chosen, candidate)
    if not _fits(_lacks(place, ledger, rules, reserved, gone + chosen)):
        return None
    for candidate in chosen:  # a small one that did not matter after all stays
        rest = tuple(p for p in chosen if p is not candidate)
        if _fits(_lacks(place, ledger, rules, reserved, gone + rest)):
            chosen = rest
    return chosen


def _may_leave(place: Place) -> bool:
    return place.phase is Phase.RESIDENT and not place.busy and not place.pinned


def _leave(ledger: Ledger, place: Place, now: float, why: str, effects: list[Effect]) -> Ledger:
    effects.append(Evict(place.name, why))
    return _change(ledger, place.name, phase=Phase.LEAVING, since=now)


# ---- words ----------------------------------------------------------------------------------------------


def why_waiting(place: Place, ledger: Ledger, now: float, rules: Rules) -> str:
    """Why a model has no place, with all numbers and the remedy."""
    words = [f"model {place.name!r} waited {now - place.since:.0f} s for {size(place.share)}"]
    if rules.budget is not None:
        words.append(f"memory.budget is {size(rules.budget)}, of which {size(ledger.held)} are held")
    words += [f"{bound} is {most}" for bound, most, _ in bounds(place.group, rules)]
    if holders := [_holder(p, now, rules) for p in ledger.holding]:
        words.append("loaded are " + ", ".join(holders))
    if ledger.free is not None and place.need > ledger.free:
        words.append(f"the host has {size(ledger.free)} free, and its load is predicted to take {size(place.need)}")
    if ledger.pressure is not Pressure.NORMAL:
        words.append(f"the host reports memory pressure ({ledger.pressure.name.lower()})")
    return "; ".join(words) + ". Try again later, unload a model, or raise memory.budget"


def _holder(place: Place, now: float, rules: Rules) -> str:
    if place.phase is not Phase.RESIDENT:
        state = place.phase.value
    elif place.busy:
        state = "busy"
    elif place.pinned:
        state = "pinned"
    elif now < place.since + rules.min_residency_s:
        state = f"loaded {now - place.since:.0f} s ago, minimum residency {rules.min_residency_s:g} s"
    else:
        state = "idle"
    return f"{place.name} with {size(place.share)} ({state})"


def _names(places: list[Place]) -> str:
    return ", ".join(f"{p.name} {size(p.share)}" for p in places)
