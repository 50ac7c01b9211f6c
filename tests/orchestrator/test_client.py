"""The blocking client against a real ROUTER socket: verbs and streams."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mlx_bulkhead.orchestrator.client import Client
from mlx_bulkhead.protocol import codec
from mlx_bulkhead.protocol.commands import (
    Attach,
    Cancel,
    Generate,
    Load,
    Restart,
    Shutdown,
    Stats,
    Unload,
)
from mlx_bulkhead.protocol.errors import (
    BadRequest,
    Disconnected,
    LoadError,
    ProtocolMismatch,
    QueueFull,
    RequestTimeout,
    UnknownModel,
)
from mlx_bulkhead.protocol.events import (
    Accepted,
    Exiting,
    Failed,
    Loaded,
    LoadFailed,
    LoadProgress,
    Progress,
    Snapshot,
    StatsReply,
    Unloaded,
)
from mlx_bulkhead.protocol.values import ModelStatus, WorkerInfo

from tests.support.fake_daemon import FakeDaemon, accepted_and, answer_with, done

TEXT = "Der Hahn ist tot, café 👩‍👩‍👧, 漢字."


@pytest.fixture
def daemon(short_tmp: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(short_tmp) as fake:
        yield fake


@pytest.fixture
def client(daemon: FakeDaemon, short_tmp: Path) -> Iterator[Client]:
    with Client(short_tmp) as connected:
        yield connected


# ---- verbs


def test_models_gives_what_the_daemon_lists(daemon: FakeDaemon, client: Client) -> None:
    daemon.models = [ModelStatus(name="a", state="READY")]
    assert client.models() == daemon.models


def test_load_reports_progress_in_the_callers_thread(daemon: FakeDaemon, client: Client) -> None:
    info = WorkerInfo(engine="text", backend="cpu")
    daemon.answers[Load] = lambda r: r.reply(
        LoadProgress("weights", 1, 2), LoadProgress("weights", 2, 2), Loaded("a", info)
    )
    seen: list[tuple[int, int]] = []
    threads: set[int] = set()

    def on_progress(progress: LoadProgress) -> None:
        seen.append((progress.done, progress.total))
        threads.add(threading.get_ident())

    assert client.load("a", "org/model", on_progress=on_progress, max_running=2) == info
    assert seen == [(1, 2), (2, 2)]
    assert threads == {threading.get_ident()}
    assert daemon.expect(Load).message == Load("a", "org/model", max_running=2)


def test_a_failed_load_raises_with_the_daemons_words(daemon: FakeDaemon, client: Client) -> None:
    daemon.answers[Load] = lambda r: r.reply(LoadFailed("load_failed", "config.json is missing"))
    with pytest.raises(LoadError, match=r"config\.json is missing"):
        client.load("a", "x/y")


def test_restart_unload_stats_and_shutdown(daemon: FakeDaemon, client: Client) -> None:
    daemon.answers[Restart] = lambda r: r.reply(Loaded("a", WorkerInfo(engine="text")))
    daemon.answers[Unload] = lambda r: r.reply(Unloaded("a", was_loaded=False))
    daemon.answers[Stats] = lambda r: r.reply(StatsReply(daemon={"uptime_s": 1.5}))
    daemon.answers[Shutdown] = lambda r: r.reply(Exiting("asked to end"))
    assert client.restart("a").engine == "text"
    assert client.unload("a") is False
    assert client.stats().daemon == {"uptime_s": 1.5}
    client.shutdown(1.0, drain=True)
    assert daemon.expect(Shutdown).message == Shutdown(grace_s=1.0, drain=True)


def test_shutdown_is_done_when_the_daemon_ends_without_a_word(daemon: FakeDaemon, client: Client) -> None:
    daemon.answers[Shutdown] = lambda _: daemon.vanish()
    client.shutdown(1.0)


def test_an_unknown_model_is_a_typed_error(daemon: FakeDaemon, client: Client) -> None:
    daemon.answers[Unload] = lambda r: r.reply(Failed("unknown_model", "no model 'a'"))
    with pytest.raises(UnknownModel, match="no model 'a'"):
        client.unload("a")


@pytest.mark.parametrize("name", ["", "x" * 300, " a", "a\n", "\ud800"])
def test_bad_names_never_reach_the_daemon(daemon: FakeDaemon, client: Client, name: str) -> None:
    for call in (client.unload, client.restart, client.stats):
        with pytest.raises(BadRequest):
            call(name)
    assert daemon.count(Unload) == daemon.count(Restart) == daemon.count(Stats) == 0


def test_an_answer_of_the_wrong_kind_is_a_protocol_error(daemon: FakeDaemon, client: Client) -> None:
    daemon.answers[Stats] = lambda r: r.reply_raw([codec.head_of(0x4A, r.request_id), b"\xc1junk"])
    with pytest.raises(ProtocolMismatch, match="StatsReply"):
        client.stats()


def test_a_call_without_an_answer_times_out(daemon: FakeDaemon, short_tmp: Path) -> None:
    with Client(short_tmp, timeout=0.2) as client, pytest.raises(RequestTimeout, match=r"Stats.* 0\.2 s"):
        client.stats()


# ---- streams


def test_a_stream_gives_snaps_and_the_result(daemon: FakeDaemon, client: Client) -> None:
    daemon.answers[Generate] = answer_with(TEXT)
    stream = client.generate("m", prompt="hi", max_tokens=5)
    snaps = list(stream)
    assert "".join(snap.new_text for snap in snaps) == TEXT
    assert [TEXT.startswith(snap.text) for snap in snaps] == [True] * len(snaps)
    assert snaps[-1].text == TEXT
    result = stream.result()
    assert (result.text, result.finish_reason, result.engine) == (TEXT, "stop", "text")
    assert result.request_id == stream.request_id == daemon.expect(Generate).request_id.hex()
    assert list(stream) == []


def test_complete(daemon: FakeDaemon, client: Client) -> None:
    daemon.answers[Generate] = answer_with(TEXT)
    assert client.complete("m", messages=[{"role": "user", "content": "hi"}]).text == TEXT


def test_bad_options_raise_before_anything_is_sent(daemon: FakeDaemon, client: Client) -> None:
    with pytest.raises(BadRequest, match="max_tokens"):
        client.generate("m", prompt="hi", max_tokens="5")  # pyright: ignore[reportArgumentType]
    assert daemon.count(Generate) == 0


def test_failure_comes_as_its_type_and_again_when_asked_again(daemon: FakeDaemon, client: Client) -> None:
    daemon.answers[Generate] = lambda r: r.reply(Failed("queue_full", "256 requests wait"))
    stream = client.generate("m", prompt="hi")
    for _ in range(2):
        with pytest.raises(QueueFull, match="256 requests wait") as caught:
            next(iter(stream))
        assert caught.value.request_id == stream.request_id
    with pytest.raises(QueueFull):
        stream.result()


def test_progress_only_for_those_who_ask(daemon: FakeDaemon, client: Client) -> None:
    daemon.answers[Generate] = lambda r: r.reply(
        Accepted(), Progress("prefill", 5, 9), Snapshot(0, 0, "a", [1]), Progress("decode"), done("a")
    )
    assert [snap.new_text for snap in client.generate("m", prompt="hi")] == ["a"]
    snaps = list(client.generate("m", prompt="hi").snapshots(progress=True))
    assert [(s.phase, s.processed, s.total, s.new_text) for s in snaps[:2]] == [
        ("prefill", 5, 9, ""),
        ("decode", 5, 9, "a"),
    ]
    assert snaps[1].usage.prompt_tokens == 9


def test_cancel_is_idempotent_and_ends_with_what_there_is(daemon: FakeDaemon, client: Client) -> None:
    stream = client.generate("m", prompt="hi")
    request = daemon.expect(Generate)
    request.reply(Accepted(), Snapshot(0, 0, "ab", [1]))
    assert next(iter(stream)).text == "ab"
    stream.cancel()
    stream.cancel()
    assert daemon.expect(Cancel).request_id == request.request_id
    request.reply(done("ab", reason="cancelled"))
    assert stream.result().finish_reason == "cancelled"
    stream.cancel()


def test_leaving_early_cancels(daemon: FakeDaemon, client: Client) -> None:
    with client.generate("m", prompt="hi") as stream:
        request = daemon.expect(Generate)
        request.reply(*accepted_and(TEXT))
        next(iter(stream))
    assert daemon.expect(Cancel).request_id == request.request_id
    with pytest.raises(Disconnected, match="closed"):
        stream.result()


def test_a_forgotten_stream_is_cancelled(daemon: FakeDaemon, client: Client) -> None:
    def begin() -> bytes:
        for _ in client.generate("m", prompt="hi"):
            break
        return daemon.expect(Generate).request_id

    daemon.answers[Generate] = lambda r: r.reply(*accepted_and(TEXT))
    request_id = begin()
    gc.collect()
    assert daemon.expect(Cancel).request_id == request_id


def test_leaving_a_detached_request_does_not_cancel_it(daemon: FakeDaemon, client: Client) -> None:
    with client.generate("m", prompt="hi", detached=True):
        request = daemon.expect(Generate)
    client.models()
    assert daemon.count(Cancel) == 0
    with client.attach(request.request_id.hex()) as again:
        attach = daemon.expect(Attach)
        assert attach.message == Attach(request=request.request_id)
        attach.reply(*accepted_and(TEXT), done(TEXT))
        assert again.result().text == TEXT
        assert again.request_id == request.request_id.hex()


def test_attach_to_an_unknown_request_says_so(daemon: FakeDaemon, client: Client) -> None:
    daemon.answers[Attach] = lambda r: r.reply(Failed("bad_request", "no such request"))
    with pytest.raises(BadRequest, match="no such request"):
        client.attach(bytes(16)).result()
    for bad in ("xyz", "00", b"short"):
        with pytest.raises(BadRequest, match="request id"):
            client.attach(bad)


def test_a_result_that_is_late_does_not_end_the_request(daemon: FakeDaemon, client: Client) -> None:
    stream = client.generate("m", prompt="hi")
    request = daemon.expect(Generate)
    request.reply(Accepted())
    with pytest.raises(RequestTimeout):
        stream.result(timeout=0.05)
    request.reply(Snapshot(0, 0, "ok"), done("ok"))
    assert stream.result(timeout=10).text == "ok"


def test_a_lost_character_is_an_error_and_ends_the_request(daemon: FakeDaemon, client: Client) -> None:
    daemon.answers[Generate] = lambda r: r.reply(Accepted(), Snapshot(0, 0, "ab"), Snapshot(1, 3, "d"))
    stream = client.generate("m", prompt="hi")
    with pytest.raises(ProtocolMismatch, match="1 characters"):
        stream.result()
    daemon.expect(Cancel)


def test_junk_is_skipped(daemon: FakeDaemon, client: Client) -> None:
    def answer(received: object) -> None:
        request = daemon.received[-1]
        request.reply_raw([b"short", b"x"])
        request.reply_raw([b"one part"])
        request.reply_raw([codec.head_of(0x7E, request.request_id), b"newer"])
        request.reply_raw([codec.head_of(0x47, bytes(16)), b"of nobody"])
        request.reply(*accepted_and(TEXT), done(TEXT))

    daemon.answers[Generate] = answer
    assert client.complete("m", prompt="hi").text == TEXT


def test_many_threads_share_one_client(daemon: FakeDaemon, client: Client) -> None:
    daemon.answers[Generate] = lambda r: r.reply(
        *accepted_and(r.message.prompt),
        done(r.message.prompt),  # pyright: ignore
    )

    def ask(number: int) -> bool:
        prompt = f"{number} {TEXT}"
        return client.complete("m", prompt=prompt).text == prompt

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(200)))


# ---- one reader


def test_a_second_thread_that_reads_a_stream_is_told_so(daemon: FakeDaemon, client: Client) -> None:
    stream = client.generate("m", prompt="hi")
    received = daemon.expect(Generate)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(stream.result, 10)
        while not stream._reading.locked():
            time.sleep(0.01)
        for read in (stream.result, lambda: next(stream)):
            with pytest.raises(RuntimeError, match="another thread is reading"):
                read()
        received.reply(*accepted_and(TEXT), done(TEXT))
        assert first.result(10).text == TEXT
    assert stream.result().text == TEXT


def test_closing_a_stream_wakes_the_thread_that_reads_it(daemon: FakeDaemon, client: Client) -> None:
    stream = client.generate("m", prompt="hi")
    daemon.expect(Generate)
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(stream.result)
        while not stream._reading.locked():
            time.sleep(0.01)
        stream.close()
        with pytest.raises(Disconnected, match="closed before its end"):
            reader.result(10)
