"""A model of the pipeline of stage 06, run in simulated time: what a setting that was never run would give.

Adds: `simulate`, from `Numbers` and `Settings` to an `Outcome`.
Leaves out: the clock (`event_time`), the records (`pipeline_model`), and choosing of many settings (`simulate`).

It follows the code step by step: the window of each rank (`ray_window`), one event loop a coordinator (`ray_dealer`),
the actor with the fewest rows (`ray_pool`), fetches side by side and one thread that computes in each actor
(`ray_worker`), a reader that copies one step after the other and stays two batches ahead (`ray_reader`). Processors of
a node are shared by all that compute on it; training needs none. Each network card is one queue each way.

It knows no failures, no page cache, no interpreter lock, and no other program on the machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mmdp.event_time import Event, Link, Places, Process, Processors, Simulation
from mmdp.pipeline_model import Numbers, Outcome, Settings

_STEAL = 4  # rows that an actor elsewhere must have less, as in `ray_pool`
_VALUE_SECONDS = 0.4e-9
"""Processor seconds a byte that passing by value costs a coordinator. Ray 2.60, 24 MB: 11.3 against 2.0 ms."""


def simulate(numbers: Numbers, settings: Settings, seed: int = 0) -> Outcome:
    """Runs the model.

    Args:
        numbers: what things cost.
        settings: what was chosen.
        seed: of latencies, and of the row that is first.

    Raises:
        ValueError: a window that never holds a step.
    """
    return _Run(numbers, settings, seed).outcome()


@dataclass(eq=False, slots=True)
class _Worker:
    node: int
    thread: Places
    gate: Places
    num_rows: int = 0


@dataclass(eq=False, slots=True)
class _Row:
    images: int
    compute: float
    done: Event
    node: int = 0


@dataclass(eq=False, slots=True)
class _Coordinator:
    node: int
    loop: Places
    workers: list[_Worker]
    waiting: deque[Event]
    busy: float = 0.0


class _Rank:
    """A rank: its window, the batches that lie ready, and what its trainer saw."""

    def __init__(self, number: int, node: int, coordinator: _Coordinator) -> None:
        self.number = number
        self.node = node
        self.coordinator = coordinator
        self.held: deque[list[_Row]] = deque()
        self.changed = Event()
        self.ready = 0
        self.waits: list[float] = []
        self.first = 0.0
        self.train = 0.0
        self.rate = 0.0


class _Run:
    def __init__(self, numbers: Numbers, settings: Settings, seed: int) -> None:
        self._numbers, self._settings = numbers, settings
        self._rows = settings.rows or numbers.rows
        self._depth = settings.depth or max(numbers.depth, self._rows)
        if self._depth < self._rows:
            raise ValueError(f"a depth of {self._depth} rows never holds a step of {self._rows}: give at least that")
        self._train = numbers.train if settings.train is None else settings.train
        self._latency = numbers.latency if settings.latency is None else settings.latency
        self._random = np.random.default_rng(seed)
        self._first_row = int(self._random.integers(len(numbers.row_images)))
        self._num_built = 0
        self._time = time = Simulation()
        processors = settings.processors or numbers.processors
        self._processors = [Processors(time, processors) for _ in range(settings.nodes)]
        self._num_processors = processors
        self._rank_base = settings.nodes - settings.num_rank_nodes
        rates = [self._rate(node) for node in range(settings.nodes)]
        self._out = [Link(time, rate) for rate in rates]
        self._in = [Link(time, rate) for rate in rates]
        self._store = Link(time, settings.store_rate)
        rank_nodes = [self._rank_base + at * settings.num_rank_nodes // settings.ranks for at in range(settings.ranks)]
        self._coordinators = [self._coordinator(number, rank_nodes) for number in range(settings.coordinators)]
        self._ranks = [
            _Rank(number, node, self._coordinators[number * settings.coordinators // settings.ranks])
            for number, node in enumerate(rank_nodes)
        ]
        self._at_barrier = 0
        self._barrier = Event()
        self._left, over = settings.ranks, Event()
        for rank in self._ranks:
            time.go(self._produce(rank))
            time.go(self._read(rank))
            time.go(self._trainer(rank, over))
        time.run(over)

    # Who is where

    def _rate(self, node: int) -> float:
        settings = self._settings
        rate = settings.rank_link if node >= self._rank_base and settings.rank_link else None
        return rate or settings.link

    def _coordinator(self, number: int, rank_nodes: list[int]) -> _Coordinator:
        """The coordinator of some ranks, with its share of the workers."""
        settings = self._settings
        of = settings.coordinators
        share, rest = divmod(settings.workers or self._numbers.workers, of)
        node = number * settings.nodes // of
        mine = [at for rank, at in enumerate(rank_nodes) if rank * of // settings.ranks == number]
        build = range(settings.nodes if settings.rank_nodes_build or not self._rank_base else self._rank_base)
        half = max(1, self._num_processors // 2)  # of a node's CPUs, which Ray fills before the next node
        workers = []
        for at in range(share + (number < rest)):
            if settings.placement == "together":
                place = (node + at // half) % settings.nodes
            elif settings.placement == "spread":
                place = build[(number * share + at) % len(build)]
            else:
                place = mine[at % len(mine)]
            gate = Places(self._time, settings.max_fetches)
            workers.append(_Worker(place, Places(self._time, 1), gate))
        if not workers:
            raise ValueError(
                f"{settings.workers or self._numbers.workers} workers for {of} coordinators: give at least one each"
            )
        return _Coordinator(node, Places(self._time, 1), workers, deque())

    # How a step comes about

    def _produce(self, rank: _Rank) -> Process:
        """Has rows built, as far ahead as the window allows."""
        number = 0
        while True:
            step: list[_Row] = []
            rank.held.append(step)
            for place in range(self._rows):
                while rank.held[0] is not step and sum(map(len, rank.held)) >= self._depth:
                    yield rank.changed
                row = self._row(number, rank.number, place)
                step.append(row)
                self._time.go(self._build(row, rank))
                self._note(rank)
            number += 1

    def _row(self, step: int, rank: int, place: int) -> _Row:
        """The rows of a step are dealt to all ranks, one after the other."""
        numbers, ranks = self._numbers, self._settings.ranks
        at = (self._first_row + (step * self._rows + place) * ranks + rank) % len(numbers.row_images)
        return _Row(numbers.row_images[at], numbers.row_compute[at], Event())

    def _build(self, row: _Row, rank: _Rank) -> Process:
        numbers, time = self._numbers, self._time
        yield from self._coordinate(rank.coordinator, numbers.dispatch)
        worker = self._free(rank)
        while worker is None:
            turn = Event()
            rank.coordinator.waiting.append(turn)
            yield turn
            worker = self._free(rank)
        worker.num_rows += 1
        row.node = worker.node
        if time.now < numbers.start:
            yield time.sleep(numbers.start - time.now)
        if numbers.fetch_compute and row.images:
            yield self._processors[worker.node].work(numbers.fetch_compute * row.images)
        arrived = [Event() for _ in range(row.images)]
        for event, draw in zip(arrived, self._draws(row.images), strict=True):
            time.go(self._fetch(worker, draw, event))
        for event in arrived:
            yield event
        thread = yield from worker.thread.enter()
        yield self._processors[worker.node].work(row.compute)
        worker.thread.leave(thread)
        worker.num_rows -= 1
        self._num_built += 1
        time.fire(row.done)
        if rank.coordinator.waiting:
            time.fire(rank.coordinator.waiting.popleft())

    def _draws(self, count: int) -> Iterator[float]:
        numbers = self._numbers
        latencies = self._latency * np.exp(numbers.spread * self._random.standard_normal(count))
        return iter((numbers.overhead + latencies).tolist())

    def _coordinate(self, coordinator: _Coordinator, seconds: float) -> Process:
        """The event loop of a coordinator does one thing at a time."""
        if seconds:
            loop = yield from coordinator.loop.enter()
            coordinator.busy += seconds
            yield self._processors[coordinator.node].work(seconds)
            coordinator.loop.leave(loop)

    def _free(self, rank: _Rank) -> _Worker | None:
        """The worker with the fewest rows; one on another node must have a few less."""
        most = self._settings.max_concurrency
        able = [one for one in rank.coordinator.workers if one.num_rows < most]
        return min(able, key=lambda one: one.num_rows + (0 if one.node == rank.node else _STEAL), default=None)

    def _fetch(self, worker: _Worker, seconds: float, arrived: Event) -> Process:
        place = yield from worker.gate.enter()
        yield self._time.sleep(seconds)
        num_bytes = self._numbers.image_bytes
        yield from self._until(max(self._store.send(num_bytes), self._in[worker.node].send(num_bytes)))
        worker.gate.leave(place)
        self._time.fire(arrived)

    def _until(self, moment: float) -> Process:
        if moment > self._time.now:
            yield self._time.sleep(moment - self._time.now)

    def _moved(self, source: int, target: int, num_bytes: float) -> float:
        """When so many bytes have come from node to node."""
        if source == target:
            return self._time.now
        return max(self._out[source].send(num_bytes), self._in[target].send(num_bytes))

    def _read(self, rank: _Rank) -> Process:
        """The reader of a rank: a step after the other."""
        numbers, time = self._numbers, self._time
        num_bytes = numbers.row_bytes
        while True:
            while len(rank.held[0]) < self._rows:
                yield rank.changed
            step = rank.held[0]
            for row in step:
                yield row.done
            sources = [row.node for row in step]
            if self._settings.by_value:
                through = rank.coordinator
                yield from self._until(max(self._moved(source, through.node, num_bytes) for source in sources))
                yield from self._coordinate(through, _VALUE_SECONDS * num_bytes * len(step))
                sources = [through.node] * len(step)
            yield time.sleep(numbers.deal)
            yield from self._until(max(self._moved(source, rank.node, num_bytes) for source in sources))
            yield self._processors[rank.node].work(numbers.copy * len(step))
            while rank.ready >= self._settings.ahead:
                yield rank.changed
            rank.ready += 1
            rank.held.popleft()
            self._note(rank)

    def _note(self, rank: _Rank) -> None:
        """Something of a rank has changed: whoever waits for it looks again."""
        event, rank.changed = rank.changed, Event()
        self._time.fire(event)

    def _trainer(self, rank: _Rank, over: Event) -> Process:
        time, began = self._time, 0.0
        for number in range(self._settings.steps):
            asked = time.now
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
                rank.first, began = wait, time.now
            else:
                rank.waits.append(wait)
        rank.train = self._train * (self._settings.steps - 1)
        rank.rate = (self._settings.steps - 1) * self._rows * self._numbers.samples / max(time.now - began, 1e-12)
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
        ranks, seconds = self._ranks, max(self._time.now, 1e-12)
        wait, train = sum(sum(rank.waits) for rank in ranks), sum(rank.train for rank in ranks)
        carried = [
            link.num_bytes / (self._rate(node) * seconds)
            for links in (self._out, self._in)
            for node, link in enumerate(links)
        ]
        return Outcome(
            wait_ratio=_ratio(wait, train),
            slowest=max(_ratio(sum(rank.waits), rank.train) for rank in ranks),
            samples_per_second=sum(rank.rate for rank in ranks),
            seconds_to_first=max(rank.first for rank in ranks),
            processors=max(one.used() for one in self._processors) / (seconds * self._num_processors),
            coordinator=max(one.busy for one in self._coordinators) / seconds,
            links=max(carried),
            sent=tuple(link.num_bytes for link in self._out),
            received=tuple(link.num_bytes for link in self._in),
            row_seconds=seconds,
            num_rows=self._num_built,
        )


def _ratio(wait: float, train: float) -> float:
    return wait / (wait + train) if wait + train else 0.0
