"""Where a pure function runs: here, in threads, in processes. Same results, same order.

Adds: the contract `Executor`; `Inline`, `Threads`, `Processes`; `executor`, which makes one by name.
Leaves out: what runs (`batching.RowBuilder`), how a process is driven (`worker_process`), Ray actors (`ray_executor`,
reached by name, so that nobody needs ray who doesn't use it).

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
| dies while it starts | nothing: a new one starts; after three in a row `WorkerError` |
| can't start, or can't load the function | `WorkerError`, at once |
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Generator, Iterable
from multiprocessing import get_all_start_methods
from typing import Any, Protocol, Self, TypeVar

from mmdp.in_order import Crew, Task, in_order
from mmdp.machine import num_processors
from mmdp.process_pool import ProcessPool
from mmdp.refusals import shorten
from mmdp.wire import Raised, WorkerDied, WorkerError
from mmdp.worker_process import StartMethod

__all__ = ["Executor", "Inline", "Processes", "Threads", "WorkerDied", "WorkerError", "executor"]

Item = TypeVar("Item")
Result = TypeVar("Result")


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
        max_weight: float = math.inf,
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
            on_error: called by the consumer in place of raising; what it returns is the item's result. It may start a
                run of its own, as to try the parts of an item that killed its worker one by one.

        Returns:
            A generator. `close` it to stop early.
        """

    def close(self) -> None:
        """Ends every run, and every worker."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...


def executor(name: str, num_workers: int | None = None, *, views: bool = False) -> Executor:
    """The executor of this name.

    Args:
        name: "inline", "threads", "processes" or "ray".
        num_workers: at least 1; by default one for each processor that this process may use, or for each CPU of the
            cluster. Inline has none.
        views: results are the caller's to read, never to write; only "ray" gains by it.

    Raises:
        ValueError: no such name, or no worker.
        ImportError: "ray", and it is not installed.
    """
    if name == "inline":
        return Inline()
    if name == "ray":
        from mmdp.ray_executor import RayExecutor

        return RayExecutor(num_workers, views=views)
    if num_workers is None:
        num_workers = num_processors()
    if name == "threads":
        return Threads(num_workers)
    if name == "processes":
        return Processes(num_workers)
    raise ValueError(f"no executor is called {shorten(name)}: choose inline, threads, processes or ray")


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
        max_weight: float = math.inf,
        timeout: float | None = None,
        on_error: Callable[[Item, Exception], Result] | None = None,
    ) -> Generator[Result, None, None]:
        """As `Executor.run` says. One item is in flight at a time, so it never weighs too much."""
        check_run(depth, weight, max_weight, timeout)
        hands = _InThread(function)
        return (Task(position, item, outcome=hands(item)).hand_over(on_error) for position, item in enumerate(items))

    def close(self) -> None:
        """Nothing to end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


class Threads:
    """Threads of this process: for functions that let go of Python's lock, as decoding an image does.

    Nothing can stop a thread. One that is stuck in the function is left to itself, and ends with the program.

    Args:
        num_workers: threads, at least 1.
    """

    def __init__(self, num_workers: int) -> None:
        self.num_workers = _check_workers(num_workers)
        self._crews: weakref.WeakSet[Crew] = weakref.WeakSet()

    def run(
        self,
        function: Callable[[Item], Result],
        items: Iterable[Item],
        *,
        depth: int,
        weight: Callable[[Item], float] | None = None,
        max_weight: float = math.inf,
        timeout: float | None = None,
        on_error: Callable[[Item, Exception], Result] | None = None,
    ) -> Generator[Result, None, None]:
        """As `Executor.run` says."""
        check_run(depth, weight, max_weight, timeout)
        crew = Crew([_InThread(function) for _ in range(self.num_workers)])
        self._crews.add(crew)
        return in_order(
            crew, items, depth=depth, weight=weight, max_weight=max_weight, timeout=timeout, on_error=on_error
        )

    def close(self) -> None:
        """Ends every run."""
        for crew in list(self._crews):
            crew.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return Threads, (self.num_workers,)  # its runs stay behind


class Processes:
    """Processes, each with a copy of the function: for functions that hold Python's lock, and for ones that may crash.

    Items and results are pickled; arrays travel beside the pickle without a copy, and arrive writable. A process takes
    a moment to start, and as long as it takes to import what the function needs. It is started when there is an item
    for it. Random state, caches and files that the function opens are those of its process.

    Args:
        num_workers: processes, at least 1.
        start_method: "spawn" is safe everywhere. "forkserver" starts faster. "fork" copies this process as it is, and
            so may hang where threads run in it or torch has been used.
    """

    def __init__(self, num_workers: int, start_method: StartMethod = "spawn") -> None:
        if start_method not in get_all_start_methods():
            raise ValueError(f"no start method {shorten(start_method)} here: choose of {get_all_start_methods()}")
        self.num_workers = _check_workers(num_workers)
        self.start_method = start_method
        self._crews: weakref.WeakSet[Crew] = weakref.WeakSet()
        self._pool = ProcessPool(start_method)

    def run(
        self,
        function: Callable[[Item], Result],
        items: Iterable[Item],
        *,
        depth: int,
        weight: Callable[[Item], float] | None = None,
        max_weight: float = math.inf,
        timeout: float | None = None,
        on_error: Callable[[Item, Exception], Result] | None = None,
    ) -> Generator[Result, None, None]:
        """As `Executor.run` says."""
        check_run(depth, weight, max_weight, timeout)
        crew = Crew(self._pool.hands(function, self.num_workers, timeout))
        self._crews.add(crew)
        return in_order(crew, items, depth=depth, weight=weight, max_weight=max_weight, timeout=None, on_error=on_error)

    def close(self) -> None:
        """Ends every run and every process."""
        for crew in list(self._crews):
            crew.stop()
        self._pool.close()

    def __enter__(self) -> Self:
        self._pool.keeps = self.num_workers
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.keeps = 0
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return Processes, (self.num_workers, self.start_method)  # its processes stay behind


class _InThread:
    """Hands that call the function right here."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def __call__(self, item: Any) -> Any:
        try:
            return self._function(item)
        except BaseException as error:
            return Raised(error)

    def kill(self) -> None:
        """Nothing stops a thread."""

    def leave(self) -> None:
        """Nothing to clear away."""


def _check_workers(num_workers: int) -> int:
    if num_workers < 1:
        raise ValueError(f"{num_workers} workers do nothing: give at least 1, or choose the executor inline")
    return num_workers


def check_run(depth: int, weight: Callable[[Any], float] | None, max_weight: float, timeout: float | None) -> None:
    """ValueError for limits of a run that let nothing through."""
    if depth < 1:
        raise ValueError(f"a depth of {depth} items lets nothing through: give at least 1")
    if weight is None and max_weight != math.inf:
        raise ValueError(f"max_weight is {max_weight}, but nothing says what an item weighs: give `weight` too")
    if max_weight <= 0:
        raise ValueError(f"a max_weight of {max_weight} lets nothing through: give more than 0")
    if timeout is not None and timeout <= 0:
        raise ValueError(f"a timeout of {timeout} s lets nothing finish: give more, or None for no limit")
