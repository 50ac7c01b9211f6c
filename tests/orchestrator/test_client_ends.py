"""Clients that are dropped, forked, or outlive their event loop: nothing hangs and nothing is printed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fake_daemon import FakeDaemon

HEAD = """
import asyncio, gc, os, sys, threading, time
from mlx_bulkhead.orchestrator.async_client import AsyncClient
from mlx_bulkhead.orchestrator.client import Client
from mlx_bulkhead.protocol.errors import Disconnected
run_dir = sys.argv[1]

def refused(function):
    started = time.monotonic()
    try:
        function()
    except Disconnected as error:
        assert "made before a fork; make a new" in str(error), error
        assert time.monotonic() - started < 1
    else:
        raise AssertionError(function)

def in_child(function):
    pid = os.fork()
    if pid:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        return
    function()
    sys.exit(0)  # with all that an interpreter does at its end
"""

KEEP = """
async def main():
    client = AsyncClient(run_dir)
    await client.models()
    return client, client.generate("m", prompt="hi")
"""


@pytest.fixture
def daemon(short_tmp: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(short_tmp) as fake:
        yield fake


def script(run_dir: Path, text: str) -> None:
    """Run a program that must end by itself, with success and without a word."""
    code = HEAD + textwrap.dedent(text)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, os.fspath(run_dir)],
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ---- dropped, or the loop has ended


@pytest.mark.parametrize(
    "then",
    [
        "del client, stream; gc.collect()",
        "cycle = [client, stream]; cycle.append(cycle); del cycle, client, stream; gc.collect()",
        "del client",
        "pass",
        "stream.close(); stream.close()",
        "stream.cancel()",
        "asyncio.run(client.aclose()); asyncio.run(client.aclose())",
        "sys.modules['kept'] = [client, stream]",
    ],
)
@pytest.mark.usefixtures("daemon")
def test_an_async_client_whose_loop_has_ended(short_tmp: Path, then: str) -> None:
    script(short_tmp, f"{KEEP}\nclient, stream = asyncio.run(main())\n{then}")


@pytest.mark.usefixtures("daemon")
def test_an_async_client_whose_loop_ended_by_an_exception(short_tmp: Path) -> None:
    script(
        short_tmp,
        """
        async def main():
            client = AsyncClient(run_dir)
            waiting = asyncio.ensure_future(client.complete("m", prompt="hi"))
            await client.models()
            raise ValueError
        for _ in range(3):
            try:
                asyncio.run(main())
            except ValueError:
                pass
            gc.collect()
        assert not [o for o in gc.get_objects() if type(o).__name__ == "LoopDriver"]
        """,
    )


@pytest.mark.usefixtures("daemon")
def test_a_loop_that_is_dropped_without_being_closed(short_tmp: Path) -> None:
    script(
        short_tmp,
        f"""{KEEP}
loop = asyncio.new_event_loop()
kept = loop.run_until_complete(main())
del kept, loop
gc.collect()
""",
    )


@pytest.mark.usefixtures("daemon")
def test_a_loop_that_was_closed_with_a_reader_waiting(short_tmp: Path) -> None:
    script(
        short_tmp,
        f"""{KEEP}
loop = asyncio.new_event_loop()
client, stream = loop.run_until_complete(main())
reader = loop.create_task(stream.result())
loop.run_until_complete(asyncio.sleep(0.05))
loop.close()
stream.close()
reader._log_destroy_pending = False
del reader, loop
gc.collect()
""",
    )


@pytest.mark.usefixtures("daemon")
def test_verbs_after_the_loop_has_ended_say_so(short_tmp: Path) -> None:
    script(
        short_tmp,
        f"""{KEEP}
client, stream = asyncio.run(main())
for verb in (stream.result, client.models, client.models):
    try:
        asyncio.run(asyncio.wait_for(verb(), 5))
    except Disconnected as error:
        assert "event loop" in str(error) or "closed" in str(error), error
    else:
        raise AssertionError(verb)
""",
    )


@pytest.mark.parametrize("then", ["pass", "del client", "del stream, client; gc.collect()", "client.close()"])
@pytest.mark.usefixtures("daemon")
def test_a_client_at_the_end_of_the_interpreter(short_tmp: Path, then: str) -> None:
    script(short_tmp, f"client = Client(run_dir)\nstream = client.generate('m', prompt='hi')\n{then}")


@pytest.mark.usefixtures("daemon")
def test_a_loop_that_runs_in_a_daemon_thread_at_the_end_of_the_interpreter(short_tmp: Path) -> None:
    script(
        short_tmp,
        f"""{KEEP}
ready = threading.Event()
async def stay():
    kept = await main()
    ready.set()
    await asyncio.sleep(1000)
threading.Thread(target=lambda: asyncio.run(stay()), daemon=True).start()
assert ready.wait(10)
""",
    )


# ---- forks


@pytest.mark.usefixtures("daemon")
def test_a_client_in_a_forked_child(short_tmp: Path) -> None:
    script(
        short_tmp,
        """
        client = Client(run_dir, timeout=3)
        stream = client.generate("m", prompt="hi")
        def child():
            global client, stream
            for verb in (
                client.models,
                client.stats,
                client.shutdown,
                lambda: client.load("a", "x/y"),
                lambda: client.generate("m", prompt="hi"),
                lambda: next(stream),
                stream.result,
                stream.cancel,
            ):
                refused(verb)
            with Client(run_dir) as fresh:
                fresh.models()
            stream.close()
            client.close()
            client.close()
            del stream, client
            gc.collect()
        in_child(child)
        in_child(lambda: None)
        os.waitpid(os.posix_spawn(sys.executable, [sys.executable, "-c", ""], os.environ), 0)
        assert client.models() == []
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.3, "the socket thread spins"
        client.close()
        """,
    )


@pytest.mark.usefixtures("daemon")
def test_a_fork_while_a_thread_waits_for_an_answer(short_tmp: Path) -> None:
    script(
        short_tmp,
        """
        client = Client(run_dir)
        stream = client.generate("m", prompt="hi")
        def wait():
            try:
                stream.result()
            except Disconnected:
                pass
        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(0.2)
        def child():
            refused(stream.result)
            stream.close()
        in_child(child)
        stream.close()
        waiting.join(5)
        assert not waiting.is_alive()
        client.close()
        """,
    )


@pytest.mark.usefixtures("daemon")
def test_an_async_client_in_a_forked_child(short_tmp: Path) -> None:
    script(
        short_tmp,
        """
        async def main():
            client = AsyncClient(run_dir)
            await client.models()
            stream = client.generate("m", prompt="hi")
            pid = os.fork()
            if pid == 0:
                asyncio.events._set_running_loop(None)
                refused(lambda: asyncio.run(client.models()))
                refused(lambda: asyncio.run(stream.result()))
                refused(stream.cancel)
                stream.close()
                asyncio.run(client.aclose())
                del stream, client
                gc.collect()
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            assert await client.models() == []
            stream.close()
            return client
        client = asyncio.run(main())
        in_child(gc.collect)
        """,
    )


@pytest.mark.usefixtures("daemon")
def test_waiting_ends_when_the_socket_thread_is_dead(short_tmp: Path) -> None:
    script(
        short_tmp,
        """
        client = Client(run_dir)
        stream = client.generate("m", prompt="hi")
        driver = client._driver
        type(driver._core).close = type(driver._core).fail_all = lambda *_: None  # it dies without a word to anybody
        def die(core, now):
            raise SystemExit
        driver.post(die)
        try:
            stream.result()
        except Disconnected as error:
            assert "thread has ended" in str(error), error
        else:
            raise AssertionError
        """,
    )
