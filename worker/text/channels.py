"""Splits the text of an answer into channels: content, reasoning, tool calls. Pure.

What a splitter gives does not depend on how the text is cut into pieces. Marks of reasoning are in no channel; those
of tool calls stay in theirs, so that it has exactly what the model wrote. Text that may still become a mark is held.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ...protocol.values import Channel

Piece = tuple[Channel, str]


@dataclass(frozen=True, slots=True)
class RawCall:
    """A tool call as the model wrote it. `name` is empty where it is part of the body."""

    body: str
    name: str = ""
    whole: bool = True
    """Whether its end was there."""


class Splitter(Protocol):
    """Splits one growing text."""

    calls: list[RawCall]

    def feed(self, text: str) -> list[Piece]:
        """What became certain with this text."""
        ...

    def finish(self) -> list[Piece]:
        """The rest, when no more text will come."""
        ...


@dataclass(frozen=True, slots=True)
class Tags:
    """Marks of a model. Empty: it has none of that kind. A call without an end mark ends with the answer."""

    think_start: str = ""
    think_end: str = ""
    tool_start: str = ""
    tool_end: str = ""
    inside: bool = False
    """Whether the prompt ends within an open block of reasoning."""
    begun: bool = False
    """Whether the prompt has the beginning of the content: no reasoning can come any more."""


class TagSplitter:
    """For models that put tags around reasoning and calls.

    Reasoning is what stands in blocks before the first visible character of the content; a tag later on is content.
    Blanks around such a block, and between calls, are left out.
    """

    def __init__(self, tags: Tags) -> None:
        self._tags = tags
        self._state = "reasoning" if tags.inside else "content" if tags.begun else "start"
        self._fresh = tags.inside  # right after an opening tag, where blanks are left out
        self._held = ""
        self._body = ""
        self._dropping = False  # blanks before content are left out: they follow a block
        self.calls: list[RawCall] = []

    def feed(self, text: str) -> list[Piece]:
        self._held += text
        out: list[Piece] = []
        while self._advance(out):
            pass
        return out

    def finish(self) -> list[Piece]:
        out: list[Piece] = []
        held, self._held = self._held, ""
        if self._state == "tool":
            self._body += held
            self.calls.append(RawCall(self._body, whole=not self._tags.tool_end))
            _add(out, "tool_calls", held)
        elif self._state == "reasoning":
            _add(out, "reasoning", held)
        elif not (self._state == "start" and self._dropping and not held.strip()):
            _add(out, "content", held)
        return out

    def _advance(self, out: list[Piece]) -> bool:
        """One step through what is held; whether another may follow."""
        if not self._held:
            return False
        match self._state:
            case "start":
                return self._start(out)
            case "reasoning":
                return self._reason(out)
            case "tool":
                return self._call(out)
            case _:
                return self._content(out)

    def _start(self, out: list[Piece]) -> bool:
        tags, text = self._tags, self._held.lstrip()
        if not text:
            return False
        for mark, state in ((tags.think_start, "reasoning"), (tags.tool_start, "tool")):
            if mark and text.startswith(mark):
                self._held = text[len(mark) :] if state == "reasoning" else text
                self._open(state, out)
                return True
        if any(mark.startswith(text) for mark in (tags.think_start, tags.tool_start) if mark):
            return False
        if self._dropping:
            self._held = text
        self._state = "content"
        return True

    def _open(self, state: str, out: list[Piece]) -> None:
        self._state = state
        if state == "reasoning":
            self._fresh = True
            return
        mark = self._tags.tool_start
        _add(out, "tool_calls", mark)
        self._held, self._body = self._held[len(mark) :], ""

    def _reason(self, out: list[Piece]) -> bool:
        if self._fresh:
            self._held = self._held.lstrip()
            if not self._held:
                return False
            self._fresh = False
        text, found = self._until(self._tags.think_end)
        _add(out, "reasoning", text)
        if found:
            self._state, self._dropping = "start", True
        return found

    def _call(self, out: list[Piece]) -> bool:
        mark = self._tags.tool_end
        text, found = self._until(mark)
        self._body += text
        _add(out, "tool_calls", text + (mark if found else ""))
        if found:
            self.calls.append(RawCall(self._body))
            self._state = "between"
        return found

    def _content(self, out: list[Piece]) -> bool:
        mark = self._tags.tool_start
        if self._state == "between":  # after a call: blanks belong to what follows
            text = self._held.lstrip()
            if not text or (mark.startswith(text) and text != mark):
                return False
            if text.startswith(mark):
                self._held = text
            self._state = "content"
        text, found = self._until(mark)
        _add(out, "content", text)
        if found:
            self._held = mark + self._held
            self._open("tool", out)
        return found

    def _until(self, mark: str) -> tuple[str, bool]:
        """Take what is before a mark, and the mark. Without it: all that cannot be its beginning."""
        held = self._held
        if not mark:
            self._held = ""
            return held, False
        at = held.find(mark)
        if at >= 0:
            self._held = held[at + len(mark) :]
            return held[:at], True
        keep = _overlap(held, mark)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False


class HarmonySplitter:
    """For the format of gpt-oss: messages with a header that names their channel."""

    _MARKS = ("<|end|>", "<|start|>", "<|call|>", "<|return|>")

    def __init__(self) -> None:
        self._held = ""
        self._header: str | None = ""
        """What is known of the header; None in a message."""
        self._channel: Channel = "content"
        self._name = ""
        self._body = ""
        self.calls: list[RawCall] = []

    def feed(self, text: str) -> list[Piece]:
        self._held += text
        out: list[Piece] = []
        while self._held and (self._read_header(out) if self._header is not None else self._read_body(out)):
            pass
        return out

    def finish(self) -> list[Piece]:
        out: list[Piece] = []
        held, self._held = self._held, ""
        if self._header is not None:
            if not _known(held):
                _add(out, "content", held)
        else:
            self._show(out, held)
            self._end_message()  # the mark that ends a call also ends the answer, so that it is no text
        return out

    def _read_header(self, out: list[Piece]) -> bool:
        if not _known(self._held):
            self._header, self._channel, self._name = None, "content", ""  # no header: a plain answer
            return True
        at = self._held.find("<|message|>")
        if at < 0:
            return False
        header, self._held = self._held[:at], self._held[at + len("<|message|>") :]
        self._header, self._body = None, ""
        target = header.partition("to=")[2].split("<|")[0].split()
        self._name = target[0].removeprefix("functions.") if target else ""
        if self._name:
            self._channel = "tool_calls"
            _add(out, "tool_calls", header + "<|message|>")
        else:
            self._channel = "reasoning" if "<|channel|>analysis" in header else "content"
        return True

    def _read_body(self, out: list[Piece]) -> bool:
        held = self._held
        found = min(((at, mark) for mark in self._MARKS if (at := held.find(mark)) >= 0), default=None)
        if found is None:
            keep = max(_overlap(held, mark) for mark in self._MARKS)
            self._show(out, held[: len(held) - keep])
            self._held = held[len(held) - keep :]
            return False
        at, mark = found
        self._show(out, held[:at])
        self._held = held[at + len(mark) :]
        if mark == "<|call|>" and self._channel == "tool_calls":
            _add(out, "tool_calls", mark)
        self._end_message()
        self._header = ""
        return True

    def _show(self, out: list[Piece], text: str) -> None:
        self._body += text if self._name else ""
        _add(out, self._channel, text)

    def _end_message(self) -> None:
        if self._name:
            self.calls.append(RawCall(self._body, self._name))
        self._name = ""


def _known(text: str) -> bool:
    """Whether it is, or may become, a header."""
    marks = ("<|channel|>", "<|start|>", "<|message|>", "assistant", "to=", "<|constrain|>")
    text = text.lstrip()
    return any(text.startswith(mark) or mark.startswith(text) for mark in marks)


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of the text that is a beginning of the mark, and not all of it."""
    for size in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0


def _add(out: list[Piece], channel: Channel, text: str) -> None:
    if not text:
        return
    if out and out[-1][0] == channel:
        out[-1] = (channel, out[-1][1] + text)
    else:
        out.append((channel, text))
