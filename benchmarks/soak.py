"""What does a coordinator bear, and what grows? A hundred thousand rows of tiny images through stage 06's own parts.

Usage: `uv run benchmarks/soak.py [--quick] [--samples N] [--only PART ...] [--report FILE.json]`, on Linux.

| part | is |
|---|---|
| soak | 100,000 rows of one sample each (a PNG of 8 x 8, a few words), a coordinator, two actors, two ranks in \
processes of their own; memory of every process looked at all along, every sample counted |
| store | the same with a tenth of the rows, of 197 KB, which lie in the object store |
| ranks | the same with 1, 2, 8 and 64 ranks and fewer rows: processor time of the coordinator a row |
| groups | eight ranks in one, two and four groups, each with a coordinator of its own |
| deal | the rows of a step dealt to 8, 64, 256 and 1,024 ranks, and what each of them gets |
| plan | an epoch of a million samples: seconds, and bytes a sample of the plan, the sizes and their making |
| data | index of a JSONL file; that file fetched, and objects listed, over 40 ms |
| start | actors until all have come up, and the processor time that each takes |

Memory is what no file backs (`RssAnon`). Growth is the slope of memory over rows in the second half of a run, in bytes
a row: a leak shows there, a cache that fills does not. References are those that Ray itself counts for the
coordinator: at first, at most, at last. A part that is run alone replaces its figures in the report, and leaves the
others there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pickle
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import obstore
import psutil
from obstore.store import S3Store
from planning import sizes_of
from rich.console import Console
from rich.table import Table
from soak_run import BATCH, WORKER_CPUS, Data, cpu_of, memory_of, planned, soaked, write_data

import mmdp
from mmdp.config import Config
from mmdp.local_store import serve
from mmdp.ray_coordinator import Coordinator
from mmdp.ray_start import Session
from mmdp.steps import Steps

STORE_BYTES = 512 * 2**20


def dealing(worlds: Sequence[int]) -> list[dict[str, Any]]:
    """A step dealt, and what each of all ranks gets of it; by one process, as a coordinator does it."""
    plan = mmdp.plan(sizes_of(100_000), mmdp.Budget(1024, 9))
    epoch = plan.epoch(0)
    found = []
    for world_size in worlds:
        assert len(epoch) >= 3 * world_size * BATCH
        ranks = [Steps(plan, BATCH, rank, world_size, False).places(epoch) for rank in range(world_size)]
        times = []
        for _ in range(3):
            start = time.process_time()
            for places in ranks:
                next(places)
            times.append(time.process_time() - start)
        found.append({"ranks": world_size, "seconds": statistics.median(times)})
    return found


def planning(samples: int) -> dict[str, Any]:
    """An epoch of so many samples, planned."""
    sizes = sizes_of(samples)
    columns = [sizes.tokens, sizes.images, sizes.vision, sizes.label_tokens, sizes._position]
    before, start = memory_of(os.getpid()), time.process_time()
    most, over = [before], threading.Event()

    def look() -> None:
        while not over.wait(0.02):
            most[0] = max(most[0], memory_of(os.getpid()))

    thread = threading.Thread(target=look)
    thread.start()
    epoch = mmdp.plan(sizes, mmdp.Budget(1024, 9)).epoch(0)
    rows = len(epoch)
    cpu = time.process_time() - start
    over.set()
    thread.join()
    kept = epoch.num_bytes
    return {
        "samples": samples,
        "rows": rows,
        "us_per_sample": 1e6 * cpu / samples,
        "plan_bytes_per_sample": kept / samples,
        "sizes_bytes_per_sample": sum(np.asarray(column).nbytes for column in columns) / samples,
        "peak_bytes_per_sample": (most[0] - before) / samples,
    }


def reading(path: Path, data: Data) -> dict[str, Any]:
    """What it takes to know the samples of a data set: an index, a file from a store, sizes in a worker.

    And a listing, which nothing here needs: rows name their images.
    """
    size, samples, seconds = path.stat().st_size, len(data.plan.sizes), data.seconds
    pickled, before, start = pickle.dumps(data.plan.sizes), memory_of(os.getpid()), time.process_time()
    sizes = pickle.loads(pickled)  # noqa: S301 - our own
    loading = time.process_time() - start
    loaded_bytes = memory_of(os.getpid()) - before
    assert len(sizes) == samples
    with serve(path.parent) as uri, TemporaryDirectory() as folder:
        start = time.perf_counter()
        far = mmdp.open_source(f"{uri}/{path.name}", config=Config(cache_dir=Path(folder)))
        far[0]
        fetched = time.perf_counter() - start
        endpoint = os.environ["AWS_ENDPOINT_URL_S3"]
        store = S3Store(
            uri.partition("://")[2], endpoint=endpoint, region="us-east-1", skip_signature=True,
            client_options={"allow_http": True},
        )  # fmt: skip

        async def listed() -> int:
            return sum([len(page) async for page in obstore.list(store, "images/")])

        start = time.perf_counter()
        objects = asyncio.run(listed())
        listing = time.perf_counter() - start
    return {
        "samples": samples,
        "file_bytes": size,
        "index_us_per_sample": 1e6 * seconds["open"] / samples,
        "measure_us_per_sample": 1e6 * seconds["measure"] / samples,
        "sizes_load_us_per_sample": 1e6 * loading / samples,
        "sizes_load_bytes_per_sample": loaded_bytes / samples,
        "token_cache_bytes_per_sample": sum(
            one.stat().st_size for one in data.plan.sizes.cache.folder.rglob("*") if one.is_file()
        )
        / samples,
        "fetch_and_index_seconds": fetched,
        "fetch_bytes_per_second": size / fetched,
        "listed_objects": objects,
        "listing_seconds": listing,
    }


def starting(data: Data, counts: Sequence[int]) -> list[dict[str, Any]]:
    """Actors until all have come up."""
    found = []
    for count in counts:
        before = _all_cpu()
        start = time.perf_counter()
        with Coordinator(
            data.source,
            data.encoder,
            data.plan,
            name=f"start-{time.monotonic_ns()}",
            num_workers=count,
            num_cpus=WORKER_CPUS / 4,
        ) as coordinator:
            while sum((stats := coordinator.stats())["workers"].values()) < count:
                time.sleep(0.05)
            seconds = time.perf_counter() - start
            cpu = [cpu_of(pid) for pid in stats["worker_pids"]]
            memory = [memory_of(pid) for pid in stats["worker_pids"]]
            found.append(
                {
                    "actors": count,
                    "seconds": seconds,
                    "cpu_seconds_per_actor": statistics.median(cpu),
                    "cpu_seconds_of_all": _all_cpu() - before,
                    "memory_per_actor": statistics.median(memory),
                }
            )
    return found


def _all_cpu() -> float:
    """Processor seconds of this program and of all that run below it; what has ended meanwhile is not counted."""
    total = 0.0
    me = psutil.Process()
    for one in (me, *me.children(recursive=True)):
        try:
            total += sum(one.cpu_times()[:2])
        except psutil.NoSuchProcess:
            continue
    return total


@contextmanager
def on_ray() -> Iterator[None]:
    """A Ray of our own."""
    with closing(Session(num_cpus=2, store_bytes=STORE_BYTES)):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("soak", "store", "ranks", "groups", "deal", "plan", "data", "start")
    parser.add_argument("--quick", action="store_true", help="5,000 samples; 50,000 are planned")
    parser.add_argument("--samples", type=int, help="by default 100,000; of the plan ten times as many")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts, help="these parts")
    parser.add_argument("--report", type=Path, help="JSON file for the figures; parts not run now stay in it")
    flags = parser.parse_args()
    samples = flags.samples or (5_000 if flags.quick else 100_000)
    if samples < 1000:
        parser.error(f"--samples is {samples}: at least 1000 are needed, so that rates can be told")
    found: dict[str, Any] = {}
    if flags.report and flags.report.exists():
        found = json.loads(flags.report.read_text())
    with TemporaryDirectory(prefix="mmdp-soak-") as folder:
        path = write_data(Path(folder) / "data", samples)
        cache = Path(folder) / "cache"

        def tiny() -> Data:
            return planned(path, cache, side=8)

        def soak() -> Any:
            data = tiny()
            with on_ray():
                return soaked(data, world_size=2, processes=2)

        def store() -> Any:
            data = planned(path, cache, side=256, samples=samples // 10)
            with on_ray():
                return soaked(data, world_size=2, processes=2)

        def ranks() -> Any:
            data, found = tiny(), []
            for world_size in (1, 2, 8, 64):
                with on_ray():
                    steps = max(8, samples // 10 // (world_size * BATCH))
                    found.append(soaked(data, world_size=world_size, processes=min(2, world_size), steps=steps))
            return found

        def groups() -> Any:
            data, found = tiny(), []
            for number in (1, 2, 4):
                with on_ray():
                    steps = max(8, samples // 10 // (8 * BATCH))
                    found.append(soaked(data, world_size=8, processes=2, groups=number, steps=steps))
            return found

        def start() -> Any:
            data = tiny()
            with on_ray():
                return starting(data, (2, 4, 8))

        work: Mapping[str, Callable[[], Any]] = {
            "soak": soak,
            "store": store,
            "ranks": ranks,
            "groups": groups,
            "deal": lambda: dealing((8, 64, 256, 1024)),
            "plan": lambda: planning(10 * samples),
            "data": lambda: reading(path, planned(path, Path(folder) / "cold", side=8)),
            "start": start,
        }
        for name in flags.only:
            print(f"{name}: load {os.getloadavg()[0]:.1f}", flush=True)
            found[name] = work[name]()
            if flags.report:
                flags.report.write_text(json.dumps(found | {"processors": os.cpu_count()}, indent=1) + "\n")
    show(Console(width=120), {name: found[name] for name in flags.only})


def show(console: Console, found: Mapping[str, Any]) -> None:
    """Tables."""
    runs = [(name, found[name]) for name in ("soak", "store") if name in found]
    runs += [(f"{one['world_size']} ranks", one) for one in found.get("ranks", ())]
    runs += [(f"8 ranks, {one['groups']} group(s)", one) for one in found.get("groups", ())]
    if runs:
        columns = ("run", "rows", "lost", "twice", "rows/s", "coordinator us a row", "all us a row", "references")
        table = Table(*columns, title="through the coordinator", box=None)
        for name, one in runs:
            cpu = one["cpu_us_per_row"]
            table.add_row(
                name,
                f"{one['rows']:,}",
                "-" if one["lost"] is None else f"{one['lost']}",
                f"{one['repeated']}",
                f"{one['rows_per_second']:,.0f}",
                f"{one['coordinator_us_per_row']:,.0f}",
                f"{sum(cpu.values()):,.0f}",
                "-" if one["references"] is None else " / ".join(map(str, one["references"])),
            )
        console.print(table)
    for name, one in runs[:2]:
        table = Table("process", "MB at the half", "at the end", "bytes a row", title=f"memory: {name}", box=None)
        for process, (half, end) in one["memory"].items():
            slope = one["growth_bytes_per_row"][process]
            table.add_row(process, f"{half / 1e6:.1f}", f"{end / 1e6:.1f}", "-" if slope is None else f"{slope:,.0f}")
        console.print(table)
    for name in ("deal", "plan", "data", "start"):
        for one in [found[name]] if isinstance(found.get(name), dict) else found.get(name, ()):
            console.print(name, {key: round(value, 4) for key, value in one.items()})


if __name__ == "__main__":
    main()
