"""Worker actors: who works on which item, what becomes of one that dies, and of the items it had.

Adds: `WorkerPool`, for one event loop: `call` gives what became of an item, and a reference to its block.
Leaves out: the order of results and how many items are in work (`ray_executor`, `ray_coordinator`), and how actors come
and go (`ray_staff`).

An actor takes several items at a time, so when it dies, all of them are suspects. Its seat gets a new actor, which
tries them one by one, alone. The one that ends an actor when it is alone is to blame, and refused by its name; the
others come out as if nothing had been. So one bad item costs two actors, an innocent one costs a moment, and nothing
is lost. Ray's own retries are off: they would start all items of a dead actor together again, the bad one among them,
until the innocent ones had used up their tries as well.

| an actor | then |
|---|---|
| dies with items | a new one tries each of them alone |
| dies of an item that is alone | that item: `WorkerDied`; a new actor goes on with the others |
| dies while it starts or loads the function | a new one starts; after three in a row, `WorkerError` for all |
| can't load the function | `WorkerError` for all items of that function, at once |
| does not come up, for want of CPUs | `WorkerError` after two minutes, if no other has come up |
| has an item for longer than `timeout` | that item: `TimeoutError`; the actor is ended, its others start anew |

An item that is wanted on a node goes to an actor there, unless one elsewhere is far less busy.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from itertools import count
from typing import Any

from mmdp.in_order import name_item
from mmdp.ray_actor import ActorGone, Placement, Worker
from mmdp.ray_job import Built, Job, Run
from mmdp.ray_staff import Seat, Staff
from mmdp.ray_worker import pack
from mmdp.refusals import counted
from mmdp.wire import WorkerDied

_FINISH_SECONDS = 1.0  # what the items of a run that has ended get to finish, before their actors are ended
_STEAL = 4  # items that a worker elsewhere must have less, before it gets one that is wanted on another node


class WorkerPool:
    """Actors and their items, for one event loop: everything here is to be called on it.

    Args:
        num_cpus: of each actor; 0 and fractions are allowed.
        max_concurrency: items an actor has at a time.
        placement: of actors, as in `ray_actor`.

    Attributes:
        staff: the actors; hire some.
    """

    def __init__(self, *, num_cpus: float, max_concurrency: int, placement: Placement) -> None:
        self.staff = Staff(num_cpus=num_cpus, max_concurrency=max_concurrency, placement=placement, changed=self._deal)
        self._max_concurrency = max_concurrency
        self._queue: deque[Job] = deque()
        self._suspects: deque[Job] = deque()
        self._numbers = count()

    def begin(self, pickled: bytes) -> Run:
        """A run of a function, given as its pickle. `end` it."""
        return Run(next(self._numbers), self.staff.take(pickled))

    def call(
        self, run: Run, item: Any, *, node: str = "", timeout: float | None = None, is_suspect: bool = False
    ) -> asyncio.Future[Built]:
        """What becomes of an item.

        Args:
            run: what it belongs to.
            item: anything that pickles.
            node: where the result is wanted.
            timeout: seconds an actor may have it; None for no limit.
            is_suspect: it may well end its actor, so it is tried alone, and but once.

        Returns:
            A future. It raises `WorkerDied`, `WorkerError` and `TimeoutError` as the table above says, and what
            pickling the item raises. It is cancelled with its run.
        """
        outcome: asyncio.Future[Built] = asyncio.get_running_loop().create_future()
        outcome.add_done_callback(_look)
        try:
            job = Job(run, item, pack(item), node, timeout, outcome, is_suspect)
            (self._suspects if is_suspect else self._queue).append(job)
        except Exception as error:
            outcome.set_exception(error)
        self._deal()
        return outcome

    def end(self, run: Run) -> None:
        """Ends a run: what it has not begun is dropped, what it has begun may take a moment to finish."""
        if run.is_ended:
            return
        run.is_ended = True
        for job in self._jobs():
            if job.run is run:
                job.outcome.cancel()
        self._queue = deque(job for job in self._queue if job.run is not run)
        late = [worker for worker in self.staff.workers() if _has(worker, run)]
        for worker in late:
            worker.drop(run.number)
        if late and self.staff.failure is None:
            self.staff.start(self._end_late(run, late))
        self.staff.give_back(run.function)
        self._deal()

    def _deal(self) -> None:
        """Gives items to actors that have room; no longer for many that wait than for few."""
        if self.staff.failure is not None:
            for job in self._jobs():
                job.refuse(self.staff.failure)
            self._queue.clear()
            self._suspects.clear()
        while self._suspects:
            min(self.staff.seats, key=_num_jobs).trials.append(self._suspects.popleft())
        passed: list[Job] = []  # for which no actor that has room has the function
        while self._queue and any(map(self._is_free, self.staff.seats)):
            job = self._queue.popleft()
            if self._is_settled(job):
                continue
            if seats := [seat for seat in self.staff.seats if self._has_room(seat, job)]:
                self._give(min(seats, key=lambda seat: self._effort(seat, job)), job)
            else:
                passed.append(job)
        self._queue.extendleft(reversed(passed))
        for seat in self.staff.seats:
            while seat.trials and (self._is_settled(seat.trials[0]) or self._has_room(seat, seat.trials[0])):
                self._give(seat, seat.trials.popleft())

    def _is_free(self, seat: Seat) -> bool:
        """Whether it would take an item, if it has the function."""
        worker = seat.worker
        if worker is None or seat.trials or any(other.is_suspect for other in worker.jobs):
            return False
        return len(worker.jobs) < self._max_concurrency

    def _is_settled(self, job: Job) -> bool:
        """Whether an item needs no actor: its run has ended, or nobody can do it."""
        failure = self.staff.failure or job.run.function.failure
        if failure is not None:
            job.refuse(failure)
        return job.outcome.done()

    def _has_room(self, seat: Seat, job: Job) -> bool:
        worker = seat.worker
        if worker is None or job.run.function.digest not in worker.loaded:
            return False
        return not worker.jobs if job.is_suspect else self._is_free(seat)

    @staticmethod
    def _effort(seat: Seat, job: Job) -> int:
        assert seat.worker is not None
        return len(seat.worker.jobs) + (0 if job.node in ("", seat.worker.place.node) else _STEAL)

    def _give(self, seat: Seat, job: Job) -> None:
        if not self._is_settled(job):
            assert seat.worker is not None
            seat.worker.jobs.add(job)
            self.staff.start(self._work(seat, seat.worker, job))

    async def _work(self, seat: Seat, worker: Worker, job: Job) -> None:
        try:
            answer = await worker.work(job.run.function, job.block, job.run.number, job.timeout)
            built = Built(*answer, worker.place.node)
            if not job.outcome.done():
                job.outcome.set_result(built)
        except TimeoutError:
            job.refuse(TimeoutError(f"no result within {job.timeout} s"))
            worker.jobs.discard(job)
            self.staff.end(seat, worker)
        except ActorGone as death:
            self.staff.bury(seat, worker, f"at {counted(len(worker.jobs), 'item')}, tried again", death)
            self._try_again(seat, worker, job, death)
        except Exception as error:
            job.refuse(error)
        finally:
            worker.jobs.discard(job)
            self._deal()

    def _try_again(self, seat: Seat, worker: Worker, job: Job, death: ActorGone) -> None:
        """An actor has gone, and it had this item."""
        if job.outcome.done():
            return
        if worker.is_ended:
            (self._suspects if job.is_suspect else self._queue).appendleft(job)
        elif job.is_suspect:
            message = f"{name_item(job.item)} ended a worker actor that had it and nothing else: {death}"
            job.refuse(WorkerDied(message, item=job.item))
        else:
            job.is_suspect = True
            seat.trials.append(job)

    async def _end_late(self, run: Run, late: list[Worker]) -> None:
        """Ends actors that still work for a run that has ended: they may be stuck in it."""
        await asyncio.sleep(_FINISH_SECONDS)
        for seat in self.staff.seats:
            if seat.worker in late and _has(seat.worker, run):
                self.staff.end(seat, seat.worker)

    def _jobs(self) -> Iterator[Job]:
        yield from self._suspects
        yield from self._queue
        for seat in self.staff.seats:
            yield from seat.trials
        for worker in self.staff.workers():
            yield from worker.jobs


def _num_jobs(seat: Seat) -> int:
    return len(seat.trials) + (len(seat.worker.jobs) if seat.worker is not None else 0)


def _has(worker: Worker, run: Run) -> bool:
    return any(job.run is run for job in worker.jobs)


def _look(outcome: asyncio.Future[Built]) -> None:
    """Marks an error as seen: nobody may wait for it any more."""
    if not outcome.cancelled():
        outcome.exception()
