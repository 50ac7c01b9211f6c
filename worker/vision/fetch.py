"""Fetches a picture over http or https: from public addresses only, within a size and a time.

The name is resolved here, once, and the connection goes to the address that was checked; a redirect is a fetch of its
own, with the same checks. Proxies of the environment are not used: they would connect to what was not checked.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable
from typing import Final
from urllib.parse import urljoin, urlsplit

from ...protocol.errors import ErrorCode
from ..engines.base import Refused

SECONDS: Final = 10.0
"""For all pictures of a request, redirects included. The worker's streams pause meanwhile."""
REDIRECTS: Final = 3
_BLOCK: Final = 64 * 1024
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
"""Addresses that stand for those of IPv4."""
_MOVED: Final = (301, 302, 303, 307, 308)

Allowed = Callable[[str], bool]
"""Whether a fetch may connect to an address."""


def is_public(address: str) -> bool:
    """Whether an address is one of the open internet: not this host's, nor of a private or special network."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(ip, "ipv4_mapped", None) or getattr(ip, "sixtofour", None)
    if ip in _NAT64:
        mapped = ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF)
    if mapped is not None:
        return is_public(str(mapped))
    return ip.is_global and not ip.is_multicast


def fetch(url: str, where: str, limit: int, *, allowed: Allowed = is_public, until: float | None = None) -> bytes:
    """The body behind a URL. Raises `Refused`, naming the URL and what is wrong.

    until: in monotonic seconds. None: for `SECONDS` from now.
    """
    deadline = time.monotonic() + SECONDS if until is None else until
    for _ in range(REDIRECTS + 1):
        found = _get(url, where, limit, allowed, deadline)
        if isinstance(found, bytes):
            return found
        url = found
    raise _refused(where, url, f"it redirects more than {REDIRECTS} times")


def _get(url: str, where: str, limit: int, allowed: Allowed, deadline: float) -> bytes | str:
    """The body, or where it moved."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise _refused(where, url, str(error)) from None
    if parts.scheme not in ("http", "https") or not host:
        raise _refused(where, url, "it is not http or https with a host")
    if parts.username is not None:
        raise _refused(where, url, "it holds a user name")
    port = port or (443 if parts.scheme == "https" else 80)
    connection = _Connection(host, port, timeout=_left(deadline, where, url))
    try:
        plain = _connect(host, port, where, url, allowed, deadline)
        connection.sock = plain
        if parts.scheme == "https":
            connection.sock = ssl.create_default_context().wrap_socket(plain, server_hostname=host)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("GET", target, headers={"Accept": "image/*", "Accept-Encoding": "identity"})
        return _answer(connection, url, where, limit, deadline)
    except (OSError, http.client.HTTPException, UnicodeError) as error:
        raise _refused(where, url, f"{type(error).__name__}: {error}") from None
    finally:
        connection.close()


def _answer(connection: http.client.HTTPConnection, url: str, where: str, limit: int, deadline: float) -> bytes | str:
    with connection.getresponse() as response:
        if response.status in _MOVED and (target := response.headers.get("Location")):
            return urljoin(url, target)
        if response.status != 200:
            raise _refused(where, url, f"the server answers {response.status} {response.reason}")
        body = bytearray()
        while True:
            if connection.sock is not None:
                connection.sock.settimeout(_left(deadline, where, url))
            _left(deadline, where, url)
            block = response.read1(_BLOCK)
            if not block:
                return bytes(body)
            body += block
            if len(body) > limit:
                raise Refused(
                    ErrorCode.TOO_LARGE,
                    f"{where} at {url} has over {limit} bytes, which is the limit; load the model with a larger "
                    "max_image_bytes",
                )


class _Connection(http.client.HTTPConnection):
    """Does not connect by itself: its socket is put in, connected to an address that was checked."""

    def connect(self) -> None:
        raise http.client.NotConnected("no checked connection")


def _connect(host: str, port: int, where: str, url: str, allowed: Allowed, deadline: float) -> socket.socket:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    refused = sorted({str(entry[4][0]) for entry in found if not allowed(str(entry[4][0]))})
    if refused:  # one is enough: which one would be used is the resolver's choice
        raise _refused(where, url, f"{host} is {', '.join(refused)}, which is not a public address")
    last: OSError | None = None
    for family, kind, protocol, _, address in found:
        plain = socket.socket(family, kind, protocol)
        try:
            plain.settimeout(_left(deadline, where, url))
            plain.connect(address)
            return plain
        except OSError as error:
            plain.close()
            last = error
        except BaseException:
            plain.close()
            raise
    raise last or OSError("the name has no address")


def _left(deadline: float, where: str, url: str) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise _refused(where, url, f"the {SECONDS:g} s for all images of a request are over")
    return left


def _refused(where: str, url: str, why: str) -> Refused:
    return Refused(ErrorCode.BAD_REQUEST, f"{where} cannot be fetched from {url[:300]}: {why}")
