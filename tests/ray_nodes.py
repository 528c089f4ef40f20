"""Two Ray nodes on this machine, and what becomes of actors and results there; prints it as JSON. Run by a test."""

import json
import os
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

import ray_work  # noqa: E402 - found by the line above
from small import tokenizer, write_data  # noqa: E402

import mmdp  # noqa: E402
from mmdp.ray_coordinator import Coordinator  # noqa: E402
from mmdp.ray_executor import RayExecutor  # noqa: E402
from mmdp.ray_start import Session, load_ray  # noqa: E402

NUM_CPUS = 2
SECONDS = 60


def spread_over(actors: RayExecutor) -> list[int]:
    """How many actors each node has, the fullest first, once all have come up."""
    run = actors.run(ray_work.process, range(100), depth=1)
    next(run)
    end = time.monotonic() + SECONDS
    while sum(actors.workers_per_node().values()) < actors.num_workers and time.monotonic() < end:
        time.sleep(0.1)
    run.close()
    return sorted(actors.workers_per_node().values(), reverse=True)


def read(rank: int, address: str, path: list[str]) -> tuple[str, list[Any]]:
    """On a rank's node: which that is, and the samples of each batch."""
    sys.path[:] = path
    import ray

    from mmdp.ray_reader import RankReader

    with RankReader("on-two-nodes", rank=rank, world_size=2, address=address) as reader:
        batches = [[list(map(int, row)) for row in batch.samples] for batch in reader]
    return ray.get_runtime_context().get_node_id(), batches


def two_ranks(address: str, placement: str) -> dict[str, Any]:
    """Two ranks, each on a node of its own, read an epoch; what they got, and where workers were."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    with tempfile.TemporaryDirectory() as folder:
        source = mmdp.open_source(write_data(Path(folder), repeat=20))
        encoder = mmdp.Encoder(tokenizer(), "fixed:16")
        sizes = mmdp.measure(source, encoder, cache=Path(folder) / "cache")
        plan = mmdp.plan(sizes, mmdp.Budget(100, 3))
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        with Coordinator(
            *(source, encoder, plan),
            name="on-two-nodes",
            batch_size=2,
            world_size=2,
            num_workers=2,
            placement=placement,
            step_seconds=0.5,
            address=address,
        ) as coordinator:
            reading = [
                ray.remote(read)
                .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
                .remote(rank, coordinator.address, sys.path)
                for rank, node in enumerate(nodes)
            ]
            got = ray.get(reading, timeout=SECONDS)
            end = time.monotonic() + SECONDS
            while sum((workers := coordinator.stats()["workers"]).values()) < 2 and time.monotonic() < end:
                time.sleep(0.1)  # an epoch may be over before the second has come up
            loaders = [mmdp.Loader(source, encoder, plan, batch_size=2, rank=rank, world_size=2) for rank in range(2)]
            wanted = [[[list(map(int, row)) for row in batch.samples] for batch in loader] for loader in loaders]
            return {
                "nodes": nodes == [node for node, _ in got],
                "same": wanted == [batches for _, batches in got],
                "steps": len(wanted[0]),
                "workers": [workers.get(node, 0) for node in nodes],
                "placement": coordinator.placement,
                "reason": coordinator.reason,
            }


def least_cpus(address: str) -> list[int]:
    """How many of four actors that take next to nothing, near this node, are on each node."""
    with RayExecutor(4, num_cpus=0.0001, address=address, placement="near") as actors:
        return spread_over(actors)


def spread_and_lost(address: str, cluster: Any, other: Any) -> tuple[list[int], list[int]]:
    """How many actors each node has where they are to be spread; and all results, though one node is lost."""
    with RayExecutor(2, num_cpus=1, address=address, placement="spread") as actors:
        spread = spread_over(actors)
        results = []
        for block, _ in actors.run(ray_work.block, range(40), depth=6, weight=lambda _: 6_000_000):
            results.append(int(block[0]))
            if len(results) == 5:
                cluster.remove_node(other, allow_graceful=False)
        return spread, results


def main() -> None:
    """The parts that are named: near, auto, least, lost; the last one takes a node away."""
    # Ray waits 15 s before it takes a node that does not answer for dead.
    os.environ.update(RAY_health_check_period_ms="500", RAY_health_check_initial_delay_ms="500")
    load_ray(starts=True)
    from ray.cluster_utils import Cluster

    start = time.monotonic()
    seconds: dict[str, float] = {}

    def note(part: str) -> None:
        seconds[part] = round(time.monotonic() - start - sum(seconds.values()), 1)

    node = {"num_cpus": NUM_CPUS, "object_store_memory": 2**27}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    other = cluster.add_node(**node)
    try:
        found: dict[str, object] = {"seconds": seconds}
        with closing(Session(cluster.address)):  # holds the connection
            note("start")
            for part in sys.argv[1:]:
                if part == "least":
                    found[part] = least_cpus(cluster.address)
                elif part == "lost":
                    found["spread"], found["results"] = spread_and_lost(cluster.address, cluster, other)
                else:
                    found[part] = two_ranks(cluster.address, part)
                note(part)
        print(json.dumps(found))
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
