"""Laws of `ahead.py`: order, a bound, errors that arrive, and threads that end."""

import gc
import threading
import time

import pytest

from mmdp.ahead import ahead


def threads() -> int:
    return sum(thread.name == "mmdp-ahead" for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def no_thread_left():
    yield
    gc.collect()
    deadline = time.monotonic() + 5
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert 0 == threads()


def test_items_come_once_and_in_order():
    """Law 7: whatever the depth."""
    for depth in (1, 2, 50):
        assert list(range(20)) == list(ahead(range(20), depth))
    assert [] == list(ahead([]))


def test_no_more_than_the_depth_is_made_ahead():
    """Law 10: `depth` items wait, and one more is in the making."""
    made = []

    def items():
        for number in range(100):
            made.append(number)
            yield number

    consumer = ahead(items(), depth=3)
    assert 0 == next(consumer)
    time.sleep(0.3)
    assert 5 == len(made)  # the one taken, three that wait, one in the making
    consumer.close()


def test_an_error_arrives_behind_the_items_before_it():
    """WRK-01: the same error, in the consumer, at its place."""

    def items():
        yield 1
        yield 2
        raise OSError("image of sample 2 is cut short")

    seen = []
    with pytest.raises(OSError, match="cut short"):
        seen.extend(ahead(items(), depth=5))
    assert [1, 2] == seen


@pytest.mark.timeout(30)
def test_a_consumer_that_stops_early_ends_the_thread():
    """WRK-02: by close, by break, by an error, by dropping it; the producer is closed too."""
    closed = []

    def items():
        try:
            yield from range(10**9)
        finally:
            closed.append(True)

    for _ in range(20):
        for item in ahead(items(), depth=1):
            if item == 2:
                break
    consumer = ahead(items())
    next(consumer)
    assert 1 == threads()
    consumer.close()
    assert 0 == threads()
    with pytest.raises(ZeroDivisionError):
        [1 // zero for zero in ahead(items())]
    next(ahead(items()))
    gc.collect()
    assert 23 == len(closed)


def test_nothing_starts_before_the_first_item_is_asked_for():
    """An iterator that is made and dropped has no thread."""
    ahead(range(3))
    assert 0 == threads()
    with pytest.raises(ValueError, match="at least 1"):
        ahead(range(3), depth=0)
