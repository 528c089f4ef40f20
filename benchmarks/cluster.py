"""Where should worker actors be, and should rows pass through the coordinator? On a small and on a large cluster.

Usage: `uv run benchmarks/cluster.py [--quick] [--repeats 3] [--report FILE.json] [--figure FILE.png]`, on Linux, as
root or where user namespaces are allowed.

Hosts with network cards of their own (`hosts.py`): g for the head node and the coordinator, c1 to c3 for workers, r1
and r2 for ranks, s3 for a real object store. Cards of g and c1 to c3 carry 50 Mbit/s, those of r1 and r2 200, the
store's has no limit. Samples are JPEGs of some 11 KB that decode to 150 KB; rows hold four. A rank trains for 50 ms a
sample, in its sleep. The cells take turns, for so many rounds:

| | by value, through the coordinator | by reference, pulled by the ranks |
|---|---|---|
| workers together: eight on g, where Ray puts them | together by value | together by reference |
| workers spread: two each on g, c1, c2, c3 | spread by value | spread by reference |
| workers near the ranks, on r1 and r2 | | near by reference |

Small is one rank and 16 samples in flight, large four ranks and 192. The hosts of ranks offer Ray too few
CPUs for the workers of other cells, and enough for those that are near, which ask for less.

Goals: at the large scale spread by reference gives at least 1.5 times the samples/s of together by value in the median,
and 1.4 times in every round; at the small scale no cell gains; near is at least as good as spread by reference, with at
most a fifth of its bytes on the wire. `--quick` has half the cards, two ranks and two cells: 1.4 times is asked of it.
Rates of cards are scaled down, so ratios carry over to a real cluster, and MB/s do not.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from secrets import token_hex
from typing import Any

from cluster_programs import Pace
from cluster_start import (
    ASK_SECONDS,
    NEAR_CPUS,
    ROWS,
    TRAIN_MS,
    UP_SECONDS,
    WORKER_CPUS,
    WORKER_ROWS,
    Cell,
    Cluster,
    Scale,
    Size,
    cluster,
)
from hosts import why_not
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from mmdp.plots.cluster import cluster_bars
from mmdp.plots.style import save
from mmdp.progress import track

_RESULTS = Path(__file__).parent / "results" / "cluster.json"
_FIGURE = Path(__file__).parent.parent / "docs" / "figures" / "cluster.png"
_FIRST_SECONDS = 150.0  # for eight actors to start and a first batch to come

BASE, BEST, NEAR = Cell("together", True), Cell("spread", False), Cell("near", False)
CELLS = (BASE, Cell("together", False), Cell("spread", True), BEST, NEAR)


FULL = Size(
    ("g", "c1", "c2", "c3"), ("r1", "r2"), 50, 200, 8, (Scale("small", 1, 4), Scale("large", 4, 12)), CELLS, 8, 20
)
QUICK = Size(("g", "c1"), ("r1",), 25, 100, 6, (Scale("quick", 2, 8),), (BASE, BEST), 6, 15)


def measured(on: Cluster, scale: Scale, cell: Cell) -> dict[str, Any]:
    """One cell at one scale: what all ranks get together, how long they wait, what cards send meanwhile."""
    size, name, ranks = on.size, f"cell-{token_hex(4)}", on.ranks[: scale.ranks]
    on.coordinate.ask(
        UP_SECONDS,
        do="open",
        name=name,
        batch_size=ROWS,
        world_size=scale.ranks,
        num_workers=size.workers,
        num_cpus=NEAR_CPUS if cell is NEAR else WORKER_CPUS,
        placement=cell.placement,
        max_concurrency=WORKER_ROWS,
        depth=scale.depth,
        by_value=cell.by_value,
    )
    for rank, program in enumerate(ranks):
        program.tell(do="read", name=name, rank=rank, ranks=scale.ranks, train_ms=TRAIN_MS)
    for program in ranks:
        program.hear(_FIRST_SECONDS)
    begin = time.monotonic() + size.settle
    end = begin + size.seconds
    for program in ranks:
        program.tell(begin=begin, end=end)
    time.sleep(max(0.0, begin - time.monotonic()))
    before, began = on.hosts.sent(), time.monotonic()
    time.sleep(max(0.0, end - time.monotonic()))
    after, ended = on.hosts.sent(), time.monotonic()
    stats = on.coordinate.ask(do="stats")
    _check_places(cell, size, stats)
    paces = [Pace(**program.hear(ASK_SECONDS + size.seconds)) for program in ranks]
    on.coordinate.ask(do="close")
    rate = sum(pace.samples / pace.seconds for pace in paces)
    sent = {host: (after[host] - before[host]) / (ended - began) for host in after}
    waits = [pace.wait / (pace.wait + pace.train) for pace in paces]
    return {
        "scale": scale.name,
        "cell": cell.name,
        "samples_per_second": rate,
        "wait_ratio": sum(pace.wait for pace in paces) / sum(pace.wait + pace.train for pace in paces),
        "longest_wait_ratio": max(waits),
        "sent_bytes_per_second": sent,
        "sent_bytes_per_sample": sum(sent.values()) / rate,
        "workers_per_node": sorted(stats["workers"].values(), reverse=True),
        "deaths": stats["deaths"],
        "paces": [asdict(pace) for pace in paces],
        "load": os.getloadavg(),
    }


def _check_places(cell: Cell, size: Size, stats: Mapping[str, Any]) -> None:
    """RuntimeError where workers are not where the cell wants them: Ray takes some placements for a wish."""
    there, readers = set(stats["workers"]), set(stats["ranks"].values())
    wanted = {"together": len(there) == 1, "spread": len(there) == len(size.worker_hosts), "near": there == readers}
    if not wanted[cell.placement]:
        raise RuntimeError(f"workers are not {cell.placement}: {stats['workers']}, ranks on {sorted(readers)}")


def summary(size: Size, rounds: Sequence[Mapping[tuple[str, str], Mapping[str, Any]]]) -> dict[str, Any]:
    """For each scale and cell the median and the extremes over the rounds; gains are over the same round's base."""

    def three(values: Sequence[float]) -> list[float]:
        return [min(values), statistics.median(values), max(values)]

    found: dict[str, Any] = {}
    for scale in size.scales:
        cells = found[scale.name] = {}
        for cell in size.cells:
            runs = [one[scale.name, cell.name] for one in rounds]
            bases = [one[scale.name, BASE.name]["samples_per_second"] for one in rounds]
            cells[cell.name] = {
                **{
                    name: three([run[name] for run in runs])
                    for name in ("samples_per_second", "wait_ratio", "longest_wait_ratio", "sent_bytes_per_sample")
                },
                "gain": three([run["samples_per_second"] / base for run, base in zip(runs, bases, strict=True)]),
                "sent_bytes_per_second": {
                    host: statistics.median(run["sent_bytes_per_second"][host] for run in runs)
                    for host in runs[0]["sent_bytes_per_second"]
                },
            }
    return found


def table(found: Mapping[str, Any]) -> Table:
    """Median, and the extremes in brackets."""
    made = Table(title="median of the rounds (least to most)", box=None)
    for column in ("scale", "cell"):
        made.add_column(column)
    for column in ("samples/s", "waits", "longest wait", "of together by value", "KB sent a sample"):
        made.add_column(column, justify="right")
    for scale, cells in found.items():
        for name, one in cells.items():
            rate, wait, longest, gain, sent = (
                one[key]
                for key in ("samples_per_second", "wait_ratio", "longest_wait_ratio", "gain", "sent_bytes_per_sample")
            )
            made.add_row(
                scale,
                name,
                f"{rate[1]:.1f} ({rate[0]:.1f} to {rate[2]:.1f})",
                f"{wait[1]:.1%}",
                f"{longest[1]:.1%}",
                f"{gain[1]:.2f} ({gain[0]:.2f} to {gain[2]:.2f})",
                f"{sent[1] / 1000:.0f}",
            )
    return made


def run(size: Size, repeats: int, console: Console) -> dict[str, Any]:
    """All cells at all scales, in turns."""
    load = os.getloadavg()
    rounds: list[dict[tuple[str, str], dict[str, Any]]] = []
    with cluster(size) as on:
        places = [
            (number, scale, cell) for number in range(repeats) for scale in reversed(size.scales) for cell in size.cells
        ]
        for number, scale, cell in track(places, "cells"):
            if number == len(rounds):
                rounds.append({})
            one = rounds[number][scale.name, cell.name] = measured(on, scale, cell)
            console.print(
                f"round {number + 1}, {scale.name}, {cell.name}: {one['samples_per_second']:.1f} samples/s, waits "
                f"{one['wait_ratio']:.1%}, workers {one['workers_per_node']}, load {one['load'][0]:.1f}"
            )
    return {
        "size": asdict(size),
        "load": load,
        "load_at_end": os.getloadavg(),
        "processors": os.cpu_count(),
        "summary": summary(size, rounds),
        "rounds": [list(one.values()) for one in rounds],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller cluster, two cells")
    parser.add_argument("--repeats", type=int, help="rounds; by default 3, with --quick 1")
    parser.add_argument("--report", type=Path, help=f"JSON file to write; without --quick {_RESULTS.name} by default")
    parser.add_argument("--figure", type=Path, help=f"PNG file to write; without --quick {_FIGURE.name} by default")
    flags = parser.parse_args()
    repeats = flags.repeats if flags.repeats is not None else 1 if flags.quick else 3
    if repeats < 1:
        parser.error(f"--repeats is {repeats}: at least 1 round is needed")
    if reason := why_not():
        print(f"cluster.py needs hosts of its own: {reason}", file=sys.stderr)
        return 2
    console = Console()
    console.width = max(console.width, 120)
    found = run(QUICK if flags.quick else FULL, repeats, console)
    console.print(table(found["summary"]))
    loads = [found["load"][0], found["load_at_end"][0]]
    console.print(f"load average {loads[0]:.1f} before, {loads[1]:.1f} after, {found['processors']} processors")
    report, figure = (
        flags.report or (None if flags.quick else _RESULTS),
        flags.figure or (None if flags.quick else _FIGURE),
    )
    if report:
        report.write_text(json.dumps(found, indent=1) + "\n")
    if figure:
        save(drawn(found["summary"]), figure)
    return 0


_ROLES = {"g": "head, coordinator, workers", "c": "hosts of more workers", "r": "hosts of ranks", "s": "object store"}
_TITLES = {"small": "one rank", "large": "four ranks on two hosts"}


def drawn(summary: Mapping[str, Mapping[str, Any]]) -> Figure:
    """The table as a figure, with hosts put together by what runs on them."""
    named: dict[str, dict[str, Any]] = {}
    for scale, cells in summary.items():
        column = named[_TITLES.get(scale, scale)] = {}
        for cell, one in cells.items():
            sent = dict.fromkeys(_ROLES.values(), 0.0)
            for host, rate in one["sent_bytes_per_second"].items():
                sent[_ROLES[host[0]]] += rate
            column[cell] = {**one, "sent_bytes_per_second": sent}
    return cluster_bars(named, title="the same knobs on one cluster of hosts, for one rank and for four")


if __name__ == "__main__":
    sys.exit(main())
