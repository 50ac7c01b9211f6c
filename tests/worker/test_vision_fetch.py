"""Pictures fetched over http: from public addresses only, within size and time, redirects included."""

from __future__ import annotations

import http.server
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from mlx_bulkhead.protocol.errors import ErrorCode
from mlx_bulkhead.worker.engines.base import Refused
from mlx_bulkhead.worker.vision.fetch import fetch, is_public

BODY = b"a picture" * 100


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        moves = {
            "/moved": "/a.png",
            "/loop": "/loop",
            "/inside": "http://10.0.0.7/a.png",
            "/file": "file:///etc/passwd",
        }
        if (target := moves.get(self.path)) is not None:
            self.send_response(302)
            self.send_header("Location", target)
            self.end_headers()
        elif self.path == "/slow":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"x")
            self.wfile.flush()
            self.server.release.wait(20)  # type: ignore[attr-defined]
        elif self.path == "/a.png":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(BODY)
        else:
            self.send_error(404, "nothing here")

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    made.release = threading.Event()  # type: ignore[attr-defined]
    made.daemon_threads = False
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{made.server_port}"
    made.release.set()  # type: ignore[attr-defined]
    made.shutdown()
    made.server_close()
    thread.join()


def local(address: str) -> bool:
    """For these tests the server's own address counts as public."""
    return address == "127.0.0.1" or is_public(address)


def get(url: str, limit: int = 10_000, **options: Any) -> bytes:
    return fetch(url, "image 1", limit, allowed=local, **options)


def test_a_picture_and_a_redirect(server: str) -> None:
    assert get(f"{server}/a.png") == BODY
    assert get(f"{server}/moved?x=1".replace("?x=1", "")) == BODY
    assert get(f"{server}/a.png", limit=len(BODY)) == BODY


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/inside", "10.0.0.7, which is not a public address"),
        ("/loop", "it redirects more than 3 times"),
        ("/file", "it is not http or https"),
        ("/missing", "the server answers 404 nothing here"),
    ],
)
def test_what_is_refused(server: str, path: str, words: str) -> None:
    with pytest.raises(Refused, match=words) as caught:
        get(server + path)
    assert caught.value.code is ErrorCode.BAD_REQUEST


def test_size(server: str) -> None:
    with pytest.raises(Refused, match=f"has over {len(BODY) - 1} bytes, which is the limit") as caught:
        get(f"{server}/a.png", limit=len(BODY) - 1)
    assert caught.value.code is ErrorCode.TOO_LARGE


def test_time(server: str) -> None:
    with pytest.raises(Refused, match=r"cannot be fetched .*(timed out|are over)"):
        get(f"{server}/slow", until=time.monotonic() + 0.2)


def test_nobody_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(Refused, match="ConnectionRefusedError"):
        get(f"http://127.0.0.1:{port}/a.png")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1/", "127.0.0.1, which is not a public address"),
        ("http://[::1]/", "which is not a public address"),
        ("http://169.254.169.254/latest", "which is not a public address"),
        ("http://2130706433/", "not a public address"),
        ("http://user@example.org/", "holds a user name"),
        ("http:///a.png", "with a host"),
        ("http://example.org:99999/", "ort"),
    ],
)
def test_addresses_of_ones_own(url: str, words: str) -> None:
    with pytest.raises(Refused, match=words):
        fetch(url, "image 1", 100)


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("10.1.2.3", False),
        ("192.168.0.1", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:8.8.8.8", True),
        ("2002:7f00:1::", False),
        ("64:ff9b::7f00:1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("localhost", False),
    ],
)
def test_public_addresses(address: str, public: bool) -> None:
    assert is_public(address) is public
