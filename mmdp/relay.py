"""A relay in front of a server on this machine, which answers as if it were far away.

Adds: `Relay`, which passes bytes on between clients and one server; `Link`, what it does to a connection meanwhile;
`Far`, the link to a place some milliseconds away; `Tokens`, so many bytes a second for all.
Leaves out: the server (`local_store`), and faults: a drill gives the relay links of its own.

It needs no privileges and knows no protocol. Bytes pass as they are, so signatures hold and connections stay open. A
request is what a client sends until the server answers; it is held back as a whole, once. Client and server see one
connection each, so what a link does to one never stops another.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import struct
from collections.abc import Callable
from random import Random
from typing import Protocol

MEDIAN_MS = 40.0
"""From asking S3 for a small object to its first byte: tens of milliseconds, with a long tail."""

TAIL = 105 / 40
"""The slowest of a hundred requests over the median one."""

_PIECE = 64 * 2**10  # bytes passed on at a time
_Z99 = 2.3263  # a normal variable is below it 99 times of 100


class Link(Protocol):
    """What becomes of one connection. A `ConnectionError` out of either method ends it, without a goodbye."""

    async def request(self) -> None:
        """A request has begun to come in; it goes on when this returns."""

    async def reply(self, data: bytes) -> bytes:
        """Some bytes of an answer have come in; what is returned goes on in their place."""


class Tokens:
    """So many bytes a second, for all that share it, first come, first served.

    Args:
        per_second: bytes; infinite for no limit.

    Raises:
        ValueError: not more than 0.
    """

    def __init__(self, per_second: float = math.inf) -> None:
        if not per_second > 0:
            raise ValueError(f"{per_second} bytes a second let nothing through: give more than 0")
        self._per_second = per_second
        self._free = 0.0  # when all that was let through has passed, on the event loop's clock

    async def take(self, num_bytes: int) -> None:
        """Returns once so many bytes have passed."""
        if self._per_second == math.inf:
            return
        now = asyncio.get_running_loop().time()
        self._free = max(self._free, now) + num_bytes / self._per_second
        await asyncio.sleep(self._free - now)


class Far:
    """The link to a place some milliseconds away: latencies are log-normal, as those of stores are.

    Args:
        median_ms: of the latencies; 0 for none.
        random: to draw them.
        tokens: that the bytes of answers need.
    """

    def __init__(self, median_ms: float, random: Random, tokens: Tokens) -> None:
        self._median = median_ms / 1000
        self._random = random
        self._tokens = tokens

    async def request(self) -> None:
        """As `Link`."""
        if self._median:
            await asyncio.sleep(self._median * self._random.lognormvariate(0, math.log(TAIL) / _Z99))

    async def reply(self, data: bytes) -> bytes:
        """As `Link`."""
        await self._tokens.take(len(data))
        return data


def far(median_ms: float = MEDIAN_MS, *, bytes_per_second: float = math.inf, seed: int = 0) -> Callable[[int], Far]:
    """Makes the link of each connection, from its number: the same latencies for the same seed and order.

    Args:
        median_ms: of the latencies.
        bytes_per_second: of all answers together.
        seed: of the latencies.

    Raises:
        ValueError: a number out of range.
    """
    if not 0 <= median_ms < math.inf:
        raise ValueError(f"a latency of {median_ms} ms: give 0 or more")
    tokens = Tokens(bytes_per_second)
    return lambda number: Far(median_ms, Random(f"{seed} {number}"), tokens)  # noqa: S311 - nothing secret


class Relay:
    """Listens on a free port of this machine, on the running event loop, inside `async with`.

    Args:
        server: (host, port) that it stands before.
        link: the link of a connection, from its number.

    Attributes:
        port: where it listens.
        connections: that clients have opened so far.
    """

    def __init__(self, server: tuple[str, int], link: Callable[[int], Link]) -> None:
        self.port = 0
        self.connections = 0
        self._server = server
        self._link = link
        self._open: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Relay:
        self._listening = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._listening.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._listening.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        link = self._link(self.connections)
        self.connections += 1
        writers = [writer]
        try:
            there = await asyncio.open_connection(*self._server)
            writers.append(there[1])
            await _pass_on(link, (reader, writer), there)
        except OSError:  # the server is not there, or one of the two has gone, or the link was cut
            for each in writers:
                _cut(each)
        except asyncio.CancelledError:  # the end of the relay, which is no error of the connection
            pass
        finally:
            for each in writers:
                each.close()


def _cut(writer: asyncio.StreamWriter) -> None:
    """Ends a connection so that the other side sees a reset, not an end."""
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


_Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _pass_on(link: Link, client: _Stream, server: _Stream) -> None:
    """Both ways, until both sides have said goodbye or one of the ways broke."""
    is_asking = False

    async def requests() -> None:
        nonlocal is_asking
        while data := await client[0].read(_PIECE):
            if not is_asking:
                is_asking = True
                await link.request()
            server[1].write(data)
            await server[1].drain()
        with contextlib.suppress(OSError):  # it may have closed by itself
            server[1].write_eof()

    async def replies() -> None:
        nonlocal is_asking
        while data := await server[0].read(_PIECE):
            is_asking = False
            client[1].write(await link.reply(data))
            await client[1].drain()
        with contextlib.suppress(OSError):
            client[1].write_eof()

    ways = [asyncio.ensure_future(requests()), asyncio.ensure_future(replies())]
    try:
        await asyncio.gather(*ways)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
