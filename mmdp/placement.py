"""Where worker actors should be: what each placement asks of network cards, and which of them has room.

Adds: `choose`, from measured numbers to a placement and the reason; `Traffic`, the numbers.
Leaves out: measuring them on a cluster (`ray_links`), and placing actors (`ray_actor`).

Rows are passed by reference: a row crosses a card where it is built, and one where it is read, if these are two nodes.

| placement | leaves the busiest card of a worker node | enters the busiest card |
|---|---|---|
| together | all rows that are read on other nodes | images of all rows, or the rows of a rank node |
| spread | a share of them, one of as many as there are nodes | the same, a share |
| near | nothing | images of the rows of a rank node |

The same flag can be worth nothing or everything: what decides is how many bytes a second the ranks want, against the
rate of a link. Of placements with room the simplest is taken. This is arithmetic on a mean; it knows no bursts, and so
asks for a quarter more than it reckons.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

Placed: TypeAlias = Literal["together", "spread", "near"]

SLACK = 1.25
"""What a link must carry, over what is reckoned: steps are not even, and a full link queues."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What flows, and through what.

    Attributes:
        link: bytes a second that one network card carries, each way; infinite where it is no limit.
        image_bytes: of a row as it is fetched: compressed.
        row_bytes: of a row as it is passed on: pixels and tokens.
        rows_per_second: that all ranks want together.
        ranks: how many.
        rank_nodes: that they are on.
        nodes: of the cluster.
    """

    link: float
    image_bytes: float
    row_bytes: float
    rows_per_second: float
    ranks: int
    rank_nodes: int
    nodes: int

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            least = 1 if one.name in ("ranks", "rank_nodes", "nodes") else 0
            if not value >= least or (one.name == "link" and not value > 0):  # NaN is refused as well
                raise ValueError(f"{one.name} is {value}: it must be {'above 0' if one.name == 'link' else least}")
            if math.isinf(value) and one.name != "link":
                raise ValueError(f"{one.name} is {value}: it must be finite")
        if not self.rank_nodes <= min(self.ranks, self.nodes):
            raise ValueError(f"{self.ranks} ranks on {self.rank_nodes} of {self.nodes} nodes: there are not so many")


@dataclass(frozen=True, slots=True)
class Choice:
    """Where actors should be.

    Attributes:
        placement: one of three.
        reason: with the numbers.
        load: bytes a second through the busiest card, for each placement.
    """

    placement: Placed
    reason: str
    load: dict[Placed, float]


def busiest(traffic: Traffic) -> dict[Placed, float]:
    """Bytes a second through the busiest card, either way, for each placement.

    A worker node that is also a rank node keeps the rows of its own ranks. Workers that are together are on a node
    without a rank, where there is one.
    """
    rows = traffic.rows_per_second * traffic.row_bytes
    images = traffic.rows_per_second * traffic.image_bytes
    per_rank_node = rows / traffic.rank_nodes
    apart = 0.0 if traffic.nodes == 1 else 1.0
    stays = 1 / traffic.rank_nodes if traffic.nodes == traffic.rank_nodes else 0.0
    shared = 1 - 1 / traffic.nodes  # of what is built everywhere, what is read elsewhere
    return {
        "together": max(images, apart * rows * (1 - stays), apart * per_rank_node),
        "spread": max(rows * shared / traffic.nodes, per_rank_node * shared + images / traffic.nodes),
        "near": images / traffic.rank_nodes,
    }


def choose(traffic: Traffic) -> Choice:
    """The simplest placement with room, else the one that asks least of its busiest card."""
    load = busiest(traffic)
    if traffic.nodes == 1:
        return Choice("together", "there is one node, so where actors are can make no difference", load)
    with_room = [placement for placement, one in load.items() if one * SLACK <= traffic.link]
    placement = with_room[0] if with_room else min(load, key=lambda one: load[one])
    asked = ", ".join(f"{name} {_rate(one)}" for name, one in load.items())
    wanted = (
        f"{traffic.ranks} ranks want {traffic.rows_per_second:.3g} rows a second of {_size(traffic.row_bytes)} "
        f"({_size(traffic.image_bytes)} as fetched); the busiest card would carry {asked}, and a link carries "
        f"{_rate(traffic.link)}"
    )
    verdict = "it is the simplest with room" if with_room else "none has room, and it asks least"
    return Choice(placement, f"{wanted}: {placement}, since {verdict}", load)


def _rate(rate: float) -> str:
    return "any" if math.isinf(rate) else f"{rate / 1e6:,.3g} MB/s"


def _size(size: float) -> str:
    return f"{size / 1e6:,.3g} MB" if size >= 1e5 else f"{size / 1e3:,.3g} kB"
