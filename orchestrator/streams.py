"""The log of a live request and the cursors that read it.

The log is append-only. A cursor that keeps up gets each frame as it came, undecoded. One that lags gets all
from its place to the end merged into one `Snapshot` a channel. So nothing is lost, memory is bounded by the
output, and a late reader gets the whole in one message.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ..protocol import codec
from ..protocol.events import Accepted, Done, Failed, Progress, Snapshot

ACCEPTED = codec.kind_of(Accepted)
PROGRESS = codec.kind_of(Progress)
SNAPSHOT = codec.kind_of(Snapshot)
DONE = codec.kind_of(Done)
FAILED = codec.kind_of(Failed)

_COMPACT_AT = 512
_progress_decoder = msgspec.msgpack.Decoder(Progress)
_snapshot_decoder = msgspec.msgpack.Decoder(Snapshot)

Body = tuple[int, bytes]
"""Kind and encoded body of an event."""


def decode_snapshots(bodies: list[bytes]) -> list[Snapshot]:
    """Decode snapshot bodies. Raises `codec.FrameError` if a worker sent junk under a good head."""
    try:
        return [_snapshot_decoder.decode(body) for body in bodies]
    except (msgspec.DecodeError, ValueError) as error:
        raise codec.FrameError(f"bad Snapshot in a stream: {error}") from None


def merge_snapshots(snapshots: list[Snapshot]) -> list[Snapshot]:
    """One snapshot a channel, with the text and ids of all of them. Neighbours of one channel only are joined
    in order, so the ids keep the order in which they were generated."""
    runs: list[list[Snapshot]] = []
    for snapshot in snapshots:
        if runs and runs[-1][0].channel == snapshot.channel:
            runs[-1].append(snapshot)
        else:
            runs.append([snapshot])
    return [
        Snapshot(
            seq=run[-1].seq,
            offset=run[0].offset,
            text="".join(s.text for s in run),
            tokens=[token for s in run for token in s.tokens],
            channel=run[0].channel,
            logprobs=[value for s in run for value in s.logprobs],
            top_logprobs=[top for s in run for top in s.top_logprobs],
        )
        for run in runs
    ]


class RequestLog:
    """All events of one request so far. Written by the request table only."""

    def __init__(self) -> None:
        self._accepted: bytes | None = None
        self._snapshots: list[bytes] = []
        self._dropped = 0
        """How many entries compaction has folded away; cursors count from the start."""
        self._progress: bytes | None = None
        self._progress_version = 0
        self._terminal: Body | None = None
        self._cursors: set[Cursor] = set()

    @property
    def closed(self) -> bool:
        return self._terminal is not None

    @property
    def terminal(self) -> Body | None:
        return self._terminal

    def accept(self, body: bytes) -> None:
        self._accepted = body
        self._wake()

    def add_snapshot(self, body: bytes) -> None:
        self._snapshots.append(body)
        self._wake()
        if len(self._snapshots) >= _COMPACT_AT:
            self._compact()

    def set_progress(self, body: bytes) -> None:
        """Progress is a state, not a sequence: a newer one replaces one that nobody has read."""
        self._progress = body
        self._progress_version += 1
        self._wake()

    @property
    def followed(self) -> bool:
        """Whether anybody reads."""
        return bool(self._cursors)

    @property
    def has_text(self) -> bool:
        return bool(self._snapshots)

    @property
    def has_progress(self) -> bool:
        return self._progress is not None

    def prefilled(self) -> tuple[int, int]:
        """Prompt tokens processed and in all, as far as the worker has said; (0, 0) before that."""
        if self._progress is None:
            return 0, 0
        try:
            progress = _progress_decoder.decode(self._progress)
        except (msgspec.DecodeError, ValueError):
            return 0, 0
        return progress.processed, progress.total

    def repeat_progress(self) -> None:
        """Send the last progress again, as a sign of life."""
        if self._progress is not None:
            self.set_progress(self._progress)

    def close(self, kind: int, body: bytes) -> None:
        """Add the terminal event; a second one is refused by an assertion, since only the table may call."""
        assert self._terminal is None
        self._terminal = (kind, body)
        self._wake()

    def snapshots(self) -> list[Snapshot]:
        """All snapshots so far, decoded."""
        return decode_snapshots(self._snapshots)

    def cursor(self, wake: Callable[[], None]) -> Cursor:
        """A reader at the start of the log. `wake()` is called whenever there is something new."""
        cursor = Cursor(self, wake)
        self._cursors.add(cursor)
        return cursor

    def _wake(self) -> None:
        for cursor in tuple(self._cursors):
            cursor.wake()

    def _compact(self) -> None:
        """Fold what every cursor has passed. Readers that come later get it merged anyhow."""
        passed = min((c.position for c in self._cursors), default=self._dropped + len(self._snapshots))
        count = passed - self._dropped
        if count < _COMPACT_AT // 2:
            return
        merged = [codec.encode_body(s) for s in merge_snapshots(decode_snapshots(self._snapshots[:count]))]
        self._snapshots[:count] = merged
        self._dropped += count - len(merged)

    def read(self, cursor: Cursor) -> list[Body]:
        """Everything that the cursor has not had yet, merged where it lags. Moves the cursor."""
        out: list[Body] = []
        if self._accepted is not None and not cursor.had_accepted:
            cursor.had_accepted = True
            out.append((ACCEPTED, self._accepted))
        if self._progress is not None and cursor.progress_version != self._progress_version:
            cursor.progress_version = self._progress_version
            if self._terminal is None:
                out.append((PROGRESS, self._progress))
        new = self._snapshots[max(0, cursor.position - self._dropped) :]
        cursor.position = self._dropped + len(self._snapshots)
        if len(new) == 1:
            out.append((SNAPSHOT, new[0]))
        elif new:
            out.extend((SNAPSHOT, codec.encode_body(s)) for s in merge_snapshots(decode_snapshots(new)))
        if self._terminal is not None and not cursor.finished:
            cursor.finished = True
            out.append(self._terminal)
        return out

    def forget(self, cursor: Cursor) -> None:
        self._cursors.discard(cursor)


class Cursor:
    """One reader's place in a log."""

    def __init__(self, log: RequestLog, wake: Callable[[], None]) -> None:
        self._log = log
        self.wake = wake
        self.position = 0
        self.progress_version = 0
        self.had_accepted = False
        self.finished = False
        """Whether the terminal event was read; nothing follows it."""

    def take(self) -> list[Body]:
        """All events since the last call, lagging snapshots merged. Empty when there is nothing new."""
        return self._log.read(self)

    def close(self) -> None:
        self._log.forget(self)
