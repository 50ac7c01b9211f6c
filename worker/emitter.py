"""Owns the frames of requests: when a snapshot leaves, how a request ends, and the counters of both.

Runs on the executor thread. Posts to the mailbox; waking the io thread is the executor's, once a batch.
"""

from __future__ import annotations

import logging
from typing import Final

from ..protocol.errors import RETRYABLE, ErrorCode
from ..protocol.events import Done, Failed, Progress
from ..protocol.values import FinishReason, Timings, Usage
from .engines.base import PrefillOut, Served
from .mailbox import Mailbox
from .progress import WorkerProgress
from .requests import Request

SNAPSHOT_PAUSE_S: Final = 0.033
"""Least time between two snapshots of a request. Below 30 tokens a second each token leaves alone."""
PROGRESS_PAUSE_S: Final = 0.1
"""Least time between two prefill reports of a request; the first and the last always leave."""

log = logging.getLogger(__name__)


class Emitter:
    """Turns what happens to requests into messages."""

    def __init__(self, mailbox: Mailbox, progress: WorkerProgress) -> None:
        self._post = mailbox.post
        self._progress = progress

    def offer(self, request: Request, now: float) -> None:
        """Send what is held, if it is time."""
        if request.is_due(now, SNAPSHOT_PAUSE_S):
            self.flush(request, now)

    def flush(self, request: Request, now: float) -> None:
        """Send everything held."""
        for snapshot in request.snapshots(now):
            self._post(request.request_id, snapshot)

    def prefill(self, request: Request, out: PrefillOut, now: float) -> None:
        """Report a prefill chunk."""
        before = request.processed if request.processed else out.cached
        self._progress.prompt_tokens += max(0, out.processed - before)
        is_first = request.progress_at == 0.0
        request.processed, request.total, request.cached = out.processed, out.total, out.cached
        if is_first or out.processed >= out.total or now - request.progress_at >= PROGRESS_PAUSE_S:
            request.progress_at = now
            self._post(request.request_id, Progress("prefill", out.processed, out.total))

    def done(self, request: Request, reason: FinishReason, served: Served, now: float) -> None:
        """Send what is held, then the good end."""
        self.flush(request, now)
        if reason in ("cancelled", "deadline"):
            self._progress.requests_cancelled += 1
        else:
            self._progress.requests_done += 1
        usage, timings = request.usage(), request.timings(now)
        calls, problem = request.tool_calls()
        if calls and reason == "stop":
            reason = "tool_calls"
        done = Done(
            reason,
            usage,
            timings,
            served.engine,
            served.fallback_reason,
            chars=request.chars["content"],
            tool_calls=calls,
            tool_error=problem,
            adapter=request.row.adapter if request.row is not None else "",
            speculation=served.speculation,
        )
        self._post(request.request_id, done)
        log.info(
            "request %s ended: %s, prompt %d (%d cached), generated %d, prefill %.0f ms, decode %.0f ms",
            request.request_id.hex()[:8],
            reason,
            usage.prompt_tokens,
            usage.cached_tokens,
            request.generated,
            timings.prompt_ms,
            timings.predicted_ms,
        )

    def failed(
        self,
        request_id: bytes,
        code: ErrorCode,
        message: str,
        usage: Usage | None = None,
        timings: Timings | None = None,
    ) -> None:
        """Send the bad end."""
        self._progress.requests_failed += 1
        self._post(request_id, Failed(code, message, code in RETRYABLE, usage or Usage(), timings or Timings()))
        log.info("request %s failed: %s", request_id.hex()[:8], code.value)
