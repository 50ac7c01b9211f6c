"""The request log: whatever readers do, each gets every character once, in order, then the terminal event."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from mlx_bulkhead.orchestrator.streams import ACCEPTED, DONE, PROGRESS, SNAPSHOT, RequestLog
from mlx_bulkhead.orchestrator.views import Assembler
from mlx_bulkhead.protocol import codec
from mlx_bulkhead.protocol.events import Accepted, Done, Progress, Snapshot
from mlx_bulkhead.protocol.values import Timings, Usage


def filled(count: int, *, closed: bool = True) -> RequestLog:
    log = RequestLog()
    log.accept(codec.encode_body(Accepted()))
    for seq in range(count):
        add(log, seq)
    if closed:
        log.close(DONE, done(count))
    return log


def add(log: RequestLog, seq: int) -> None:
    log.add_snapshot(codec.encode_body(Snapshot(seq=seq, offset=2 * seq, text=f"{seq % 10}é", tokens=[seq])))


def done(count: int) -> bytes:
    return codec.encode_body(
        Done(finish_reason="stop", usage=Usage(), timings=Timings(), engine="text", chars=2 * count)
    )


def test_a_reader_that_keeps_up_gets_each_frame_as_it_came() -> None:
    log = filled(0, closed=False)
    cursor = log.cursor(lambda: None)
    assert [kind for kind, _ in cursor.take()] == [ACCEPTED]
    add(log, 0)
    first = log._snapshots[0]
    assert cursor.take() == [(SNAPSHOT, first)]
    assert cursor.take() == []


def test_a_late_reader_gets_the_whole_in_one_message() -> None:
    log = filled(5000)
    taken = log.cursor(lambda: None).take()
    assert [kind for kind, _ in taken] == [ACCEPTED, SNAPSHOT, DONE]
    snapshot = codec.decode_body(*taken[1][:1], bytes(16), taken[1][1])
    assert isinstance(snapshot, Snapshot)
    assert len(snapshot.tokens) == 5000
    assert len(snapshot.text) == 10_000


def test_memory_is_bounded_by_the_output() -> None:
    log = RequestLog()
    for seq in range(20_000):
        add(log, seq)
    assert len(log._snapshots) < 1024
    assert sum(map(len, log._snapshots)) < 20_000 * 16


def test_progress_is_a_state() -> None:
    log = filled(0, closed=False)
    cursor = log.cursor(lambda: None)
    for done_tokens in range(10):
        log.set_progress(codec.encode_body(Progress(phase="prefill", processed=done_tokens, total=10)))
    kinds = [kind for kind, _ in cursor.take()]
    assert kinds == [ACCEPTED, PROGRESS]


def test_wake_is_called_for_everything_new() -> None:
    log = RequestLog()
    woken: list[int] = []
    log.cursor(lambda: woken.append(1))
    log.accept(codec.encode_body(Accepted()))
    add(log, 0)
    log.close(DONE, done(1))
    assert len(woken) == 3


@given(
    plan=st.lists(st.one_of(st.integers(0, 2), st.just("add"), st.just("burst")), max_size=60),
    late=st.booleans(),
)
def test_every_reader_assembles_the_same_text(plan: list[int | str], late: bool) -> None:
    log = RequestLog()
    log.accept(codec.encode_body(Accepted()))
    cursors = [log.cursor(lambda: None) for _ in range(3)]
    assemblers = [Assembler(bytes(16)) for _ in range(3)]
    count = 0

    def read(index: int) -> None:
        for kind, body in cursors[index].take():
            assemblers[index].feed(codec.decode_body(kind, bytes(16), body))  # pyright: ignore[reportArgumentType]

    for what in plan:
        if isinstance(what, int):
            read(what)
        else:
            for _ in range(1 if what == "add" else 300):
                add(log, count)
                count += 1
    log.close(DONE, done(count))
    if late:
        cursors.append(log.cursor(lambda: None))
        assemblers.append(Assembler(bytes(16)))
    for index in range(len(cursors)):
        read(index)
        assert cursors[index].finished
        assert cursors[index].take() == []
    expected = "".join(f"{seq % 10}é" for seq in range(count))
    for assembler in assemblers:
        assert assembler.error is None
        assert assembler.result is not None
        assert assembler.result.text == expected
        assert assembler.result.tokens == list(range(count))
