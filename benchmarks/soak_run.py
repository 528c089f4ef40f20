"""Rows from a coordinator to ranks in other processes, looked at all along: what `soak.py` measures.

Adds: `write_data`, short samples with tiny images; `planned`, one sample a row; `soaked`, a run and its figures.
Leaves out: which runs, and all that needs no coordinator (`soak.py`).
"""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from PIL import Image

import mmdp
from mmdp.config import Config
from mmdp.planner import Plan
from mmdp.ray_coordinator import Coordinator
from mmdp.ray_reader import RankReader
from mmdp.ray_start import NAMESPACE, load_ray, used_store_bytes

NUM_IMAGES = 1000
"""Files; rows take turns with them."""

WORKERS = 2
WORKER_CPUS = 0.5
BATCH = 8
"""Rows a rank and step."""

LOOK_SECONDS = 1.0
_LOOKS = 50  # that are kept, at most
_REFERENCES_EVERY = 10  # looks: the coordinator stands still while it counts them


def write_data(folder: Path, samples: int) -> Path:
    """A JSONL file of so many short samples, and the tiny images that they share."""
    (folder / "images").mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 4, (NUM_IMAGES, 8, 8, 3), dtype=np.uint8) * 80
    for number in range(NUM_IMAGES):
        Image.fromarray(pixels[number]).quantize(4).save(folder / "images" / f"{number}.png", optimize=True)
    path = folder / "train.jsonl"
    with path.open("w") as file:
        for number in range(samples):
            turn = {"user": f"What is number {number}?", "assistant": f"A square, the {number}th."}
            row = {"id": number, "images": [f"images/{number % NUM_IMAGES}.png"], "texts": [turn]}
            file.write(json.dumps(row) + "\n")
    return path


@dataclass(frozen=True, slots=True)
class Data:
    """What is read, planned so that a row holds one sample."""

    source: Any
    encoder: mmdp.Encoder
    plan: Plan
    seconds: Mapping[str, float]


def planned(path: Path, cache: Path, *, side: int, samples: int | None = None) -> Data:
    """Opens, measures and plans; each with its seconds."""
    encoder = mmdp.Encoder(vision=f"fixed:1:side={side}")
    start = time.perf_counter()
    source = mmdp.open_source(path, config=Config(cache_dir=cache))
    opened = time.perf_counter()
    sizes = mmdp.measure(source, encoder, samples=samples, cache=cache)
    measured = time.perf_counter()
    plan = mmdp.plan(sizes, mmdp.Budget(tokens=int(sizes.tokens.max()), images=1))
    rows = len(plan.epoch(0))
    if rows != len(sizes):
        raise RuntimeError(f"{rows} rows for {len(sizes)} samples: the budget was to hold one of them")
    ended = time.perf_counter()
    return Data(source, encoder, plan, {"open": opened - start, "measure": measured - opened, "plan": ended - measured})


class Readers:
    """An actor that is several ranks, each in a thread that reads and trains on nothing."""

    def pid(self) -> int:
        """Of its process."""
        return os.getpid()

    def read(self, names: Mapping[int, str], world_size: int, steps: int | None) -> dict[int, list[int]]:
        """Rank to the samples it was given, to the end of the epoch or for so many steps.

        Args:
            names: rank to its coordinator.
            world_size: ranks in all.
            steps: None for all.
        """
        seen: dict[int, list[int]] = {rank: [] for rank in names}
        failures: list[BaseException] = []

        def one(rank: int) -> None:
            try:
                with RankReader(names[rank], rank, world_size) as reader, closing(iter(reader)) as batches:
                    for number, batch in enumerate(batches, 1):
                        seen[rank] += [sample for row in batch.samples for sample in row]
                        if number == steps:
                            break
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return seen


def memory_of(pid: int) -> int:
    """Bytes of a process that no file backs."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def cpu_of(pid: int) -> float:
    """Processor seconds of a process."""
    used = psutil.Process(pid).cpu_times()
    return used.user + used.system


def ray_processes(driver: int) -> dict[str, int]:
    """What Ray itself runs below this program, by name."""
    wanted = {"raylet": "raylet", "gcs_server": "gcs"}
    return {
        wanted[one.name()]: one.pid for one in psutil.Process(driver).children(recursive=True) if one.name() in wanted
    }


def soaked(data: Data, *, world_size: int, processes: int, groups: int = 1, steps: int | None = None) -> dict[str, Any]:
    """Rows from a coordinator to so many ranks in so many processes, looked at all along.

    Args:
        data: what is read.
        world_size: ranks.
        processes: that they are spread over.
        groups: of ranks, each with a coordinator and workers of its own; all work by the same plan.
        steps: of each rank; None for the whole epoch.
    """
    ray = load_ray()
    actors = [ray.remote(Readers).options(num_cpus=0).remote() for _ in range(processes)]
    pids = {f"ranks {number}": ray.get(actor.pid.remote()) for number, actor in enumerate(actors)}
    pids |= {"driver": os.getpid(), **ray_processes(os.getpid())}
    with ExitStack() as opened:
        coordinators = [
            opened.enter_context(
                Coordinator(
                    data.source,
                    data.encoder,
                    data.plan,
                    name=f"soak-{time.monotonic_ns()}",
                    batch_size=BATCH,
                    world_size=world_size,
                    num_workers=max(1, WORKERS // groups),
                    num_cpus=WORKER_CPUS,
                )
            )
            for _ in range(groups)
        ]
        pids |= _processes_of(coordinators)
        names = {rank: coordinators[rank % groups].name for rank in range(world_size)}
        shares = [{rank: names[rank] for rank in range(number, world_size, processes)} for number in range(processes)]
        reading = [actor.read.remote(share, world_size, steps) for actor, share in zip(actors, shares, strict=True)]
        looks: list[dict[str, Any]] = []
        while len(ray.wait(reading, num_returns=processes, timeout=LOOK_SECONDS)[0]) < processes:
            looks.append(_look(coordinators, pids))
            if len(looks) % _REFERENCES_EVERY == 1:
                looks[-1]["references"] = _num_references(coordinators)
        seen: dict[int, list[int]] = {}
        for one in ray.get(reading):
            seen |= one
        stats = [coordinator.stats() for coordinator in coordinators]
    for actor in actors:
        ray.kill(actor)
    whole = len(data.plan.sizes) if steps is None else None
    totals = {key: sum(one[key] for one in stats) for key in ("rows", "peak_bytes", "objects")}
    return {"world_size": world_size, "groups": groups, **totals, **_figures(looks, seen, totals["rows"], whole)}


def _processes_of(coordinators: Sequence[Coordinator]) -> dict[str, int]:
    """Coordinators and their workers, once all have come up."""
    pids = {}
    for number, coordinator in enumerate(coordinators):
        wanted = max(1, WORKERS // len(coordinators))
        while sum((stats := coordinator.stats())["workers"].values()) < wanted:
            time.sleep(0.1)
        pids[f"coordinator {number}"] = stats["pid"]
        pids |= {f"worker {number}.{place}": pid for place, pid in enumerate(stats["worker_pids"])}
    return pids


def _look(coordinators: Sequence[Coordinator], pids: Mapping[str, int]) -> dict[str, Any]:
    stats = [coordinator.stats() for coordinator in coordinators]
    return {
        "at": time.monotonic(),
        "rows": sum(one["rows"] for one in stats),
        "ready": sum(sum(one["ready"].values()) for one in stats),
        "store_bytes": used_store_bytes(),
        "memory": {name: memory_of(pid) for name, pid in pids.items()},
        "cpu": {name: cpu_of(pid) for name, pid in pids.items()},
    }


def _num_references(coordinators: Sequence[Coordinator]) -> int:
    """References that Ray counts for the coordinators."""

    def num(_: Any) -> int:  # in here, so that it travels by value: the coordinator imports nothing for it
        from ray._private.worker import global_worker

        return len(global_worker.core_worker.get_all_reference_counts())

    ray = load_ray()
    dealers = [ray.get_actor(coordinator.name, NAMESPACE) for coordinator in coordinators]
    return sum(ray.get([dealer.__ray_call__.remote(num) for dealer in dealers]))


def _figures(
    looks: Sequence[Mapping[str, Any]], seen: Mapping[int, list[int]], num_rows: int, samples: int | None
) -> dict[str, Any]:
    """What the looks say. Rates and processor time are from the first look with rows on.

    Args:
        looks: in order.
        seen: rank to its samples.
        num_rows: in all.
        samples: that were to come; None where not all were.
    """
    given = [sample for rank in seen.values() for sample in rank]
    inside = [look for look in looks if look["rows"]]
    first, last = inside[0], inside[-1]
    rows, seconds = last["rows"] - first["rows"], last["at"] - first["at"]
    late = [look for look in inside if look["rows"] >= num_rows / 2]
    counted = [look["references"] for look in inside if "references" in look]
    cpu = {name: 1e6 * (last["cpu"][name] - first["cpu"][name]) / rows for name in first["cpu"]}
    return {
        "samples": len(given),
        "repeated": len(given) - len(set(given)),
        "lost": samples - len(set(given)) if samples is not None else None,
        "rows_per_second": rows / seconds,
        "cpu_us_per_row": cpu,
        "coordinator_us_per_row": sum(value for name, value in cpu.items() if name.startswith("coordinator")),
        "ready_rows": statistics.median(look["ready"] for look in inside),
        "store_bytes": [min(look["store_bytes"] for look in late), max(look["store_bytes"] for look in late)],
        "references": [counted[0], max(counted), counted[-1]] if counted else None,
        "memory": {name: [late[0]["memory"][name], last["memory"][name]] for name in first["memory"]},
        "growth_bytes_per_row": {name: _slope(late, name) for name in first["memory"]},
        "looks": [[look["rows"], look["memory"], look["store_bytes"]] for look in inside[:: len(inside) // _LOOKS + 1]],
        "load": os.getloadavg(),
    }


def _slope(looks: Sequence[Mapping[str, Any]], name: str) -> float | None:
    rows = np.array([look["rows"] for look in looks], dtype=float)
    if len(looks) < 3 or np.ptp(rows) == 0:
        return None
    return float(np.polyfit(rows, [look["memory"][name] for look in looks], 1)[0])
