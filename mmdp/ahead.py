"""An iterator that works ahead of its consumer, in a thread of its own.

Adds: `ahead`, the producer and the consumer of every prefetching loader, with a queue of a fixed depth between them.
Leaves out: more than one worker (`executors.py`).

What makes such a pair hang or leak is how it ends. Here an error of the producer is raised in the consumer, behind the
items made before it; and a consumer that stops early (`close`, `break`, an error, a dropped iterator) ends the thread.
"""

from __future__ import annotations

import atexit
import os
import threading
import warnings
from collections.abc import Generator, Iterable, Iterator
from queue import Full, Queue
from typing import TypeVar

from mmdp.forked import refuse_fork

T = TypeVar("T")

_POLL = 0.05
"""Seconds after which a producer that waits for room looks whether anybody still wants its items."""

_END_SECONDS = 10.0
"""For the item in the making, where a consumer stops early. Nothing stops a thread, and nobody waits for ever."""


def ahead(items: Iterable[T], depth: int = 2) -> Generator[T, None, None]:
    """The items in order, `depth` of them made ahead, and one more in the making.

    The thread starts with the first item that is asked for. If `items` is a generator, it is closed with the consumer.

    Args:
        items: pulled in the thread, so they must not depend on what the consumer does meanwhile.
        depth: items that may wait, at least 1.

    Raises:
        ValueError: a depth below 1.
        RuntimeError: while it runs, in a process that was forked meanwhile.

    >>> list(ahead(range(4)))
    [0, 1, 2, 3]
    """
    if depth < 1:
        raise ValueError(f"a depth of {depth} holds nothing: give at least 1")
    return _consume(items, depth)


class _End:
    """What the producer sends last: the error it ended with, or None."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def _consume(items: Iterable[T], depth: int) -> Generator[T, None, None]:
    queue: Queue[T | _End] = Queue(depth)
    stopped = threading.Event()
    thread = threading.Thread(target=_produce, args=(iter(items), queue, stopped), daemon=True, name="mmdp-ahead")

    current_thread, unregister = threading.current_thread, atexit.unregister  # the interpreter's end takes modules away

    def stop() -> None:
        stopped.set()
        # The garbage collector may close a consumer from any thread, its own producer's too.
        if not thread.is_alive() or thread is current_thread():
            return
        thread.join(_END_SECONDS)
        if thread.is_alive():
            warnings.warn(
                f"an item has been in the making for more than {_END_SECONDS:.0f} s: its thread is left to itself, and "
                "ends with it",
                RuntimeWarning,
                stacklevel=3,
            )

    atexit.register(stop)  # a daemon thread that still works while the interpreter goes down can crash it
    thread.start()
    process = os.getpid()
    try:
        while True:
            refuse_fork(process)
            item = queue.get()
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            yield item
    finally:
        unregister(stop)
        stop()


def _produce(items: Iterator[T], queue: Queue[T | _End], stopped: threading.Event) -> None:
    end = _End(None)
    try:
        for item in items:
            if not _put(queue, item, stopped):
                break
    except BaseException as error:
        end = _End(error)
    finally:
        if isinstance(items, Generator):
            items.close()
        _put(queue, end, stopped)


def _put(queue: Queue[T | _End], item: T | _End, stopped: threading.Event) -> bool:
    """False where nobody wants the item any more."""
    while not stopped.is_set():
        try:
            queue.put(item, timeout=_POLL)
        except Full:
            continue
        return True
    return False
