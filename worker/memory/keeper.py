"""Keeps a worker within its memory limit: looks, asks ladder and guard, and gives back what may be given back.

It never ends a request itself; the service does, when told. Executor thread only. No MLX here: what asks MLX comes
in as `Means`.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from ...protocol.commands import Load
from ...protocol.values import LadderStats, Memory
from .ladder import Lines, Rung, Seen, State, biggest, decide, level
from .prefill_guard import Dims, Prefill, Verdict, demand, estimate, fitting_chunk, judge, superfluous

LOOK_S: Final = 0.25
"""Least time between two looks in calm times."""
CLOSE_LOOK_S: Final = 0.02
"""The same near the soft line."""
NEAR: Final = 0.9
"""Share of the soft line from which on it is near."""
RETRY_S: Final = 0.05
"""Least time between two tries to admit a request that must wait for memory."""
MOST_RUNGS: Final = 1000
"""Rungs in one visit; more than there can be kept prefixes worth dropping at once."""

_log = logging.getLogger(__name__)


class Holder(Protocol):
    """Keeps prefixes of prompts in memory, and can let go of them."""

    def __len__(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def drop_oldest(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Means:
    """What a keeper looks and acts through."""

    sample: Callable[[], Memory]
    clear: Callable[[], None]
    """Give free memory back to the system."""


class Held(NamedTuple):
    """A running request, as far as memory goes."""

    request_id: bytes
    tokens: int
    """Prompt and answer so far."""
    left: int
    """Prompt tokens still to process; 0 once it decodes."""
    done: int
    """Prompt tokens processed."""


class Keeper:
    """Watches one worker. Without a limit it only looks."""

    def __init__(
        self,
        limit: int,
        load: Load,
        means: Means,
        dims: Dims | None,
        holders: Sequence[Holder] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`limit`: bytes in force for this worker; 0: none."""
        self.holders = list(holders)
        """Those whose prefixes count as part of this worker's budget."""
        self.lines = Lines.of(limit, load.memory_soft, load.memory_hard) if limit else None
        self._rungs = frozenset(rung for rung in Rung if rung.value not in load.memory_off)
        self.dims = dims
        self._guarded = "guard" not in load.memory_off
        self._hard_share = load.memory_hard
        self.means = means
        self._clock = clock
        self._state = State()
        self._retry_at = 0.0
        self._retry_beside = 0
        self._counts = dict.fromkeys(Rung, 0)
        self._refused = 0
        self.memory = Memory()
        self.chunk = sys.maxsize
        """Tokens that one step may prefill, all prompts together: fewer where memory is tight."""

    @property
    def pause(self) -> float:
        """Seconds until the next look."""
        if self.lines is None or self.usage < self.lines.soft * NEAR:
            return LOOK_S
        return CLOSE_LOOK_S

    @property
    def usage(self) -> int:
        """Bytes at the last look: MLX's, or the whole process, whichever is more."""
        return max(self.memory.mlx_active + self.memory.mlx_cache, self.memory.footprint)

    def look(self) -> Memory:
        """Take a sample."""
        self.memory = self.means.sample()
        return self.memory

    # The ladder.

    def relieve(self, rows: Sequence[Held]) -> tuple[bytes, str] | None:
        """Take a look and whatever rungs are due. Gives the request that must fail, and why."""
        self.look()
        lines = self.lines
        if lines is None:
            return None
        for _ in range(MOST_RUNGS):
            seen = Seen(self.usage, self.memory.mlx_cache, self._entries, len(rows))
            held = self._state.holding
            self._state, rung = decide(self._state, seen, lines, self._rungs)
            if held and not self._state.holding:
                _log.info("memory is back at %s; requests start again", _mib(self.usage))
            if rung is None:
                return None
            self._count(rung)
            if rung is Rung.FAIL:
                tokens = {row.request_id: row.tokens for row in rows}
                victim = biggest(tokens)
                return victim, self._why_failed(tokens[victim], len(rows))
            self._take(rung)
        return None

    def _take(self, rung: Rung) -> None:
        match rung:
            case Rung.CLEAR:
                self.means.clear()
            case Rung.DROP:
                max(self.holders, key=lambda holder: holder.nbytes if len(holder) else -1).drop_oldest()
                self.means.clear()
            case _:
                return
        self.look()

    def _count(self, rung: Rung) -> None:
        self._counts[rung] += 1
        if rung in (Rung.WAIT, Rung.FAIL) and self.lines is not None:
            _log.warning("memory: %s in use of %s: %s", _mib(self.usage), _mib(self.lines.limit), rung.value)

    # The guard.

    def admit(self, tokens: int, rows: Sequence[Held], chunk: int) -> tuple[Verdict, str]:
        """Whether a request of so many tokens may start beside `rows`; the words belong to a refusal."""
        lines = self.lines
        if lines is None:
            return "admit", ""
        now = self._clock()
        if rows and (self._state.holding or (now < self._retry_at and len(rows) >= self._retry_beside)):
            return "wait", ""
        self._retry_at = 0.0
        dims = self.dims
        if dims is None or not self._guarded or tokens <= 0:
            return "admit", ""
        newcomer = Prefill(tokens)
        prefills = [*_prefills(rows), newcomer]
        chunk = self._fitting(dims, prefills, chunk)
        own = estimate(dims, newcomer, chunk)
        need = demand(dims, prefills, chunk)
        freed = 0
        if Rung.WAIT in self._rungs:
            freed = sum(dims.held(row.tokens) for row in rows) + self._droppable if rows else 0
        verdict = self._judge(need, freed, own.peak)
        if verdict == "admit":
            self.chunk = chunk
        elif verdict == "wait":
            self._retry_at, self._retry_beside = now + RETRY_S, len(rows)
        else:
            self._refused += 1
            return verdict, self._why_refused(f"a prompt of {tokens} tokens", need, lines)
        return verdict, ""

    def may_wait(self, beside: int) -> bool:
        """Whether a prompt that must give way can wait for one of so many others. Nothing starts before that ends."""
        if not beside or Rung.WAIT not in self._rungs:
            return False
        self._retry_at, self._retry_beside = math.inf, beside
        return True

    def lacks(self, what: str, size: int) -> str:
        """Why there is no room for something else of so many bytes, such as an adapter; empty if there is."""
        if self.lines is None or not self._guarded:
            return ""
        self._reclaim(size)
        if self._judge(size) == "admit":
            return ""
        self._refused += 1
        return (
            f"{what} takes {_mib(size)} on top of {_mib(self._current)} in use; {self._line(self.lines)}. Drop "
            "another one, wait for requests to end, or load the model with a larger memory_limit"
        )

    def recheck(self, rows: Sequence[Held], chunk: int) -> tuple[bytes, str] | None:
        """Between chunks: the prefill that must fail for the rest to go on, and why."""
        lines, dims = self.lines, self.dims
        if lines is None or dims is None or not self._guarded or not any(row.left and row.done for row in rows):
            return None
        chunk = self.chunk = self._fitting(dims, _prefills(rows), chunk)
        need = demand(dims, _prefills(rows), chunk)
        if self._judge(need) == "admit":
            return None
        unfinished = [row for row in rows if row.left]
        row = unfinished[superfluous(dims, _prefills(rows), chunk, lines.hard - self._current)]
        self._refused += 1
        what = f"a prompt of {row.left + row.done} tokens, {row.left} of them to process,"
        return row.request_id, self._why_refused(what, need, lines)

    def _reclaim(self, need: int) -> int:
        """Look, and give free memory back if there is not that much room. Gives the room that there is."""
        assert self.lines is not None
        hard = self.lines.hard
        self.look()
        if self._current + need > hard and Rung.CLEAR in self._rungs:
            self._count(Rung.CLEAR)
            self._take(Rung.CLEAR)
        return hard - self._current

    def _fitting(self, dims: Dims, prefills: Sequence[Prefill], chunk: int) -> int:
        """How many tokens at once these prompts can be given: short chunks rather than a refusal."""
        return fitting_chunk(dims, prefills, chunk, self._reclaim(demand(dims, prefills, chunk)))

    def _judge(self, need: int, freed: int = 0, alone: int = 0) -> Verdict:
        """What becomes of a prompt, once everything was given back that is not in use."""
        assert self.lines is not None
        hard = self.lines.hard
        # Prefixes go only if that makes room: a prompt that can never fit must not cost others theirs.
        while hard < self._current + need <= hard + self._droppable and self._entries:
            self._count(Rung.DROP)
            self._take(Rung.DROP)
        return judge(self._current, need, hard, freed=freed, alone=alone)

    @property
    def _current(self) -> int:
        return max(self.memory.mlx_active, self.memory.footprint)

    @property
    def _entries(self) -> int:
        return sum(map(len, self.holders))

    @property
    def _droppable(self) -> int:
        return sum(holder.nbytes for holder in self.holders) if Rung.DROP in self._rungs else 0

    # Words and figures.

    def _why_refused(self, what: str, need: int, lines: Lines) -> str:
        return (
            f"{what} needs {_mib(self._current + need)} in all: {_mib(need)} for KV cache and attention, with the "
            f"prompts in prefill, on top of {_mib(self._current)} in use; {self._line(lines)}. Shorten the prompt, "
            "wait for other requests to end, or load the model with a larger memory_limit"
        )

    def _why_failed(self, tokens: int, running: int) -> str:
        assert self.lines is not None
        return (
            f"{_mib(self.usage)} are in use and {self._line(self.lines)}; this request, with {tokens} tokens the "
            f"biggest of {running}, was ended for the others. Send fewer tokens or fewer requests at once, or load "
            "the model with a larger memory_limit"
        )

    def _line(self, lines: Lines) -> str:
        return (
            f"the hard line is {_mib(lines.hard)}, {self._hard_share:.0%} of the memory limit of {_mib(lines.limit)}"
        )

    def stats(self) -> LadderStats:
        """Where the worker stands, and how often each rung was taken."""
        if self.lines is None:
            return LadderStats()
        return LadderStats(
            level=level(self.usage, self.lines),
            holding=self._state.holding,
            clears=self._counts[Rung.CLEAR],
            drops=self._counts[Rung.DROP],
            waits=self._counts[Rung.WAIT],
            fails=self._counts[Rung.FAIL],
            refusals=self._refused,
        )


def _prefills(rows: Sequence[Held]) -> list[Prefill]:
    return [Prefill(row.left, row.done) for row in rows if row.left]


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
