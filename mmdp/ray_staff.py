"""Worker actors that come and go: started, given functions, replaced when they die.

Adds: `Staff`, for one event loop, and its `Seat`s, each the place of an actor and of the next one once that has died.
Leaves out: who works on which item (`ray_pool`), and a single actor (`ray_actor`).
"""

from __future__ import annotations

import asyncio
import contextlib
import warnings
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from mmdp import ray_start
from mmdp.ray_actor import ActorGone, Function, Placement, Worker, start_worker
from mmdp.ray_job import Job
from mmdp.ray_warnings import repeat
from mmdp.wire import WorkerError

_START_SECONDS = 120.0  # for an actor to get its CPUs, while no other has come up
_END_SECONDS = 1.0  # for tasks to notice that their actors have gone
_DEAD_STARTS = 3  # actors that die while they start, one after the other, before it is said that none can
_KEPT_FUNCTIONS = 4  # in each actor, beside those in use


@dataclass(slots=True, eq=False)
class Seat:
    """The place of an actor.

    Attributes:
        node: that it works for; "" for anywhere.
        worker: None while there is none that has come up.
        trials: items that it takes one by one, alone.
    """

    node: str
    worker: Worker | None = None
    trials: deque[Job] = field(default_factory=deque)


class Staff:
    """All actors of a pool. Everything here belongs to one event loop.

    Args:
        num_cpus: of each actor.
        max_concurrency: items an actor has at a time.
        placement: of actors, as in `ray_actor`.
        changed: told when an actor has a function, when a function is refused, and when no actor can be had.

    Attributes:
        seats: of actors.
        deaths: actors that died, those we ended ourselves aside; one that was idle is missed when it is next asked.
        failure: why no actor can be had.
    """

    def __init__(
        self, *, num_cpus: float, max_concurrency: int, placement: Placement, changed: Callable[[], None]
    ) -> None:
        self.seats: list[Seat] = []
        self.deaths = 0
        self.failure: WorkerError | None = None
        self._num_cpus = num_cpus
        self._max_concurrency = max_concurrency
        self._placement = placement
        self._changed = changed
        self._functions: dict[str, Function] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._dead_starts = 0

    def hire(self, num_workers: int, node: str = "") -> None:
        """Starts so many actors, for this node or where the placement puts them."""
        for _ in range(num_workers):
            seat = Seat(node)
            self.seats.append(seat)
            self.start(self._fill(seat))

    def workers(self) -> list[Worker]:
        """Those that have come up."""
        return [seat.worker for seat in self.seats if seat.worker is not None]

    def per_node(self) -> dict[str, int]:
        """How many actors have come up on each node."""
        return dict(Counter(worker.place.node for worker in self.workers()))

    def pids(self) -> list[int]:
        """The process of each actor that has come up, as its own node numbers it."""
        return [worker.place.pid for worker in self.workers()]

    def take(self, pickled: bytes) -> Function:
        """A function for actors, given as its pickle; they load it at once. Give it back."""
        digest = blake2b(pickled, digest_size=16).hexdigest()
        function = self._functions.get(digest)
        if function is None or function.failure is not None:
            function = Function(digest, ray_start.load_ray().put(np.frombuffer(pickled, dtype=np.uint8)))
            self._functions[digest] = function
        function.num_runs += 1
        for seat in self.seats:
            if seat.worker is not None:
                self.start(self._prepare(seat, seat.worker, function))
        return function

    def give_back(self, function: Function) -> None:
        """A run needs it no more; the next one often wants the same."""
        function.num_runs -= 1
        idle = [one for one in self._functions.values() if not one.num_runs]
        for old in idle[: max(0, len(idle) - _KEPT_FUNCTIONS)]:
            del self._functions[old.digest]
            for worker in self.workers():
                worker.forget(old)

    def bury(self, seat: Seat, worker: Worker, when: str, death: ActorGone) -> bool:
        """Fills the seat of an actor that has died; False where that was done already."""
        if seat.worker is not worker:
            return False
        self.deaths += 1
        worker.make_sure()
        warnings.warn(f"a worker actor died {when}; a new one starts. {death}", RuntimeWarning, stacklevel=2)
        self._empty(seat)
        return True

    def end(self, seat: Seat, worker: Worker) -> None:
        """Ends an actor, and fills its seat."""
        worker.end()
        if seat.worker is worker:
            self._empty(seat)

    async def close(self) -> None:
        """Ends every actor, and whatever they do."""
        self._fail(WorkerError("the workers were closed"))
        for seat in self.seats:
            if seat.worker is not None:
                self.end(seat, seat.worker)
        if self._tasks:  # they end by themselves, since their actors have gone
            await asyncio.wait(self._tasks, timeout=_END_SECONDS)
        for task in self._tasks:
            task.cancel()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Has a coroutine run until the staff is closed."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _empty(self, seat: Seat) -> None:
        seat.worker = None
        if self.failure is None:
            self.start(self._fill(seat))

    async def _fill(self, seat: Seat) -> None:
        """Starts an actor in a seat."""
        while not self._has_failed():
            try:
                worker = await start_worker(
                    num_cpus=self._num_cpus,
                    max_concurrency=self._max_concurrency,
                    placement=self._placement,
                    node=seat.node,
                    seconds=_START_SECONDS,
                )
            except TimeoutError:
                if not self.workers():
                    self._fail(self._no_room())
            except ActorGone as death:
                self._count_dead_start(death)
            else:
                if self._has_failed():  # meanwhile
                    worker.end()
                    return
                seat.worker = worker
                self.start(self._listen(worker))
                for function in self._functions.values():
                    if function.num_runs:
                        self.start(self._prepare(seat, worker, function))
                return

    async def _listen(self, worker: Worker) -> None:
        """Warns here of what an actor warns of there, until it has gone; whoever asks it for a row hears of that."""
        with contextlib.suppress(ActorGone):
            while True:
                repeat(await worker.heard())

    async def _prepare(self, seat: Seat, worker: Worker, function: Function) -> None:
        """Gives an actor a function; it gets no items of it before it has it."""
        try:
            await worker.load(function)
            self._dead_starts = 0
        except ActorGone as death:
            if self.bury(seat, worker, "while it started", death):
                self._count_dead_start(death)
        except WorkerError:
            pass  # the function's own failure: its items hear of it
        self._changed()

    def _no_room(self) -> WorkerError:
        return WorkerError(
            f"no worker actor came up within {_START_SECONDS:.0f} s. Each asks for {self._num_cpus:g} CPUs; the "
            f"cluster has {ray_start.total_cpus():g}, of which {ray_start.free_cpus():g} are free: give fewer workers, "
            "or a smaller `num_cpus`"
        )

    def _count_dead_start(self, death: ActorGone) -> None:
        self._dead_starts += 1
        if self._dead_starts >= _DEAD_STARTS:
            self._fail(WorkerError(f"{self._dead_starts} worker actors ended while they started, the last: {death}"))

    def _fail(self, failure: WorkerError) -> None:
        """No actor can be had."""
        self.failure = failure
        self._changed()

    def _has_failed(self) -> bool:
        return self.failure is not None
