"""Shows an answer as it comes: text on stdout, what happens to it meanwhile on stderr, figures at its end."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from ...protocol.errors import BulkheadError, Disconnected
from .common import note

if TYPE_CHECKING:
    from ..client_streams import Stream
    from ..views import Result, Snap

DIED = "[the worker died; restarting]"
RESTARTING = "[the worker is restarting]"
"""For an answer that no worker had begun."""
CLEAR = "\r\x1b[K"


class AnswerView:
    """Writes one answer. Everything else about it is a line on stderr, which never joins a line of the answer.

    Args:
        text: whether to write the answer itself.
        died: the line for a worker that died in mid-answer.
    """

    def __init__(self, *, text: bool = True, died: str = DIED) -> None:
        self._text = text
        self._died = died
        self._terminal = sys.stderr.isatty()
        self._one_place = _one_place()
        self._open = False
        """Whether a line that stands where stderr writes is unfinished."""
        self._status = False
        """Whether the terminal's line shows how far the prompt is, to be wiped."""
        self._phase = ""
        """That of the last sign of life."""
        self._begun = False

    def show(self, snap: Snap) -> None:
        """Write what is new in a snap."""
        self._begun = self._begun or snap.phase in ("prefill", "decode")
        if snap.new_text or snap.new_reasoning or snap.tokens:
            self._write(snap)
        else:
            self._progress(snap)

    def say(self, line: str) -> None:
        """A line for people, in the midst of the answer."""
        self.break_line()
        note(line)

    def break_line(self) -> None:
        """End the line that stands where stderr writes, if one is unfinished."""
        self._wipe()
        if self._open:
            self._open = False
            note("")

    def end(self, result: Result) -> None:
        """The answer is whole: end its last line."""
        self._wipe()
        if self._text and not result.text.endswith("\n"):
            print(flush=True)
            self._open = self._open and not self._one_place
        self.break_line()
        if not result.text and result.reasoning:
            spent = result.usage.completion_tokens
            note(f"the answer ended within its reasoning, after {spent} tokens; --max-tokens may be too small")

    def _progress(self, snap: Snap) -> None:
        before, self._phase = self._phase, snap.phase  # not of snaps with text: that of a dead worker may come late
        if snap.phase == "restarting" and before != "restarting":
            self.say(self._died if self._begun else RESTARTING)
        elif snap.phase == "prefill" and snap.total and self._terminal and not self._open:
            self._status = True
            print(f"{CLEAR}prefill {snap.processed}/{snap.total} tokens", end="", file=sys.stderr, flush=True)

    def _write(self, snap: Snap) -> None:
        self._wipe()
        if self._terminal and self._text and snap.new_reasoning:
            print(f"\x1b[2m{snap.new_reasoning}\x1b[0m", end="", file=sys.stderr, flush=True)
            self._open = not snap.new_reasoning.endswith("\n")
        if self._text and snap.new_text:
            sys.stdout.write(snap.new_text)
            sys.stdout.flush()
            if self._one_place:
                self._open = not snap.new_text.endswith("\n")

    def _wipe(self) -> None:
        if self._status:
            self._status = False
            print(CLEAR, end="", file=sys.stderr, flush=True)


def show_answer(stream: Stream, *, text: bool = True) -> Result:
    """Show a stream to its end. Raises its typed error; a lost daemon's says so if some of the answer had come."""
    view = AnswerView(text=text)
    some = False
    try:
        for snap in stream.snapshots(progress=True):
            view.show(snap)
            some = some or bool(snap.new_text or snap.new_reasoning)
        result = stream.result()
    except Disconnected as error:
        view.break_line()
        if not some:
            raise
        raise Disconnected(
            f"the daemon went away in mid-answer: {error.message.removeprefix('no daemon: ')}"
        ) from None
    except (BulkheadError, KeyboardInterrupt):
        view.break_line()
        raise
    view.end(result)
    return result


def summary(result: Result) -> str:
    """Usage, speed and engine in one line."""
    usage, timings = result.usage, result.timings
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    parts = [
        f"{usage.prompt_tokens} prompt tokens{cached} at {timings.prompt_per_second:.0f}/s",
        f"{usage.completion_tokens} tokens at {timings.predicted_per_second:.1f}/s",
        f"engine {result.engine}" + (f" ({result.fallback_reason})" if result.fallback_reason else ""),
        result.finish_reason,
    ]
    if result.restarts:
        parts.append(f"survived {restarts(result.restarts)}")
    return f"[{'; '.join(parts)}]"


def restarts(count: int) -> str:
    """How many restarts of a worker, in words."""
    return f"{count} worker restart{'' if count == 1 else 's'}"


def _one_place() -> bool:
    """Whether stdout and stderr go to the same terminal, file or pipe."""
    try:
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except (OSError, ValueError):  # something without a descriptor stands for one of them
        return False
