"""The text side of one request: detokenizer and stop scanner joined, and the replay of a resumed row."""

from __future__ import annotations

from collections.abc import Sequence

from .detokenize import Detokenizer
from .stops import StopScanner


class TextStream:
    """Implements `base.TextOut`."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str], silent: frozenset[int]) -> None:
        self._detokenizer = detokenizer
        self._scanner = StopScanner(stops) if stops else None
        self._silent = silent  # end-of-sequence tokens have no text
        self._skip = 0
        self._waiting = ""
        self._ended = False

    def replay(self, tokens: Sequence[int], sent_chars: int) -> None:
        """Take tokens of an earlier incarnation, of whose text the first `sent_chars` were already sent.

        The rest, if there is any, leaves with the next token. Sampling may differ from here on, so
        the count goes on into new text if the old tokens do not make up for it.
        """
        self._skip = sent_chars
        self._waiting = "".join(self._next(token) for token in tokens)

    def push(self, token: int) -> str:
        if self._ended:
            return ""
        text = self._next(token)
        if self._waiting:
            text, self._waiting = self._waiting + text, ""
        self._ended = self.stopped
        return text

    def finish(self) -> str:
        if self._ended:
            return ""
        self._ended = True
        text = self._detokenizer.finish()
        if self._scanner is not None:
            text = self._scanner.feed(text) + self._scanner.flush()
        text, self._waiting = self._waiting + self._unsent(text), ""
        return text

    @property
    def stopped(self) -> bool:
        return self._scanner is not None and self._scanner.stopped

    def _next(self, token: int) -> str:
        if token in self._silent or self.stopped:
            return ""
        text = self._detokenizer.push(token)
        if self._scanner is not None:
            text = self._scanner.feed(text)
        return self._unsent(text) if self._skip else text

    def _unsent(self, text: str) -> str:
        skipped = min(self._skip, len(text))
        self._skip -= skipped
        return text[skipped:]
