"""Laws of `spans.py` and `span_table.py`: one clock, nothing while off, bounded memory, nothing lost unsaid."""

import multiprocessing
import pickle
import threading
import time

import numpy as np
import pytest

from mmdp import spans
from mmdp.span_table import NO_NUMBER, Lane, Spans, merge


@pytest.fixture(autouse=True)
def off():
    """Whatever a test leaves on."""
    yield
    spans.stop()


def test_nothing_happens_while_off():
    """Law: off, all spans are one object that does nothing, and nothing is kept."""
    with spans.span("decode", row=1) as first:
        first.add(num_bytes=3)
    assert first is spans.span("fetch")
    spans.record("wait", 0, 1)
    spans.receive(_table(3))
    assert not spans.is_on()
    assert 0 == len(spans.take())
    assert 0 == len(spans.stop())


def test_a_span_has_its_name_its_numbers_and_its_time():
    """Law: what was noted comes out, in wall time, and no more than once."""
    spans.start()
    before = time.time_ns()
    with spans.span("fetch", sample=7) as work:
        time.sleep(0.02)
        work.add(num_bytes=300)
    after = time.time_ns()
    began = time.monotonic_ns()
    spans.record("wait", began, began + 5, step=2)
    noted = spans.stop()
    assert ("fetch", "wait") == noted.names
    assert {"sample": [7, NO_NUMBER], "num_bytes": [300, NO_NUMBER], "step": [NO_NUMBER, 2]} == {
        key: values.tolist() for key, values in noted.numbers.items()
    }
    assert [300] == noted.number("num_bytes").tolist()
    slack = 50_000_000  # the wall clock may be set meanwhile, by a little
    assert before - slack <= noted.start[0] < noted.end[0] <= after + slack
    assert 0.02 <= noted.named("fetch").seconds[0]
    assert 5 == noted.end[1] - noted.start[1]
    assert 0 == noted.dropped
    assert 0 == len(spans.stop())


def test_a_span_ends_with_an_error_too():
    """Law: the error passes through, and the time is noted."""
    spans.start()
    with pytest.raises(OSError, match="gone"), spans.span("fetch"):
        raise OSError("gone")
    assert 1 == len(spans.stop())


def test_each_thread_has_a_lane():
    """Law: spans of all threads arrive, each in the lane of its thread; those inside others too."""
    spans.start()
    ready = threading.Barrier(3)

    def work():
        ready.wait()
        with spans.span("row"):
            for _ in range(100):
                with spans.span("decode"):
                    pass

    threads = [threading.Thread(target=work, name=f"worker-{number}") for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    noted = spans.stop()
    assert 303 == len(noted)
    assert {"worker-0": 101, "worker-1": 101, "worker-2": 101} == {
        lane.thread: int((noted.lane == place).sum()) for place, lane in enumerate(noted.lanes)
    }
    assert all(lane.processors >= 1 for lane in noted.lanes)


def test_memory_is_bounded_and_what_is_lost_is_counted():
    """Law: the last `capacity` are kept, of this process and of what others send; kept and dropped add up."""
    spans.start(capacity=10)
    for number in range(25):
        spans.record("decode", number, number + 1, row=number)
    noted = spans.take()
    assert list(range(15, 25)) == noted.numbers["row"].tolist()
    assert 15 == noted.dropped
    spans.record("decode", 0, 1, row=99)
    assert (1, 0) == (len(rest := spans.take()), rest.dropped)
    for first in (0, 4, 8):
        spans.receive(_table(4, first))
    noted = spans.stop()
    assert [4, 5, 6, 7, 8, 9, 10, 11] == noted.numbers["row"].tolist()
    assert 4 == noted.dropped


def test_twice_on_and_no_room_are_refused():
    """Law: an error that says what to do."""
    with pytest.raises(ValueError, match="0 spans keeps nothing"):
        spans.start(capacity=0)
    spans.start()
    with pytest.raises(RuntimeError, match="stop them first"):
        spans.start()


def test_merging_keeps_every_span_with_its_name_lane_and_numbers():
    """Law: the parts one after the other; a pickle of them is about 8 bytes a value."""
    one, two = _table(3, name="fetch", lane="a"), _table(1000, name="decode", lane="b", key="step")
    whole = merge([one, two, _table(2, name="fetch", lane="b")])
    assert 1005 == len(whole)
    assert {"fetch": 5, "decode": 1000} == {name: len(whole.named(name)) for name in whole.names}
    assert [3, 1002] == [int((whole.lane == place).sum()) for place in range(2)]
    assert 1000 == len(whole.number("step"))
    assert 5 == len(whole.number("row"))
    assert 0 == len(merge([]))
    pickled = pickle.dumps(two, protocol=5)
    assert len(pickled) < 1000 * (5 * 8 + 1) + 1000
    assert two.start.tolist() == pickle.loads(pickled).start.tolist()


def test_named_spans_come_in_the_order_of_time():
    """Law: earliest first, whoever recorded them first."""
    spans.start()
    for start in (30, 10, 20):
        spans.record("fetch", start, start + 5)
    noted = spans.stop().named("fetch")
    assert [0, 10, 20] == (noted.start - noted.start[0]).tolist()


def test_clocks_of_one_host_are_one():
    """Law: a worker that is given its parent's clock keeps it on the same host, and its own on another."""
    own = spans.own_clock()
    spans.start(clock=spans.Clock(own.host, own.offset + 7))
    spans.record("fetch", 0, 1)
    assert own.offset + 7 == spans.stop().start[0]
    spans.start(clock=spans.Clock("elsewhere", 7))
    spans.record("fetch", 0, 1)
    assert own.offset == spans.stop().start[0]
    assert abs(time.time_ns() - time.monotonic_ns() - own.offset) < 1e9


def _is_on_in_child(answer):
    spans.record("fetch", 0, 1)
    answer.put(spans.is_on())
    spans.start()
    answer.put(len(spans.stop()))


def test_a_fork_does_not_send_what_its_parent_noted():
    """Law: recording is off in a forked process, and can be started there."""
    spans.start()
    spans.record("fetch", 0, 1)
    context = multiprocessing.get_context("fork")
    answer = context.SimpleQueue()
    child = context.Process(target=_is_on_in_child, args=(answer,))
    child.start()
    child.join(60)
    assert [False, 0] == [answer.get(), answer.get()]
    assert 1 == len(spans.stop())


def _table(num: int, first: int = 0, *, name="decode", lane="worker", key="row") -> Spans:
    at = np.arange(first, first + num, dtype=np.int64)
    zeros = np.zeros(num, dtype=np.int64)
    return Spans((name,), (Lane("host", 1, 1, lane, 2),), zeros, zeros, at, at + 1, {key: at})
