"""What placing actors hangs on, measured on a running cluster: the rate of a link, and the bytes of a row.

Adds: `measured`, the `Traffic` of a job that is about to start.
Leaves out: what follows from it (`placement`).

The link is measured by an object that another node has made and this one pulls, over the cluster's own road. It is
done while nothing else of ours runs; what others send meanwhile counts, as it will later.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from mmdp import store
from mmdp.placement import Traffic
from mmdp.ray_start import load_ray
from mmdp.refusals import DataError

if TYPE_CHECKING:
    from mmdp.planner import Plan
    from mmdp.records import ImageRef
    from mmdp.row_builder import RowBuilder
    from mmdp.sources import Source

_FIRST_BYTES, _PROBE_BYTES = 2 * 2**20, 64 * 2**20
"""Of the objects that are pulled: the first takes a third of a second on a link of 50 Mbit/s, and the second, which
only a faster link gets, 20 ms on one of 25 Gbit/s."""

_ENOUGH_SECONDS = 0.1  # of pulling, beside which a few milliseconds of Ray's own are nothing

_PROBE_SECONDS = 60.0  # for another node to make it and for this one to have it
_LOOKED_AT = 32  # rows, and images, whose bytes are counted
_BUILT = 3  # rows, to see what one costs


def measured(build: RowBuilder, plan: Plan, *, ranks: int, wanted: float, workers: float) -> Traffic:
    """What will flow, and how fast a link is.

    Args:
        build: sample indices to a row.
        plan: the rows.
        ranks: that read them; taken to be on as many nodes as there are, one each.
        wanted: rows a second that all ranks take; infinite where nobody knows.
        workers: that build rows side by side. What they can build is what ranks get at most.

    Raises:
        TimeoutError: another node does not answer.
    """
    nodes = [node["NodeID"] for node in load_ray().nodes() if node["Alive"]]
    epoch = plan.epoch(0)
    rows = [[int(sample) for sample in epoch[number]] for number in range(min(_LOOKED_AT, len(epoch)))]
    image_bytes, row_bytes = _bytes_of(build.source, plan, rows)
    built = workers / _seconds_of(build, rows[:_BUILT])
    return Traffic(
        link=link_rate(nodes),
        image_bytes=image_bytes,
        row_bytes=row_bytes,
        rows_per_second=min(wanted, built),
        ranks=ranks,
        rank_nodes=min(ranks, len(nodes)),
        nodes=len(nodes),
    )


def link_rate(nodes: list[str]) -> float:
    """Bytes a second from one other node to this one; infinite where there is no other."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray = load_ray()
    here = ray.get_runtime_context().get_node_id()
    other = next((node for node in nodes if node != here), None)
    if other is None:
        return math.inf
    there = NodeAffinitySchedulingStrategy(other, soft=False)
    make = ray.remote(_random).options(num_cpus=0, scheduling_strategy=there)
    rate = 0.0
    for num_bytes in (_FIRST_BYTES, _PROBE_BYTES):  # the first one pays for the connection
        rate = _pull(make.remote(num_bytes), num_bytes, other)
        if rate * _ENOUGH_SECONDS < num_bytes:
            return rate  # slow enough to be told by this one
    return rate


def _pull(reference: Any, num_bytes: int, other: str) -> float:
    """Bytes a second at which an object comes here, once it has been made."""
    ray = load_ray()
    made, _ = ray.wait([reference], timeout=_PROBE_SECONDS, fetch_local=False)
    begin = time.perf_counter()
    if not made:
        raise TimeoutError(f"node {other} has not answered within {_PROBE_SECONDS:.0f} s: is it alive? `ray status`")
    try:
        ray.get(reference, timeout=_PROBE_SECONDS)  # what is late is given up on purpose: the link is free again
    except ray.exceptions.GetTimeoutError:
        return num_bytes / _PROBE_SECONDS  # or less
    return num_bytes / (time.perf_counter() - begin)


def _seconds_of(build: RowBuilder, rows: list[list[int]]) -> float:
    """Processor seconds of a row."""
    for row in rows[:1]:
        build(row)  # imports, and files that are read for the first time
    begin = time.process_time()
    for row in rows:
        build(row)
    return max(1e-4, time.process_time() - begin) / max(1, len(rows))


def _random(num_bytes: int) -> Any:
    return np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8)  # nothing that could be packed


def _bytes_of(source: Source, plan: Plan, rows: list[list[int]]) -> tuple[float, float]:
    """Bytes of a row as its images are fetched, and as it is passed on; the mean of some."""
    passed = 0
    references: list[ImageRef] = []
    for row in rows:
        for sample in row:
            encoded = plan.sizes.encoded(sample)
            passed += 16 * len(encoded.ids)  # ids, labels, positions, segments: int32
            passed += sum(3 * layout.height * layout.width for layout in encoded.layouts)
            references += source[sample].images
    some = references[:: max(1, len(references) // _LOOKED_AT)]
    lengths = [len(data) for data in store.read_many(some) if not isinstance(data, DataError)]
    fetched = float(np.mean(lengths)) * len(references) if lengths else 0.0
    return fetched / max(1, len(rows)), passed / max(1, len(rows))
