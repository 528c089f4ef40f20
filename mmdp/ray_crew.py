"""One run on actors: items in, results in the order of the items, in flight only so much.

Adds: `RayCrew`, which `in_order` drives; `Window`, how many items and bytes may be in flight.
Leaves out: the event loop and the actors (`ray_engine`), and what becomes of an actor that dies (`ray_pool`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

from mmdp.in_order import Task
from mmdp.ray_engine import Engine
from mmdp.ray_fetch import BlockLost, fetched
from mmdp.ray_job import Built, Run
from mmdp.ray_start import load_ray
from mmdp.ray_worker import Block, unpack
from mmdp.wire import Raised, WorkerDied, WorkerError

STORE_SHARE = 0.4
"""Of the object store that may be in flight. The rest is for what a consumer has in hand; Ray spills at 80 %."""

_TRIES = 3  # to get a block whose node has gone


class Window:
    """What may be in flight, in items and in bytes.

    Args:
        depth: items.
        weight: bytes of an item's result, told before it is worked on.
        max_bytes: of all together.
        heaviest: bytes of the heaviest result that the function has given before; 0 if none.

    Attributes:
        heaviest: the same, results of this run among them.
    """

    def __init__(
        self, depth: int, weight: Callable[[Any], float] | None, max_bytes: float, heaviest: float = 0
    ) -> None:
        self.depth = depth
        self.max_bytes = max_bytes
        self.heaviest = heaviest
        self._weight = weight
        self._first = 0.0

    def measure(self, store: int, num_workers: int) -> None:
        """Fits the window to an object store; ValueError where it can't be."""
        most = STORE_SHARE * store
        if math.isfinite(self.max_bytes) and self.max_bytes > most:
            raise ValueError(
                f"{self.max_bytes:,.0f} bytes in flight are too much for an object store of {store:,} bytes: at most "
                f"{STORE_SHARE:.0%} of it, {most:,.0f}, so that nothing is spilled to disk. Give less (`max_bytes` of "
                "a Loader), or start Ray with a larger object_store_memory"
            )
        self.max_bytes = min(self.max_bytes, most)
        self._first = most / num_workers

    def weigh(self, item: Any) -> float:
        """Bytes to reckon with; before any result is known, an item for each worker fills the window."""
        return self._weight(item) if self._weight is not None else self.heaviest or self._first

    def learn(self, num_bytes: int) -> None:
        """What a result has weighed."""
        self.heaviest = max(self.heaviest, num_bytes)


class RayCrew:
    """Actors at work for one run, as `in_order` drives them: `submit`, `wait`, `stop`.

    Args:
        engine: whose actors they are.
        pickled: the function.
        window: hears what results weigh.
        timeout: seconds an actor may have an item.
        views: results are views of the object store.
        keeps_references: results are not fetched at all.
    """

    def __init__(
        self,
        engine: Engine,
        pickled: bytes,
        window: Window,
        timeout: float | None,
        *,
        views: bool,
        keeps_references: bool,
    ) -> None:
        self._engine = engine
        self._pickled = pickled
        self._window = window
        self._timeout = timeout
        self._views = views
        self._keeps_references = keeps_references
        self._run: Run | None = None
        self._finished = threading.Condition()
        self._failure: Exception | None = None
        self._stopped = False

    def start(self) -> None:
        """The function goes to the actors with the first item."""

    def submit(self, task: Task) -> None:
        """Gives an item to the actors; RuntimeError in a fork, where none would take it."""
        load_ray()
        self._engine.begin(self._see_to(task))

    async def _see_to(self, task: Task) -> None:
        pool = self._engine.pool
        if self._stopped:
            return
        if self._run is None:
            self._run = pool.begin(self._pickled)
        failure: Exception | None = None
        outcome: Any = None
        try:
            for _ in range(_TRIES):
                built = await pool.call(self._run, task.item, timeout=self._timeout)
                self._window.learn(built.meta.num_bytes)
                outcome, is_lost = await self._take(built)
                if not is_lost:
                    break
        except (WorkerDied, TimeoutError) as error:
            outcome = Raised(error)
        except WorkerError as error:
            failure = error
        except Exception as error:  # the item can't be sent
            outcome = Raised(error)
        with self._finished:
            if failure is not None:
                self._failure = failure
            else:
                task.outcome, task.done = outcome, True
            self._finished.notify_all()

    async def _take(self, built: Built) -> tuple[Any, bool]:
        """What the consumer gets, and whether it was lost on the way."""
        if built.meta.failure is not None:
            return Raised(built.meta.failure.rebuild()), False
        if self._keeps_references:
            return (built.meta, built.block), False
        try:
            return await fetched(built), False
        except BlockLost as error:
            lost = f"the result was lost with the node it lay on, {_TRIES} times over: {error}"
            return Raised(WorkerError(lost)), True

    def wait(self, task: Task, timeout: float | None) -> None:
        """Returns once the task is done, its result unpacked; RuntimeError in a fork, where it never would be."""
        load_ray()
        with self._finished:
            while not task.done:
                if self._failure is not None:
                    raise self._failure
                if self._stopped:
                    raise RuntimeError("the executor was closed, and with it this run")
                self._finished.wait(timeout)
        if isinstance(task.outcome, Block):
            try:
                task.outcome = unpack(task.outcome, views=self._views)
            except Exception as error:  # such as a class that this process can't import
                task.outcome = Raised(error)

    def stop(self) -> None:
        """Nothing more is wanted."""
        if self._stopped:
            return
        self._stopped = True
        run = self._run
        with self._finished:
            self._finished.notify_all()
        self._engine.post(lambda: self._engine.pool.end(run) if run is not None else None)
