"""The client without its sockets: which requests are live, whether the daemon is there, what to send when.

Sans IO. A driver (`client_io.py`, `client_loop.py`) feeds frames and the time in, and performs the `actions` that
come out. Answers go undecoded into the sink of their request; whoever reads the sink decodes them
(`client_answers.py`), so that the thread with the socket does little.

Loss of the daemon is noticed by the connection's end, or by silence: it sends something for a live request
every second. Silence leads to a probe (`Models`), an unanswered probe to a fresh socket, and a fresh socket
to `Attach` for every live stream. What the daemon no longer knows ends with `Disconnected`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from ..protocol import codec
from ..protocol.commands import Attach, Cancel, Generate, Models, Shutdown
from ..protocol.errors import BulkheadError, Disconnected, ErrorCode, RequestTimeout
from ..protocol.events import Accepted, Exiting, Failed
from .client_live import (
    REWIND,
    TERMINAL,
    Action,
    ClientSettings,
    Connect,
    Disconnect,
    Item,
    Link,
    Live,
)

ACCEPTED: Final = codec.kind_of(Accepted)
FAILED: Final = codec.kind_of(Failed)
EXITING: Final = codec.kind_of(Exiting)

MAX_REFUSALS: Final = 3
"""Refused connections in a row before the daemon counts as gone: one may be a full backlog."""


@dataclass(slots=True)
class ClientCore:
    """State of one client. Every method that takes `now` wants monotonic seconds."""

    settings: ClientSettings
    remedy: str
    """Ends the message of every `Disconnected`: where the daemon was looked for, and how to start it."""
    link: Link = Link.DOWN
    ignored: int = 0
    """Frames of no live request, or unreadable."""
    _live: dict[bytes, Live] = field(default_factory=dict)
    _timed: dict[bytes, Live] = field(default_factory=dict)
    """Those of the live ones that have a deadline."""
    _unsent: list[tuple[Live | None, list[bytes]]] = field(default_factory=list)
    _actions: list[Action] = field(default_factory=list)
    _probe: bytes | None = None
    _probe_until: float = 0.0
    _retry_at: float = 0.0
    _lost_at: float = 0.0
    _sweep_at: float = 0.0
    _attempts: int = 0
    _refusals: int = 0

    # ---- what callers want

    def submit(self, live: Live, body: bytes, now: float) -> None:
        """Start a request or call; `body` is its command, encoded."""
        live.wire_id = live.request_id if live.command is Generate else codec.new_request_id()
        live.heard = now
        if not self._live:
            self._sweep_at = now + self.settings.silence / 5
        self._live[live.wire_id] = live
        if live.timeout is not None:
            live.deadline = now + live.timeout
            self._timed[live.wire_id] = live
        self._send(live, [codec.head_of(codec.kind_of(live.command), live.wire_id), body])
        if self.link is Link.DOWN:
            self._lost_at = now
            self._attempts = self._refusals = 0
            self._join(now)

    def cancel(self, live: Live) -> None:
        """Ask the daemon to end a request. Harmless when it has ended."""
        if self.link is not Link.DOWN:
            self._send(None, codec.encode(Cancel(), live.request_id))

    def abandon(self, live: Live, *, cancel: bool) -> None:
        """Nobody reads this request any more. Harmless when it has ended."""
        if self._drop(live) and cancel and live.sent:
            self.cancel(live)

    def close(self) -> None:
        """The client closes: cancel what it started and fail every reader. The link ends with it."""
        for live in list(self._live.values()):
            self.abandon(live, cancel=live.cancel_on_close)
            live.sink.push(Disconnected("the client was closed"))
        self.link = Link.DOWN

    def fail_all(self, error: BulkheadError) -> None:
        """End everything with an error."""
        for live in list(self._live.values()):
            self._end(live, error)
        self._unsent.clear()

    # ---- what the driver sees

    def frame(self, parts: list[bytes], now: float) -> None:
        """A message came in."""
        try:
            if len(parts) != 2:
                raise codec.FrameError("a frame has 2 parts")
            kind, wire_id = codec.split_head(parts[0])
        except codec.FrameError:
            self.ignored += 1
            return
        if wire_id == self._probe:
            self._probe_answered(now)
            return
        live = self._live.get(wire_id)
        if live is None or kind not in codec.KINDS:
            self.ignored += 1
            return
        live.heard = now
        if live.rejoining:
            live.rejoining = False
            if kind == FAILED and self._is_forgotten(live, parts[1]):
                self._end(live, self._gone("it no longer knows the request"))
                return
            live.sink.push(REWIND)
        if kind == ACCEPTED:
            live.accepted = True
        if kind in TERMINAL[live.command]:
            self._drop(live)
        live.sink.push((kind, parts[1]))

    def lost(self, why: str, now: float, *, refused: bool = False) -> None:
        """The connection ended, or (`refused`) there is nobody to connect to."""
        if self.link not in (Link.UP, Link.JOINING):
            return
        if self.link is Link.UP:
            self._lost_at = now
            self._attempts = self._refusals = 0
        self._refusals = self._refusals + 1 if refused else 0
        self._probe = None
        self._actions = [action for action in self._actions if not isinstance(action, list)]
        self._actions.append(Disconnect())
        for live in [live for live in self._live.values() if not live.is_stream]:
            asked_for = live.command is Shutdown and live.sent
            self._end(live, (EXITING, codec.encode_body(Exiting())) if asked_for else self._gone(why))
        if self._refusals >= MAX_REFUSALS or now >= self._lost_at + self.settings.timeout:
            self.fail_all(self._gone(why))
        if not self._live:
            self._unsent.clear()
            self.link = Link.DOWN
            return
        self.link = Link.RESTING
        delay = self.settings.backoff_first * 2.0**self._attempts
        self._retry_at = now + min(self.settings.backoff_most, delay)
        self._attempts += 1

    def tick(self, now: float) -> None:
        """Time passes. Call after the waiting frames were fed, or a stopped process would mistake its own
        absence for the daemon's."""
        for live in [live for live in self._timed.values() if live.deadline is not None and now >= live.deadline]:
            late = f"{live.command.__name__}: no answer from the daemon within {live.timeout:g} s"
            self._end(live, RequestTimeout(late))
        if self._probe is not None and now >= self._probe_until:
            self.lost("it does not answer", now)
        elif self.link is Link.RESTING and now >= self._retry_at:
            self._join(now)
        elif self.link is Link.UP and now >= self._sweep_at:  # not at every frame: there may be thousands live
            self._sweep_at = now + self.settings.silence / 5
            if self._probe is None and self._silent(now):
                self._send_probe(now, self.settings.silence)

    def wait_until(self, now: float) -> float | None:
        """When `tick` is wanted next; None: not before the next frame or caller."""
        times = [live.deadline for live in self._timed.values() if live.deadline is not None]
        if self._probe is not None:
            times.append(self._probe_until)
        if self.link is Link.RESTING:
            times.append(self._retry_at)
        elif self._live and self.link is Link.UP:
            times.append(max(now, self._sweep_at))
        return min(times, default=None)

    def actions(self) -> list[Action]:
        """What the driver has to do now, in order."""
        if not self._actions:
            return self._actions
        actions, self._actions = self._actions, []
        return actions

    # ---- inside

    def _drop(self, live: Live) -> bool:
        self._timed.pop(live.wire_id, None)
        return self._live.pop(live.wire_id, None) is not None

    def _end(self, live: Live, item: Item) -> None:
        self._drop(live)
        live.sink.push(item)

    def _gone(self, why: str) -> Disconnected:
        return Disconnected(f"no daemon: {why}; {self.remedy}")

    def _send(self, live: Live | None, frame: list[bytes]) -> None:
        if self.link is not Link.UP:
            self._unsent.append((live, frame))
            return
        self._actions.append(frame)
        if live is not None:
            live.sent = True

    def _join(self, now: float) -> None:
        self.link = Link.JOINING
        self._actions.append(Connect())
        left = self._lost_at + self.settings.timeout - now
        self._send_probe(now, max(0.0, min(left, self.settings.timeout)))

    def _send_probe(self, now: float, patience: float) -> None:
        self._probe = codec.new_request_id()
        self._probe_until = now + patience
        self._actions.append(codec.encode(Models(), self._probe))

    def _probe_answered(self, now: float) -> None:
        self._probe = None
        if self.link is Link.JOINING:
            self.link = Link.UP
            self._attempts = self._refusals = 0
            for live in [live for live in self._live.values() if live.sent]:
                self._rejoin(live, now)
            unsent, self._unsent = self._unsent, []
            for live, frame in unsent:
                if live is None or live.wire_id in self._live:
                    self._send(live, frame)
            return
        for live in self._silent(now):
            if live.rejoining:  # asked once, and not answered
                self._end(live, self._gone("it does not answer for this request"))
            elif live.is_stream:
                self._rejoin(live, now)
            else:
                live.heard = now

    def _rejoin(self, live: Live, now: float) -> None:
        del self._live[live.wire_id]
        live.wire_id = codec.new_request_id()
        live.rejoining = True
        live.heard = now
        self._live[live.wire_id] = live
        self._send(live, codec.encode(Attach(request=live.request_id), live.wire_id))

    def _silent(self, now: float) -> list[Live]:
        limit = now - self.settings.silence
        return [live for live in self._live.values() if live.sent and live.heard <= limit]

    @staticmethod
    def _is_forgotten(live: Live, body: bytes) -> bool:
        """Whether a `Failed` that comes first after an `Attach` means: no such request."""
        if live.accepted:  # else the log would have begun with Accepted
            return True
        try:
            failed = codec.decode_body(FAILED, live.wire_id, body)
        except codec.FrameError:
            return False
        return isinstance(failed, Failed) and failed.code == ErrorCode.BAD_REQUEST
