"""A worker without MLX that serves a known stream of fake text, and misbehaves on request.

Run it in place of `mlx_bulkhead.worker`, with the same command line. The environment tells it what to do:

    BULKHEAD_MISBEHAVE       mode, or mode:argument, of the list below
    BULKHEAD_MISBEHAVE_ONCE  path; misbehave only if there is no such file yet, and create it
    BULKHEAD_FAKE_RATE       tokens a second of each request, 200 if absent; 0: as fast as it can
    BULKHEAD_FAKE_PREFILL_S  seconds from the request to its first token, 0 if absent
    BULKHEAD_FAKE_LOAD_S     seconds of a load that reports progress, 0 if absent

`expected_text` and `expected_tokens` say what a request gives, so that a test needs no second run.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NoReturn

import zmq
from mlx_bulkhead.protocol import codec, commands, events
from mlx_bulkhead.protocol.exit_codes import WorkerExit
from mlx_bulkhead.protocol.limits import DEFAULT_MAX_TOKENS
from mlx_bulkhead.protocol.values import FinishReason, Limits, Memory, Timings, Usage, WorkerInfo, WorkerStats
from mlx_bulkhead.worker import lifeline

MODES: Final = {
    "never_hello": "connects to nothing and sleeps",
    "wrong_version": "says hello with protocol version 999",
    "wrong_incarnation": "says hello with another token",
    "crash_on_start": "ends with this code before hello (1)",
    "crash_on_load": "dies when told to load, by a signal or code: -6, -9, 43 (-6)",
    "load_fails": "answers LoadFailed and ends with its code",
    "load_hangs": "is silent about its load, heartbeats go on",
    "load_freezes": "stops everything when told to load, heartbeats too",
    "load_slow": "takes this many seconds to load and reports progress (3)",
    "hang": "stops making steps after N tokens, heartbeats go on (3)",
    "silent": "stops everything once loaded, heartbeats too",
    "abort": "SIGABRT after N tokens (3)",
    "segfault": "SIGSEGV after N tokens (3)",
    "kill": "SIGKILL after N tokens (3)",
    "exit": "ends with code 0 after N tokens, without Exiting (3)",
    "executor_died": "sends Exiting and ends with code 43 after N tokens (3)",
    "garbage": "sends 200 junk frames after N tokens and goes on (3)",
    "long_line": "writes a line of 1 MB to its log after N tokens and goes on (3)",
    "ignore_sigterm": "ignores SIGTERM and Shutdown",
    "balloon": "holds this many MiB once loaded (256)",
    "swell": "after N tokens takes 4 MiB more every few ms for ever, and answers nobody (3)",
    "fill": "after N tokens holds BULKHEAD_FAKE_FILL MiB and goes on (3)",
    "duplicate_done": "ends each request twice, with a snapshot between",
    "lost_request": "never answers a request, makes steps",
    "die_on": "SIGABRT on a prompt that contains this text (POISON)",
}
BEAT_S: Final = 0.2
WORDS: Final = ("tide", "lamp", "most", "věž", "水", "keel", "🚢", "rope", "kůň", "door")


def fake_token(prompt: str, position: int) -> int:
    """The id at a position of the answer to a prompt. Its text is a word and a blank."""
    return zlib.crc32(f"{prompt}|{position}".encode()) % 1000


def token_text(token: int) -> str:
    """The text of an id."""
    return f"{WORDS[token % len(WORDS)]}{token} "


def expected_tokens(prompt: str, count: int) -> list[int]:
    """What a request for that many tokens gives."""
    return [fake_token(prompt, position) for position in range(count)]


def expected_text(prompt: str, count: int) -> str:
    """The text of a request for that many tokens."""
    return "".join(map(token_text, expected_tokens(prompt, count)))


def prompt_of(request: commands.Generate) -> str:
    """The input of a request as one text, whatever its form."""
    if request.messages is not None:
        return "\n".join(str(message.content) for message in request.messages)
    return request.prompt if request.prompt is not None else str(request.tokens)


@dataclass
class Live:
    """A request in the making."""

    request: commands.Generate
    prompt: str
    limit: int
    position: int
    seq: int
    chars: int
    next_at: float
    began: float
    tokens: list[int] = field(default_factory=list[int])


class Misbehaviour:
    """Which mode is on, and its argument. Off when it was to happen once and has."""

    def __init__(self, environ: dict[str, str]) -> None:
        self.mode, _, self.argument = environ.get("BULKHEAD_MISBEHAVE", "").partition(":")
        if self.mode and self.mode not in MODES:
            sys.exit(f"unknown mode {self.mode!r}; there are {', '.join(MODES)}")
        once = environ.get("BULKHEAD_MISBEHAVE_ONCE")
        if self.mode and once:
            try:
                os.close(os.open(once, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                self.mode = ""

    def number(self, default: float) -> float:
        return float(self.argument) if self.argument else default


class FakeWorker:
    """One loop that does it all: socket, clock and fake decoding."""

    def __init__(self, options: argparse.Namespace, mis: Misbehaviour, environ: dict[str, str]) -> None:
        self.options = options
        self.mis = mis
        self.rate = float(environ.get("BULKHEAD_FAKE_RATE", "200"))
        self.prefill_s = float(environ.get("BULKHEAD_FAKE_PREFILL_S", "0"))
        self.load_s = float(environ.get("BULKHEAD_FAKE_LOAD_S", "0"))
        self.name = ""
        self.live: dict[bytes, Live] = {}
        self.steps = self.made = self.done = self.failed = self.cancelled = self.started = 0
        self.refused = 0
        self.last_step = time.monotonic()
        self.frozen = False
        self.draining: float | None = None
        self.terminated = False
        self.balloon = b""
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, 500)
        self.socket.connect(options.endpoint)
        signal.signal(signal.SIGTERM, self.on_sigterm)

    def send(self, message: codec.Message, request_id: bytes = codec.NO_REQUEST) -> None:
        self.socket.send_multipart(codec.encode(message, request_id))

    def run(self) -> NoReturn:
        version = 999 if self.mis.mode == "wrong_version" else codec.PROTOCOL_VERSION
        token = "someone-else" if self.mis.mode == "wrong_incarnation" else self.options.incarnation
        self.send(events.Hello(version, token, os.getpid()))
        next_beat = 0.0
        while True:
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + BEAT_S
                self.beat(now)
            due = min((live.next_at for live in self.live.values()), default=next_beat)
            wait = max(0.0, min(next_beat, next_beat if self.frozen else due) - now)
            if self.socket.poll(int(wait * 1000) + (1 if wait else 0)):
                self.receive()
            if self.terminated:
                self.leave("terminated (SIGTERM)", WorkerExit.TERMINATED)
            if not self.frozen:
                self.step()
            if self.draining is not None and (not self.live or time.monotonic() >= self.draining):
                self.leave("shut down", WorkerExit.CLEAN)

    def stats(self, now: float) -> WorkerStats:
        counts = (self.steps, self.started, self.done, self.failed, self.cancelled, 0, self.made)
        return WorkerStats(
            len(self.live),
            0,
            *counts,
            engine="fake",
            phase="decode" if self.live else "idle",
            memory=Memory(footprint=len(self.balloon)),
            frames_refused=self.refused,
        )

    def beat(self, now: float) -> None:
        busy = now - self.last_step if self.live else None
        self.send(events.Heartbeat(self.steps, self.stats(now), busy))

    def receive(self) -> None:
        while True:
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                _, request_id, message = codec.decode(parts)
            except codec.FrameError as error:
                self.refused += 1
                if error.kind == codec.kind_of(commands.Generate) and error.request_id:
                    self.send(events.Failed(error.code, str(error)), error.request_id)
                continue
            match message:
                case commands.Load():
                    self.load(request_id, message)
                case commands.Generate():
                    self.generate(request_id, message)
                case commands.Cancel():
                    if request_id in self.live:
                        self.finish(request_id, message.reason)
                case commands.Stats():
                    self.send(events.StatsReply(worker=self.stats(time.monotonic())), request_id)
                case commands.Shutdown():
                    if self.mis.mode != "ignore_sigterm":
                        self.draining = time.monotonic() + (message.grace_s if message.drain else 0.0)
                case _:
                    self.refused += 1

    def load(self, request_id: bytes, load: commands.Load) -> None:
        mode = self.mis.mode
        if mode == "crash_on_load":
            die(int(self.mis.number(-signal.SIGABRT)))
        if mode == "load_hangs":
            return
        if mode == "load_freezes":
            sleep_for_ever()
        if mode == "load_fails":
            self.send(events.LoadFailed("load_failed", f"{load.model}/config.json is missing"), request_id)
            self.leave("the load failed", WorkerExit.LOAD_FAILED)
        self.name = load.name
        seconds = self.mis.number(3.0) if mode == "load_slow" else self.load_s
        parts = max(1, int(seconds / 0.05))
        for part in range(parts if seconds else 0):
            self.send(events.LoadProgress("weights", part + 1, parts), request_id)
            self.beat(time.monotonic())
            time.sleep(seconds / parts)
        if mode == "balloon":
            self.balloon = os.urandom(4096) * int(self.mis.number(256) * 256)
        limits = Limits(max_running=load.max_running, max_queued=load.max_queued)
        self.send(events.Loaded(load.name, WorkerInfo("fake", "fake", "cpu", 1000, limits=limits)), request_id)
        if mode == "silent":
            sleep_for_ever()

    def generate(self, request_id: bytes, request: commands.Generate) -> None:
        if request_id in self.live:
            return
        prompt = prompt_of(request)
        if self.mis.mode == "die_on" and (self.mis.argument or "POISON") in prompt:
            die(-signal.SIGABRT)
        if request.model != self.name:
            self.failed += 1
            self.send(events.Failed("unknown_model", f"this worker holds {self.name}"), request_id)
            return
        now = time.monotonic()
        if not self.live:
            self.last_step = now
        self.started += 1
        self.live[request_id] = Live(
            request=request,
            prompt=prompt,
            limit=request.max_tokens or DEFAULT_MAX_TOKENS,
            position=len(request.resume_tokens),
            seq=request.resume_seq,
            chars=request.resume_chars,
            next_at=now + self.prefill_s,
            began=now,
        )
        self.send(events.Progress("prefill", 0, len(prompt)), request_id)

    def step(self) -> None:
        """One token for each request that is due."""
        now = time.monotonic()
        for request_id, live in list(self.live.items()):
            if now < live.next_at:
                continue
            self.steps += 1
            self.last_step = now
            live.next_at = max(live.next_at + (1 / self.rate if self.rate else 0), now - 0.1)
            if self.mis.mode == "lost_request":
                continue
            if live.position < live.limit:
                self.token(request_id, live)
            if live.position >= live.limit:
                self.finish(request_id, "length")
            if self.frozen:
                return

    def token(self, request_id: bytes, live: Live) -> None:
        token = fake_token(live.prompt, live.position)
        live.position += 1
        self.made += 1
        live.tokens.append(token)
        if len(live.tokens) >= live.request.stream_interval or live.position == 1:
            self.flush(request_id, live)
        if self.mis.mode in AFTER_TOKENS and self.made == int(self.mis.number(3)):
            self.misbehave()

    def flush(self, request_id: bytes, live: Live) -> None:
        if live.tokens:
            text = "".join(map(token_text, live.tokens))
            self.send(events.Snapshot(live.seq, live.chars, text, live.tokens), request_id)
            live.seq, live.chars, live.tokens = live.seq + 1, live.chars + len(text), []

    def finish(self, request_id: bytes, reason: FinishReason) -> None:
        live = self.live.pop(request_id)
        self.flush(request_id, live)
        made = live.position - len(live.request.resume_tokens)
        timings = Timings(predicted_n=made, predicted_ms=(time.monotonic() - live.began) * 1000)
        done = events.Done(reason, Usage(len(live.prompt), 0, live.position), timings, "fake", chars=live.chars)
        self.send(done, request_id)
        is_cancel = reason in ("cancelled", "deadline")
        self.cancelled, self.done = self.cancelled + is_cancel, self.done + (not is_cancel)
        if self.mis.mode == "duplicate_done":
            self.send(events.Snapshot(live.seq, live.chars, "ghost", [1]), request_id)
            self.send(done, request_id)

    def misbehave(self) -> None:
        match self.mis.mode:
            case "hang":
                self.frozen = True
            case "abort" | "segfault" | "kill" as how:
                die({"abort": -signal.SIGABRT, "segfault": -signal.SIGSEGV, "kill": -signal.SIGKILL}[how])
            case "swell":
                hoard: list[bytes] = []
                while True:
                    hoard.append(os.urandom(4096) * 1024)
                    time.sleep(0.005)
            case "fill":
                self.balloon = os.urandom(4096) * (int(os.environ["BULKHEAD_FAKE_FILL"]) * 256)
            case "exit":
                self.close(0)
            case "executor_died":
                self.leave("RuntimeError: planted", WorkerExit.EXECUTOR_DIED, cancel=False)
            case "garbage":
                self.send_garbage()
            case "long_line":
                print("x" * 1_000_000, file=sys.stderr, flush=True)
            case _:
                pass

    def send_garbage(self) -> None:
        """Junk of each kind that a reader must survive."""
        some = next(iter(self.live), codec.NO_REQUEST)
        for number in range(50):
            self.socket.send_multipart([b"", b""])
            self.socket.send_multipart([os.urandom(17), os.urandom(number)])
            self.socket.send_multipart([bytes((0xEE,)) + some, b"\x80"])
            self.socket.send_multipart([os.urandom(3)] * (1 + number % 4))

    def leave(self, reason: str, code: WorkerExit, cancel: bool = True) -> NoReturn:
        for request_id in list(self.live) if cancel else ():
            self.finish(request_id, "cancelled")
        self.send(events.Exiting(reason, code))
        self.close(code)

    def close(self, code: int) -> NoReturn:
        self.socket.close(500)
        self.context.term()
        os._exit(code)

    def on_sigterm(self, signum: int, frame: object) -> None:
        self.terminated = self.mis.mode != "ignore_sigterm"


AFTER_TOKENS: Final = frozenset(mode for mode, words in MODES.items() if "after N tokens" in words)


def die(code: int) -> NoReturn:
    """End at once: by the signal of a negative code, or with the code."""
    if code < 0:
        os.kill(os.getpid(), -code)
        sleep_for_ever()
    os._exit(code)


def sleep_for_ever() -> NoReturn:
    """Only the lifeline still works, and SIGTERM if no worker was made yet."""
    while True:
        time.sleep(3600)


def main() -> NoReturn:
    parser = argparse.ArgumentParser()
    for name in ("endpoint", "incarnation", "parent", "name", "model"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--lifeline-fd", required=True, type=int)
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--prewarm", action="store_true")
    options = parser.parse_args()
    lifeline.arm(options.lifeline_fd, options.run_dir)
    mis = Misbehaviour(dict(os.environ))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if mis.mode == "crash_on_start":
        die(int(mis.number(1)))
    if mis.mode == "never_hello":
        sleep_for_ever()
    FakeWorker(options, mis, dict(os.environ)).run()


if __name__ == "__main__":
    main()
