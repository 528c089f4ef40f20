"""Files of a web server, through urllib3: off unless the host is named, and never from inside one's own network.

Adds: `WebStore`, one web host as a `remote.Store`.
Leaves out: what is in flight, and which failure is tried again here (`fetch`).

obstore could fetch these too, but it follows every redirect without asking, also to the cloud's own addresses. Here

- the host must be in `Config.http_hosts`, as `host` (then its port is the scheme's own) or `host:port`;
- a redirect is checked like the first address, and never leads from https to http;
- where a host is given by name, the connection it leads to must be to a public address. That is asked of the connection
  itself, so a name that changes its meaning is no way around. A private address may be read only as it is written in
  `http_hosts`: `10.0.0.7:8000`;
- no proxy of the environment is used, since behind one no address could be checked.

Tries are counted in `fetch`: the first wait of urllib3's own policy is none at all, which makes a busy server busier.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
import socket
import threading
from collections.abc import AsyncGenerator, Callable
from email.utils import parsedate_to_datetime
from functools import partial
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import TypeVar
from urllib.parse import quote, urljoin, urlsplit

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    LocationParseError,
    NewConnectionError,
    ProtocolError,
    ReadTimeoutError,
    SSLError,
)
from urllib3.response import BaseHTTPResponse

from mmdp.refusals import shorten
from mmdp.remote import WEB, Access, FetchError, MissingObjectError, Rest, RestError, SilentError, TransientError

T = TypeVar("T")

_MOST_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_TRY_AGAIN = (408, 429, 500, 502, 503, 504)
_PORTS = {"http": 80, "https": 443}
_NAT64 = IPv6Network("64:ff9b::/96")
_PIECE = 2**16
"""Bytes read at a time."""


class WebStore:
    """A web host, for the process that made it.

    Args:
        place: scheme and host, such as `https://host`.
        access: the hosts that may be read, time limits, tries.

    Raises:
        ValueError: the host is not one that may be read.
    """

    def __init__(self, place: str, access: Access) -> None:
        self._place = place
        self._access = access
        self._check(place)
        self._manager = urllib3.PoolManager(
            maxsize=access.max_fetches,
            timeout=urllib3.Timeout(connect=access.connect_seconds, read=access.read_seconds),
            retries=False,
        )
        self._manager.pool_classes_by_scheme = {"http": _HTTPPool, "https": _HTTPSPool}

    async def open(self, key: str, limit: int | None, rest: Rest | None = None) -> _Answer:
        """As `remote.Store`; `ValueError` for an address that may not be read."""
        return await _in_thread(lambda: self._open(key, limit, rest))

    def _open(self, key: str, limit: int | None, rest: Rest | None = None) -> _Answer:
        url = uri = f"{self._place}/{quote(key)}"
        headers = {"Accept-Encoding": "identity"}
        if rest is not None:
            headers |= {"Range": f"bytes={rest.start}-", "If-Range": rest.stamp}
        elif limit is not None:
            headers["Range"] = f"bytes=0-{limit - 1}"
        for _ in range(_MOST_REDIRECTS + 1):
            self._check(url)
            try:
                response = self._manager.urlopen("GET", url, headers=headers, redirect=False, preload_content=False)
            except (SSLError, LocationParseError) as error:
                raise FetchError(errno.EIO, str(error), uri) from None
            except ReadTimeoutError:
                raise SilentError(f"no byte for {self._access.read_seconds:g} s") from None
            except HTTPError as error:
                if isinstance(error, ConnectTimeoutError) and not isinstance(error, NewConnectionError):
                    seconds = f"{self._access.connect_seconds:g} s"
                    raise TransientError(f"no connection within {seconds} (Config.connect_seconds)") from None
                raise TransientError(_cause(error)) from None
            if response.status not in _REDIRECTS:
                break
            response.drain_conn()
            url = urljoin(url, response.headers.get("Location", ""))
        else:
            raise FetchError(errno.ELOOP, f"more than {_MOST_REDIRECTS} redirects", uri)
        if rest is not None and response.status in (200, 412, 416):
            response.close()
            raise RestError("the file is another one by now, or its server ignores ranges")
        if response.status in (200, 206):
            return _Answer(response, uri, self._access.read_seconds, start=rest.start if rest else 0)
        response.close()
        said = f"{response.status} {response.reason}"
        if response.status == 416 and limit is not None:  # an empty file has no range
            return self._open(key, None)
        if response.status in (404, 410):
            raise MissingObjectError(said)
        if response.status in (401, 403):
            raise FetchError(errno.EACCES, f"{said}: the server refuses access; only open files are read", uri)
        if response.status in _TRY_AGAIN:
            raise TransientError(said)
        raise FetchError(errno.EIO, said, uri)

    def _check(self, url: str) -> None:
        """Refuses an address that may not be read."""
        parts = urlsplit(url)
        host = (parts.hostname or "").lower()
        port = parts.port or _PORTS.get(parts.scheme, 0)
        shown = shorten(f"{host}:{port}" if parts.port else host)
        if parts.scheme not in WEB or (self._place.startswith("https:") and parts.scheme != "https"):
            raise ValueError(f"{shorten(self._place)} redirects to {shorten(url)}: only {self._place} or https is read")
        names = {f"{host}:{port}", f"[{host}]:{port}"} | ({host} if port == _PORTS[parts.scheme] else set())
        if not names & {name.lower() for name in self._access.http_hosts}:
            found = "may not be read from the web" if url == self._place else f"is where {self._place} redirects to"
            raise ValueError(f"{shown} {found}: if you trust it, name it, as in Config(http_hosts=({shown},))")


class _Answer:
    """As `remote.Opened`."""

    def __init__(self, response: BaseHTTPResponse, uri: str, read_seconds: float, *, start: int) -> None:
        self._response = response
        self._read_seconds = read_seconds
        header = response.headers
        range_ = header.get("Content-Range", "") if response.status == 206 else ""
        whole = re.fullmatch(rf"bytes {start}-\d+/(\d+)", range_)
        length = header.get("Content-Length", "")
        if not length.isdecimal() or (response.status == 206 and whole is None) or header.get("Content-Encoding"):
            response.close()
            raise FetchError(
                errno.EIO, "the server compresses it, or does not tell how long it is: serve it plain", uri
            )
        self.num_bytes = int(length)
        self.size = int(whole.group(1)) if whole else self.num_bytes
        self.modified_ns = _modified_ns(header.get("Last-Modified", ""))
        etag = header.get("ETag", "")
        self.stamp = etag or (f"{self.modified_ns} {self.size}" if self.modified_ns else "")
        self.resumes = etag.startswith('"')  # a weak one, W/"...", does not promise the same bytes

    async def read(self) -> bytes:
        return b"".join([piece async for piece in self.pieces(self.num_bytes)])

    async def pieces(self, num_bytes: int) -> AsyncGenerator[bytes, None]:
        left = self.num_bytes
        try:
            while left:
                piece = await _in_thread(partial(self._read, min(left, num_bytes)))
                left -= len(piece)
                yield piece
        finally:
            # Also where nobody waits any more: it wakes the thread that still reads.
            if left:
                with contextlib.suppress(RuntimeError):  # it has ended by itself
                    self._response.shutdown()
                self._response.close()
            else:
                self._response.release_conn()

    def _read(self, num_bytes: int) -> bytes:
        pieces, left = [], num_bytes
        try:
            while left:
                pieces.append(self._response.read(min(left, _PIECE), decode_content=False))
                left -= len(pieces[-1])
                if not pieces[-1]:
                    raise TransientError("the body was cut short")
        except (ReadTimeoutError, TimeoutError):
            raise SilentError(f"no byte for {self._read_seconds:g} s") from None
        except (HTTPError, OSError) as error:
            raise TransientError(f"the body was cut short: {type(error).__name__}") from None
        return b"".join(pieces)


class _PublicOnly(HTTPConnection):
    """A connection to a host by name that refuses to lead into a private network, before a byte is sent."""

    def _new_conn(self) -> socket.socket:
        connection = super()._new_conn()
        address = connection.getpeername()[0]
        if _is_literal(self.host) or is_public(address):
            return connection
        connection.close()
        raise ValueError(
            f"{shorten(self.host)} leads to the private address {address}, and no web address may: "
            "if it is yours, name the address itself in Config.http_hosts and in the data's address"
        )


class _PublicOnlyTLS(_PublicOnly, HTTPSConnection):
    pass


class _HTTPPool(urllib3.HTTPConnectionPool):
    ConnectionCls = _PublicOnly


class _HTTPSPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _PublicOnlyTLS


def is_public(address: str) -> bool:
    """Whether an address is one of the whole internet, and none inside it leads elsewhere.

    >>> is_public("8.8.8.8"), is_public("169.254.169.254"), is_public("::ffff:10.0.0.1")
    (True, False, False)
    """
    found = ip_address(address.partition("%")[0])
    if isinstance(found, IPv6Address):
        # Of an IPv4 address in an IPv6 one, that is what counts: mapped, 6to4, and NAT64 (RFC 6052).
        is_nat64 = found in _NAT64
        inner = found.ipv4_mapped or found.sixtofour or (IPv4Address(int(found) % 2**32) if is_nat64 else None)
        if inner is not None:
            return is_public(str(inner))
    return found.is_global and not found.is_multicast


def _is_literal(host: str) -> bool:
    try:
        ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def _cause(error: HTTPError) -> str:
    """The plain words of an error, without the objects that urllib3 shows with them."""
    inner = error.args[-1] if isinstance(error, ProtocolError) and len(error.args) > 1 else error
    return f"{type(error).__name__}: {str(inner).rpartition('connection: ')[2]}"


def _modified_ns(text: str) -> int:
    try:
        return int(parsedate_to_datetime(text).timestamp()) * 10**9
    except ValueError:
        return 0


async def _in_thread(function: Callable[[], T]) -> T:
    """What the function returns or raises. Its thread keeps no process alive, unlike those of a pool."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]
        else:
            future.set_exception(error)

    def work() -> None:
        try:
            outcome: tuple[T | None, BaseException | None] = (function(), None)
        except BaseException as error:
            outcome = (None, error)
        loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=work, daemon=True, name="mmdp-web").start()
    return await future
