"""What the executor asks of an engine, and the values that pass between them. No MLX here.

An engine owns model, caches and decoding. The executor owns requests, text and frames. All methods of an
engine run on the executor thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ...protocol.commands import Generate
from ...protocol.errors import ErrorCode
from ...protocol.values import CacheStats, Speculation, SpeculationStats, ToolCall, WorkerInfo
from ..memory.keeper import Keeper
from ..text.channels import Piece

Report = Callable[[str, int, int], None]
"""`report(phase, done, total)`: a load moves; becomes `LoadProgress`."""


class Refused(Exception):
    """A request that this model cannot serve; becomes `Failed` before any work is done for it."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class LoadProblem(Exception):
    """A model that cannot be loaded; becomes `LoadFailed`. The message names the file and what was expected."""

    def __init__(self, message: str, code: ErrorCode = ErrorCode.LOAD_FAILED) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose tokens, ranges already checked. Temperature 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    logit_bias: dict[int, float] = field(default_factory=dict[int, float])
    repetition_penalty: float = 1.0
    repetition_window: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence to decode.

    `prompt` and `emitted` are token ids. `emitted` is what an earlier incarnation already generated: it is prefilled
    after the prompt, counts against `max_tokens`, and sampling goes on at position `len(emitted)`.
    """

    request_id: bytes
    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    emitted: list[int] = field(default_factory=list[int])
    salt: str = ""
    """Rows share prefixes with rows of the same salt only."""
    caching: bool = True
    """Whether it may use kept prefixes, and leave its own."""
    logprobs: bool = False
    """Whether its tokens come with their log probabilities, and with those of so many others: """
    top_logprobs: int = 0
    constrain: Callable[[Sequence[int]], Any] | None = None
    """Makes what keeps the answer in its form: a processor of logits, given what is generated already."""
    adapter: str = ""
    """The adapter that computes it. Empty: the base model."""
    speculative: str = "auto"
    """`on`: whatever the measured gain. `off`: never. `auto`: while it pays."""
    media: Any = None
    """Its pictures, a `sight.Media`; their tokens are in `prompt`. None: text only."""


class TokenOut(NamedTuple):
    """A token was generated. `finish` is set on the row's last one; the row is then gone from the engine."""

    request_id: bytes
    token: int
    finish: str | None
    """None, `stop` (an end-of-sequence token, which `token` is) or `length` (`max_tokens` reached)."""
    logprob: float | None = None
    """Of the token, if the row asks for it: natural, of the distribution before filters and temperature."""
    top: dict[int, float] | None = None
    """The likeliest tokens at this place, likeliest first, if the row asks for them."""


class PrefillOut(NamedTuple):
    """A prefill chunk was processed. Tokens of prompt and emitted together; `cached` were reused."""

    request_id: bytes
    processed: int
    total: int
    cached: int = 0


class RowFailed(NamedTuple):
    """Choosing a row's tokens failed. The row is gone from the engine; the others go on."""

    request_id: bytes
    message: str


StepOut = TokenOut | PrefillOut | RowFailed


class Served(NamedTuple):
    """What serves, or last served, a row."""

    engine: str
    """`text` or `vision` (alone), `batch` or `vision_batch`, or `dflash`."""
    fallback_reason: str = ""
    """Why it was not the engine that the load was made for, if it was not."""
    speculation: Speculation | None = None
    """What DFlash did for it, if it had it at all."""


class TextOut(Protocol):
    """Turns the tokens of one request into text that may be shown."""

    def push(self, token: int) -> Sequence[Piece]:
        """Text that became certain with this token, often none. After `stopped`, always none."""
        ...

    def finish(self) -> Sequence[Piece]:
        """The held-back rest, when generation ends other than by a stop string."""
        ...

    def calls(self) -> tuple[list[ToolCall], str]:
        """The tool calls so far, and what is wrong with them."""
        ...

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found. The text ends right before it."""
        ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked request: the row to decode, and its text side."""

    row: Row
    text: TextOut


class Engine(Protocol):
    """A loaded model that decodes rows."""

    info: WorkerInfo
    keeper: Keeper
    """Watches the memory of the process; its rungs reach what the engine keeps."""

    @property
    def prefill_chunk(self) -> int:
        """Tokens that its prefill processes at once, at most."""
        ...

    def prepare(self, request_id: bytes, request: Generate) -> Prepared:
        """Render, tokenise and check against the model. Raises `Refused`. Starts nothing."""
        ...

    def insert(self, row: Row) -> None:
        """Take a row; its prefill starts with a later `step`. The caller keeps to `limits.max_running`."""
        ...

    def remove(self, request_id: bytes, *, keep: bool = True) -> bool:
        """Drop a row in any phase; False when it is not here. What it has computed may be kept, or not at all."""
        ...

    def step(self) -> list[StepOut]:
        """One unit of work: a decode step for all rows, or a prefill chunk, or one of each. Blocks on the device."""
        ...

    @property
    def busy(self) -> bool:
        """Whether any row is here."""
        ...

    def next_is_prefill(self) -> bool:
        """Whether the next `step` may take long because it prefills; held text is flushed before it."""
        ...

    def served(self, request_id: bytes) -> Served:
        """Which engine serves, or last served, a row, and why."""
        ...

    def cache_stats(self) -> CacheStats:
        """What is kept of earlier prompts, and what it was good for."""
        ...

    def speculation_stats(self) -> SpeculationStats | None:
        """What speculation did so far; None where there is no draft."""
        ...

    def tend(self) -> bool:
        """A little of what can wait for an idle moment; gives whether there is more."""
        ...

    def add_adapter(self, name: str, folder: Path) -> None:
        """Add an adapter between two steps; `info` names it then. Raises `LoadProblem`, with nothing changed."""
        ...

    def drop_adapter(self, name: str) -> None:
        """Let an adapter go that no row names. Raises `Refused`."""
        ...

    def close(self) -> None:
        """Release model, caches and streams on this thread."""
        ...
