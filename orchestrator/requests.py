"""The table of requests: each one from its acceptance to its one terminal event.

The only writer of request state. Workers' frames, cancels, deadlines, crashes and shutdown all end up here, so
that "exactly one terminal event" is a property of this file.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

import msgspec

from ..protocol import codec
from ..protocol.commands import Generate
from ..protocol.errors import RETRYABLE, BadRequest, ErrorCode, Quarantined, QueueFull
from ..protocol.events import Accepted, Done, Failed, Progress, Snapshot
from ..protocol.values import CancelReason, Channel, Phase, Timings, Usage
from .streams import DONE, FAILED, PROGRESS, SNAPSHOT, RequestLog

KEEP_FINISHED = 256
KEEP_FINISHED_S = 120.0
QUARANTINE_S = 300.0
MAX_CHARGE = 1
"""Deaths of workers that a request may be held to account for and still be resumed."""
CANCEL_GRACE_S = 5.0
"""How long a worker may take to end a cancelled request; then it is ended here. A hung one never would."""


class LiveRequest:
    """One request. Others read it; only the table writes it."""

    def __init__(self, request_id: bytes, message: Generate, now: float) -> None:
        self.id = request_id
        self.message = message
        self.log = RequestLog()
        self.accepted_at = now
        self.last_event_at = now
        self.finished_at = 0.0
        self.holder = ""
        """The token of the incarnation that has it; empty: none."""
        self.started = False
        """A worker has begun to work on it."""
        self.charge = 0
        """Deaths of workers that this request may have caused."""
        self.suspect = False
        """It was with a worker that died."""
        self.proven = False
        """This worker has already got a token out of it."""
        self.restarts = 0
        """Workers that the request has survived."""
        self.deadline: asyncio.TimerHandle | None = None
        self.cancelled: CancelReason | None = None
        """The worker was told to end it, for this reason."""
        self.cancelled_at = 0.0

    @property
    def model(self) -> str:
        return self.message.model

    @property
    def sent(self) -> bool:
        """Whether a worker has it."""
        return self.holder != ""

    @property
    def on_trial(self) -> bool:
        """A suspect that the present worker has not proven yet."""
        return self.sent and self.suspect and not self.proven

    @property
    def closed(self) -> bool:
        return self.log.closed


class RequestTable:
    """All live requests, and for a while the finished ones, for `Attach`."""

    def __init__(
        self,
        *,
        max_requests: int,
        on_closed: Callable[[LiveRequest], None],
        on_proven: Callable[[LiveRequest], None],
        on_deadline: Callable[[LiveRequest], None],
    ) -> None:
        self._live: dict[bytes, LiveRequest] = {}
        self._finished: OrderedDict[bytes, LiveRequest] = OrderedDict()
        self._quarantine: dict[bytes, float] = {}
        self._max_requests = max_requests
        self._on_closed = on_closed
        self._on_proven = on_proven
        self._on_deadline = on_deadline
        self.total = 0
        self.resumed = 0
        self.frames_refused = 0

    def __len__(self) -> int:
        return len(self._live)

    def open(self, request_id: bytes, message: Generate) -> LiveRequest:
        """Accept a checked request. Raises `BadRequest` for an id in use, `QueueFull`, `Quarantined`."""
        now = time.monotonic()
        if request_id == codec.NO_REQUEST:
            raise BadRequest("a request id of zeros is reserved; make a random one")
        if request_id in self._live or request_id in self._finished:
            raise BadRequest(f"request id {request_id.hex()} is in use")
        if len(self._live) >= self._max_requests:
            raise QueueFull(f"{len(self._live)} requests are live; the limit is {self._max_requests}")
        self._check_quarantine(message, now)
        request = LiveRequest(request_id, message, now)
        self._live[request_id] = request
        self.total += 1
        request.log.accept(codec.encode_body(Accepted()))
        if message.deadline_s is not None:
            loop = asyncio.get_running_loop()
            request.deadline = loop.call_later(message.deadline_s, self._on_deadline, request)
        return request

    def find(self, request_id: bytes) -> LiveRequest | None:
        """A live or lately finished request."""
        return self._live.get(request_id) or self._finished.get(request_id)

    def of_model(self, model: str) -> list[LiveRequest]:
        """The live requests of a model, oldest first."""
        return [r for r in self._live.values() if r.model == model]

    def live(self) -> Iterator[LiveRequest]:
        yield from tuple(self._live.values())

    def worker_event(self, model: str, kind: int, request_id: bytes, body: bytes) -> None:
        """An event that a worker sent for a request. What fits no live request of its model is dropped and counted:
        late frames after a cancel are normal."""
        request = self._live.get(request_id)
        if request is None or request.model != model:
            self.frames_refused += 1
            return
        request.started = True
        request.last_event_at = time.monotonic()
        if kind == SNAPSHOT:
            try:
                request.log.add_snapshot(body)
            except codec.FrameError as error:
                self._junk(request, error)
            if not request.proven:
                request.proven = True
                if request.suspect:
                    self._on_proven(request)
        elif kind == PROGRESS:
            request.log.set_progress(body)
        elif kind in (DONE, FAILED):
            self._worker_ended(request, kind, body)
        else:
            self.frames_refused += 1

    def _worker_ended(self, request: LiveRequest, kind: int, body: bytes) -> None:
        """A terminal event is looked into before it closes anything: junk must not be a request's last word."""
        try:
            event = codec.decode_body(kind, request.id, body)
        except codec.FrameError as error:
            self._junk(request, error)
            return
        if isinstance(event, Done) and request.restarts:
            body = codec.encode_body(msgspec.structs.replace(event, restarts=request.restarts))
        self._close(request, kind, body)

    def _junk(self, request: LiveRequest, error: Exception) -> None:
        self.frames_refused += 1
        self.fail(request, ErrorCode.PROTOCOL, f"the worker sent a frame that makes no sense: {error}")

    def sent(self, request: LiveRequest, holder: str) -> None:
        """A worker was given the request."""
        request.holder = holder
        request.proven = False

    def cancelling(self, request: LiveRequest, reason: CancelReason) -> None:
        """The worker that has the request is told to end it. Whatever becomes of that worker, it ends."""
        if request.cancelled is None:
            request.cancelled, request.cancelled_at = reason, time.monotonic()

    def charge(self, model: str, holder: str) -> None:
        """The worker of a model died: charge those of its requests that may be the cause.

        If one was on trial it is the cause. Else all that had begun may be or, if none had, all that were there.
        All of them are suspects then, to be tried one at a time."""
        here = [r for r in self.of_model(model) if r.holder == holder]
        tried = [r for r in here if r.on_trial]
        for request in tried or [r for r in here if r.started] or here:
            request.charge += 1
        for request in here:
            request.suspect = True

    def fail(self, request: LiveRequest, code: ErrorCode, message: str) -> None:
        """End a request badly. No-op if it has ended."""
        if not request.closed:
            failed = Failed(code=code.value, message=message, retryable=code in RETRYABLE, usage=self._usage(request))
            self._close(request, FAILED, codec.encode_body(failed))

    def end_here(self, request: LiveRequest, reason: CancelReason) -> None:
        """End a cancelled request that no worker has (any more). No-op if it has ended."""
        if request.closed:
            return
        usage = self._usage(request)
        chars = _chars(self._safe_snapshots(request), "content")
        done = Done(
            finish_reason=reason,
            usage=usage,
            timings=Timings(queued_ms=(time.monotonic() - request.accepted_at) * 1000.0),
            engine="",
            chars=chars,
            restarts=request.restarts,
        )
        self._close(request, DONE, codec.encode_body(done))

    def progress(self, request: LiveRequest, phase: Phase) -> None:
        """Say from here that a request is alive and what it waits for."""
        if not request.closed:
            request.last_event_at = time.monotonic()
            request.log.set_progress(codec.encode_body(Progress(phase=phase)))

    def keep_alive(self, silence_s: float, phase_of: Callable[[LiveRequest], Phase | None]) -> None:
        """Repeat the progress of every request that was silent for so long. `phase_of` None: as it was."""
        now = time.monotonic()
        for request in self.live():
            if request.cancelled is not None and now - request.cancelled_at >= CANCEL_GRACE_S:
                self.end_here(request, request.cancelled)
            elif now - request.last_event_at >= silence_s:
                phase = phase_of(request)
                if phase is not None:
                    self.progress(request, phase)
                else:
                    request.last_event_at = now
                    request.log.repeat_progress()
        self._forget_old(now)

    def save(self, request: LiveRequest, problem: ErrorCode, message: str, *, crashed: bool) -> bool:
        """The worker that had this request is gone. True if it is to be sent again, else it has been ended.

        A request that no worker had begun is kept as it is. One that was running is resumed once.
        """
        if request.closed:
            return False
        if not request.sent:
            return True
        if request.cancelled is not None:
            self.end_here(request, request.cancelled)
            return False
        began, request.holder, request.started = request.started, "", False
        if crashed and request.charge > MAX_CHARGE:
            self._quarantine[_prompt_hash(request.message)] = time.monotonic() + QUARANTINE_S
            self.fail(request, problem, f"{message}. Two workers died on this request; it is not tried again")
            return False
        if crashed and request.message.on_crash == "fail" and (began or request.charge):
            self.fail(request, problem, message)
            return False
        if not began:
            return True
        request.restarts += 1
        self.resumed += 1
        self.progress(request, "restarting")
        return True

    def resumable(self, request: LiveRequest) -> Generate:
        """The command for the next worker: the original, and what its client already has."""
        snapshots = self._safe_snapshots(request)
        if not snapshots:
            return request.message
        return msgspec.structs.replace(
            request.message,
            resume_tokens=[token for s in snapshots for token in s.tokens],
            resume_chars=_chars(snapshots, "content"),
            resume_seq=snapshots[-1].seq + 1,
            resume_reasoning_chars=_chars(snapshots, "reasoning"),
            resume_tool_chars=_chars(snapshots, "tool_calls"),
        )

    def describe(self, request: LiveRequest) -> str:
        """Sizes of a request in words, never its content."""
        tokens = self._usage(request).completion_tokens
        processed, total = request.log.prefilled()
        prompt = f"{total} prompt tokens ({processed} prefilled)" if total else "a prompt not yet tokenised"
        return f"{prompt} and {tokens} tokens generated"

    def _close(self, request: LiveRequest, kind: int, body: bytes) -> None:
        if request.deadline is not None:
            request.deadline.cancel()
        self._live.pop(request.id, None)
        request.finished_at = time.monotonic()
        request.message = msgspec.structs.replace(  # what is kept for Attach is the answer, not the prompt
            request.message,
            prompt=None,
            tokens=None,
            messages=None,
            tools=None,
            template_args=None,
            response_format=None,
        )
        self._finished[request.id] = request
        while len(self._finished) > KEEP_FINISHED:
            self._finished.popitem(last=False)
        request.log.close(kind, body)
        self._on_closed(request)

    def _forget_old(self, now: float) -> None:
        while self._finished:
            oldest = next(iter(self._finished.values()))
            if now - oldest.finished_at < KEEP_FINISHED_S:
                break
            del self._finished[oldest.id]
        for key in [k for k, until in self._quarantine.items() if until <= now]:
            del self._quarantine[key]

    def _check_quarantine(self, message: Generate, now: float) -> None:
        if not self._quarantine:
            return
        until = self._quarantine.get(_prompt_hash(message), 0.0)
        if until > now:
            raise Quarantined(
                f"this prompt ended two workers shortly before; it is refused for another {until - now:.0f} s"
            )

    def _safe_snapshots(self, request: LiveRequest) -> list[Snapshot]:
        try:
            return request.log.snapshots()
        except codec.FrameError:
            return []

    def _usage(self, request: LiveRequest) -> Usage:
        return Usage(completion_tokens=sum(len(s.tokens) for s in self._safe_snapshots(request)))


def _prompt_hash(message: Generate) -> bytes:
    """What identifies a prompt, whatever its sampling: model, adapter as named, and input."""
    what = (message.model, message.adapter, message.prompt, message.tokens, message.messages)
    return hashlib.blake2b(msgspec.msgpack.encode(what), digest_size=16).digest()


def _chars(snapshots: list[Snapshot], channel: Channel) -> int:
    return sum(len(s.text) for s in snapshots if s.channel == channel)
