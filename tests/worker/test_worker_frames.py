"""Junk that comes in, a reader that does not read, statistics from a stuck worker, one MLX thread."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
from mlx_bulkhead.protocol.codec import (
    NO_REQUEST,
    FrameError,
    decode,
    encode,
    head_of,
    kind_of,
    new_request_id,
)
from mlx_bulkhead.protocol.commands import Cancel, Generate, Models, Unload
from mlx_bulkhead.protocol.events import Done, Failed, Heartbeat, Progress, Snapshot
from mlx_bulkhead.protocol.values import Timings, Usage, WorkerStats
from mlx_bulkhead.worker.mailbox import Backlog, Outgoing, merge

from tests.support.worker_harness import WorkerHarness, loaded_worker


def junk(chance: random.Random) -> list[bytes]:
    """A random frame that means nothing."""
    while True:
        shape = chance.random()
        if shape < 0.2:
            parts = [chance.randbytes(chance.randrange(40)) for _ in range(chance.randrange(1, 4))]
        elif shape < 0.6:
            parts = [chance.randbytes(17), chance.randbytes(chance.randrange(60))]
        else:
            command = Generate(model="tiny", prompt="x" * chance.randrange(20), max_tokens=5)
            head, body = encode(command, chance.randbytes(16))
            cut = chance.randrange(len(body))
            parts = [head, body[:cut] + chance.randbytes(chance.randrange(4))]
        try:
            decode(parts)
        except FrameError:
            return parts


def test_a_flood_of_junk_changes_nothing(short_tmp: Path, tiny_model: Path) -> None:
    chance = random.Random(11)
    frames = [junk(chance) for _ in range(1000)]
    with loaded_worker(short_tmp, tiny_model) as worker:
        for number in range(100_000):
            worker.socket.send_multipart(frames[number % 1000])
            if number % 500 == 0:
                worker.drop_incoming()
        worker.send(Unload("tiny"))
        worker.send(Models())
        worker.send(Heartbeat(0, WorkerStats()))
        total = 100_003
        stats = worker.until_stats(lambda stats: stats.frames_unknown + stats.frames_refused >= total)
        assert stats.frames_unknown + stats.frames_refused == total
        assert stats.frames_unknown > 0
        done = worker.run(prompt="a good one", max_tokens=3).done
        assert done is not None
        assert len(worker.log()) < 6000, "the log has not been flooded, too"


def test_a_request_that_cannot_be_read_is_answered(short_tmp: Path) -> None:
    with WorkerHarness(short_tmp) as worker:
        worker.hello()
        request_id = new_request_id()
        body = msgspec.msgpack.encode({"type": kind_of(Generate), "model": "tiny", "max_tokens": "ten"})
        worker.socket.send_multipart([head_of(kind_of(Generate), request_id), body])
        reply = worker.reply_to(request_id)
        assert isinstance(reply, Failed)
        assert reply.code == "bad_request"
        assert "max_tokens" in reply.message


def test_commands_before_the_load_mean_nothing(short_tmp: Path, tiny_model: Path) -> None:
    with WorkerHarness(short_tmp) as worker:
        worker.send(Cancel(), new_request_id())
        worker.load(tiny_model)
        assert worker.run(prompt="x", max_tokens=2).done


def test_statistics_and_heartbeats_come_from_a_stuck_worker(short_tmp: Path, tiny_model: Path) -> None:
    prelude = """
import mlx_bulkhead.worker.engines.loader as loader, threading
original = loader.open_engine
def planted(load, report):
    engine = original(load, report)
    step, count = engine.step, iter(range(5))
    def stepped():
        if next(count, None) is None:
            threading.Event().wait()
        return step()
    engine.step = stepped
    return engine
loader.open_engine = planted
"""
    with WorkerHarness(short_tmp, prelude=prelude) as worker:
        worker.load(tiny_model)
        worker.generate(prompt="a step that hangs", max_tokens=50)
        worker.until_stats(lambda stats: stats.steps == 5)
        worker.heartbeats.clear()
        worker.until(lambda: len(worker.heartbeats) >= 3)
        first, *_, last = worker.heartbeats
        assert first.steps == last.steps == 5
        assert first.busy_since_s is not None
        assert last.busy_since_s is not None
        assert last.busy_since_s > first.busy_since_s
        stats = worker.stats(2)
        assert (stats.running, stats.phase) == (1, "decode")
        assert stats.oldest_request_age_s is not None
        assert stats.last_token_age_s is not None


def test_statistics_while_busy_show_the_rates(short_tmp: Path, tiny_model: Path) -> None:
    with loaded_worker(short_tmp, tiny_model) as worker:
        worker.generate(prompt="go on", max_tokens=8000)
        stats = worker.until_stats(lambda s: s.decode_tokens_per_second > 0 and s.phase == "decode")
        assert stats.engine == "text"


def test_a_reader_that_does_not_read_gets_it_merged(short_tmp: Path, tiny_model: Path) -> None:
    """Nothing is lost, and what waits is bounded by the text, not by the number of messages."""
    slow = "import zmq, mlx_bulkhead.worker.channel as c\n"
    slow += "class Small(zmq.Context):\n"
    slow += "    def socket(self, *a, **k):\n"
    slow += "        s = super().socket(*a, **k); s.sndhwm = 1; s.setsockopt(zmq.SNDBUF, 4096); return s\n"
    slow += "c.zmq.Context = Small\n"
    slow += "import mlx_bulkhead.worker.emitter as e; e.SNAPSHOT_PAUSE_S = 0.0\n"
    with WorkerHarness(short_tmp, prelude=slow, receive_limit=1) as worker:
        worker.load(tiny_model)
        whole = worker.run(prompt="tell me all", max_tokens=500)
        request_id = worker.generate(prompt="tell me all", max_tokens=500)
        worker.wait_for_log("generated 500", 2)
        outcome = worker.result(request_id)
        assert outcome.text == whole.text
        assert outcome.tokens == whole.tokens
        assert len(outcome.snapshots) < len(whole.snapshots)
        assert max(len(snapshot.tokens) for snapshot in outcome.snapshots) > 50


def test_only_the_executor_thread_touches_mlx(short_tmp: Path, tiny_model: Path) -> None:
    """Import, load, prepare, step and close: field report H07."""
    prelude = """
import os, sys, threading, traceback
def check(what):
    if threading.current_thread().name != "executor":
        print("WRONG THREAD", what, threading.current_thread().name, flush=True)
        os._exit(99)
def audit(event, args):
    if event == "import" and args[0].partition(".")[0] in ("mlx", "mlx_lm"):
        check(args[0])
sys.addaudithook(audit)
import mlx_bulkhead.worker.engines.loader as loader
original = loader.open_engine
class Checked:
    def __init__(self, engine):
        object.__setattr__(self, "engine", engine)
    def __getattribute__(self, name):
        engine = object.__getattribute__(self, "engine")
        check(name)
        used.add(name)
        return getattr(engine, name)
used = set()
def planted(load, report):
    check("load")
    return Checked(original(load, report))
loader.open_engine = planted
real = os._exit
def leaving(code):
    print("USED", *sorted(used), flush=True)
    real(code)
os._exit = leaving
"""
    with WorkerHarness(short_tmp, prelude=prelude) as worker:
        worker.load(tiny_model)
        ids = [worker.generate(prompt=f"row {number}", max_tokens=20) for number in range(3)]
        worker.cancel(ids[1])
        worker.stats()
        for request_id in ids:
            assert worker.result(request_id).done
        worker.shutdown()
        assert worker.wait_exit() == 0
        used = worker.log().partition("USED ")[2].split()
        assert {"prepare", "insert", "step", "keeper", "close"} <= set(used)


def test_the_log_tells_no_prompt(short_tmp: Path, tiny_model: Path) -> None:
    with loaded_worker(short_tmp, tiny_model) as worker:
        outcome = worker.run(prompt="my secret harbour", max_tokens=30)
        assert worker.run(prompt="my secret harbour", max_tokens=-1).failed
        log = worker.log()
        assert "secret" not in log
        assert outcome.text[5:15] not in log
        assert "generated 30" in log
        assert "fork" not in log


# The backlog, without a process.


def snapshot(seq: int, offset: int, text: str) -> Snapshot:
    return Snapshot(seq, offset, text, [seq])


def test_merge_keeps_first_offset_and_last_number() -> None:
    merged = merge([snapshot(3, 10, "ab"), snapshot(4, 12, ""), snapshot(5, 12, "é")])
    assert merged == Snapshot(5, 10, "abé", [3, 4, 5])


def test_backlog_merges_within_a_request_and_keeps_the_order() -> None:
    backlog = Backlog()
    a, b = b"a" * 16, b"b" * 16
    done = Done("stop", Usage(), Timings(), "text")
    for request_id, message in (
        (a, Progress("prefill", 1, 2)),
        (a, snapshot(0, 0, "x")),
        (b, snapshot(0, 0, "p")),
        (a, snapshot(1, 1, "y")),
        (NO_REQUEST, Heartbeat(1, WorkerStats())),
        (b, snapshot(1, 1, "q")),
        (a, done),
        (a, snapshot(0, 0, "a new life of the id")),
    ):
        backlog.push(Outgoing(request_id, message))
    sent = []
    while backlog:
        sent.append(backlog.head())
        backlog.pop()
    assert sent == [
        (a, Progress("prefill", 1, 2)),
        (a, Snapshot(1, 0, "xy", [0, 1])),
        (b, Snapshot(1, 0, "pq", [0, 1])),
        (NO_REQUEST, Heartbeat(1, WorkerStats())),
        (a, done),
        (a, snapshot(0, 0, "a new life of the id")),
    ]


def test_a_snapshot_after_a_pop_starts_a_new_entry() -> None:
    backlog = Backlog()
    backlog.push(Outgoing(b"a" * 16, snapshot(0, 0, "x")))
    backlog.pop()
    backlog.push(Outgoing(b"a" * 16, snapshot(1, 1, "y")))
    assert backlog.head().message == snapshot(1, 1, "y")


def test_backlog_keeps_channels_apart_and_log_probabilities_with_their_tokens() -> None:
    backlog = Backlog()
    for seq, channel in enumerate(("reasoning", "reasoning", "content", "content")):
        made = Snapshot(seq, seq % 2, "x", [seq], channel, logprobs=[-float(seq)], top_logprobs=[{seq: -1.0}])
        backlog.push(Outgoing(b"a" * 16, made))
    sent = []
    while backlog:
        sent.append(backlog.head().message)
        backlog.pop()
    assert sent == [
        Snapshot(1, 0, "xx", [0, 1], "reasoning", logprobs=[0.0, -1.0], top_logprobs=[{0: -1.0}, {1: -1.0}]),
        Snapshot(3, 0, "xx", [2, 3], "content", logprobs=[-2.0, -3.0], top_logprobs=[{2: -1.0}, {3: -1.0}]),
    ]
