"""What a caller sees of a request: `Snap` and `Result`, and the `Assembler` that builds them from events.

Pure: no sockets, no clock. The assembler is the receiving end of `protocol.grammar`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..protocol import grammar
from ..protocol.codec import kind_of
from ..protocol.errors import BulkheadError, ProtocolMismatch, error_for
from ..protocol.events import Accepted, Done, Failed, Progress, Snapshot
from ..protocol.grammar import GrammarError, RequestState
from ..protocol.values import Channel, FinishReason, Phase, Speculation, Timings, ToolCall, Usage

StreamEvent = Accepted | Progress | Snapshot | Done | Failed
_KINDS = {cls: kind_of(cls) for cls in (Accepted, Progress, Snapshot, Done, Failed)}


class _Text:
    """Append-only text of one channel. Joined on demand, so that a stream nobody reads whole stays linear."""

    __slots__ = ("_joined", "chars", "parts")

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.chars = 0
        self._joined = (0, "")  # swapped as one object: snaps are read in other threads

    def append(self, text: str) -> None:
        self.parts.append(text)
        self.chars += len(text)

    def upto(self, count: int) -> str:
        """The text of the first `count` parts."""
        done, text = self._joined
        if count == done:
            return text
        if count < done:  # an old snap, read late
            return "".join(self.parts[:count])
        text += "".join(self.parts[done:count])
        self._joined = (count, text)
        return text

    def whole(self) -> str:
        return self.upto(len(self.parts))


class _Texts:
    """The text of all channels."""

    __slots__ = ("content", "reasoning", "tool_calls")

    def __init__(self) -> None:
        self.content = _Text()
        self.reasoning = _Text()
        self.tool_calls = _Text()

    def of(self, channel: Channel) -> _Text:
        return getattr(self, channel)


class Snap:
    """The state of a request at one moment. `text` is all so far, `new_text` what came since the last snap.

    The same goes for `reasoning`, and for `tool_text`, which is what the model wrote to call tools.

    `tokens` are the ids new since the last snap; `logprobs` and `top_logprobs` have one entry for each of them if the
    request asks for that, else none. `processed` and `total` count prompt tokens in the phase
    prefill, or whatever the phase counts; `total` 0 means unknown.
    """

    __slots__ = (
        "_parts",
        "_texts",
        "logprobs",
        "new_reasoning",
        "new_text",
        "new_tool_text",
        "phase",
        "processed",
        "tokens",
        "top_logprobs",
        "total",
        "usage",
    )

    def __init__(
        self,
        texts: _Texts,
        *,
        new_text: str,
        new_reasoning: str,
        new_tool_text: str,
        tokens: list[int],
        logprobs: list[float],
        top_logprobs: list[dict[int, float]],
        usage: Usage,
        phase: Phase,
        processed: int,
        total: int,
    ) -> None:
        self._texts = texts
        self._parts = (len(texts.content.parts), len(texts.reasoning.parts), len(texts.tool_calls.parts))
        self.new_text = new_text
        self.new_reasoning = new_reasoning
        self.new_tool_text = new_tool_text
        self.tokens = tokens
        self.logprobs = logprobs
        self.top_logprobs = top_logprobs
        self.usage = usage
        self.phase: Phase = phase
        self.processed = processed
        self.total = total

    @property
    def text(self) -> str:
        """All content so far."""
        return self._texts.content.upto(self._parts[0])

    @property
    def reasoning(self) -> str:
        """All reasoning so far."""
        return self._texts.reasoning.upto(self._parts[1])

    @property
    def tool_text(self) -> str:
        """All that was written to call tools so far, marks included."""
        return self._texts.tool_calls.upto(self._parts[2])

    def __repr__(self) -> str:
        return f"Snap(phase={self.phase!r}, new_text={self.new_text!r}, tokens={len(self.tokens)})"


@dataclass(frozen=True, slots=True)
class Result:
    """How a request ended well."""

    text: str
    reasoning: str
    tokens: list[int]
    """Ids generated, in order."""
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    engine: str
    """The engine that really served the request."""
    fallback_reason: str
    restarts: int
    """Workers that the request survived."""
    request_id: str
    """Hexadecimal."""
    logprobs: list[float] = field(default_factory=list[float])
    """One for each token, if the request asks for them."""
    top_logprobs: list[dict[int, float]] = field(default_factory=list[dict[int, float]])
    """For each token the likeliest ids at its place, likeliest first, if the request asks for them."""
    tool_calls: list[ToolCall] = field(default_factory=list[ToolCall])
    """The tools that the answer asks to call."""
    tool_text: str = ""
    """How the model wrote that, marks included."""
    tool_error: str = ""
    """What of it could not be parsed, or names no given tool."""
    adapter: str = ""
    """The adapter that served the request. Empty: the base model."""
    speculation: Speculation | None = None
    """What speculative decoding did for it, if it had a part in it."""


class Assembler:
    """Builds the views of one request from its events.

    After `closed`, exactly one of `result` and `error` is set and further events are ignored. `progress` says
    whether a `Progress` is worth a snap; it may be changed at any time.
    """

    def __init__(self, request_id: bytes, *, progress: bool = False) -> None:
        self.request_id = request_id
        self.progress = progress
        self.result: Result | None = None
        self.error: BulkheadError | None = None
        self.phase: Phase = "queued"
        self._state = RequestState.NEW
        self._texts = _Texts()
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._top_logprobs: list[dict[int, float]] = []
        self._tokens_arrived = 0  # of the stream as sent now; behind len(_tokens) after a rewind
        self._processed = 0
        self._total = 0
        self._prompt_tokens = 0

    @property
    def closed(self) -> bool:
        return self._state is RequestState.CLOSED

    @property
    def text(self) -> str:
        """All content so far."""
        return self._texts.content.whole()

    @property
    def usage(self) -> Usage:
        """Tokens counted so far; the prompt's once prefill has said its total."""
        return Usage(prompt_tokens=self._prompt_tokens, completion_tokens=len(self._tokens))

    def rewind(self) -> None:
        """The stream will be sent again from its start (`Attach`); what is known already will be cut."""
        if not self.closed:
            self._state = RequestState.NEW
            self._tokens_arrived = 0

    def fail(self, error: BulkheadError) -> None:
        """End the request with an error of the receiver's own. No-op once closed."""
        if not self.closed:
            error.request_id = self.request_id.hex()
            self.error = error
            self._state = RequestState.CLOSED

    def feed(self, event: StreamEvent) -> Snap | None:
        """Take one event. Gives a snap when there is something new to show. Never raises for a bad stream:
        that closes the request with a `ProtocolMismatch` in `error`."""
        if self.closed:
            return None
        try:
            after = grammar.advance(self._state, _KINDS[type(event)])
        except GrammarError as error:
            self.fail(ProtocolMismatch(f"the stream broke its grammar: {error}"))
            return None
        match event:
            case Snapshot():
                self._state = after
                return self._snapshot(event)
            case Progress():
                self._state = after
                return self._progress(event)
            case Accepted():
                self._state = after
            case Done():
                self._done(event)
            case Failed():
                self.fail(error_for(event.code, event.message))
        return None

    def _progress(self, event: Progress) -> Snap | None:
        self.phase = event.phase
        if event.total:  # a keep-alive has no figures; those of the last prefill stay
            self._processed, self._total = event.processed, event.total
        if event.phase == "prefill" and not self._prompt_tokens:  # a resumed prefill has the answer so far in it
            self._prompt_tokens = event.total
        return self._snap("content", "", [], [], []) if self.progress else None

    def _snapshot(self, event: Snapshot) -> Snap | None:
        channel = self._texts.of(event.channel)
        text = event.text
        if event.offset != channel.chars:
            overlap = channel.chars - event.offset
            if overlap < 0:
                self.fail(
                    ProtocolMismatch(
                        f"{-overlap} characters of the {event.channel} channel are missing: "
                        f"snapshot {event.seq} starts at {event.offset}, {channel.chars} are here"
                    )
                )
                return None
            if channel.whole()[event.offset : event.offset + len(text)] != text[:overlap]:
                self.fail(
                    ProtocolMismatch(f"snapshot {event.seq} contradicts text sent before its offset {event.offset}")
                )
                return None
            text = text[overlap:]
        for extra in (event.logprobs, event.top_logprobs):
            if extra and len(extra) != len(event.tokens):
                self.fail(
                    ProtocolMismatch(f"snapshot {event.seq} has {len(event.tokens)} tokens and {len(extra)} logprobs")
                )
                return None
        known = len(self._tokens) - self._tokens_arrived
        self._tokens_arrived += len(event.tokens)
        tokens = event.tokens[known:] if known else event.tokens
        if not text and not tokens:
            return None
        self.phase = "decode"
        self._tokens += tokens
        logprobs, tops = event.logprobs[known:], event.top_logprobs[known:]
        self._logprobs += logprobs
        self._top_logprobs += tops
        if text:
            channel.append(text)
        return self._snap(event.channel, text, tokens, logprobs, tops)

    def _snap(
        self,
        channel: Channel,
        text: str,
        tokens: list[int],
        logprobs: list[float],
        tops: list[dict[int, float]],
    ) -> Snap:
        return Snap(
            self._texts,
            new_text=text if channel == "content" else "",
            new_reasoning=text if channel == "reasoning" else "",
            new_tool_text=text if channel == "tool_calls" else "",
            tokens=tokens,
            logprobs=logprobs,
            top_logprobs=tops,
            usage=self.usage,
            phase=self.phase,
            processed=self._processed,
            total=self._total,
        )

    def _done(self, event: Done) -> None:
        if event.chars != (chars := self._texts.content.chars):
            self.fail(ProtocolMismatch(f"the text has {chars} characters, the sender counted {event.chars}"))
            return
        self.result = Result(
            text=self._texts.content.whole(),
            reasoning=self._texts.reasoning.whole(),
            tokens=list(self._tokens),
            finish_reason=event.finish_reason,
            usage=event.usage,
            timings=event.timings,
            engine=event.engine,
            fallback_reason=event.fallback_reason,
            restarts=event.restarts,
            request_id=self.request_id.hex(),
            logprobs=list(self._logprobs),
            top_logprobs=list(self._top_logprobs),
            tool_calls=list(event.tool_calls),
            tool_text=self._texts.tool_calls.whole(),
            tool_error=event.tool_error,
            adapter=event.adapter,
            speculation=event.speculation,
        )
        self._state = RequestState.CLOSED
