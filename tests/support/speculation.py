"""Owns what tests of speculative decoding share: pairs, a draft that guesses right, and a driver of the engine."""

from __future__ import annotations

import dataclasses
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from mlx_bulkhead.protocol.commands import Generate
from mlx_bulkhead.protocol.values import Draft
from mlx_bulkhead.worker.engines.base import PrefillOut, RowFailed, TokenOut
from mlx_bulkhead.worker.engines.dflash.engine import Speculating

from tests.support.tiny_drafts import make_draft
from tests.worker.test_engine import library, model_directory, open_tiny

ARCHITECTURES = ("qwen3", "qwen3_5", "gemma4_text")
"""Plain, recurrent and windowed caches; the last with a window of 64 tokens, which most answers here pass."""
MODES = ("adaptive", "dflash", "ddtree", "off")
LOOP = "one two three four five six seven eight nine ten " * 6
"""A text that the library copies from itself, and whose tokens it so accepts."""


@cache
def draft_directory(architecture: str) -> Path:
    return make_draft(Path(tempfile.mkdtemp(prefix="bh-model-")), model_directory(architecture))


def open_pair(architecture: str = "qwen3", load: dict[str, Any] | None = None, **draft: Any) -> Speculating:
    """The engine of the rows without an adapter."""
    draft.setdefault("cache_entries", 0)
    model = draft.pop("model", str(draft_directory(architecture)))
    whole: Any = open_tiny(architecture, draft=Draft(model, **draft), **(load or {}))
    engine = whole._base
    assert isinstance(engine, Speculating), engine.info.speculation
    return engine


@cache
def greedy(architecture: str, ids: tuple[int, ...], count: int) -> list[int]:
    """What mlx-lm generates."""
    from mlx_lm import stream_generate

    model, tokenizer = library(architecture)
    return [out.token for out in stream_generate(model, tokenizer, list(ids), max_tokens=count)]


class Oracle:
    """In place of the draft: proposes the target's own tokens, but for every `wrong`-th place in the sequence."""

    def __init__(self, engine: Speculating, wrong: int) -> None:
        self._own: Any = engine._pair.backend
        self._engine = engine
        self._wrong = wrong
        engine._pair = dataclasses.replace(engine._pair, backend=self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def draft_greedy(self, *, block_len: int, **rest: Any) -> Any:
        import mlx.core as mx

        self._own.draft_greedy(block_len=block_len, **rest)
        return mx.array(self._propose(block_len), dtype=mx.uint32)

    def draft_with_topk(self, *, block_len: int, top_width: int, **rest: Any) -> Any:
        import mlx.core as mx

        self._own.draft_with_topk(block_len=block_len, top_width=top_width, **rest)
        drafted = self._propose(block_len)
        tops = [[token, *range(2, top_width + 1)] for token in drafted]
        values = [[9.0, *[-float(i) for i in range(1, top_width)]] for _ in drafted]
        return mx.array(drafted, dtype=mx.uint32), tops, values

    def _propose(self, block_len: int) -> list[int]:
        run = self._engine._run
        assert run is not None
        assert run.live is not None
        covered, live = run._watch.covered, run.live
        ids = [*live.row.prompt, *greedy(live_architecture(self._engine), tuple(live.row.prompt), 100)]
        guess = ids[covered + 1 : covered + block_len]
        guess += [0] * (block_len - 1 - len(guess))
        places = enumerate(guess, covered + 1)
        return [token + 1 if place % self._wrong == 0 else token for place, token in places]


def live_architecture(engine: Speculating) -> str:
    return engine.info.model_type


class Hand:
    """Drives an engine row by row, and keeps each row's tokens."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.tokens: dict[str, list[int]] = {}
        self.ids: dict[str, list[int]] = {}
        self.finish: dict[str, str | None] = {}
        self.prefills: list[PrefillOut] = []

    def insert(self, name: str, prompt: str | None, **options: Any) -> None:
        options = {"max_tokens": 40, "speculative": "on", **options}
        prepared = self.engine.prepare(name.encode(), Generate(model="tiny", prompt=prompt, **options))
        self.tokens[name], self.ids[name] = [], prepared.row.prompt
        self.engine.insert(prepared.row)

    def step(self) -> None:
        for out in self.engine.step():
            assert not isinstance(out, RowFailed)
            if isinstance(out, TokenOut):
                name = out.request_id.decode()
                self.tokens[name].append(out.token)
                self.finish[name] = out.finish
            else:
                self.prefills.append(out)

    def until(self, name: str, count: int) -> None:
        while len(self.tokens[name]) < count:
            self.step()

    def finish_all(self) -> None:
        while self.engine.busy:
            self.step()

    def check(self, architecture: str) -> None:
        """All rows have the tokens of mlx-lm."""
        for name, tokens in self.tokens.items():
            assert tokens == greedy(architecture, tuple(self.ids[name]), len(tokens)), name
