"""Laws 7 and 8 of every executor: the order of results, and errors at their places.

A test module takes them in by `from executor_laws import *`, and gives the fixtures `any_executor`, and `kept`, one
whose workers are other processes.
"""

import re
import threading
from functools import partial

import psutil
import pytest
import work

from mmdp.refusals import DataError
from mmdp.remote import FetchError

__all__ = [
    "test_an_error_comes_out_at_its_place",
    "test_an_error_may_be_replaced_by_a_result",
    "test_an_error_of_data_comes_without_the_code_that_met_it",
    "test_an_error_of_the_items_comes_after_the_results_before_it",
    "test_any_number_of_items",
    "test_arrays_arrive_whole_and_writable",
    "test_arrays_in_items_travel_too",
    "test_errors_that_can_not_be_rebuilt_are_told",
    "test_leaving_the_function_by_exit_is_no_item_to_replace",
    "test_results_come_in_the_order_of_the_items",
    "test_two_runs_at_once",
    "test_what_can_not_travel_is_that_items_error",
]


def check_workers(executor, before: set[int]) -> None:
    """The workers that were there are at work still, and no other took the place of one: there are two at most."""
    assert all(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in before)
    assert len(before | set(executor.run(work.process_id, range(6), depth=6))) <= 2


def test_results_come_in_the_order_of_the_items(any_executor):
    """Law 7, also where later items finish first, and a second time on the same executor."""
    for _ in range(2):
        results = list(any_executor.run(work.start_and_end, range(9), depth=6))
        assert list(range(9)) == [item for item, _, _ in results]
    if getattr(any_executor, "num_workers", 2):
        assert results[0][2] > results[1][2], "the case did not arise: item 0 was not overtaken"


@pytest.mark.parametrize("num_items", [0, 1, 5])
def test_any_number_of_items(any_executor, num_items):
    """Law 7, also with fewer items than workers."""
    assert [2 * item for item in range(num_items)] == list(any_executor.run(work.double, range(num_items), depth=3))


def test_two_runs_at_once(any_executor):
    """Each run has its own results."""
    first = any_executor.run(work.double, range(6), depth=4)
    second = any_executor.run(work.raises, range(10, 16), depth=4)
    assert [(0, 10), (2, 11), (4, 12), (6, 13), (8, 14), (10, 15)] == list(zip(first, second, strict=False))
    first.close()
    second.close()


def test_an_error_comes_out_at_its_place(any_executor):
    """Law 8: class, message, item and the worker's traceback; the results before it come first."""
    results = []
    with pytest.raises(OSError, match="image of sample 3 is cut short") as caught:
        results.extend(any_executor.run(work.raises, [0, 1, 2, 3, 4, 5], depth=6))
    assert [0, 1, 2] == results
    assert OSError is caught.type
    notes = "\n".join(caught.value.__notes__)
    assert "item 3 of the run: 3" in notes
    frames = notes + "".join(str(entry) for entry in caught.traceback)
    assert "work.py" in frames
    assert "raise OSError" in frames


@pytest.mark.parametrize("kind", [DataError, FetchError])
def test_an_error_of_data_comes_without_the_code_that_met_it(any_executor, kind):
    """Its message says what to mend; sixty lines of a worker's frames would hide it."""
    with pytest.raises(kind, match="of sample 3") as caught:
        list(any_executor.run(partial(work.meets, kind), range(6), depth=6))
    notes = "".join(getattr(caught.value, "__notes__", []))
    assert re.fullmatch(r"(in worker process \d+)?", notes), "nor with a number that means nothing to a reader"


def test_an_error_may_be_replaced_by_a_result(any_executor):
    """`on_error` is called in the consumer, at the error's place, and the run goes on."""
    seen = []

    def replace(item, error):
        seen.append((item, type(error), threading.current_thread()))
        return "replaced"

    results = list(any_executor.run(work.raises, range(6), depth=4, on_error=replace))
    assert [0, 1, 2, "replaced", 4, 5] == results
    assert [(3, OSError, threading.current_thread())] == seen


def test_errors_that_can_not_be_rebuilt_are_told(any_executor):
    """Law 8 for errors with an `__init__` of their own, with a lock inside, or without a message."""
    errors = []
    list(any_executor.run(work.raises_awkwardly, range(4), depth=4, on_error=lambda _, error: errors.append(error)))
    told = [f"{type(error).__name__}: {error!s}" for error in errors[:3]]
    for text, name, message in zip(
        told, ["NeedsTwoError", "SaysElseError", "HoldsLockError"], ["key0: 403", "key1: 404", "key2: 405"], strict=True
    ):
        assert name in text
        assert text.endswith(message)
    assert all(f"item {number} of the run" in "".join(error.__notes__) for number, error in enumerate(errors))
    assert "SilentError" in repr(errors[3]), "an error without a message has a name at least"


def test_leaving_the_function_by_exit_is_no_item_to_replace(any_executor):
    """SystemExit comes out as it does inline; it does not end a worker."""
    before = set(any_executor.run(work.process_id, range(6), depth=6))
    with pytest.raises(SystemExit, match="enough"):
        list(any_executor.run(work.exits, range(6), depth=4, on_error=lambda *_: None))
    check_workers(any_executor, before)


def test_an_error_of_the_items_comes_after_the_results_before_it(any_executor):
    """The source of items may break: nothing that it gave before is lost."""

    def items():
        yield from range(3)
        raise KeyError("source")

    results = []
    with pytest.raises(KeyError, match="source"):
        results.extend(any_executor.run(work.double, items(), depth=8))
    assert [0, 2, 4] == results


@pytest.mark.parametrize(
    ("function", "items"),
    [
        (work.double, [0, 1, 2, threading.Lock(), 4, 5]),
        (work.lock_at_bad, range(6)),
        (work.only_there, range(6)),
    ],
    ids=["item", "result", "result that can't be rebuilt here"],
)
def test_what_can_not_travel_is_that_items_error(kept, function, items):
    """An item or a result that can't be pickled or rebuilt costs itself only, not its worker."""
    before = set(kept.run(work.process_id, range(6), depth=6))
    errors = []
    results = list(kept.run(function, items, depth=4, on_error=lambda _, error: errors.append(error)))
    assert [None] == [result for position, result in enumerate(results) if position == work.BAD]
    assert 5 == len([result for result in results if result is not None])
    assert 1 == len(errors)
    assert "item 3 of the run" in "".join(errors[0].__notes__)
    check_workers(kept, before)


@pytest.mark.parametrize("num_bytes", [0, 800, 2**21, 2**26])
def test_arrays_arrive_whole_and_writable(any_executor, num_bytes):
    """Small and large ones, up to 64 MB; each with memory of its own."""
    results = []
    for result in any_executor.run(work.array, [num_bytes] * 3, depth=2):
        assert (work.array(num_bytes) == result).all()
        result[:1] = -1
        results.append(result)
    assert all((result[:1] == -1).all() for result in results)
    assert [num_bytes] * 3 == [result.nbytes for result in results]


def test_arrays_in_items_travel_too(kept):
    """An item may be large as well."""
    items = [work.array(2**21) + number for number in range(4)]
    for item, result in zip(items, kept.run(work.double, items, depth=3), strict=True):
        assert (2 * item == result).all()
