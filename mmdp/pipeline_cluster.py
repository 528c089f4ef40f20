"""What a model of the pipeline runs on: nodes with processors and cards, coordinators and workers on them.

Adds: `Cluster`, from `Numbers` and `Settings`; `Coordinator` and `Worker`, what each has to do now.
Leaves out: what they do, and in which order (`pipeline_run`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass

from mmdp.event_time import Event, Link, Places, Process, Processors, Simulation
from mmdp.pipeline_model import Numbers, Settings

_STEAL = 4  # rows that an actor elsewhere must have less, as in `ray_pool`


class Worker:
    """An actor: a thread that computes, and room for fetches."""

    def __init__(self, node: int, simulation: Simulation, max_fetches: int) -> None:
        self.node = node
        self.thread = Places(simulation, 1)
        self.gate = Places(simulation, max_fetches)
        self.num_rows = 0


@dataclass(eq=False, slots=True)
class Coordinator:
    """One event loop, the workers it has, and the rows that wait for one of them."""

    node: int
    loop: Places
    workers: list[Worker]
    waiting: deque[Event]
    busy: float = 0.0


class Cluster:
    """Nodes, and who is on which.

    Args:
        time: that passes.
        numbers: what things cost.
        settings: what was chosen.

    Attributes:
        processors: of each node.
        rank_nodes: the node of each rank.
        coordinators: each for its share of the ranks.

    Raises:
        ValueError: fewer workers than coordinators.
    """

    def __init__(self, time: Simulation, numbers: Numbers, settings: Settings) -> None:
        self._time = time
        self._settings = settings
        self._num_workers = settings.workers or numbers.workers
        self._num_processors = settings.processors or numbers.processors
        free = self._num_processors - numbers.background
        if free <= 0:
            raise ValueError(
                f"{self._num_processors} processors a node: {numbers.background} of them are always busy, so give more"
            )
        self.processors = [Processors(time, free) for _ in range(settings.nodes)]
        self._background = numbers.background
        self._rank_base = settings.nodes - settings.num_rank_nodes
        self._rates = [self._rate(node) for node in range(settings.nodes)]
        self._out = [Link(time, rate) for rate in self._rates]
        self._in = [Link(time, rate) for rate in self._rates]
        self._store = Link(time, settings.store_rate)
        of = settings.ranks
        self.rank_nodes = [self._rank_base + rank * settings.num_rank_nodes // of for rank in range(of)]
        self.coordinators = [self._coordinator(number) for number in range(settings.coordinators)]

    def _rate(self, node: int) -> float:
        settings = self._settings
        rate = settings.rank_link if node >= self._rank_base and settings.rank_link else None
        return rate or settings.link

    def _coordinator(self, number: int) -> Coordinator:
        """The coordinator of some ranks, with its share of the workers."""
        settings = self._settings
        of = settings.coordinators
        share, rest = divmod(self._num_workers, of)
        node = number * settings.nodes // of
        mine = [at for rank, at in enumerate(self.rank_nodes) if rank * of // settings.ranks == number]
        build = range(settings.nodes if settings.rank_nodes_build or not self._rank_base else self._rank_base)
        half = max(1, self._num_processors // 2)  # of a node's CPUs, which Ray fills before the next node
        if not share:
            raise ValueError(f"{self._num_workers} workers for {of} coordinators: give at least one each")
        all_of_mine = range(share + (number < rest))
        places = {
            "together": [(node + at // half) % settings.nodes for at in all_of_mine],
            "spread": [build[(number * share + at) % len(build)] for at in all_of_mine],
            "near": [mine[at % len(mine)] for at in all_of_mine],
        }
        workers = [Worker(place, self._time, settings.max_fetches) for place in places[settings.placement]]
        return Coordinator(node, Places(self._time, 1), workers, deque())

    def coordinator_of(self, rank: int) -> Coordinator:
        """The one that deals to this rank."""
        return self.coordinators[rank * self._settings.coordinators // self._settings.ranks]

    def free_worker(self, coordinator: Coordinator, node: int) -> Generator[Event, None, Worker]:
        """Waits for one that has room: that with the fewest rows, or a few more if it is on the node where they go."""
        while True:
            able = [one for one in coordinator.workers if one.num_rows < self._settings.max_concurrency]
            if able:
                return min(able, key=lambda one: one.num_rows + (0 if one.node == node else _STEAL))
            turn = Event()
            coordinator.waiting.append(turn)
            yield turn

    def coordinate(self, coordinator: Coordinator, seconds: float) -> Process:
        """The event loop of a coordinator does one thing at a time; this waits for its turn even with nothing to do."""
        loop = yield from coordinator.loop.enter()
        coordinator.busy += seconds
        yield self.processors[coordinator.node].work(seconds)
        coordinator.loop.leave(loop)

    def moved(self, source: int, target: int, num_bytes: float) -> list[Event]:
        """What happens when so many bytes have come from node to node."""
        return [] if source == target else [self._out[source].use(num_bytes), self._in[target].use(num_bytes)]

    def fetched(self, node: int, num_bytes: float) -> list[Event]:
        """What happens when so many bytes have come out of the store."""
        return [self._store.use(num_bytes), self._in[node].use(num_bytes)]

    # How busy they were

    def sent(self) -> tuple[float, ...]:
        """Bytes out of each node."""
        return tuple(link.used() for link in self._out)

    def received(self) -> tuple[float, ...]:
        """Bytes into each."""
        return tuple(link.used() for link in self._in)

    def busiest_link(self, seconds: float) -> float:
        """0 to 1, of what the busiest card can carry one way in so many seconds."""
        ways = zip((*self.sent(), *self.received()), (*self._rates, *self._rates), strict=True)
        return max(num_bytes / (rate * seconds) for num_bytes, rate in ways)

    def busiest_processors(self, seconds: float) -> float:
        """0 to 1, of the processors of the busiest node, in so many seconds."""
        most = max(one.used() for one in self.processors)
        return (most / seconds + self._background) / self._num_processors
