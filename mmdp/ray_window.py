"""The rows that are in flight for one rank: begun, built, or handed over and not yet copied.

Adds: `Window`, in rows and in bytes; `Step` and `Row`, what is in it.
Leaves out: who builds rows, and who asks for them (`ray_dealer`).

A rank gets whole steps. So the step that it waits for is built whole, even where it is over the bytes; nothing behind
it is begun then.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mmdp.ray_job import Built
from mmdp.ray_pool import WorkerPool
from mmdp.steps import Place


@dataclass(slots=True, eq=False)
class Row:
    """A row on its way.

    Attributes:
        samples: its sample indices.
        num_bytes: of its pixels, as planned.
        work: builds it.
        parts: what became of it.
        killed: samples that killed their worker.
    """

    samples: tuple[int, ...]
    num_bytes: int = 0
    work: asyncio.Future[None] | None = None
    parts: list[Built] = field(default_factory=list)
    killed: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Step:
    """The rows of one rank's step.

    Attributes:
        number: of the loop's steps, from 0.
        places: what the plan says of each row.
        state: after the step.
        rows: those that were begun.
    """

    number: int
    places: Sequence[Place]
    state: Mapping[str, Any]
    rows: list[Row] = field(default_factory=list)


class Window:
    """What is in flight for one rank, in one loop.

    Args:
        loop: its number.
        depth: rows, at least those of a step.
        max_bytes: of pixels.
        pool: builds rows.
        build: the pickled function that does.

    Attributes:
        run: of the pool, for these rows.
        state: after the last step that was added.
        num_bytes: of the rows in flight and those of the step released last, as planned.
        full: which bound the next row waits for, `rows` or `bytes`; "" where none waits.
    """

    def __init__(self, loop: int, depth: int, max_bytes: int, pool: WorkerPool, build: bytes) -> None:
        self.loop = loop
        self.run = pool.begin(build)
        self.state: Mapping[str, Any] = {}
        self.num_bytes = 0
        self.full: Literal["", "rows", "bytes"] = ""
        self._depth = depth
        self._max_bytes = max_bytes
        self._pool = pool
        self._steps: deque[Step] = deque()
        self._released: Step | None = None
        self._num_added = 0
        self._num_given = 0
        self._changed = asyncio.Event()
        self._producer: asyncio.Task[None] | None = None

    def start(self, producer: Coroutine[Any, Any, None]) -> None:
        """Begins to fill it."""
        self._producer = asyncio.get_running_loop().create_task(producer)
        self._producer.add_done_callback(lambda _: self._note())

    def end(self) -> None:
        """Lets go of all that is in it."""
        if self._producer is not None:
            self._producer.cancel()
        self._pool.end(self.run)
        self._steps.clear()
        self._released = None
        self.num_bytes = 0
        self._note()

    @property
    def num_ready(self) -> int:
        """Rows that are built and not yet asked for."""
        waiting = (step for step in self._steps if step.number >= self._num_given)
        return sum(row.work is not None and row.work.done() for step in waiting for row in step.rows)

    def add(self, places: Sequence[Place], state: Mapping[str, Any]) -> Step:
        """A step whose rows are about to be begun."""
        step = Step(self._num_added, places, state)
        self._num_added += 1
        self._steps.append(step)
        self.state = state
        return step

    async def room(self, step: Step, num_bytes: int) -> None:
        """Waits until one more row of the step may be begun."""
        while True:
            self.full = ""
            if self.num_bytes + num_bytes > self._max_bytes:
                self._let_go()
            if step is self._steps[0]:
                return
            num_rows = sum(len(held.rows) for held in self._steps)
            if num_rows < self._depth and self.num_bytes + num_bytes <= self._max_bytes:
                return
            self.full = "bytes" if num_rows < self._depth else "rows"
            await self._changed.wait()

    def begin(self, step: Step, row: Row, work: Coroutine[Any, Any, None]) -> None:
        """Begins a row of the step."""
        row.work = asyncio.get_running_loop().create_task(work)
        row.work.add_done_callback(_look)
        step.rows.append(row)
        self.num_bytes += row.num_bytes
        self._note()

    async def next(self) -> Step | None:
        """The next step, all of its rows begun; None behind the last.

        Raises:
            RuntimeError: the loop was ended.
            Exception: what planning it raised.
        """
        while True:
            for step in self._steps:
                if step.number == self._num_given and len(step.rows) == len(step.places):
                    self._num_given += 1
                    return step
            assert self._producer is not None
            if self._producer.cancelled() or self._producer.cancelling():
                raise RuntimeError("this loop was ended")
            if self._producer.done():
                self._producer.result()
                return None
            await self._changed.wait()

    def held(self, number: int) -> Step:
        """A step that the rank has, and has not released."""
        return next(step for step in self._steps if step.number == number)

    def release(self, count: int) -> None:
        """The rank has copied so many steps, the oldest.

        Their references are kept until the next release, or until the bytes are wanted. By then Ray has heard that the
        rank's own are gone; where the owner's are gone first, Ray never forgets the object: some 500 bytes a row that
        the coordinator grows by.
        """
        for _ in range(count):
            self._let_go()
            self._released = self._steps.popleft()
        self._note()

    def _let_go(self) -> None:
        """Of the step that was released last."""
        if self._released is not None:
            self.num_bytes -= sum(row.num_bytes for row in self._released.rows)
            self._released = None

    def _note(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _look(work: asyncio.Future[None]) -> None:
    """Marks an error as seen: the rank may never ask for this row."""
    if not work.cancelled():
        work.exception()
