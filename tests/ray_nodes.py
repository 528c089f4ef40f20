"""Two Ray nodes on this machine, and what becomes of actors and results there; prints it as JSON. Run by a test."""

import json
import os
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

import ray_work  # noqa: E402 - found by the line above

from mmdp.ray_executor import RayExecutor  # noqa: E402
from mmdp.ray_start import load_ray  # noqa: E402

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


def main() -> None:
    # Ray waits 15 s before it takes a node that does not answer for dead.
    os.environ.update(RAY_health_check_period_ms="500", RAY_health_check_initial_delay_ms="500")
    load_ray(starts=True)
    from ray.cluster_utils import Cluster

    node = {"num_cpus": NUM_CPUS, "object_store_memory": 2**27}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    other = cluster.add_node(**node)
    try:
        found: dict[str, object] = {}
        with RayExecutor(2, num_cpus=1, address=cluster.address, placement="spread") as actors:
            found["spread"] = spread_over(actors)
            results = []
            for block, _ in actors.run(ray_work.block, range(40), depth=6, weight=lambda _: 6_000_000):
                results.append(int(block[0]))
                if len(results) == 5:
                    cluster.remove_node(other, allow_graceful=False)
            found["results"] = results
        print(json.dumps(found))
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
