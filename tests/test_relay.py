"""Laws of the relay: bytes pass unchanged, each request is held back once, and one that breaks breaks alone."""

import asyncio
import math
import statistics
import time
from collections.abc import Awaitable, Callable
from random import Random

import pytest

from mmdp.relay import TAIL, Far, Link, Relay, Tokens, far

SECONDS = 20.0  # in which whatever happens must have happened, however busy the machine is


def against(link: Callable[[int], Link], use: Callable[[Relay, list], Awaitable[None]], size: int = 1) -> None:
    """Runs `use` with a relay before a server that answers each line with `size` times what it got."""
    got: list[bytes] = []

    async def answer(reader, writer):
        while line := await reader.readline():
            got.append(line)
            writer.write(size * line)
            await writer.drain()
        writer.close()

    async def run():
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server, Relay(server.sockets[0].getsockname(), link) as relay:
            async with asyncio.timeout(SECONDS):
                await use(relay, got)

    asyncio.run(run())


async def asked(stream, line: bytes, size: int = 1) -> tuple[bytes, float]:
    """The answer to a line on a connection, and the seconds it took."""
    reader, writer = stream
    start = time.perf_counter()
    writer.write(line)
    answer = await reader.readexactly(size * len(line))
    return answer, time.perf_counter() - start


def test_bytes_pass_unchanged_on_one_connection():
    """Many requests and answers, larger than any buffer, one after the other on a connection that stays open."""
    lines = [bytes(Random(number).choices(range(32, 127), k=count)) + b"\n" for number, count in enumerate((5, 30_000))]

    async def use(relay, got):
        stream = await asyncio.open_connection("127.0.0.1", relay.port)
        for line in 3 * lines:
            answer, _ = await asked(stream, line, size=20)
            assert 20 * line == answer
        assert 3 * lines == got
        assert 1 == relay.connections
        stream[1].close()

    against(far(0), use, size=20)


def test_each_request_waits_once():
    """The median of the waits is the latency asked for, on every connection; what comes in pieces waits as a whole."""

    async def use(relay, got):
        async def client():
            reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
            seconds = [(await asked((reader, writer), b"x\n"))[1] for _ in range(4)]
            start = time.perf_counter()
            for piece in (b"in ", b"three ", b"pieces\n"):
                writer.write(piece)
                await asyncio.sleep(0.001)
            await reader.readline()
            writer.close()
            return [*seconds, time.perf_counter() - start]

        waits = await asyncio.gather(*(client() for _ in range(8)))
        assert 8 == relay.connections
        assert 0.035 < statistics.median(wait for of_client in waits for wait in of_client) < 0.25
        assert 0.2 > min(of_client[-1] for of_client in waits), "a request in pieces waited for each of them"

    against(far(50), use)


def test_latencies_are_log_normal_and_seeded(monkeypatch):
    """The median and the 99th percentile are as said; the same seed and connection draw the same."""
    slept: list[float] = []

    async def note(seconds):
        slept.append(seconds)

    monkeypatch.setattr("mmdp.relay.asyncio.sleep", note)

    def drawn(seed: int, number: int) -> list[float]:
        slept.clear()
        link = far(40, seed=seed)(number)

        async def draw():
            for _ in range(4000):
                await link.request()

        asyncio.run(draw())
        return sorted(slept)

    waits = drawn(0, 0)
    assert pytest.approx(0.040, rel=0.05) == waits[2000]
    assert pytest.approx(0.040 * TAIL, rel=0.12) == waits[3960]
    assert waits == drawn(0, 0)
    assert waits != drawn(0, 1) != drawn(1, 1)


def test_bandwidth_is_shared():
    """All answers together pass at the given rate, never faster."""

    async def use(relay, got):
        streams = [await asyncio.open_connection("127.0.0.1", relay.port) for _ in range(3)]
        start = time.perf_counter()
        await asyncio.gather(*(asked(stream, 999 * b"x" + b"\n", size=100) for stream in streams))
        seconds = time.perf_counter() - start
        assert seconds > 0.29  # 300,000 bytes, a million a second
        for _, writer in streams:
            writer.close()

    against(far(0, bytes_per_second=1e6), use, size=100)


def test_a_link_may_cut_its_connection_and_no_other():
    """What a drill does: one connection breaks in the middle of an answer, the next one lives."""

    class Cuts(Far):
        async def reply(self, data):
            raise ConnectionResetError

    async def use(relay, got):
        reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
        writer.write(b"x\n")
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1)
        assert [b"x\n"] == got, "the request should have come through"
        answer, _ = await asked(await asyncio.open_connection("127.0.0.1", relay.port), b"y\n")
        assert b"y\n" == answer

    against(lambda number: (Far if number else Cuts)(0, Random(0), Tokens()), use)


def test_a_server_that_is_not_there():
    """The client sees a connection that ends, at once."""

    async def run():
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        place = server.sockets[0].getsockname()
        server.close()
        async with Relay(place, far(0)) as relay, asyncio.timeout(SECONDS):
            reader, _ = await asyncio.open_connection("127.0.0.1", relay.port)
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"median_ms": -1}, "a latency of -1 ms"),
        ({"median_ms": math.nan}, "a latency of nan ms"),
        ({"bytes_per_second": 0}, "0 bytes a second"),
    ],
)
def test_numbers_that_let_nothing_through(arguments, said):
    """Refused with the value."""
    with pytest.raises(ValueError, match=said):
        far(**arguments)
