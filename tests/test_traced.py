"""Laws of `traced.py`: spans of every executor's workers arrive, and nothing else about a run changes."""

import asyncio
import os
import pickle
import time
from itertools import islice

import pytest
from runs import digest

from mmdp import spans
from mmdp.executors import Processes
from mmdp.loader import Loader
from mmdp.traced import traced, untraced

BAD = 3


@pytest.fixture(autouse=True)
def off():
    """Whatever a test leaves on."""
    yield
    spans.stop()


def work(item):
    with spans.span("decode", row=item):
        time.sleep(0.002)
        if item == BAD:
            raise OSError(f"item {item}")
    return item, os.getpid()


def good(item):
    return work(item + BAD + 1)


def test_spans_arrive_from_all_workers(any_executor):
    """Law: one span an item, in the process that worked on it, between what this process saw before and after."""
    spans.start()
    start = time.monotonic_ns() + spans.own_clock().offset
    results = list(untraced(any_executor.run(traced(good), range(20), depth=6)))
    end = time.monotonic_ns() + spans.own_clock().offset
    noted = spans.stop().named("decode")
    assert list(range(BAD + 1, BAD + 21)) == [item for item, _ in results]
    assert sorted(item for item, _ in results) == sorted(noted.numbers["row"].tolist())
    pids = dict(results)
    assert all(
        pids[row] == noted.lanes[lane].pid for row, lane in zip(noted.numbers["row"].tolist(), noted.lane, strict=True)
    )
    assert start <= noted.start.min()
    assert noted.end.max() <= end


def test_errors_keep_their_place_and_their_spans_come_later(any_executor):
    """Law 8: the same error at its place; the span of the item that failed comes with a later result."""
    spans.start()
    run = untraced(any_executor.run(traced(work), range(8), depth=2, on_error=lambda item, error: (item, str(error))))
    results = list(run)
    assert list(range(8)) == [item for item, _ in results]
    assert f"item {BAD}" in results[BAD][1]
    rows = spans.stop().numbers["row"].tolist()
    assert set(range(8)) - {7} <= set(rows)  # a worker that has no later result keeps what it has
    with pytest.raises(OSError, match=f"item {BAD}"):
        list(untraced(any_executor.run(traced(work), range(8), depth=2)))


def test_closing_early_closes_the_run(any_executor):
    """Law 9: a run that is left ends."""
    spans.start()
    inner = any_executor.run(traced(good), range(100), depth=2)
    run = untraced(inner)
    next(run)
    run.close()
    assert inner.gi_frame is None


def test_a_worker_sends_nothing_where_nothing_is_traced(kept):
    """Law: the plain function gives plain results, also in a process that has traced before."""
    list(untraced(kept.run(traced(good), range(4), depth=2)))
    assert all(isinstance(result, tuple) for result in kept.run(good, range(4), depth=2))


class TwoPhases:
    async def fetch(self, item):
        with spans.span("fetch", row=item):
            await asyncio.sleep(0.001)
        return 2 * item

    def assemble(self, fetched):
        with spans.span("decode", row=fetched // 2):
            return fetched + 1


def test_a_function_of_two_phases_keeps_them():
    """Law: `fetch` stays one for an event loop; away from home `assemble` carries the spans of both."""
    function = traced(TwoPhases())
    assert asyncio.iscoroutinefunction(function.fetch)
    assert 7 == function.assemble(asyncio.run(function.fetch(3)))
    away = pickle.loads(pickle.dumps(function))
    object.__setattr__(away, "home", "another process")
    carried = away.assemble(asyncio.run(away.fetch(3)))
    spans.stop()
    assert 7 == carried.value
    assert {"fetch", "decode"} == set(carried.spans.names)


def test_a_loader_gives_the_same_batches_with_tracing_on(parts, any_executor):
    """Law 7: bit for bit, and a loader tells how far its rows were ahead."""
    expected = [digest(batch) for batch in islice(Loader(*parts, batch_size=2, executor="inline"), 6)]
    spans.start()
    loader = Loader(*parts, batch_size=2, executor=any_executor)
    assert expected == [digest(batch) for batch in islice(loader, 6)]
    loader.close()
    noted = spans.stop()
    assert {"fetch", "decode", "join", "gather"} <= set(noted.names)
    gather = noted.named("gather")
    assert [2] * 6 == gather.numbers["rows"].tolist()
    assert {any_executor.num_workers} == set(gather.numbers["workers"].tolist())
    assert ((0 <= gather.numbers["ahead"]) & (gather.numbers["ahead"] <= gather.numbers["depth"] + 1)).all()
    made = [noted.lanes[lane].pid for lane in noted.named("decode").lane]
    assert (os.getpid() in made) == (not isinstance(any_executor, Processes))
    assert noted.number("num_bytes").min() > 0
