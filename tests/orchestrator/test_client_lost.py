"""The blocking client when the daemon is not there, goes away or falls silent, and when the client closes."""

from __future__ import annotations

import gc
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mlx_bulkhead.orchestrator.client import Client
from mlx_bulkhead.protocol.commands import (
    Attach,
    Cancel,
    Generate,
    Load,
    Models,
)
from mlx_bulkhead.protocol.errors import (
    Disconnected,
    RequestTimeout,
)
from mlx_bulkhead.protocol.events import (
    Accepted,
    Failed,
    Snapshot,
)
from mlx_bulkhead.protocol.values import ModelStatus

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


# ---- the daemon is not there, or goes away


def test_no_daemon_says_where_and_what_to_do(short_tmp: Path) -> None:
    started = time.monotonic()
    with pytest.raises(Disconnected, match=f"{short_tmp}.*bulkhead serve"):
        Client(short_tmp)
    assert time.monotonic() - started < 2


def test_a_stale_socket_file_is_no_daemon(short_tmp: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(os.fspath(short_tmp / "daemon.sock"))
    started = time.monotonic()
    with pytest.raises(Disconnected, match="nobody listens"):
        Client(short_tmp)
    assert time.monotonic() - started < 2


def test_a_daemon_that_does_not_answer_is_given_up(daemon: FakeDaemon, short_tmp: Path) -> None:
    daemon.mute = True
    with pytest.raises((Disconnected, RequestTimeout)):
        Client(short_tmp, timeout=0.3)


def test_the_end_of_the_daemon_ends_its_streams_at_once(daemon: FakeDaemon, client: Client) -> None:
    stream = client.generate("m", prompt="hi")
    daemon.expect(Generate).reply(*accepted_and(TEXT))
    snaps = iter(stream)
    next(snaps)
    started = time.monotonic()
    daemon.close()
    with pytest.raises(Disconnected, match="bulkhead serve"):
        stream.result()
    assert time.monotonic() - started < 3
    with pytest.raises(Disconnected):
        client.models()


def test_a_load_fails_when_the_daemon_ends(daemon: FakeDaemon, client: Client) -> None:
    daemon.answers[Load] = lambda _: daemon.vanish()
    with pytest.raises(Disconnected):
        client.load("a", "x/y")


def test_an_idle_client_finds_the_next_daemon(daemon: FakeDaemon, client: Client, short_tmp: Path) -> None:
    daemon.close()
    with FakeDaemon(short_tmp) as following:
        following.models = [ModelStatus(name="new", state="READY")]
        assert client.models() == following.models


def test_a_lost_connection_is_taken_up_again_without_a_seam(daemon: FakeDaemon, client: Client) -> None:
    stream = client.generate("m", prompt="hi")
    request = daemon.expect(Generate)
    request.reply(Accepted(), Snapshot(0, 0, "abc", [1, 2]))
    snaps = iter(stream)
    assert next(snaps).text == "abc"
    daemon.rebind()
    attach = daemon.expect(Attach)
    assert attach.message == Attach(request=request.request_id)
    attach.reply(Accepted(), Snapshot(3, 0, "abcde", [1, 2, 3]), done("abcde"))
    rest = list(snaps)
    assert [(snap.new_text, snap.tokens) for snap in rest] == [("de", [3])]
    assert stream.result().tokens == [1, 2, 3]


def test_a_daemon_that_has_forgotten_the_request_means_disconnected(daemon: FakeDaemon, client: Client) -> None:
    daemon.answers[Attach] = lambda r: r.reply(Failed("bad_request", "no request"))
    stream = client.generate("m", prompt="hi")
    daemon.expect(Generate).reply(Accepted())
    daemon.rebind()
    with pytest.raises(Disconnected, match="no longer knows"):
        stream.result()


def test_silence_is_probed_and_the_stream_taken_up_again(daemon: FakeDaemon, short_tmp: Path) -> None:
    with Client(short_tmp, silence=0.2) as client:
        stream = client.generate("m", prompt="hi")
        daemon.expect(Generate).reply(Accepted(), Snapshot(0, 0, "a"))
        daemon.expect(Attach).reply(Accepted(), Snapshot(1, 0, "ab"), done("ab"))
        assert stream.result().text == "ab"
        assert daemon.count(Models) >= 2


def test_silence_without_an_answer_to_the_probe_means_disconnected(daemon: FakeDaemon, short_tmp: Path) -> None:
    with Client(short_tmp, silence=0.1, timeout=0.5) as client:
        stream = client.generate("m", prompt="hi")
        daemon.mute = True
        daemon.expect(Generate).reply(Accepted())
        with pytest.raises(Disconnected):
            stream.result()


# ---- closing


def test_close_is_quick_with_a_dead_daemon_and_unsent_messages(daemon: FakeDaemon, short_tmp: Path) -> None:
    client = Client(short_tmp)
    daemon.mute = True
    streams = [client.generate("m", prompt="x" * 200_000) for _ in range(50)]
    daemon.close(keep_socket_file=True)
    started = time.monotonic()
    client.close()
    assert time.monotonic() - started < 1.0
    client.close()
    for stream in streams:
        with pytest.raises(Disconnected):
            stream.result()
    with pytest.raises(Disconnected, match="closed"):
        client.models()


def test_close_cancels_what_runs_and_frees_who_waits(daemon: FakeDaemon, short_tmp: Path) -> None:
    client = Client(short_tmp)
    stream = client.generate("m", prompt="hi")
    request = daemon.expect(Generate)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(stream.result)
        client.close()
        with pytest.raises(Disconnected, match="closed"):
            waiting.result(timeout=5)
    assert daemon.expect(Cancel).request_id == request.request_id


def test_a_forgotten_client_ends_its_thread(daemon: FakeDaemon, short_tmp: Path) -> None:
    client = Client(short_tmp)
    thread = client._driver._thread
    del client
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


def test_twenty_clients_come_and_go(daemon: FakeDaemon, short_tmp: Path) -> None:
    daemon.answers[Generate] = answer_with(TEXT)
    for _ in range(20):
        with Client(short_tmp) as client:
            assert client.complete("m", prompt="hi").text == TEXT
