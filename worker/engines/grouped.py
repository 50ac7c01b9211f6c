"""The engine of a model: a text engine for each adapter in use, one of which computes at a step.

Without adapters there is only that of the base model, and all is left to it. They share model, prompt cache and
tokenizer. Groups that have rows take turns, so none waits for more than a step of each of the others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from ...protocol.commands import Generate
from ...protocol.values import CacheStats, SpeculationStats
from .adapters import Adapters
from .base import Prepared, Row, Served, StepOut
from .prepare import Preparer
from .text import TextEngine

if TYPE_CHECKING:  # it imports a library of its own
    from .dflash.engine import Speculating

_REMEMBERED: Final = 2048
"""Rows of which it is remembered which group served them; more than can run."""


class Groups:
    """Implements `base.Engine`."""

    def __init__(
        self,
        base: TextEngine | Speculating,
        make: Callable[[], TextEngine],
        preparer: Preparer,
        adapters: Adapters,
    ) -> None:
        """`base` serves the model without an adapter. `make` gives engines that share all but their rows with it."""
        self._make = make
        self._preparer = preparer
        self._adapters = adapters
        self._base = base
        self.info = self._base.info
        self.keeper = base.keeper
        # Whose turn is next goes first.
        self._engines: OrderedDict[str, TextEngine | Speculating] = OrderedDict({"": base})
        self._where: OrderedDict[bytes, str] = OrderedDict()

    def prepare(self, request_id: bytes, request: Generate) -> Prepared:
        adapter = self._adapters.pick(request.adapter)
        prepared = self._preparer.prepare(request_id, request)
        if not adapter:
            return prepared
        row = replace(prepared.row, adapter=adapter, salt=self._adapters.salt(adapter, request.tenant))
        return Prepared(row, prepared.text)

    def insert(self, row: Row) -> None:
        engine = self._engines.get(row.adapter)
        if engine is None:
            engine = self._engines[row.adapter] = self._make()
        self._where[row.request_id] = row.adapter
        self._where.move_to_end(row.request_id)
        while len(self._where) > _REMEMBERED:
            self._where.popitem(last=False)
        engine.insert(row)

    @property
    def prefill_chunk(self) -> int:
        return self._base.prefill_chunk

    def remove(self, request_id: bytes, *, keep: bool = True) -> bool:
        return any(engine.remove(request_id, keep=keep) for engine in self._engines.values())

    def step(self) -> list[StepOut]:
        if len(self._engines) == 1:  # the base model's, which is in force
            return self._base.step()
        name = self._next()
        if name is None:
            return []
        engine = self._engines[name]
        self._engines.move_to_end(name)
        engine.beside = any(other.busy for other in self._engines.values() if other is not engine)
        self._adapters.switch(name)
        return engine.step()

    @property
    def busy(self) -> bool:
        return self._base.busy or self._next() is not None

    def next_is_prefill(self) -> bool:
        name = self._next()
        return name is not None and self._engines[name].next_is_prefill()

    def served(self, request_id: bytes) -> Served:
        engine = self._engines.get(self._where.get(request_id, ""), self._base)
        return engine.served(request_id)

    def cache_stats(self) -> CacheStats:
        return self._base.cache_stats()

    def speculation_stats(self) -> SpeculationStats | None:
        return self._base.speculation_stats()

    def tend(self) -> bool:
        return self._base.tend()

    def add_adapter(self, name: str, folder: Path) -> None:
        self._adapters.add(name, folder)
        self._tell()

    def drop_adapter(self, name: str) -> None:
        self._adapters.drop(name)
        if isinstance(engine := self._engines.pop(name, None), TextEngine):
            engine.release()
        self._base.beside = False
        self._tell()

    def _tell(self) -> None:
        self.info = msgspec.structs.replace(self.info, adapters=self._adapters.infos)

    def close(self) -> None:
        self._adapters.switch("")
        for engine in self._engines.values():
            engine.close()

    def _next(self) -> str | None:
        """The group whose turn it is."""
        return next((name for name, engine in self._engines.items() if engine.busy), None)
