"""Laws of `fetch.py` and `fetch_loop.py`: so many at once and no more, by number and by bytes, whoever asks."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from statistics import mean

import pytest
from servers import Shelf, environment

from mmdp import store
from mmdp.config import Config
from mmdp.fetch import pauses, stream
from mmdp.fetch_loop import Clock, Gate
from mmdp.records import ImageRef
from mmdp.refusals import DataError
from mmdp.remote import Access, FetchError, MissingObjectError

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(params=["s3", "http"])
def reach(request, monkeypatch):
    """Makes a root of a server's bucket `b`, as S3 or as the web."""

    def reach(shelf, **knobs):
        for name, value in environment(shelf.endpoint).items():
            monkeypatch.setenv(name, value)
        root = "s3://b" if request.param == "s3" else f"{shelf.endpoint}/b"
        store.use_root(root, Access.of(Config(http_hosts=(shelf.place,), **knobs), root))
        return root

    return reach


def refs_of(shelf, root):
    return [ImageRef(path.removeprefix("b/"), root) for path in shelf.files]


@pytest.fixture
def slow():
    """Twenty-four objects, each a fifth of a second away."""
    with Shelf({f"b/{number}.png": b"%d" % number for number in range(24)}, delay=0.2) as shelf:
        yield shelf


def test_many_are_in_flight_and_no_more(slow, reach):
    """`max_fetches` at a time: reached, and never passed."""
    root = reach(slow, max_fetches=8)
    started = time.monotonic()
    assert list(slow.files.values()) == store.read_many(refs_of(slow, root))
    assert 8 == slow.most
    assert time.monotonic() - started < 24 * 0.2 / 2


def test_the_bound_holds_for_a_process_whoever_asks(slow, reach):
    """Threads that read one by one, and an event loop that reads many, share it."""
    root = reach(slow, max_fetches=5)
    refs = refs_of(slow, root)

    async def many():
        return await asyncio.gather(*map(store.aread, refs[8:]))

    threads = [threading.Thread(target=store.read, args=(ref,)) for ref in refs[:8]]
    for thread in threads:
        thread.start()
    assert list(slow.files.values())[8:] == asyncio.run(many())
    for thread in threads:
        thread.join()
    assert 5 == slow.most


def test_an_event_loop_goes_on_while_it_reads(slow, reach):
    """`aread` blocks nothing, and a loop that comes later can use it as well."""
    root = reach(slow)

    async def read_beside_a_clock():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        clock = asyncio.create_task(tick())
        found = await asyncio.gather(*map(store.aread, refs_of(slow, root)))
        clock.cancel()
        return found, ticks

    for _ in range(2):
        found, ticks = asyncio.run(read_beside_a_clock())
        assert list(slow.files.values()) == found
        assert ticks >= 5


def test_reading_for_an_event_loop_can_be_given_up(slow, reach):
    """A cancelled `aread` ends at once, and leaves its room to others."""
    root = reach(slow, max_fetches=1)
    refs = refs_of(slow, root)

    async def give_up():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await store.aread(refs[0])
        return await store.aread(refs[1])

    assert b"1" == asyncio.run(give_up())


def test_bytes_in_flight_are_bounded():
    """So many bytes at most; one that is larger than all gets in alone; whoever came first gets in first."""
    held, most, order = [], [], []

    async def hold(gate, number, num_bytes):
        async with gate.bytes(num_bytes):
            held.append(num_bytes)
            most.append(sum(held))
            order.append(number)
            await asyncio.sleep(0.001)
            held.remove(num_bytes)

    async def run():
        gate = Gate(100, 10)
        await asyncio.gather(*(hold(gate, number, size) for number, size in enumerate([4, 4, 4, 25, 1, 1, 10] * 5)))

    asyncio.run(run())
    assert list(range(35)) == order
    assert 25 == max(most)
    assert max(total for total in most if total != 25) <= 10
    assert [] == held


def test_room_is_given_back_by_whoever_fails_or_leaves():
    """An error inside, or a caller that no longer waits, costs no room."""

    async def run():
        gate = Gate(1, 10)
        with pytest.raises(ZeroDivisionError):
            async with gate.bytes(10):
                _ = 1 / 0
        async with gate.bytes(10):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01), gate.bytes(1):
                    pass
        async with asyncio.timeout(1), gate.bytes(10):
            return True

    assert asyncio.run(run())


@pytest.mark.parametrize("max_fetch_bytes", [1, 1500, 10**6])
def test_no_bound_of_bytes_ever_stops_all(reach, max_fetch_bytes):
    """Files that are larger than it, or not, all come."""
    with Shelf({f"b/{number}.png": bytes(1000) for number in range(20)}) as shelf:
        root = reach(shelf, max_fetch_bytes=max_fetch_bytes)
        assert [bytes(1000)] * 20 == store.read_many(refs_of(shelf, root))


def test_waiting_for_room_costs_no_time_of_the_fetch():
    """The clock runs only while a store is waited for, and then for so long in all."""

    async def run():
        clock = Clock(0.2)
        await clock.run(asyncio.sleep(0.1))
        await asyncio.sleep(0.3)
        assert 7 == await clock.run(asyncio.sleep(0.01, 7))
        with pytest.raises(TimeoutError):
            await clock.run(asyncio.sleep(0.2))

    asyncio.run(run())


def test_queueing_costs_no_time_of_the_fetch(slow, reach):
    """Two seconds of queue with half a second for each fetch: all come."""
    root = reach(slow, max_fetches=2, fetch_seconds=1.0)
    assert list(slow.files.values()) == store.read_many(refs_of(slow, root))


def test_waits_grow_and_are_spread():
    """The mean wait before the fifth further try is above that before the first; no wait is none, or past the bound."""
    runs = [list(pauses(Access.of(Config(fetch_retries=12), "s3://b"))) for _ in range(200)]
    assert {12} == set(map(len, runs))
    assert 0.1 <= min(map(min, runs))
    assert max(map(max, runs)) <= 15
    assert mean(run[4] for run in runs) > 2 * mean(run[0] for run in runs)
    assert 200 == len({run[0] for run in runs})


def test_an_error_of_the_store_gives_up_the_rest(reach):
    """`read_many` raises it at once, whatever else is still in flight."""
    with Shelf({}, delay={"b/slow.png": 20}, refused={"b/secret.png": 403}) as shelf:
        root = reach(shelf, read_seconds=30)
        started = time.monotonic()
        with pytest.raises(FetchError, match=r"403.*secret"):
            store.read_many([ImageRef(name, root) for name in ("slow.png", "secret.png", "slow.png")])
        assert time.monotonic() - started < 10


def test_ctrl_c_reaches_a_reader_at_once():
    """KeyboardInterrupt in whoever waits, though the store says nothing for a minute."""
    script = """
        import time
        from mmdp import store
        from mmdp.records import ImageRef
        print("go", flush=True)
        try:
            store.read(ImageRef("a.png", "s3://b"))
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    """
    with Shelf({}, delay=20) as shelf:
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script)],
            env=os.environ | environment(shelf.endpoint),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        assert "go\n" == child.stdout.readline()
        for _ in range(200):
            if shelf.asked:
                break
            time.sleep(0.05)
        started = time.monotonic()
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=30)
    assert ("interrupted\n", "", 0) == (out, err, child.returncode)
    assert time.monotonic() - started < 10


def test_a_large_file_comes_in_pieces(reach):
    """`stream`: its length, a stamp of its content, and all its bytes, none held back to the end."""
    data = os.urandom(10**6)
    with Shelf({"b/large": data}) as shelf:
        root = reach(shelf)
        place, _, bucket = root.rpartition("/") if root.startswith("http") else (root, "", "")
        access = Access.of(Config(http_hosts=(shelf.place,)), root)
        opened, pieces = stream(place, f"{bucket}/large".lstrip("/"), access, 100_000)
        assert (len(data), len(data)) == (opened.size, opened.num_bytes)
        assert opened.stamp
        found = list(pieces)
        assert len(found) > 3
        assert all(len(piece) >= 100_000 for piece in found[:-1])
        assert data == b"".join(found)
        with pytest.raises(MissingObjectError):
            stream(place, "nosuch", access, 100_000)


def test_a_bad_image_among_many_is_told_apart(reach):
    """Its `DataError` stands in its place, and the others come."""
    with Shelf({"b/a.png": b"a", "b/empty.png": b""}) as shelf:
        root = reach(shelf)
        found = store.read_many([ImageRef(name, root) for name in ("empty.png", "a.png", "nosuch.png")])
    assert b"a" == found[1]
    assert ["empty_image", "missing_image"] == [found[number].reason for number in (0, 2)]
    assert all(isinstance(error, DataError) for error in itertools.chain(found[:1], found[2:]))
