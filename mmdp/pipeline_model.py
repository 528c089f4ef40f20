"""What a model of the pipeline is given, and what it gives: records, all with units.

Adds: `Numbers`, what a sample, a row and a step cost; `Settings`, what may be chosen; `Outcome`.
Leaves out: running the model (`pipeline_run`), and where the numbers come from (`calibration`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import get_args

from mmdp.placement import Placed
from mmdp.refusals import shorten

_LEAST = {"samples": 0, "rows": 1, "processors": 1, "workers": 1, "depth": 1}


def _check(name: str, value: float, least: float) -> None:
    if not least <= value < math.inf:  # NaN is refused as well
        raise ValueError(f"{name} is {value}: it must be at least {least}, and finite")


@dataclass(frozen=True, slots=True)
class Numbers:
    """What things cost. Rows are used in their order, over and over.

    Attributes:
        row_images: images of each row.
        row_compute: processor seconds of each row: decode, encode, join, and passing it on.
        samples: a row, on average.
        rows: a step of one rank.
        train: seconds a step.
        latency: seconds, median, that the store takes to answer.
        overhead: seconds of a fetch beside that.
        spread: sigma of the logarithm of the latency; 0 for none.
        fetch_compute: processor seconds of a fetch.
        image_bytes: of an image as it is fetched.
        row_bytes: of a row as it is passed on.
        copy: processor seconds a row that its reader takes to copy it into the batch.
        deal: seconds from the last row of a step to the references at its rank.
        dispatch: processor seconds of the coordinator a row.
        start: seconds until actors have come up.
        processors: of a node.
        workers: actors of the run that was looked at.
        depth: rows in flight for a rank, likewise.
    """

    row_images: tuple[int, ...]
    row_compute: tuple[float, ...]
    samples: float
    rows: int
    train: float
    latency: float
    overhead: float = 0.0
    spread: float = 0.0
    fetch_compute: float = 0.0
    image_bytes: float = 0.0
    row_bytes: float = 0.0
    copy: float = 0.0
    deal: float = 0.0
    dispatch: float = 0.0
    start: float = 0.0
    processors: int = 1
    workers: int = 1
    depth: int = 1

    def __post_init__(self) -> None:
        if not self.row_images or len(self.row_images) != len(self.row_compute):
            raise ValueError(
                f"{len(self.row_images)} rows with images and {len(self.row_compute)} with seconds: give as many, "
                "and at least one"
            )
        for name, values in (("row_images", self.row_images), ("row_compute", self.row_compute)):
            _check(name, min(values), 0)
            _check(name, max(values), 0)
        for one in fields(self)[2:]:
            _check(one.name, getattr(self, one.name), _LEAST.get(one.name, 0))


@dataclass(frozen=True, slots=True)
class Settings:
    """What may be chosen, or is different elsewhere; `None` is as in `Numbers`.

    Ranks are on the last `rank_nodes` nodes, as evenly as can be. The first coordinator is on the first node.

    Attributes:
        ranks: that train.
        workers: actors of all ranks.
        depth: rows in flight for each rank, at least those of a step.
        rows: a step of one rank.
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
    rows: int | None = None
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
                _check(one.name, value, 0 if one.name in ("train", "latency") else 2 if one.name == "steps" else 1)
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


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a setting. The first step stands apart, as it does where this is measured.

    Attributes:
        wait_ratio: 0 to 1, over all ranks.
        slowest: the same of the rank that waits most.
        samples_per_second: of all ranks.
        seconds_to_first: from the first request to the first batch, of the last rank.
        processors: 0 to 1, share of the busiest node's processor time that is used.
        coordinator: 0 to 1, share of the time that the busiest coordinator computes.
        links: 0 to 1, share of what the busiest card can carry.
        sent: bytes out of each node.
        received: bytes into each node, images included.
        row_seconds: from the start to the end, over the rows that were built; for rates.
        num_rows: that were built.
    """

    wait_ratio: float
    slowest: float
    samples_per_second: float
    seconds_to_first: float
    processors: float
    coordinator: float
    links: float
    sent: tuple[float, ...]
    received: tuple[float, ...]
    row_seconds: float
    num_rows: int
