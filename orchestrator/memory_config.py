"""`[memory]` of the configuration, and what of it cannot work. Pure but for links of paths: the numbers are given.

Each check gives what is wrong in words that name the key, the value and the remedy, or None.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from typing import Final, Literal, NamedTuple

import msgspec

from ..protocol.commands import Load
from ..protocol.limits import MIB
from .options import closest
from .policy.ladder import Lines
from .policy.placement import bounds, size
from .policy.placement_values import Rules

MAX_S: Final = 31_536_000.0


class GroupConfig(msgspec.Struct, frozen=True):
    """`[memory.groups.NAME]`: models that name it as their `group`."""

    max_loaded: int
    """Workers of the group at once."""


class Wish(NamedTuple):
    """What a configured model asks of placement, as far as the file tells."""

    ttl_s: float | None = None
    pin: bool = False
    preload: bool = False
    group: str = ""


class MemoryConfig(msgspec.Struct, frozen=True):
    """`[memory]`: one budget for all workers of this orchestrator. Without it nobody is made to leave or wait."""

    budget: int | Literal["auto"] | None = None
    """Bytes for all workers together. `auto`: 85 % of what models can have on this machine."""
    max_loaded: int | None = None
    """Workers at once."""
    ttl_s: float | None = None
    """Idle seconds, from the end of the last request, after which a model is unloaded. Pinned ones stay."""
    min_residency_s: float = 10.0
    """A loaded model makes no room for another before that."""
    queue_s: float = 60.0
    """How long a model may wait for a place before its requests are refused."""
    working_context: int = 16_384
    """Tokens of all running requests of a model together for which it gets room; a higher `context_limit` counts."""
    host_pressure: bool = True
    """Load less, and then nothing, while the system says that it is short of memory."""
    enforce: bool | None = None
    """Take the hard steps below. None: if there is a budget."""
    drain_at: float = 0.95
    """Share of its cap at which a worker is drained and replaced. 0: off."""
    kill_at: float = 1.0
    """Share of its cap over which a worker is killed. 0: off."""
    groups: dict[str, GroupConfig] = {}
    """Bounds for some of the models, by name."""

    def active(self, ttls: Iterable[float | None]) -> bool:
        """Whether there is anything to place. `ttls`: of the models."""
        return bool(self.groups) or any(x is not None for x in (self.budget, self.max_loaded, self.ttl_s, *ttls))

    def rules(self, usable: int) -> Rules:
        """For the decider. `usable`: bytes that models can have on this machine."""
        budget = usable if self.budget == "auto" else self.budget
        return Rules(
            budget=budget,
            max_loaded=self.max_loaded,
            min_residency_s=self.min_residency_s,
            queue_s=self.queue_s,
            groups={name: group.max_loaded for name, group in self.groups.items()},
        )

    def lines(self) -> Lines | None:
        """For the hard ladder; None: off."""
        on = self.enforce if self.enforce is not None else self.budget is not None
        return Lines(drain=self.drain_at, kill=self.kill_at) if on else None


class Configured(msgspec.Struct, frozen=True):
    """A configured model, as the checks at start see it."""

    load: Load
    pinned: bool = False
    preload: bool = False
    share: int | None = None
    """What it will hold of the budget; None: cannot be told yet."""


def check_ranges(memory: MemoryConfig, models: Mapping[str, Wish]) -> str | None:
    """What needs nothing but the file."""
    ttls = {name: wish.ttl_s for name, wish in models.items()}
    if isinstance(memory.budget, int) and memory.budget < MIB:
        return (
            f'memory.budget is {memory.budget}: it must be bytes, {MIB} (1 MiB) or more, or "auto"; '
            "leave it out for no budget"
        )
    if memory.max_loaded is not None and memory.max_loaded < 1:
        return f"memory.max_loaded is {memory.max_loaded}: it must be 1 or more; leave it out for no bound"
    for name, group in memory.groups.items():
        if group.max_loaded < 1:
            return f"memory.groups.{name}.max_loaded is {group.max_loaded}: it must be 1 or more"
    times = {"memory.ttl_s": memory.ttl_s, **{f"models.{name}.ttl_s": ttl for name, ttl in ttls.items()}}
    for key, seconds in times.items():
        if seconds is not None and not (math.isfinite(seconds) and 0.01 <= seconds <= MAX_S):
            return f"{key} is {seconds:g}: it must be 0.01 to {MAX_S:.0f} seconds; leave it out to keep idle models"
    for key, low in (("min_residency_s", 0.0), ("queue_s", 0.01)):
        seconds = getattr(memory, key)
        if not low <= seconds <= 86_400:  # false for NaN too
            return f"memory.{key} is {seconds:g}: it must be {low:g} to 86400 seconds"
    if not 256 <= memory.working_context <= 2**31 - 1:
        return f"memory.working_context is {memory.working_context}: it must be 256 tokens or more"
    if memory.drain_at and not 0.5 <= memory.drain_at <= 1.0:
        return f"memory.drain_at is {memory.drain_at:g}: it must be 0.5 to 1, or 0 for never"
    if memory.kill_at and not max(0.5, memory.drain_at) <= memory.kill_at <= 2.0:
        return f"memory.kill_at is {memory.kill_at:g}: it must be {max(0.5, memory.drain_at):g} to 2, or 0 for never"
    pins = [name for name, wish in models.items() if wish.pin]
    return _of_no_use(memory, ttls.values(), pins) or _groups(memory, models) or _too_many(memory, models)


def _groups(memory: MemoryConfig, models: Mapping[str, Wish]) -> str | None:
    """Names that nothing belongs to."""
    for name, wish in models.items():
        if wish.group and wish.group not in memory.groups:
            known = f"; groups are {', '.join(memory.groups)}" if memory.groups else ""
            return (
                f"models.{name}.group is {wish.group!r}: there is no [memory.groups.{wish.group}]"
                f"{closest(wish.group, memory.groups)}{known}"
            )
    for group in memory.groups:
        if all(wish.group != group for wish in models.values()):
            return f"memory.groups.{group} is of no use: no model names it as its group"
    return None


def _too_many(memory: MemoryConfig, models: Mapping[str, Wish]) -> str | None:
    """More pinned or preloaded models than may be loaded at once, or none left for the others."""
    rules = memory.rules(0)
    for name, wish in models.items():
        for bound, most, group in bounds(wish.group, rules):
            same = {other: one for other, one in models.items() if group in ("", one.group)}
            for key, those in (
                ("pin", [other for other, one in same.items() if one.pin]),
                ("preload", [other for other, one in same.items() if one.preload]),
            ):
                if len(those) > most:
                    return f"{bound} is {most}, but {len(those)} of its models have {key}: {', '.join(those)}"
            pins = [other for other, one in same.items() if one.pin]
            if not wish.pin and len(pins) >= most:
                return f"models.{name} could never be loaded: {bound} is {most}, and {', '.join(pins)} is pinned"
    return None


def _of_no_use(memory: MemoryConfig, ttls: Iterable[float | None], pins: list[str]) -> str | None:
    """An option that something else would have to be set for: refused, rather than ignored."""
    plain = MemoryConfig()
    given = memory.budget is not None or memory.max_loaded is not None or bool(memory.groups)
    for key, useful, needs in (
        ("min_residency_s", given, "memory.budget, memory.max_loaded or memory.groups"),
        ("queue_s", given, "memory.budget, memory.max_loaded or memory.groups"),
        ("working_context", memory.budget is not None, "memory.budget"),
        ("drain_at", memory.lines() is not None, "memory.budget or memory.enforce = true"),
        ("kill_at", memory.lines() is not None, "memory.budget or memory.enforce = true"),
    ):
        if not useful and getattr(memory, key) != getattr(plain, key):
            return f"memory.{key} is of no use without {needs}"
    if pins and not memory.active(ttls):
        return f"models.{pins[0]}.pin is of no use without memory.budget, memory.max_loaded, memory.groups or a ttl_s"
    return None


def check_host(memory: MemoryConfig, models: dict[str, Configured], total: int, rules: Rules) -> str | None:
    """What needs the machine and the sizes of the models."""
    if rules.budget is None:
        return None
    if rules.budget > total:
        return f"memory.budget is {size(rules.budget)}, but this machine has {size(total)}"
    return _two_names(models) or _too_large(models, rules.budget)


def _two_names(models: dict[str, Configured]) -> str | None:
    seen: dict[str, str] = {}
    for name, model in models.items():
        path = os.path.realpath(model.load.model) if os.path.isdir(model.load.model) else model.load.model
        if (other := seen.setdefault(path, name)) != name and os.path.isdir(path):
            return (
                f"models.{other} and models.{name} are the same directory, {path}: it would be loaded twice; "
                "use one name, with adapters where they differ by those"
            )
    return None


def _too_large(models: dict[str, Configured], budget: int) -> str | None:
    pins = {name: model.share for name, model in models.items() if model.pinned and model.share is not None}
    if sum(pins.values()) > budget:
        words = ", ".join(f"{name} {size(share)}" for name, share in pins.items())
        return f"the pinned models need {size(sum(pins.values()))} ({words}), but memory.budget is {size(budget)}"
    ahead = {name: model.share for name, model in models.items() if model.preload and model.share is not None}
    if sum(ahead.values()) > budget:
        words = ", ".join(f"{name} {size(share)}" for name, share in ahead.items())
        return f"models with preload need {size(sum(ahead.values()))} ({words}), but memory.budget is {size(budget)}"
    for name, model in models.items():
        if model.share is None:
            continue
        beside = sum(share for other, share in pins.items() if other != name)
        if model.share > budget - beside:
            rest = f", of which pinned models take {size(beside)}" if beside else ""
            return (
                f"models.{name} needs {size(model.share)}, but memory.budget is {size(budget)}{rest}; raise the "
                "budget, or set its context_limit, memory_limit or kv_bits lower"
            )
    return None
