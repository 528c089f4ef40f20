"""Where a pure function runs: here, in threads, in processes. Same results, same order.

Adds: the contract `Executor`; `Inline`, `Threads`, `Processes`; `executor`, which makes one by name.
Leaves out: what runs (`batching.RowBuilder`), how a process is driven (`worker_process`), Ray (a later part).

    for row in Threads(4).run(build, rows, depth=16):
        ...

`items` is pulled, and results and errors come out, in the thread of the consumer, and only while it waits for the next
result; nothing but `function` ever runs elsewhere. So no lock is needed around the iterator of items, and nothing is
built that nobody asked for: at most `depth` items, and `max_weight` of what they weigh, are in flight, which is
submitted or finished, and not yet handed over. An iterator of items that waits makes the consumer wait too.

A run's threads and processes start with its first item and end with the run: when it is used up, closed, dropped, or
broken by an error or Ctrl-C. Inside `with executor:` processes stay for the next run, and end with the block.

What a worker may do to a run, and what comes of it:

| it | comes out |
|---|---|
| raises | that error at its place in the order, with a note that names the item |
| raises what can't be pickled or rebuilt | `WorkerError` with the class name and the message |
| dies, as by the out-of-memory killer | nothing: the item is tried once more, first thing in a new process |
| dies again | `WorkerDied` at the item's place |
| takes longer than `timeout` | `TimeoutError` at the item's place |
| can't start, or can't load the function | `WorkerError`, at once |
"""

from __future__ import annotations

import atexit
import os
import pickle
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, Self, TypeVar, cast, get_args

from mmdp.records import shorten
from mmdp.wire import Raised, WorkerError
from mmdp.worker_process import StartMethod, WorkerDied, WorkerProcess

__all__ = ["Executor", "Inline", "Processes", "Threads", "WorkerDied", "WorkerError", "executor"]

_FINISH_SECONDS = 1.0  # what an item in work gets to finish when its run is closed, before its process is killed
_END_SECONDS = 5.0  # for threads to end once nothing holds them

Item = TypeVar("Item")
Result = TypeVar("Result")
_Item = TypeVar("_Item", contravariant=True)


class Executor(Protocol):
    """Runs a function over items. Serves several runs, one after the other or at once."""

    @property
    def num_workers(self) -> int:
        """How many items are worked on at a time; 0 where the consumer does it itself."""

    def run(
        self,
        function: Callable[[Item], Result],
        items: Iterable[Item],
        *,
        depth: int,
        weight: Callable[[Item], float] | None = None,
        max_weight: float = float("inf"),
        timeout: float | None = None,
        on_error: Callable[[Item, Exception], Result] | None = None,
    ) -> Generator[Result, None, None]:
        """The results, in the order of the items.

        Args:
            function: pure. Threads share it; each process gets a copy of it, once.
            items: as many as there are, without end too. An error it raises comes out after the results before it.
            depth: items in flight, at most.
            weight: what the result of an item will weigh, such as its bytes, told from the item before it is worked on.
            max_weight: what the items in flight weigh, at most; one that weighs more is in flight alone.
            timeout: seconds one item may take. `Inline` has nobody to watch it, and doesn't.
            on_error: called by the consumer in place of raising; what it returns is the item's result.

        Returns:
            A generator. `close` it to stop early.
        """

    def close(self) -> None:
        """Ends every run, and every worker."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...


def executor(name: str, num_workers: int | None = None) -> Executor:
    """The executor of this name.

    Args:
        name: "inline", "threads" or "processes".
        num_workers: at least 1; by default one for each processor that this process may use. Inline has none.

    Raises:
        ValueError: no such name, or no worker.
    """
    if name == "inline":
        return Inline()
    if num_workers is None:
        num_workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if name == "threads":
        return Threads(num_workers)
    if name == "processes":
        return Processes(num_workers)
    raise ValueError(f"no executor is called {shorten(name)}: choose inline, threads or processes")


class Inline:
    """No worker: an item is worked on when its result is asked for."""

    num_workers = 0

    def run(
        self,
        function: Callable[[Item], Result],
        items: Iterable[Item],
        *,
        depth: int = 1,
        weight: Callable[[Item], float] | None = None,
        max_weight: float = float("inf"),
        timeout: float | None = None,
        on_error: Callable[[Item, Exception], Result] | None = None,
    ) -> Generator[Result, None, None]:
        """As `Executor.run` says; one item is in flight at a time, so it never weighs too much."""
        _check(depth, weight, max_weight, timeout)
        return self._run(function, items, on_error)

    def _run(
        self,
        function: Callable[[Item], Result],
        items: Iterable[Item],
        on_error: Callable[[Item, Exception], Result] | None,
    ) -> Generator[Result, None, None]:
        for position, item in enumerate(items):
            task = _Task(position, item, 0.0)
            task.outcome = _outcome(function, item)
            yield cast(Result, task.hand_over(on_error))

    def close(self) -> None:
        """Nothing to end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
