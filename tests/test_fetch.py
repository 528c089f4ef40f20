"""Laws of `fetch.py` and `fetch_loop.py`: so many at once and no more, by number and by bytes, whoever asks."""

import asyncio
import contextlib
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from statistics import mean
from types import SimpleNamespace

import pytest
from servers import Shelf, environment

from mmdp import fetch, object_store, store, web_store
from mmdp.config import Config
from mmdp.fetch import stream
from mmdp.fetch_loop import Clock, Gate
from mmdp.records import ImageRef
from mmdp.refusals import DataError
from mmdp.remote import Access, FetchError, MissingObjectError, TransientError, pauses

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
    """Each of the first seven is above the one before it, whatever chance does; none is none, or past the bound."""
    runs = [list(pauses(Access.of(Config(fetch_retries=12), "s3://b"))) for _ in range(200)]
    assert {12} == set(map(len, runs))
    assert 0.1 <= min(map(min, runs))
    assert max(map(max, runs)) <= 15
    assert all(one <= other for run in runs for one, other in itertools.pairwise(run[:7]))
    assert all(run[7:] >= [7.5] * 5 for run in runs)
    assert mean(run[4] for run in runs) > 8 * mean(run[0] for run in runs)
    assert 200 == len({run[0] for run in runs})


def test_the_default_waits_outlast_half_a_minute(monkeypatch):
    """With the least that chance can give; and with the most, they fit the time of a file."""
    access = Access.of(Config(), "s3://b")
    monkeypatch.setattr(random, "uniform", lambda least, most: least)
    assert sum(pauses(access)) >= 30
    monkeypatch.setattr(random, "uniform", lambda least, most: most)
    assert 30 < sum(pauses(access)) < access.fetch_seconds


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"fetch_retries": 2}, "no byte for 0.3 s, 3 times: raise Config.read_seconds"),
        ({"fetch_retries": 0}, "no byte for 0.3 s, once: raise Config.read_seconds"),
        ({"fetch_seconds": 0.9}, "no byte for 0.3 s, (once|2 times): raise Config.read_seconds"),
        ({"read_seconds": 20, "fetch_seconds": 0.3}, "not whole within 0.3 s: raise Config.fetch_seconds"),
    ],
)
@pytest.mark.parametrize("part", ["answer", "body"])
def test_a_store_that_answers_late_is_told_by_its_knob(reach, knobs, words, part):
    """Whether the tries or the time ran out: what says nothing for `read_seconds` is not what is too large."""
    with Shelf({"b/a.png": bytes(1000)}, delay=10 if part == "answer" else 0) as shelf:
        if part == "body":
            answer = shelf._answer

            def stall(request):
                write = request.wfile.write

                def begin(data):
                    write(data[:500])
                    request.wfile.flush()
                    if len(data) == 1000:
                        time.sleep(10)

                request.wfile.write = begin
                answer(request)

            shelf._answer = stall
        root = reach(shelf, **({"read_seconds": 0.3} | knobs))
        started = time.monotonic()
        with pytest.raises(FetchError, match=words) as caught:
            store.read(ImageRef("a.png", root))
        assert "a.png" in str(caught.value)
        assert time.monotonic() - started < 5
        assert shelf.asked


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"fetch_retries": 1}, "2 tries: .*Config.fetch_retries"),
        ({"fetch_seconds": 0.5}, "[23] tries within 0.5 s: .*Config.fetch_seconds"),
    ],
)
def test_a_store_that_is_not_there_is_told_by_its_knob(reach, knobs, words):
    """Tries or time, whichever was used up first."""
    with Shelf({}) as shelf:
        pass
    with pytest.raises(FetchError, match=f"(?i)refused.*{words}") as caught:
        store.read(ImageRef("a.png", reach(shelf, **knobs)))
    assert "object at" not in str(caught.value)
    assert "_PublicOnly" not in str(caught.value)


def test_a_network_that_takes_no_connection_is_told_by_its_knob(reach):
    """It is no store that is silent: nothing was asked yet."""
    with socket.socket() as full, contextlib.ExitStack() as waiting:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):  # more than its queue takes, so that the next one's first packet is dropped
            connection = waiting.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex(full.getsockname())
        place = f"127.0.0.1:{full.getsockname()[1]}"
        shelf = SimpleNamespace(place=place, endpoint=f"http://{place}")
        root = reach(shelf, connect_seconds=0.3, fetch_retries=1)
        with pytest.raises(FetchError, match=r"no connection within 0\.3 s \(Config.connect_seconds\), 2 tries"):
            store.read(ImageRef("a.png", root))


def test_a_store_that_is_gone_for_long_is_spoken_of_once(reach, monkeypatch):
    """A warning that says how long it is tried; none for a short one, and none for each file. Silence counts too."""
    monkeypatch.setattr(fetch, "_WARN_SECONDS", 0.65)
    with Shelf({}, refused={f"b/{number}.png": 503 for number in range(3)}) as shelf:
        root = reach(shelf, fetch_retries=1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(FetchError):
                store.read(ImageRef("0.png", root))
        root = reach(shelf, fetch_retries=3)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                with pytest.raises(FetchError):
                    store.read_many([ImageRef(f"{number}.png", root) for number in range(3)])
        (one,) = [str(one.message) for one in said if one.category is RuntimeWarning]
        assert "fails (503" in one
        assert "for up to 120 s a file: see Config.fetch_retries" in one
    with (
        Shelf({"b/a.png": b""}, delay=10) as shelf,
        pytest.warns(RuntimeWarning, match=r"fails \(no byte"),
        pytest.raises(FetchError),
    ):
        store.read(ImageRef("a.png", reach(shelf, read_seconds=0.6, fetch_retries=2)))


def test_each_outage_is_spoken_of(reach, monkeypatch):
    """One that comes after the store was well again is another one."""
    monkeypatch.setattr(fetch, "_WARN_SECONDS", 0.01)
    with Shelf({"b/well.png": b"an image"}, refused={"b/gone.png": 503}) as shelf:
        root = reach(shelf, fetch_retries=1)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                with pytest.raises(FetchError):
                    store.read(ImageRef("gone.png", root))
                assert b"an image" == store.read(ImageRef("well.png", root))
        assert 2 == len([one for one in said if "is tried again" in str(one.message)])


def test_one_file_that_can_not_be_had_is_told_from_a_store_that_is_down(reach):
    """Where others came meanwhile, longer waits would help nobody: the advice is about this file."""
    with Shelf({"b/well.png": b"an image"}, refused={"b/broken.png": 500}) as shelf:
        root = reach(shelf, fetch_retries=3)
        stopped = threading.Event()

        def read_others() -> None:
            while not stopped.wait(0.02):
                store.read(ImageRef("well.png", root))

        with pytest.raises(FetchError, match=r"4 tries: see whether the store is up .* Config.fetch_retries"):
            store.read(ImageRef("broken.png", root))  # nothing else was asked for
        reader = threading.Thread(target=read_others)
        reader.start()
        with pytest.raises(FetchError, match=r"500.*4 tries: other files came meanwhile, .* upload it again, or drop"):
            store.read(ImageRef("broken.png", root))
        stopped.set()
        reader.join()


def test_a_body_that_is_shorter_than_was_said_is_fetched_again(reach, monkeypatch):
    """Whatever the client makes of it: a cut image is never handed on."""
    tries = []
    for kind in (object_store._Answer, web_store._Answer):

        async def cut(self, whole=kind.read):
            data = await whole(self)
            tries.append(len(data))
            return data[:-1] if len(tries) == 1 else data

        monkeypatch.setattr(kind, "read", cut)
    with Shelf({"b/a.png": b"an image"}) as shelf:
        assert b"an image" == store.read(ImageRef("a.png", reach(shelf)))
    assert [8, 8] == tries


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


def cut_answers(shelf, num_bytes, times):
    """From now on, the first so many answers of a shelf end after so many bytes of their bodies."""
    answer, cuts = shelf._answer, []

    def cut(request):
        if len(cuts) < times:
            cuts.append(1)
            request.close_connection = True
            write = request.wfile.write
            request.wfile.write = lambda data: write(data if data.startswith(b"HTTP/") else data[:num_bytes])
        answer(request)

    shelf._answer = cut
    return cuts


def open_large(shelf, root, **knobs):
    """As `stream` of the file `large` of the bucket."""
    place, _, bucket = root.rpartition("/") if root.startswith("http") else (root, "", "")
    access = Access.of(Config(http_hosts=(shelf.place,), **knobs), root)
    return stream(place, f"{bucket}/large".lstrip("/"), access, 100_000)


def test_a_large_file_that_is_cut_goes_on_where_it_ended(reach):
    """More cuts than tries: as long as it goes on, each cut costs at most the chunk that it came in."""
    data = os.urandom(10**6)
    with Shelf({"b/large": data}) as shelf:
        cuts = cut_answers(shelf, 240_000, 4)
        _, pieces = open_large(shelf, reach(shelf), fetch_retries=1)
        assert data == b"".join(pieces)
        assert 4 == len(cuts)
        assert 5 == len(shelf.asked)
        starts = [int(wanted.removeprefix("bytes=").rstrip("-")) for _, wanted in shelf.asked[1:]]
        assert all(other - one >= 150_000 for one, other in itertools.pairwise([0, *starts]))


def test_a_large_file_that_does_not_go_on_is_an_error(reach):
    """Not one byte more, time and again: after as many tries as are allowed."""
    with Shelf({"b/large": bytes(10**6)}) as shelf:
        cut_answers(shelf, 0, 100)
        _, pieces = open_large(shelf, reach(shelf), fetch_retries=2)
        with pytest.raises(FetchError, match=r"cut short.*, 3 tries: .*Config.fetch_retries"):
            list(pieces)
        assert 3 == len(shelf.asked)


def test_the_rest_of_another_file_is_never_taken(reach):
    """What changed between the halves is to be opened anew; so is what a store gives whole or not at all."""
    for change in ("content", "ranges", "gone"):
        with Shelf({"b/large": bytes(10**6)}) as shelf:
            cut_answers(shelf, 250_000, 1)
            _, pieces = open_large(shelf, reach(shelf), fetch_retries=2)
            found = [next(pieces)]
            if change == "content":
                shelf.files["b/large"] = b"1" * 10**6
            elif change == "gone":
                shelf.files.clear()
            else:
                shelf._ranges = False
            with pytest.raises(TransientError, match="its rest can't be had"):
                found.extend(pieces)
            assert 2 == len(shelf.asked)
            assert {0} == set(b"".join(found))


def test_a_bad_image_among_many_is_told_apart(reach):
    """Its `DataError` stands in its place, and the others come."""
    with Shelf({"b/a.png": b"a", "b/empty.png": b""}) as shelf:
        root = reach(shelf)
        found = store.read_many([ImageRef(name, root) for name in ("empty.png", "a.png", "nosuch.png")])
    assert b"a" == found[1]
    assert ["empty_image", "missing_image"] == [found[number].reason for number in (0, 2)]
    assert all(isinstance(error, DataError) for error in itertools.chain(found[:1], found[2:]))
