"""What a model of the pipeline is given, and what it gives: records, all with units.

Adds: `Numbers`, what rows, fetches, calls and steps cost; `Settings`, what may be chosen; `Outcome`.
Leaves out: running the model (`pipeline_run`), and where the numbers come from (`calibration`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, get_args

from mmdp.placement import Placed
from mmdp.refusals import shorten

_LEAST = {"processors": 1, "workers": 1, "depth": 1, "step_rows": 1, "steps": 2}
_FROM_NOTHING = ("train", "latency", "epoch_rows")  # in `Settings`, where all else is at least 1


def _check(name: str, value: float, least: float) -> None:
    if not least <= value < math.inf:  # NaN is refused as well
        raise ValueError(f"{name} is {value}: it must be at least {least}, and finite")


def _check_all(record: Any) -> None:
    for one in fields(record):
        value = getattr(record, one.name)
        if isinstance(value, (int, float)):
            _check(one.name, value, _LEAST.get(one.name, 0))


class RowCost(NamedTuple):
    """What a row costs.

    Attributes:
        images: that are fetched for it.
        compute: processor seconds of its actor: decode, encode, join, and passing it on.
        samples: in it; a fraction where only their mean is known.
    """

    images: int
    compute: float
    samples: float


@dataclass(frozen=True, slots=True)
class FetchCost:
    """What the fetch of an image costs.

    Attributes:
        latency: seconds, median, that the store takes to answer.
        overhead: seconds beside that.
        spread: sigma of the logarithm of the latency; 0 for none.
        compute: processor seconds of the actor's event loop. Nobody waits for them; they are missing elsewhere.
        around: the same, of others on the actor's node: Ray's own processes, a store that is there too.
        num_bytes: of an image.
    """

    latency: float
    overhead: float = 0.0
    spread: float = 0.0
    compute: float = 0.0
    around: float = 0.0
    num_bytes: float = 0.0

    def __post_init__(self) -> None:
        _check_all(self)


@dataclass(frozen=True, slots=True)
class CallCost:
    """What going through the coordinator costs.

    Attributes:
        dispatch: processor seconds of the coordinator a row; it does one thing at a time.
        launch: seconds from that to the first fetch of the row.
        deal: seconds from the last row of a step to the references at its rank.
    """

    dispatch: float = 0.0
    launch: float = 0.0
    deal: float = 0.0

    def __post_init__(self) -> None:
        _check_all(self)


@dataclass(frozen=True, slots=True)
class Numbers:
    """What things cost. Rows are used in their order, over and over.

    Attributes:
        rows: in the order of the plan.
        step_rows: rows of a step, for one rank.
        train: seconds a step.
        fetch: of an image.
        call: to the coordinator.
        row_bytes: of a row as it is passed on.
        copy: processor seconds a row that its reader takes to copy it into the batch.
        epoch_rows: after so many, an epoch is over; at its end nothing is read ahead. 0 where it never is.
        start: seconds until actors have come up.
        background: processors of a node that are busy all the time, with or without rows.
        processors: of a node.
        workers: actors of the run that was looked at.
        depth: rows in flight for a rank, likewise.
    """

    rows: tuple[RowCost, ...]
    step_rows: int
    train: float
    fetch: FetchCost
    call: CallCost = field(default_factory=CallCost)
    row_bytes: float = 0.0
    copy: float = 0.0
    epoch_rows: int = 0
    start: float = 0.0
    background: float = 0.0
    processors: int = 1
    workers: int = 1
    depth: int = 1

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError("no row: give at least one")
        for name, values in zip(RowCost._fields, zip(*self.rows, strict=True), strict=True):
            _check(name, min(values), 0)
            _check(name, max(values), 0)
        _check_all(self)
        if not self.background < self.processors:
            raise ValueError(
                f"background is {self.background}: it must be less than the {self.processors} processors that there are"
            )


@dataclass(frozen=True, slots=True)
class Settings:
    """What may be chosen, or is different elsewhere; `None` is as in `Numbers`.

    Ranks are on the last `rank_nodes` nodes, as evenly as can be. The first coordinator is on the first node.

    Attributes:
        ranks: that train.
        workers: actors of all ranks.
        depth: rows in flight for each rank, at least those of a step.
        step_rows: rows of a step, for one rank.
        epoch_rows: rows of an epoch, 0 for one without end.
        train: seconds a step.
        latency: seconds, median, that the store takes to answer.
        nodes: of the cluster.
        rank_nodes: that ranks are on; by default as many as there are ranks, if there are as many nodes.
        rank_nodes_build: workers that are spread are on those nodes too.
        processors: of a node.
        link: bytes a second of a network card, each way.
        rank_link: the same, of nodes that ranks are on.
        store_rate: bytes a second of the store.
        placement: of actors.
        by_value: rows pass through a coordinator.
        lockstep: after each step, ranks wait for the slowest; so it is with an all-reduce.
        coordinators: each deals to its share of the ranks.
        steps: that each rank trains.
        max_fetches: of an actor at a time.
        max_concurrency: rows of an actor at a time.
        ahead: batches that lie ready at a rank.
    """

    ranks: int = 1
    workers: int | None = None
    depth: int | None = None
    step_rows: int | None = None
    epoch_rows: int | None = None
    train: float | None = None
    latency: float | None = None
    nodes: int = 1
    rank_nodes: int | None = None
    rank_nodes_build: bool = True
    processors: int | None = None
    link: float = math.inf
    rank_link: float | None = None
    store_rate: float = math.inf
    placement: Placed = "together"
    by_value: bool = False
    lockstep: bool = False
    coordinators: int = 1
    steps: int = 20
    max_fetches: int = 64
    max_concurrency: int = 16
    ahead: int = 2

    def __post_init__(self) -> None:
        if self.placement not in get_args(Placed):
            raise ValueError(f"no placement {shorten(self.placement)}: choose of {', '.join(get_args(Placed))}")
        for one in fields(self):
            value = getattr(self, one.name)
            if value is None or isinstance(value, (bool, str)):
                continue
            if one.name in ("link", "rank_link", "store_rate"):
                if not value > 0:
                    raise ValueError(f"{one.name} is {value}: it must be above 0; infinite where it is no limit")
            else:
                _check(one.name, value, 0 if one.name in _FROM_NOTHING else _LEAST.get(one.name, 1))
        if not self.num_rank_nodes <= min(self.ranks, self.nodes):
            raise ValueError(
                f"rank_nodes is {self.num_rank_nodes}, of {self.nodes} nodes for {self.ranks} ranks: give no more than "
                "there are of either"
            )
        if self.coordinators > self.ranks:
            raise ValueError(f"{self.coordinators} coordinators for {self.ranks} ranks: give at most one a rank")

    @property
    def num_rank_nodes(self) -> int:
        """Nodes that ranks are on."""
        return min(self.ranks, self.nodes) if self.rank_nodes is None else self.rank_nodes


class Busy(NamedTuple):
    """How much the busiest of each kind is used, 0 to 1.

    Attributes:
        processors: of a node.
        coordinator: of the time, how much it computes.
        links: of what a card can carry.
    """

    processors: float
    coordinator: float
    links: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a setting. The first step stands apart, as it does where this is measured.

    Attributes:
        wait_ratio: 0 to 1, over all ranks.
        slowest: the same of the rank that waits most.
        samples_per_second: of all ranks.
        seconds_to_first: from the first request to the first batch, of the last rank.
        busy: what is used most.
        sent: bytes out of each node.
        received: bytes into each node, images included.
        num_rows: that were built.
        seconds: from the start to the end, in which they were.
    """

    wait_ratio: float
    slowest: float
    samples_per_second: float
    seconds_to_first: float
    busy: Busy
    sent: tuple[float, ...]
    received: tuple[float, ...]
    num_rows: int
    seconds: float
