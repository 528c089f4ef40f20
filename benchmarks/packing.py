"""How many rows each packer needs, how long it takes, and whether our goals are met. All in one run, by seed.

    uv run benchmarks/packing.py [--quick] [--report FILE.json]

"Waste" is rows over the lower bound (`knapsack.lower_bound`: all tokens, or all images, without a gap), in percent. One
row over the bound always counts as met: there is no half row to gain. Times are CPU time of this process, the least of
a few repetitions, with the garbage collector off. Judge by ratios: machines differ, and are shared. `--quick` packs
100,000 samples where the goals speak of a million.

The lengths, all by seed:

- `vqa`: text log-normal with mean 198 and sigma 0.8, and 64 tokens an image; one image each where there is one budget,
  else 0..8 images with the shares in `IMAGE_SHARES`, mean 1.42.
- `uniform`: text of 16..700 tokens, 0..8 images, all alike likely. `bimodal`: 70 % of the texts near 90 tokens, 30 %
  near 700, images as in `vqa`. `gamma`: text of mean 300; half of the samples have no image, the others 1..4.

Beside ours stands the rule of the blog's packer, written anew: longest sample first, into the emptiest of (lower bound
+ 5) rows. It sees all samples at once here, where the original sees a buffer, so it looks better than it does there.
"""

from __future__ import annotations

import gc
import heapq
import json
import math
import os
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sized
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from mmdp.knapsack import STRATEGIES, RowStream, lower_bound, pack
from mmdp.length_histogram import best_fit_decreasing, martello_toth_bound
from mmdp.records import Budget
from mmdp.row_stream import BUFFER

IMAGE_SHARES = (0.21, 0.50, 0.14, 0.06, 0.04, 0.02, 0.015, 0.01, 0.005)
IMAGE_TOKENS = 64
SEEDS = (0, 1, 2)
HELD_OUT_SEEDS = (3, 4, 5)

Sizes = tuple[np.ndarray, np.ndarray]
Rows = list[list[int]]
Packed = TypeVar("Packed", bound=Sized)


@dataclass(frozen=True, slots=True)
class Line:
    """One measured number; `goal` and `met` are None where none was set."""

    topic: str
    what: str
    value: float
    unit: str
    goal: float | None = None
    met: bool | None = None


def at_most(topic: str, what: str, value: float, unit: str, goal: float, *, one_row: float = 0.0) -> Line:
    return Line(topic, what, value, unit, goal, value <= max(goal, one_row))


def draw_sizes(family: str, n: int, seed: int, budget: Budget) -> Sizes:
    """Tokens and images of n drawn samples, without those that no row can hold."""
    rng = np.random.default_rng(seed)
    if family == "uniform":
        text, images = rng.uniform(16, 700, n), rng.integers(0, 9, n)
    elif family == "bimodal":
        text = np.where(rng.random(n) < 0.7, rng.normal(90, 20, n), rng.normal(700, 90, n))
        images = rng.choice(9, n, p=IMAGE_SHARES)
    elif family == "gamma":
        text = rng.gamma(2.0, 150.0, n)
        images = np.where(rng.random(n) < 0.5, 0, rng.integers(1, 5, n))
    else:
        text = rng.lognormal(math.log(198) - 0.8**2 / 2, 0.8, n)
        images = np.ones(n, np.int64) if budget.images is None else rng.choice(9, n, p=IMAGE_SHARES)
    tokens = np.maximum(4, np.rint(text)).astype(np.int64) + IMAGE_TOKENS * images
    fits = (tokens <= budget.tokens) & (images <= (8 if budget.images is None else budget.images))
    return tokens[fits], images[fits]


def cpu_seconds(function: Callable[[], Packed], repeat: int = 1) -> tuple[float, Packed]:
    """The least CPU time of some repetitions, and the last result."""
    least = math.inf
    for _ in range(repeat):
        gc.collect()
        gc.disable()
        start = time.process_time()
        result = function()
        least = min(least, time.process_time() - start)
        gc.enable()
    return least, result


def stream(sizes: Sizes, budget: Budget, buffer: int = BUFFER) -> Callable[[], Rows]:
    tokens, images = sizes[0].tolist(), sizes[1].tolist()
    return lambda: list(RowStream(zip(range(len(tokens)), tokens, images, strict=True), budget, buffer=buffer))


def next_fit_tokens(all_tokens: list[int], max_tokens: int) -> Rows:
    """The bare loop: about the least that plain Python can do with each sample."""
    rows: Rows = []
    row: list[int] = []
    filled = 0
    for index, tokens in enumerate(all_tokens):
        if filled + tokens > max_tokens:
            rows.append(row)
            row, filled = [], 0
        row.append(index)
        filled += tokens
    return [*rows, row]


def next_fit_both(all_tokens: list[int], all_images: list[int], max_tokens: int, max_images: int) -> Rows:
    """The bare loop with two budgets."""
    rows: Rows = []
    row: list[int] = []
    filled = held = 0
    for index, (tokens, images) in enumerate(zip(all_tokens, all_images, strict=True)):
        if filled + tokens > max_tokens or held + images > max_images:
            rows.append(row)
            row, filled, held = [], 0, 0
        row.append(index)
        filled += tokens
        held += images
    return [*rows, row]


def next_fit(sizes: Sizes, budget: Budget) -> Callable[[], Rows]:
    tokens, images = sizes[0].tolist(), sizes[1].tolist()
    if budget.images is None:
        return lambda: next_fit_tokens(tokens, budget.tokens)
    return lambda: next_fit_both(tokens, images, budget.tokens, budget.images or 0)


def histogram_bfd(sizes: Sizes, budget: Budget) -> Callable[[], np.ndarray]:
    """As `pack` calls it, without cutting its answer into a list of rows."""
    return lambda: best_fit_decreasing(sizes[0], budget.tokens)[1][:-1]


def emptiest_first(sizes: Sizes, budget: Budget, spare_rows: int = 5) -> int:
    """How many rows the blog's rule fills: longest first, each into the emptiest row that can hold it."""
    max_images = math.inf if budget.images is None else budget.images
    held = [0] * (lower_bound(*sizes, budget) + spare_rows)
    emptiest = [(0, row) for row in range(len(held))]  # a heap of (tokens, row)
    for index in np.argsort(-sizes[0], kind="stable").tolist():
        tokens, images = sizes[0][index].item(), sizes[1][index].item()
        full_of_images = []
        while emptiest and emptiest[0][0] + tokens <= budget.tokens and held[emptiest[0][1]] + images > max_images:
            full_of_images.append(heapq.heappop(emptiest))
        if emptiest and emptiest[0][0] + tokens <= budget.tokens:
            filled, row = heapq.heappop(emptiest)
        else:
            filled, row = 0, len(held)
            held.append(0)
        held[row] += images
        for entry in (*full_of_images, (filled + tokens, row)):
            heapq.heappush(emptiest, entry)
    return sum(filled > 0 for filled, _ in emptiest)


def waste(num_rows: int, sizes: Sizes, budget: Budget) -> float:
    """Percent over the lower bound."""
    return 100 * (num_rows / lower_bound(*sizes, budget) - 1)


def image_variation(rows: Rows, images: np.ndarray) -> float:
    """Coefficient of variation of the images a row."""
    counts = np.array([images[row].sum() for row in rows])
    return float(counts.std() / counts.mean())


def toy() -> Iterator[Line]:
    topic, lengths = "lengths 1..24 into 100", np.arange(1, 25)
    for strategy in STRATEGIES:
        rows = len(pack(lengths, None, Budget(tokens=100), strategy))
        yield Line(topic, strategy, rows, "rows") if strategy == "greedy" else at_most(topic, strategy, rows, "rows", 3)
    rows = emptiest_first((lengths, 0 * lengths), Budget(tokens=100))
    yield Line(topic, "emptiest first", rows, "rows")


def one_budget(n: int) -> Iterator[Line]:
    """Waste of the worst seed, and CPU time of the quickest."""
    for max_tokens, stream_goal, whole_goal in ((1024, 0.2, 0.10), (4096, 0.1, 0.03), (16384, 0.1, 0.01)):
        topic, budget = f"one budget, {n:,} samples, L {max_tokens}", Budget(max_tokens)
        proven, one_row = math.inf, 0.0
        worst: dict[str, float] = defaultdict(float)
        least: dict[str, float] = defaultdict(lambda: math.inf)
        for seed in SEEDS:
            sizes = draw_sizes("vqa", n, seed, budget)
            proven = min(proven, waste(martello_toth_bound(sizes[0], max_tokens), sizes, budget))
            one_row = max(one_row, waste(lower_bound(*sizes, budget) + 1, sizes, budget))
            for name, run, repeat in (
                ("next-fit loop", next_fit(sizes, budget), 1),
                ("bfd", histogram_bfd(sizes, budget), 5),
                ("knapsack", stream(sizes, budget), 1),
                ("knapsack, all at once", stream(sizes, budget, buffer=n), 1),
            ):
                taken, rows = cpu_seconds(run, repeat)
                worst[name] = max(worst[name], waste(len(rows), sizes, budget))
                least[name] = min(least[name], taken)
        yield Line(topic, "no packer can do better", proven, "% waste")
        yield Line(topic, "next-fit loop", worst["next-fit loop"], "% waste")
        yield Line(topic, "bfd", worst["bfd"], "% waste")
        yield at_most(topic, "knapsack", worst["knapsack"], "% waste", stream_goal, one_row=one_row)
        whole = "knapsack, all at once"
        yield at_most(topic, whole, worst[whole], "% waste", whole_goal, one_row=one_row)
        yield at_most(topic, whole, least[whole], "s CPU", 60)
        yield at_most(topic, "bfd", 1e3 * least["bfd"], "ms CPU", 100)
        yield from speed(topic, draw_sizes("vqa", 50_000, 0, budget), budget)


def speed(topic: str, sizes: Sizes, budget: Budget, repeat: int = 7) -> Iterator[Line]:
    """Samples a second, and the ratio to the bare loop: the median of runs side by side, since the machine drifts."""
    pairs = [[cpu_seconds(run)[0] for run in (stream(sizes, budget), next_fit(sizes, budget))] for _ in range(repeat)]
    yield Line(topic, "knapsack", len(sizes[0]) / min(taken for taken, _ in pairs) / 1e3, "thousand samples/s")
    ratio = float(np.median([taken / loop for taken, loop in pairs]))
    yield at_most(topic, "knapsack", ratio, "x next-fit loop", 40)


def two_budgets(n: int) -> Iterator[Line]:
    """Waste and spread of images, mean over the seeds."""
    cases = (
        (Budget(1024, 9), 0.15, None),
        (Budget(2048, 9), 1.3, 0.08),
        (Budget(4096, 18), 0.7, 0.05),
        (Budget(4096, 9), 0.1, None),
    )
    for budget, waste_goal, variation_goal in cases:
        topic = f"two budgets, {n:,} samples, L {budget.tokens}, {budget.images} images"
        drawn = [draw_sizes("vqa", n, seed, budget) for seed in SEEDS]
        for strategy in ("greedy", "ffd", "bfd"):
            rows = [len(pack(*sizes, budget, strategy)) for sizes in drawn]
            yield Line(topic, strategy, mean_waste(rows, drawn, budget), "% waste")
        rows = [emptiest_first(sizes, budget) for sizes in drawn]
        yield Line(topic, "emptiest first", mean_waste(rows, drawn, budget), "% waste")
        packed = [stream(sizes, budget)() for sizes in drawn]
        rows = [len(rows) for rows in packed]
        yield at_most(topic, "knapsack", mean_waste(rows, drawn, budget), "% waste", waste_goal)
        variation = float(np.mean([image_variation(rows, sizes[1]) for rows, sizes in zip(packed, drawn, strict=True)]))
        if variation_goal is None:
            yield Line(topic, "knapsack", variation, "variation of images a row")
        else:
            yield at_most(topic, "knapsack", variation, "variation of images a row", variation_goal)
        yield from speed(topic, draw_sizes("vqa", 50_000, 0, budget), budget)


def mean_waste(rows: list[int], drawn: list[Sizes], budget: Budget) -> float:
    return float(np.mean([waste(num_rows, sizes, budget) for num_rows, sizes in zip(rows, drawn, strict=True)]))


def held_out(n: int) -> Iterator[Line]:
    """Families on which no rule was chosen; image budgets so that both bind. Goal: beat the blog's rule.

    No goal at 1024 tokens, where rows hold two or three samples: what counts there is to see all long ones at once.
    """
    for family in ("vqa", "uniform", "bimodal", "gamma"):
        tokens, images = draw_sizes(family, n, 0, Budget(2**20, 8))
        for max_tokens in (1024, 2048, 4096):
            budget = Budget(max_tokens, max(8, round(max_tokens * images.sum() / tokens.sum())))
            topic = f"{family}, {n:,} samples, L {max_tokens}, {budget.images} images"
            drawn = [draw_sizes(family, n, seed, budget) for seed in HELD_OUT_SEEDS]
            proven = [max(lower_bound(*sizes, budget), martello_toth_bound(sizes[0], max_tokens)) for sizes in drawn]
            yield Line(topic, "no packer can do better", mean_waste(proven, drawn, budget), "% waste")
            ffd = [len(pack(*sizes, budget, "ffd")) for sizes in drawn]
            yield Line(topic, "ffd", mean_waste(ffd, drawn, budget), "% waste")
            blog = mean_waste([emptiest_first(sizes, budget) for sizes in drawn], drawn, budget)
            yield Line(topic, "emptiest first", blog, "% waste")
            rows = [len(pack(*sizes, budget)) for sizes in drawn]
            ours = mean_waste(rows, drawn, budget)
            if max_tokens == 1024:
                yield Line(topic, "knapsack", ours, "% waste")
            else:
                yield at_most(topic, "knapsack", ours, "% waste", blog)


def growth(n: int) -> Iterator[Line]:
    """CPU time for ten times the samples."""
    budget = Budget(1024)
    small, large = (draw_sizes("vqa", size, 0, budget) for size in (n // 10, n))
    topic = f"growth, {n // 10:,} to {n:,} samples"
    for name, packer in (("bfd", histogram_bfd), ("knapsack", stream)):
        few = cpu_seconds(packer(small, budget), 7)[0]
        many = cpu_seconds(packer(large, budget), 3)[0]
        yield at_most(topic, name, many / few, "x CPU", 15)


def order(n: int) -> Iterator[Line]:
    """Whether rows keep the order given, how long a sample waits, how large a state is."""
    for budget in (Budget(1024), Budget(16384), Budget(2048, 9), Budget(4096, 9)):
        topic = f"order, {n:,} samples, L {budget.tokens}, {budget.images or 'any'} images"
        sizes = draw_sizes("vqa", n, 0, budget)
        tokens, images = sizes
        rows = RowStream(zip(range(len(tokens)), tokens.tolist(), images.tolist(), strict=True), budget)
        packed, largest_state = [], 0
        for row in rows:
            packed.append(row)
            if len(packed) % 50 == 0:
                largest_state = max(largest_state, len(json.dumps(rows.state_dict())))
        longest = np.array([tokens[row].max() for row in packed])
        # The stream reads sample i once no more than `BUFFER` - 1 of the samples before it are left.
        taken = np.cumsum([0, *(len(row) for row in packed)])
        read_before = np.searchsorted(taken, np.concatenate(packed) - BUFFER, side="right")
        waits = np.repeat(np.arange(len(packed)), np.diff(taken)) - read_before
        yield at_most(topic, "knapsack", abs(rank_correlation(longest)), "|rank correlation| of row and longest", 0.1)
        yield at_most(topic, "knapsack", int(waits.max()), "rows of waiting at most", BUFFER)
        yield at_most(topic, "knapsack", largest_state, "bytes of state", 4096)


def rank_correlation(values: np.ndarray) -> float:
    """Spearman's, of the values with their places."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    mean_ranks = np.cumsum(counts) - (counts - 1) / 2
    return float(np.corrcoef(np.arange(len(values)), mean_ranks[inverse])[0, 1])


def table(lines: list[Line]) -> Table:
    grid = Table("", "", "", "goal", "met", box=box.SIMPLE_HEAD)
    grid.columns[1].justify = "right"
    topic = ""
    for line in lines:
        if line.topic != topic:
            topic = line.topic
            grid.add_section()
            grid.add_row(f"[bold]{topic}")
        met = "" if line.met is None else "[green]yes" if line.met else "[red]NO"
        goal = "" if line.goal is None else f"<= {line.goal:.4g}"
        grid.add_row(f"  {line.what}", f"{line.value:.4g}", line.unit, goal, met)
    return grid


def main(*, quick: bool = False, report: Path | None = None) -> None:
    """Measures the packers.

    Args:
        quick: 100,000 samples instead of a million, in about a minute of CPU time instead of three.
        report: write the lines to this JSON file.
    """
    n = 100_000 if quick else 1_000_000
    console = Console(width=120)
    lines: list[Line] = []
    for part in (toy(), one_budget(n), two_budgets(10_000), held_out(6_000), growth(n), order(100_000)):
        new = list(part)
        lines += new
        console.print(table(new))
    missed = [line for line in lines if line.met is False]
    console.print(f"{sum(line.met is True for line in lines)} goals met, {len(missed)} missed")
    for line in missed:
        console.print(f"[red]missed:[/] {line.topic}: {line.what} {line.value:.4g} {line.unit}, goal {line.goal:.4g}")
    if report:
        machine = {"python": platform.python_version(), "numpy": np.__version__, "cpus": os.cpu_count()}
        report.write_text(json.dumps({"machine": machine, "lines": [asdict(line) for line in lines]}, indent=1))


if __name__ == "__main__":
    tyro.cli(main)
