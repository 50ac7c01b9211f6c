"""Owns a real worker child and the orchestrator's end of its socket and lifeline, without an orchestrator.

Blocking and single-threaded: frames are read while something is waited for. Leaving the context kills and
reaps the child and closes everything.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import zmq
from mlx_bulkhead.protocol.codec import NO_REQUEST, Frame, Message, decode, encode, new_request_id
from mlx_bulkhead.protocol.commands import Cancel, Generate, Load, Shutdown, Stats
from mlx_bulkhead.protocol.events import (
    Done,
    Exiting,
    Failed,
    Heartbeat,
    Hello,
    Loaded,
    LoadFailed,
    Progress,
    Snapshot,
    StatsReply,
)
from mlx_bulkhead.protocol.values import WorkerStats

NAME = "tiny"
TIMEOUT_S = 20.0
E = TypeVar("E")


@dataclass
class Outcome:
    """All that came for one request."""

    request_id: bytes
    text: str = ""
    tokens: list[int] = field(default_factory=list[int])
    snapshots: list[Snapshot] = field(default_factory=list[Snapshot])
    progress: list[Progress] = field(default_factory=list[Progress])
    done: Done | None = None
    failed: Failed | None = None

    @property
    def is_over(self) -> bool:
        return self.done is not None or self.failed is not None

    def add(self, message: Message) -> None:
        assert not self.is_over, f"{type(message).__name__} came after the terminal event"
        match message:
            case Snapshot():
                if self.snapshots:
                    assert message.seq > self.snapshots[-1].seq
                    assert message.offset == self.snapshots[0].offset + len(self.text)
                self.snapshots.append(message)
                self.text += message.text
                self.tokens += message.tokens
            case Progress():
                self.progress.append(message)
            case Done():
                self.done = message
                if self.snapshots:
                    assert message.chars == self.snapshots[0].offset + len(self.text)
            case Failed():
                self.failed = message
            case _:
                raise AssertionError(f"{type(message).__name__} is no event of a request")


class WorkerHarness:
    """One worker incarnation, seen from its orchestrator."""

    def __init__(
        self,
        run_dir: Path,
        *,
        prelude: str = "",
        env: Mapping[str, str] | None = None,
        script: Path | None = None,
        receive_limit: int | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        """Start the child.

        Args:
            run_dir: an existing directory with a short path.
            prelude: Python code that runs in the child before the worker's `main`, to plant a fault.
            script: runs instead of `mlx_bulkhead.worker`, with the same command line.
            receive_limit: frames and, roughly, kilobytes that may wait at our end, to be a slow reader.
            arguments: more of the command line.
        """
        self.incarnation = secrets.token_hex(8)
        self.run_dir = run_dir
        self.log_path = run_dir.with_name(run_dir.name + f"-{self.incarnation}.log")
        self.requests: dict[bytes, Outcome] = {}
        self.heartbeats: list[Heartbeat] = []
        self.control: deque[Frame] = deque()
        self._replies: dict[bytes, deque[Message]] = defaultdict(deque)
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, 0)
        if receive_limit is not None:
            self.socket.setsockopt(zmq.RCVHWM, receive_limit)
            self.socket.setsockopt(zmq.RCVBUF, 1024 * receive_limit)
        self.endpoint = f"ipc://{run_dir}/w-{self.incarnation[:6]}"
        self.socket.bind(self.endpoint)
        lifeline_in, self._lifeline = os.pipe()
        if script is not None:
            program = ["-P", str(script)]
        elif prelude:
            program = ["-P", "-c", f"{prelude}\nfrom mlx_bulkhead.worker.__main__ import main\nmain()"]
        else:
            program = ["-P", "-m", "mlx_bulkhead.worker"]
        named = {
            "--endpoint": self.endpoint,
            "--incarnation": self.incarnation,
            "--lifeline-fd": str(lifeline_in),
            "--run-dir": str(run_dir),
            "--parent": str(os.getpid()),
            "--name": NAME,
            "--model": "none",
        }
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *program, *(part for pair in named.items() for part in pair), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(lifeline_in,),
                start_new_session=True,
                env={**os.environ, **(env or {})},
            )
        os.close(lifeline_in)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill and reap the child, close everything."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(5)
        self.drop_lifeline()
        self.socket.close(0)
        self._context.term()
        self.log_path.unlink(missing_ok=True)

    # Out.

    def send(self, message: Message, request_id: bytes = NO_REQUEST) -> None:
        self.socket.send_multipart(encode(message, request_id))

    def generate(self, request_id: bytes | None = None, **fields: Any) -> bytes:
        """Send a `Generate` for the loaded model; its id."""
        request_id = request_id or new_request_id()
        self.requests.setdefault(request_id, Outcome(request_id))
        fields.setdefault("model", NAME)
        self.send(Generate(**fields), request_id)
        return request_id

    def cancel(self, request_id: bytes, reason: str = "cancelled") -> None:
        self.send(Cancel(reason), request_id)  # pyright: ignore[reportArgumentType]

    def drop_lifeline(self) -> None:
        """What the death of the orchestrator does."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    # In.

    def pump(self, timeout: float) -> bool:
        """Read what comes within the timeout, at least one frame; False if nothing came."""
        if not self.socket.poll(int(timeout * 1000) + 1):
            return False
        while True:
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            self._route(decode(parts))

    def _route(self, frame: Frame) -> None:
        if isinstance(frame.message, Heartbeat):
            self.heartbeats.append(frame.message)
        elif frame.request_id in self.requests:
            self.requests[frame.request_id].add(frame.message)
        elif isinstance(frame.message, StatsReply | Failed):
            self._replies[frame.request_id].append(frame.message)
        else:
            self.control.append(frame)

    def drop_incoming(self) -> None:
        """Read what is there and forget it."""
        while self.socket.poll(0):
            self.socket.recv_multipart()

    def wait_for_log(self, words: str, count: int = 1, timeout: float = TIMEOUT_S) -> None:
        """Wait, without reading frames, until the log has these words that often."""
        deadline = time.monotonic() + timeout
        while self.log_path.read_text(errors="replace").count(words) < count:
            assert time.monotonic() < deadline, f"{words!r} is not in the log\n{self.log()}"
            time.sleep(0.01)  # nothing signals a line in a file

    def until(self, condition: Callable[[], bool], timeout: float = TIMEOUT_S, what: str = "") -> None:
        """Read frames until the condition holds. AssertionError with the worker's log otherwise."""
        deadline = time.monotonic() + timeout
        while not condition():
            left = deadline - time.monotonic()
            ended = self.process.poll() is not None
            if not self.pump(max(0.0, min(left, 0.02 if ended else 0.5))) and (left <= 0 or ended):
                if condition():
                    return
                raise AssertionError(
                    f"{what or 'the condition'} did not come in {timeout} s "
                    f"(exit code {self.process.returncode})\n{self.log()}"
                )

    def expect(self, kind: type[E], timeout: float = TIMEOUT_S) -> E:
        """The next control message of a kind; those before it are dropped."""
        found: list[E] = []

        def look() -> bool:
            while self.control:
                message = self.control.popleft().message
                if isinstance(message, kind):
                    found.append(message)
                    return True
            return False

        self.until(look, timeout, str(kind))
        return found[0]

    def hello(self) -> Hello:
        return self.expect(Hello)

    def load(self, model: Path | str, timeout: float = 30.0, **fields: Any) -> Loaded:
        """Say hello and load a model that can be loaded."""
        self.hello()
        answer = self.try_load(model, timeout, **fields)
        assert isinstance(answer, Loaded), f"{answer}\n{self.log()}"
        return answer

    def try_load(self, model: Path | str, timeout: float = 30.0, **fields: Any) -> Loaded | LoadFailed:
        fields.setdefault("name", NAME)
        self.send(Load(model=str(model), **fields), new_request_id())
        return self.expect(Loaded | LoadFailed, timeout)  # pyright: ignore[reportArgumentType, reportReturnType]

    def result(self, request_id: bytes, timeout: float = TIMEOUT_S) -> Outcome:
        """The outcome of a request, when it is over."""
        outcome = self.requests[request_id]
        self.until(lambda: outcome.is_over, timeout, "the end of the request")
        return outcome

    def run(self, timeout: float = TIMEOUT_S, **fields: Any) -> Outcome:
        """Generate and wait for the end."""
        return self.result(self.generate(**fields), timeout)

    def first_tokens(self, request_id: bytes, count: int = 1, timeout: float = TIMEOUT_S) -> Outcome:
        """The outcome so far, when it has that many tokens."""
        outcome = self.requests[request_id]
        self.until(lambda: len(outcome.tokens) >= count, timeout, f"token {count}")
        return outcome

    def first_tokens_or_end(self, request_id: bytes, timeout: float = TIMEOUT_S) -> Outcome:
        """The outcome so far, when it has a token or is over."""
        outcome = self.requests[request_id]
        self.until(lambda: bool(outcome.tokens) or outcome.is_over, timeout, "a token or the end")
        return outcome

    def stats(self, timeout: float = TIMEOUT_S) -> WorkerStats:
        """Ask for statistics."""
        request_id = new_request_id()
        self.send(Stats(), request_id)
        replies = self._replies[request_id]
        self.until(lambda: bool(replies), timeout, "StatsReply")
        reply = replies.popleft()
        assert isinstance(reply, StatsReply)
        assert reply.worker is not None
        return reply.worker

    def until_stats(self, condition: Callable[[WorkerStats], bool], timeout: float = TIMEOUT_S) -> WorkerStats:
        """Statistics that satisfy a condition, asked for again and again."""
        deadline = time.monotonic() + timeout
        while not condition(stats := self.stats(timeout)):
            assert time.monotonic() < deadline, f"statistics stayed {stats}\n{self.log()}"
            self.pump(0.01)
        return stats

    def reply_to(self, request_id: bytes, timeout: float = TIMEOUT_S) -> Message:
        """What came under an id that `generate` did not make."""
        replies = self._replies[request_id]
        self.until(lambda: bool(replies), timeout, "a reply")
        return replies.popleft()

    # Ends.

    def shutdown(self, drain: bool = False, grace_s: float = 5.0) -> None:
        self.send(Shutdown(grace_s, drain), new_request_id())

    def exiting(self, timeout: float = TIMEOUT_S) -> Exiting:
        return self.expect(Exiting, timeout)

    def wait_exit(self, timeout: float = 5.0) -> int:
        """The return code, when the child has ended. What it sent last is read, too."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the worker did not end in {timeout} s\n{self.log()}") from None
        self.pump(0.1)
        return code

    def log(self) -> str:
        """The end of what the worker wrote."""
        return self.log_path.read_text(errors="replace")[-6000:]


@contextlib.contextmanager
def loaded_worker(run_dir: Path, model: Path, **fields: Any) -> Iterator[WorkerHarness]:
    """A worker that has its model."""
    with WorkerHarness(run_dir) as worker:
        worker.load(model, **fields)
        yield worker
