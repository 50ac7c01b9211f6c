"""The text side of one request: detokenizer, channels and stop scanner joined, and the replay of a resumed row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...protocol.values import Channel, ToolCall
from .channels import Piece, RawCall, Splitter
from .detokenize import Detokenizer
from .stops import StopScanner

NONE: Sequence[Piece] = ()


@dataclass(frozen=True, slots=True)
class Channels:
    """What splits an answer, and what parses its tool calls."""

    splitter: Splitter
    parse: Callable[[Sequence[RawCall]], tuple[list[ToolCall], str]]


class TextStream:
    """Implements `base.TextOut`. Stop strings are looked for in the content only."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        silent: frozenset[int],
        channels: Channels | None = None,
        blind: str = "",
    ) -> None:
        """`blind`: why tool calls are not looked for, although the request has tools."""
        self._detokenizer = detokenizer
        self._scanner = StopScanner(stops) if stops else None
        self._silent = silent  # end-of-sequence tokens have no text
        self._channels = channels
        self._blind = blind
        self._quiet: str | None = ""  # the text so far, while none of it is in a channel
        self._skip: dict[Channel, int] = {}
        self._waiting: list[Piece] = []
        self._ended = False

    def replay(self, tokens: Sequence[int], content: int, reasoning: int = 0, tool_calls: int = 0) -> None:
        """Take tokens of an earlier incarnation, of whose text so many characters a channel were already sent.

        The rest, if there is any, leaves with the next token. Sampling may differ from here on, so
        the count goes on into new text if the old tokens do not make up for it.
        """
        sent: tuple[tuple[Channel, int], ...] = (
            ("content", content),
            ("reasoning", reasoning),
            ("tool_calls", tool_calls),
        )
        self._skip = {channel: count for channel, count in sent if count}
        self._waiting = [piece for token in tokens for piece in self._next(token)]

    def push(self, token: int) -> Sequence[Piece]:
        if self._ended:
            return NONE
        pieces = self._next(token)
        if self._waiting:
            pieces, self._waiting = [*self._waiting, *pieces], []
        self._ended = self.stopped
        return pieces

    def finish(self) -> Sequence[Piece]:
        if self._ended:
            return NONE
        self._ended = True
        rest = self._detokenizer.finish()
        pieces: list[Piece] = [("content", rest)] if rest else []
        if self._channels is not None:
            pieces = [*self._split(self._channels, rest), *self._channels.splitter.finish()]
            if self._quiet and not pieces:  # nothing but marks: better these than an empty answer
                pieces = [("content", self._quiet)]
        if self._scanner is not None:
            pieces = [*self._scan(pieces), *([("content", self._scanner.flush())])]
        pieces, self._waiting = [*self._waiting, *self._unsent(pieces)], []
        return [piece for piece in pieces if piece[1]]

    def calls(self) -> tuple[list[ToolCall], str]:
        """The tool calls so far, and what is wrong with them."""
        if self._channels is None or not self._channels.splitter.calls:
            return [], self._blind
        return self._channels.parse(self._channels.splitter.calls)

    @property
    def stopped(self) -> bool:
        return self._scanner is not None and self._scanner.stopped

    def _next(self, token: int) -> Sequence[Piece]:
        if token in self._silent or self.stopped:
            return NONE
        text = self._detokenizer.push(token)
        if not text:
            return NONE
        pieces: Sequence[Piece]
        pieces = (("content", text),) if self._channels is None else self._split(self._channels, text)
        if self._scanner is not None:
            pieces = self._scan(pieces)
        return self._unsent(pieces) if self._skip else pieces

    def _split(self, channels: Channels, text: str) -> Sequence[Piece]:
        pieces = channels.splitter.feed(text)
        if self._quiet is not None:
            self._quiet = None if pieces else self._quiet + text
        return pieces

    def _scan(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Pieces up to a stop string."""
        assert self._scanner is not None  # asked before
        out: list[Piece] = []
        for channel, text in pieces:
            if channel == "content":
                text = self._scanner.feed(text)
            elif held := self._scanner.flush():  # the content is interrupted: what it ends with is no stop string
                out.append(("content", held))
            if text:
                out.append((channel, text))
            if self._scanner.stopped:
                break
        return out

    def _unsent(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Without what was sent before. All of it stays in place, so that the channels keep their order."""
        out: list[Piece] = []
        for channel, text in pieces:
            skipped = min(self._skip.get(channel, 0), len(text))
            if skipped:
                self._skip[channel] -= skipped
            if text := text[skipped:]:
                out.append((channel, text))
        return out
