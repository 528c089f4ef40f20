"""What does a plan cost, how alike is the work of ranks, and how long does joining a row take?

Usage: `uv run benchmarks/planning.py [--quick] [--report FILE.json]`

1. Plans of a million samples (log-normal text of mean 198 and sigma 0.8, one image of 64 tokens each): CPU seconds for
   an epoch, wall milliseconds to its first row, bytes a sample.
2. Straggler factor over 8 ranks (the dearest rank of a step over the mean, averaged over steps) at 8 rows a rank and at
   one; images, dearest over mean, beside it. Against the same rows in the order the packer gave them.
3. Order: rank correlation of a row's place in the epoch with its longest sample.
4. Joining a row of 4096 tokens with all metadata, against a loop that appends one 0-d tensor a token, in turns.

Goals stand beside the figures and are from the project's own list.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from mmdp.batching import join
from mmdp.dealing import deal, row_costs
from mmdp.planner import plan
from mmdp.records import Budget, Encoded
from mmdp.sizes import Sizes

LENGTHS = (1024, 4096, 16384)
GOALS = {1024: 1.15, 4096: 1.25, 16384: 1.15}  # straggler factor at one row a rank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the samples")
    parser.add_argument("--report", type=Path, help="write the figures to this JSON file")
    flags = parser.parse_args()
    count = 100_000 if flags.quick else 1_000_000
    found = {"samples": count, "plans": [planned(count, length) for length in LENGTHS], "join": joined()}
    show(found)
    if flags.report:
        flags.report.write_text(json.dumps(found, indent=1) + "\n")


def sizes_of(count: int) -> Sizes:
    random = np.random.default_rng(0)
    text = np.clip(random.lognormal(np.log(198) - 0.32, 0.8, count), 1, 900).astype(np.int32)
    ones = np.ones(count, dtype=np.int32)
    nothing = SimpleNamespace(records=np.empty(0))
    return Sizes(text + 64, ones, ones.astype(np.int64), text // 2, {}, "benchmark", nothing, np.arange(count))


def planned(count: int, length: int) -> dict:
    sizes = sizes_of(count)
    one = plan(sizes, Budget(length, length * 9 // 1024))
    start = time.perf_counter()
    one.epoch(1)[0]
    first = time.perf_counter() - start
    start = time.process_time()
    epoch = one.epoch(0)
    rows = list(epoch)
    seconds = time.process_time() - start
    unordered = np.random.default_rng(1).permutation(len(rows))
    return {
        "tokens": length,
        "rows": len(rows),
        "over_bound": len(rows) / -(-int(sizes.tokens.sum()) // length) - 1,
        "cpu_seconds": seconds,
        "first_row_ms": first * 1e3,
        "bytes_a_sample": epoch.num_bytes / count,
        "straggler": {str(batch): stragglers(rows, sizes, batch) for batch in (8, 1)},
        "shuffled_straggler": {str(b): stragglers([rows[place] for place in unordered], sizes, b) for b in (8, 1)},
        "rank_correlation": correlation([int(sizes.tokens[row].max()) for row in rows]),
    }


def stragglers(rows: list[np.ndarray], sizes: Sizes, batch: int, steps: int = 2000) -> dict[str, float]:
    """Dearest rank over the mean of 8, averaged over steps: by cost, and by images."""
    costs, images = [], []
    for start in range(0, min(len(rows), steps * 8 * batch) - 8 * batch + 1, 8 * batch):
        step = rows[start : start + 8 * batch]
        dealt = deal(step, sizes, world_size=8, batch_size=batch)
        cost = row_costs(step, sizes).astype(float)
        loads = [sum(cost[place] for place in places) for places in dealt]
        pictures = [sum(int(sizes.images[step[place]].sum()) for place in places) for places in dealt]
        costs.append(max(loads) / np.mean(loads))
        images.append(max(pictures) / np.mean(pictures))
    return {"cost": float(np.mean(costs)), "images": float(np.mean(images))}


def correlation(longest: list[int]) -> float:
    """Spearman's: equal values share their mean rank."""
    _, inverse, counts = np.unique(longest, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - counts / 2)[inverse]
    return float(np.corrcoef(ranks, np.arange(len(ranks)))[0, 1])


def joined() -> dict:
    random = np.random.default_rng(0)
    parts = [random.integers(1, 9000, length).astype(np.int32) for length in (1000, 96, 1500, 700, 800)]
    samples = [Encoded(part, part, ()) for part in parts]
    none: list = [[] for _ in samples]

    def ours() -> None:
        join(samples, none, range(5))

    tensors = [torch.from_numpy(part) for part in parts]

    def one_by_one() -> None:
        ids: list = []
        for tensor in tensors:
            ids.extend(tensor)
        torch.stack(ids)

    times = {"ours": [], "one_by_one": []}
    for _ in range(7):
        times["ours"].append(per_call(ours, 200))
        times["one_by_one"].append(per_call(one_by_one, 2))
    ratios = [slow / fast for slow, fast in zip(times["one_by_one"], times["ours"], strict=True)]
    return {
        "us": min(times["ours"]),
        "one_by_one_us": min(times["one_by_one"]),
        "times_as_fast": {"min": min(ratios), "median": statistics.median(ratios), "max": max(ratios)},
    }


def per_call(function: Callable[[], None], calls: int) -> float:
    start = time.process_time()
    for _ in range(calls):
        function()
    return (time.process_time() - start) / calls * 1e6


def show(found: dict) -> None:
    console = Console()
    table = Table(title=f"plans of {found['samples']:,} samples")
    for column in ("tokens a row", "rows", "over the bound", "CPU s", "first row ms", "bytes a sample", "correlation"):
        table.add_column(column, justify="right")
    for one in found["plans"]:
        table.add_row(
            f"{one['tokens']:,}",
            f"{one['rows']:,}",
            f"{one['over_bound']:.2%}",
            f"{one['cpu_seconds']:.1f}",
            f"{one['first_row_ms']:.0f}",
            f"{one['bytes_a_sample']:.1f}",
            f"{one['rank_correlation']:+.3f}",
        )
    console.print(table)
    table = Table(title="straggler factor over 8 ranks")
    for column in (
        "tokens a row",
        "rows a rank",
        "by cost",
        "goal",
        "rows in random order",
        "by images",
        "random order",
    ):
        table.add_column(column, justify="right")
    for one in found["plans"]:
        for batch, goal in (("8", 1.10), ("1", GOALS[one["tokens"]])):
            ours, other = one["straggler"][batch], one["shuffled_straggler"][batch]
            figures = (ours["cost"], goal, other["cost"], ours["images"], other["images"])
            table.add_row(f"{one['tokens']:,}", batch, *(f"{figure:.3f}" for figure in figures))
    console.print(table)
    joining = found["join"]
    spread = " / ".join(f"{value:.0f}" for value in joining["times_as_fast"].values())
    console.print(
        f"joining a row of 4096 tokens: {joining['us']:.0f} us (goal 60), token by token "
        f"{joining['one_by_one_us']:,.0f} us: {spread} times as fast"
    )


if __name__ == "__main__":
    main()
