"""The client's core without sockets: what it sends when frames, silence and lost connections come."""

from __future__ import annotations

from mlx_bulkhead.orchestrator.client_core import ClientCore
from mlx_bulkhead.orchestrator.client_live import (
    Action,
    ClientSettings,
    Connect,
    Disconnect,
    Item,
    Link,
    Live,
    Rewind,
)
from mlx_bulkhead.protocol import codec
from mlx_bulkhead.protocol.codec import Frame, Message
from mlx_bulkhead.protocol.commands import Attach, Cancel, Command, Generate, Models, Stats
from mlx_bulkhead.protocol.errors import Disconnected, RequestTimeout
from mlx_bulkhead.protocol.events import Accepted, Failed, ModelsReply, Progress, StatsReply

from tests.support.fake_daemon import done

SETTINGS = ClientSettings(timeout=10.0, silence=5.0, backoff_first=0.1, backoff_most=1.0)


class Sink:
    """Keeps what is pushed."""

    def __init__(self) -> None:
        self.items: list[Item] = []

    def push(self, item: Item) -> None:
        self.items.append(item)

    @property
    def error(self) -> object:
        return self.items[-1] if self.items else None


class Bench:
    """A core with a clock, and a peer that answers probes when told to."""

    def __init__(self) -> None:
        self.core = ClientCore(SETTINGS, "remedy")
        self.now = 100.0
        self.sent: list[Frame] = []
        self.other: list[Action] = []

    def collect(self) -> list[Frame]:
        """The frames sent since the last call; connects and disconnects go to `other`."""
        frames = []
        for action in self.core.actions():
            if isinstance(action, list):
                frames.append(codec.decode(action))
            else:
                self.other.append(action)
        return frames

    def start(self, command: Command, *, timeout: float | None = None) -> tuple[Live, Sink]:
        sink = Sink()
        live = Live(type(command), codec.new_request_id(), sink, timeout)
        self.core.submit(live, codec.encode_body(command), self.now)
        return live, sink

    def event(self, request_id: bytes, message: Message) -> None:
        self.core.frame(codec.encode(message, request_id), self.now)

    def connect(self) -> list[Frame]:
        """Answer the probe of a fresh socket; gives what is sent then."""
        probe = self.collect()[-1]
        assert isinstance(probe.message, Models)
        self.event(probe.request_id, ModelsReply())
        assert self.core.link is Link.UP
        return self.collect()

    def pass_time(self, seconds: float) -> list[Frame]:
        self.now += seconds
        self.core.tick(self.now)
        return self.collect()


def generate() -> Generate:
    return Generate(model="m", prompt="hi")


def test_nothing_is_sent_before_the_daemon_has_answered() -> None:
    bench = Bench()
    live, _ = bench.start(generate())
    bench.core.cancel(live)
    frames = bench.connect()
    assert [type(frame.message) for frame in frames] == [Generate, Cancel]
    assert {frame.request_id for frame in frames} == {live.request_id}
    assert [type(action) for action in bench.other] == [Connect]


def test_what_is_abandoned_before_it_was_sent_is_never_sent() -> None:
    bench = Bench()
    live, _ = bench.start(generate())
    bench.core.abandon(live, cancel=True)
    assert bench.connect() == []


def test_a_refused_call_fails_at_once_and_a_stream_after_three() -> None:
    bench = Bench()
    _, call = bench.start(Stats())
    _, stream = bench.start(generate())
    for attempt in range(3):
        assert stream.items == [], attempt
        bench.core.lost("nobody listens", bench.now, refused=True)
        assert isinstance(call.error, Disconnected)
        bench.pass_time(2.0)
    assert isinstance(stream.error, Disconnected)
    assert "nobody listens; remedy" in str(stream.error)
    assert bench.core.link is Link.DOWN
    assert bench.core.wait_until(bench.now) is None


def test_silence_is_probed_and_an_answer_means_a_new_attach() -> None:
    bench = Bench()
    live, sink = bench.start(generate())
    bench.connect()
    bench.event(live.wire_id, Accepted())
    assert bench.pass_time(4.0) == []
    bench.event(live.wire_id, Progress("decode"))
    assert bench.pass_time(4.0) == []
    (probe,) = bench.pass_time(2.1)
    assert isinstance(probe.message, Models)
    bench.event(probe.request_id, ModelsReply())
    (attach,) = bench.collect()
    assert attach.message == Attach(request=live.request_id)
    assert attach.request_id != live.request_id
    bench.event(attach.request_id, Accepted())
    bench.event(attach.request_id, done(""))
    assert isinstance(sink.items[2], Rewind)
    assert len(sink.items) == 5
    bench.event(attach.request_id, done(""))
    assert bench.core.ignored == 1


def test_an_attach_that_stays_unanswered_is_given_up_at_the_next_silence() -> None:
    bench = Bench()
    _, sink = bench.start(generate())
    bench.connect()
    for _ in range(2):
        (probe,) = bench.pass_time(6.1)
        bench.event(probe.request_id, ModelsReply())
        bench.collect()
    assert isinstance(sink.error, Disconnected)


def test_a_long_call_survives_silence_while_the_daemon_answers() -> None:
    bench = Bench()
    _, sink = bench.start(Stats())
    bench.connect()
    for _ in range(5):
        (probe,) = bench.pass_time(6.1)
        bench.event(probe.request_id, ModelsReply())
        assert bench.collect() == []
    assert sink.items == []


def test_an_unanswered_probe_means_a_fresh_socket_and_then_the_end() -> None:
    bench = Bench()
    _, sink = bench.start(generate())
    bench.connect()
    bench.other.clear()
    bench.pass_time(6.1)
    bench.pass_time(5.1)
    assert [type(action) for action in bench.other] == [Disconnect]
    bench.pass_time(0.2)
    assert isinstance(bench.other[-1], Connect)
    bench.pass_time(10.1)
    assert isinstance(sink.error, Disconnected)


def test_after_a_lost_connection_streams_are_attached_and_calls_fail() -> None:
    bench = Bench()
    stream, sink = bench.start(generate())
    _, call = bench.start(Stats())
    bench.connect()
    bench.event(stream.wire_id, Accepted())
    bench.core.lost("gone", bench.now)
    assert isinstance(call.error, Disconnected)
    bench.core.cancel(stream)
    assert bench.collect() == []
    bench.now += 0.2
    bench.core.tick(bench.now)
    attach, cancel = bench.connect()
    assert attach.message == Attach(request=stream.request_id)
    assert (cancel.message, cancel.request_id) == (Cancel(), stream.request_id)
    bench.event(attach.request_id, Failed("unknown_model", "no such request"))
    assert isinstance(sink.error, Disconnected)


def test_a_request_that_failed_before_it_was_accepted_keeps_its_own_error() -> None:
    bench = Bench()
    _, sink = bench.start(generate())
    bench.connect()
    bench.core.lost("gone", bench.now)
    bench.pass_time(0.2)
    bench.core.frame(codec.encode(ModelsReply(), bench.core._probe or b""), bench.now)
    (attach,) = bench.collect()
    bench.event(attach.request_id, Failed("queue_full", "256 wait"))
    kind, _ = sink.items[-1]  # pyright: ignore[reportGeneralTypeIssues]
    assert kind == codec.kind_of(Failed)


def test_calls_time_out_exactly() -> None:
    bench = Bench()
    _, sink = bench.start(Stats(), timeout=1.0)
    bench.connect()
    assert bench.core.wait_until(bench.now) == bench.now + 1.0
    bench.pass_time(0.9)
    assert sink.items == []
    bench.pass_time(0.1)
    assert isinstance(sink.error, RequestTimeout)


def test_late_answers_and_junk_are_ignored() -> None:
    bench = Bench()
    live, sink = bench.start(Stats(), timeout=1.0)
    bench.connect()
    bench.pass_time(1.0)
    bench.event(live.wire_id, StatsReply())
    bench.core.frame([b"x"], bench.now)
    bench.core.frame([b"x", b"y"], bench.now)
    bench.core.frame([codec.head_of(0x7F, live.wire_id), b""], bench.now)
    assert len(sink.items) == 1
    assert bench.core.ignored == 4


def test_an_idle_client_lets_go_and_comes_back_for_the_next_call() -> None:
    bench = Bench()
    live, _ = bench.start(Stats())
    bench.connect()
    bench.event(live.wire_id, StatsReply())
    bench.core.lost("gone", bench.now)
    bench.collect()
    assert bench.core.link is Link.DOWN
    assert bench.core.wait_until(bench.now) is None
    bench.start(Stats())
    assert [type(frame.message) for frame in bench.connect()] == [Stats]


def test_close_cancels_its_own_and_fails_all() -> None:
    bench = Bench()
    sinks = [Sink(), Sink()]
    lives = [
        Live(Generate, codec.new_request_id(), sink, cancel_on_close=own)
        for sink, own in zip(sinks, (True, False), strict=True)
    ]
    for live in lives:
        bench.core.submit(live, codec.encode_body(generate()), bench.now)
    bench.connect()
    bench.core.close()
    assert [(f.message, f.request_id) for f in bench.collect()] == [(Cancel(), lives[0].request_id)]
    assert all(isinstance(sink.error, Disconnected) for sink in sinks)
