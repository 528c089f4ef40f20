"""A model of the pipeline of stage 06, run in simulated time: what a setting that was never run would give.

Adds: `simulate`, from `Numbers` and `Settings` to an `Outcome`.
Leaves out: the clock (`event_time`), the records (`pipeline_model`), who is where (`pipeline_cluster`), which rows are
in which step (`pipeline_steps`), and choosing of many settings (`simulate`).

It follows the code step by step: the window of each rank (`ray_window`), one event loop a coordinator (`ray_dealer`),
the actor with the fewest rows (`ray_pool`), fetches side by side and one thread that computes in each actor
(`ray_worker`), a reader that copies one step after the other and stays two batches ahead (`ray_reader`), and an epoch's
end, at which nothing is read ahead. Processors of a node are shared by all that compute on it; training needs none.
Each network card is shared by all that passes it, each way for itself.

It knows no failures, no page cache, no interpreter lock, and no other program on the machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from mmdp.event_time import Event, Process, Simulation
from mmdp.pipeline_cluster import Cluster, Worker
from mmdp.pipeline_model import Busy, Numbers, Outcome, RowCost, Settings
from mmdp.pipeline_steps import ModelSteps

_VALUE_SECONDS = 0.4e-9
"""Processor seconds a byte that passing by value costs a coordinator. Ray 2.60, 24 MB: 11.3 against 2.0 ms."""


def simulate(numbers: Numbers, settings: Settings, seed: int = 0) -> Outcome:
    """Runs the model.

    Args:
        numbers: what things cost.
        settings: what was chosen.
        seed: of latencies.

    Raises:
        ValueError: a window that never holds a step, or fewer workers than coordinators.
    """
    run = _Run(numbers, settings, seed)
    run.go()
    return run.outcome()


@dataclass(eq=False, slots=True)
class _Row:
    """A row in flight, and the node that builds it."""

    cost: RowCost
    done: Event = field(default_factory=Event)
    node: int = 0


class _Rank:
    """A rank: its window, the batches that lie ready, and what its trainer saw."""

    def __init__(self, number: int, node: int) -> None:
        self.number = number
        self.node = node
        self.held: deque[list[_Row]] = deque()
        self.changed = Event()
        self.ready = 0
        self.waits: list[float] = []
        self.samples = 0.0
        self.seconds_to_first = 0.0
        self.began = 0.0
        self.ended = 0.0


class _Run:
    def __init__(self, numbers: Numbers, settings: Settings, seed: int) -> None:
        self._numbers, self._settings = numbers, settings
        self._step_rows = settings.step_rows or numbers.step_rows
        self._depth = settings.depth or max(numbers.depth, self._step_rows)
        if self._depth < self._step_rows:
            raise ValueError(
                f"a depth of {self._depth} rows never holds a step of {self._step_rows}: give at least that many"
            )
        self._train = numbers.train if settings.train is None else settings.train
        self._latency = numbers.fetch.latency if settings.latency is None else settings.latency
        epoch_rows = numbers.epoch_rows if settings.epoch_rows is None else settings.epoch_rows
        self._steps = ModelSteps(numbers.rows, epoch_rows, settings.ranks, self._step_rows)
        self._random = np.random.default_rng(seed)
        self._num_built = 0
        self._time = Simulation()
        self._cluster = Cluster(self._time, numbers, settings)
        self._ranks = [_Rank(number, node) for number, node in enumerate(self._cluster.rank_nodes)]
        self._at_barrier = 0
        self._barrier = Event()
        self._left = settings.ranks

    def go(self) -> None:
        """Lets all ranks train to the end."""
        over = Event()
        for rank in self._ranks:
            self._time.go(self._trainer(rank, over))
        self._time.run(over)

    # How a step comes about

    def _produce(self, rank: _Rank, first: int, last: int) -> Process:
        """Has the rows of steps built, as far ahead as the window allows."""
        for number in range(first, last):
            step: list[_Row] = []
            rank.held.append(step)
            for cost in self._steps.of(number, rank.number):
                while rank.held[0] is not step and sum(map(len, rank.held)) >= self._depth:
                    yield rank.changed
                row = _Row(cost)
                step.append(row)
                self._time.go(self._build(row, rank))
                self._note(rank)

    def _build(self, row: _Row, rank: _Rank) -> Process:
        numbers, time, cluster = self._numbers, self._time, self._cluster
        coordinator = cluster.coordinator_of(rank.number)
        yield from cluster.coordinate(coordinator, numbers.call.dispatch)
        worker = yield from cluster.free_worker(coordinator, rank.node)
        worker.num_rows += 1
        row.node = worker.node
        yield time.sleep(numbers.call.launch + max(0.0, numbers.start - time.now))
        processors = cluster.processors[worker.node]
        loop = row.cost.images * numbers.fetch.compute / 2
        processors.work(loop, worker)  # to ask: nobody waits for it, but it is missing elsewhere
        arrived = [Event() for _ in range(row.cost.images)]
        for event, draw in zip(arrived, self._draws(row.cost.images), strict=True):
            time.go(self._fetch(worker, draw, event))
        for event in arrived:
            yield event
        processors.work(loop, worker)  # to take what came
        thread = yield from worker.thread.enter()
        yield processors.work(row.cost.compute)
        worker.thread.leave(thread)
        worker.num_rows -= 1
        self._num_built += 1
        time.fire(row.done)
        if coordinator.waiting:
            time.fire(coordinator.waiting.popleft())

    def _draws(self, count: int) -> Iterator[float]:
        fetch = self._numbers.fetch
        latencies = self._latency * np.exp(fetch.spread * self._random.standard_normal(count))
        return iter((fetch.overhead + latencies).tolist())

    def _fetch(self, worker: Worker, seconds: float, arrived: Event) -> Process:
        place = yield from worker.gate.enter()
        yield self._time.sleep(seconds)
        yield from self._cluster.fetched(worker.node, self._numbers.fetch.num_bytes)
        self._cluster.processors[worker.node].work(self._numbers.fetch.around)
        worker.gate.leave(place)
        self._time.fire(arrived)

    def _read(self, rank: _Rank, count: int) -> Process:
        """The reader of a rank: so many steps, one after the other."""
        numbers, cluster = self._numbers, self._cluster
        through = cluster.coordinator_of(rank.number)
        for _ in range(count):
            while not rank.held or len(rank.held[0]) < self._step_rows:
                yield rank.changed
            step = rank.held[0]
            for row in step:
                yield row.done
            yield from cluster.coordinate(through, 0.0)
            sources = [row.node for row in step]
            if self._settings.by_value:
                yield from self._moved(sources, through.node)
                yield from cluster.coordinate(through, _VALUE_SECONDS * numbers.row_bytes * len(step))
                sources = [through.node] * len(sources)
            yield self._time.sleep(numbers.call.deal)
            yield from self._moved(sources, rank.node)
            yield cluster.processors[rank.node].work(numbers.copy * len(step))
            while rank.ready >= self._settings.ahead:
                yield rank.changed
            rank.ready += 1
            rank.held.popleft()
            self._note(rank)

    def _moved(self, sources: list[int], target: int) -> Process:
        """Rows pass side by side; this waits for the last one."""
        for passed in [self._cluster.moved(source, target, self._numbers.row_bytes) for source in sources]:
            yield from passed

    def _note(self, rank: _Rank) -> None:
        """Something of a rank has changed: whoever waits for it looks again."""
        event, rank.changed = rank.changed, Event()
        self._time.fire(event)

    def _trainer(self, rank: _Rank, over: Event) -> Process:
        time, steps = self._time, self._settings.steps
        for number in range(steps):
            asked = time.now
            if self._steps.begins(number):  # a loop of the reader; nothing of it was begun before
                count = self._steps.num_steps or steps + self._settings.ahead + self._depth  # so far it may read
                time.go(self._produce(rank, number, number + count))
                time.go(self._read(rank, count))
            while not rank.ready:
                yield rank.changed
            rank.ready -= 1
            self._note(rank)
            wait = time.now - asked
            yield time.sleep(self._train)
            if self._settings.lockstep:
                done = time.now
                yield from self._all_reduce()
                wait += time.now - done
            if number == 0:
                rank.seconds_to_first, rank.began = wait, time.now
            else:
                rank.waits.append(wait)
                rank.samples += sum(row.samples for row in self._steps.of(number, rank.number))
        rank.ended = time.now
        self._left -= 1
        if not self._left:
            time.fire(over)

    def _all_reduce(self) -> Process:
        """Returns once all ranks have come."""
        self._at_barrier += 1
        barrier = self._barrier
        if self._at_barrier == self._settings.ranks:
            self._at_barrier, self._barrier = 0, Event()
            self._time.fire(barrier)
        yield barrier

    # What came of it

    def outcome(self) -> Outcome:
        """The figures."""
        ranks, cluster, seconds = self._ranks, self._cluster, max(self._time.now, 1e-12)
        train = self._train * (self._settings.steps - 1)
        return Outcome(
            wait_ratio=_ratio(sum(sum(rank.waits) for rank in ranks), train * len(ranks)),
            slowest=max(_ratio(sum(rank.waits), train) for rank in ranks),
            samples_per_second=sum(rank.samples / max(rank.ended - rank.began, 1e-12) for rank in ranks),
            seconds_to_first=max(rank.seconds_to_first for rank in ranks),
            busy=Busy(
                processors=cluster.busiest_processors(seconds),
                coordinator=max(one.busy for one in cluster.coordinators) / seconds,
                links=cluster.busiest_link(seconds),
            ),
            sent=cluster.sent(),
            received=cluster.received(),
            num_rows=self._num_built,
            seconds=seconds,
        )


def _ratio(wait: float, train: float) -> float:
    return wait / (wait + train) if wait + train else 0.0
