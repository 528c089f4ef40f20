"""Threads that work off a window of items, and give the results in the order of the items.

Adds: `in_order`, the one loop behind every executor that has workers; `Crew`, its threads; `Task`, an item on its way.
Leaves out: what a thread does with an item (`Hands`: call a function, or ask a process; `executors`).
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from mmdp.forked import refuse_fork
from mmdp.refusals import counted, shorten
from mmdp.wire import Raised

_FINISH_SECONDS = 1.0  # what the items in work get to finish when a run is closed, before their workers are killed
_END_SECONDS = 3.0  # for the threads to end after that

OnError = Callable[[Any, Exception], Any]


class Hands(Protocol):
    """What one thread does with its items."""

    def __call__(self, item: Any) -> Any:
        """The result, or `Raised`. An error raised here ends the run."""

    def kill(self) -> None:
        """Lets go of the item in work, if that is possible. Called from another thread."""

    def leave(self) -> None:
        """The thread ends."""


class Workers(Protocol):
    """Whoever works on the items of a run."""

    def start(self) -> None:
        """The run begins."""

    def submit(self, task: Task) -> None:
        """Takes an item, to be done after those before it."""

    def wait(self, task: Task, timeout: float | None) -> None:
        """Returns once the task is done; after `timeout` seconds of work it is done with a `TimeoutError`."""

    def stop(self) -> None:
        """The run ends, whatever is left. Called more than once."""


@dataclass(slots=True, eq=False)
class Task:
    """An item on its way.

    Attributes:
        position: its number in the run, from 0.
        item: what is worked on.
        weight: what its result weighs.
        outcome: the result, or `Raised`, once it is done and not yet handed over.
        done: whether it is.
        thread: who works on it.
        started: when that began, by the monotonic clock.
    """

    position: int
    item: Any
    weight: float = 0.0
    outcome: Any = None
    done: bool = False
    thread: threading.Thread | None = None
    started: float | None = None

    def hand_over(self, on_error: OnError | None) -> Any:
        """The result, which is the caller's alone from now on; raises what the function raised, the item named.

        An error of data (`wire` says which) names its file and row itself.
        """
        outcome, self.outcome = self.outcome, None
        if not isinstance(outcome, Raised):
            return outcome
        error = outcome.error
        if not getattr(error, "says_all", False):
            error.add_note(f"item {self.position} of the run: {name_item(self.item)}")
        try:
            if on_error is not None and isinstance(error, Exception):
                return on_error(self.item, error)
            raise error
        finally:
            del error, outcome  # else the traceback and this frame hold each other, and all the results around them


def name_item(item: object) -> str:
    """The item in a few words, for messages; never fails."""
    try:
        return shorten(item)
    except Exception:
        return f"a {type(item).__name__} that can't be shown"


def in_order(
    crew: Workers,
    items: Iterable[Any],
    *,
    depth: int,
    weight: Callable[[Any], float] | None,
    max_weight: float,
    timeout: float | None,
    on_error: OnError | None,
) -> Generator[Any, None, None]:
    """The results of the crew's work, in the order of the items. Arguments as in `Executor.run`."""
    source = enumerate(items)
    window: deque[Task] = deque()
    load = 0.0
    pulled: Task | None = None  # taken from the source, too heavy for now
    exhausted = False
    failure: Exception | None = None
    unregister = atexit.unregister  # a run that ends with the interpreter finds no module any more
    atexit.register(crew.stop)  # a daemon thread that still computes while the interpreter goes down can crash it
    try:
        crew.start()
        while True:
            num_new = 0
            # While a result lies ready, the window grows by one: so a slow source doesn't hold it back for long.
            while not exhausted and len(window) < depth and (num_new < 2 or not window[0].done):
                if pulled is None:
                    try:
                        position, item = next(source)
                        pulled = Task(position, item, weight(item) if weight is not None else 0.0)
                    except StopIteration:
                        exhausted = True
                        break
                    except Exception as error:
                        failure, exhausted = error, True
                        break
                if window and load + pulled.weight > max_weight:
                    break
                crew.submit(pulled)
                window.append(pulled)
                load += pulled.weight
                num_new, pulled = num_new + 1, None
            if not window:
                break
            crew.wait(window[0], timeout)
            load -= window[0].weight
            yield window.popleft().hand_over(on_error)
        if failure is not None:
            raise failure
    finally:
        del failure
        unregister(crew.stop)
        crew.stop()
        window.clear()  # an error on its way holds this frame, and must not hold results


class Crew:
    """Threads that take tasks in order. Lives as long as one run.

    Args:
        hands: of each thread.
    """

    def __init__(self, hands: Sequence[Hands]) -> None:
        self._hands = hands
        self._to_do: SimpleQueue[Task | None] = SimpleQueue()
        self._finished = threading.Condition()
        self._threads: set[threading.Thread] = set()
        self._failure: BaseException | None = None
        self._stopped = False
        self._process = os.getpid()

    def start(self) -> None:
        """Starts the threads."""
        for hands in self._hands:
            self._start(hands)

    def _start(self, hands: Hands) -> None:
        # Daemonic: one that is stuck in the function must not keep the program from ending.
        thread = threading.Thread(target=self._work, args=(hands,), name="mmdp-worker", daemon=True)
        self._threads.add(thread)
        thread.start()

    def submit(self, task: Task) -> None:
        """Puts a task at the end of the queue."""
        self._to_do.put(task)

    def wait(self, task: Task, timeout: float | None) -> None:
        """Returns once the task is done; after `timeout` seconds of work it is done with a `TimeoutError`."""
        refuse_fork(self._process)
        with self._finished:
            while not task.done:
                if self._failure is not None:
                    raise self._failure
                if self._stopped:
                    raise RuntimeError("the executor was closed, and with it this run")
                left = None
                if timeout is not None:
                    now = time.monotonic()
                    left = timeout + (now if task.started is None else task.started) - now
                    if left <= 0:
                        self._give_up(task, timeout)
                        break
                self._finished.wait(left)

    def _give_up(self, task: Task, timeout: float) -> None:
        assert task.thread is not None
        task.outcome, task.done = Raised(TimeoutError(f"no result within {timeout} s")), True
        self._threads.discard(task.thread)  # nothing stops a thread: it is left to itself, and replaced
        self._start(self._hands[0])

    def _work(self, hands: Hands) -> None:
        try:
            while (task := self._to_do.get()) is not None and not self._stopped:
                task.thread, task.started = threading.current_thread(), time.monotonic()
                outcome = hands(task.item)
                with self._finished:
                    if task.done:
                        return  # too late: this thread has been replaced
                    task.outcome, task.done = outcome, True
                    self._finished.notify()
                del outcome  # the consumer's alone
        except BaseException as error:
            with self._finished:
                self._failure = error
                self._finished.notify()
        finally:
            hands.leave()

    def stop(self) -> None:
        """Ends the threads: each finishes the item it works on, unless that takes long. Nothing is left to do."""
        if (self._stopped and not self._threads) or os.getpid() != self._process:  # a fork ends nothing
            return
        self._stopped = True
        with self._finished:
            self._finished.notify()  # a consumer in another thread must not wait on
        try:
            while True:
                self._to_do.get_nowait()
        except Empty:
            pass
        for _ in self._threads:
            self._to_do.put(None)
        try:
            self._join(_FINISH_SECONDS)
        finally:  # also after a second Ctrl-C
            for hands in self._hands:
                hands.kill()
        self._join(_END_SECONDS)
        if self._threads:
            stuck = counted(len(self._threads), "thread")
            self._threads.clear()
            warnings.warn(
                f"stuck in the function that they run: {stuck}, which stay until the program ends",
                RuntimeWarning,
                stacklevel=2,
            )

    def _join(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        for thread in list(self._threads):
            own = thread is threading.current_thread()  # the garbage collector may close a run from any thread
            if thread.is_alive() and not own:
                thread.join(max(0.0, end - time.monotonic()))
            if own or not thread.is_alive():
                self._threads.discard(thread)
