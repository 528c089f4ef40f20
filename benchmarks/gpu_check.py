"""Does it hold on a real GPU? Packed layouts with real kernels, the feed's promises, and what a better feed can bring.

    uv run benchmarks/gpu_check.py [--cpu] [--quick] [--report FILE.json]

One command, no network. It ends with code 0 where all is as it should be, 1 where something is not, and 2 where there
is no CUDA device; `--cpu` then does what a CPU can: kernels of sdpa, the feed without pinned memory, a tiny training.
The figures are saved in `benchmarks/results/`.

1. Layouts, in bfloat16, against each sample alone in float32: the largest difference of a logit, in standard deviations
   of the sample's logits. "alone" is the same difference without any packing: what rounding costs. P1 are positions
   that restart and no mask, P4 the boundaries for a flash kernel beside them, N4 positions with a mask (B, L) that is 0
   on the tail. P1 and P4 must keep samples apart; N4, and P1 of several rows with flash, must not: else the check could
   not fail. Flash runs by whatever kernel is installed, and the report says so where none is.
2. The feed: GPU-01 to GPU-06 of `tests/feed_checks.py`; and how many values are wrong where the feed leaves one of its
   protections out, which shows that GPU-02 can fail.
3. Wait ratio of stage 05: the demo set, packed rows, a SmolVLM with random weights. Four ways take turns: batches moved
   by the loop itself, a feed without pinned memory and stream, the feed, and the feed of a perfect loader, the ceiling.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import count, islice
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import mmdp
from mmdp.lanes import PlainLane
from mmdp.objective import loss
from mmdp.replay import perfect
from mmdp.tiny_model import tiny_vlm
from mmdp.wait_meter import WaitMeter

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import feed_checks  # noqa: E402 - lies beside the tests
from packed_kernels import DTYPE, LIMIT, check_layouts  # noqa: E402

Figures = dict[str, Any]

ROUNDS, STEPS = 3, 60
LARGE = {"hidden": 1024, "layers": 12}  # some 200 million weights: a step of tens of milliseconds on a large GPU
SMALL = {"hidden": 64, "layers": 2}


# 2. The feed


def check_feed(device: str) -> Figures:
    """What each check saw, or how it failed."""
    found: Figures = {}
    for name, check in feed_checks.CHECKS.items():
        start = time.perf_counter()
        try:
            found[name] = {"ok": True, **check(device)}
        except Exception as error:
            traceback.print_exc()
            found[name] = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        found[name]["seconds"] = time.perf_counter() - start
    if device == "cuda":
        for protection in ("record", "wait"):
            wrong = feed_checks.wrong_without(protection)
            found[f"GPU-02 fails without the {protection}"] = {"ok": wrong > 0, "wrong": wrong}
    return found


# 3. The wait ratio of stage 05


WAYS = {"cuda": ("no feed", "feed, plain copies", "feed", "perfect"), "cpu": ("no feed", "feed", "perfect")}
ROWS = {"cuda": 8, "cpu": 2}


class Plain(PlainLane):
    """As where there is no pinned memory, without saying so."""

    def __init__(self, device: torch.device) -> None:
        self._device = device


def epochs(way: str, loader: mmdp.Loader, device: str) -> Iterator[Any]:
    """Batches on the device, epoch after epoch."""
    if way == "no feed":
        for _ in count():
            yield from (batch.to(device) for batch in loader)
    fed = mmdp.feed(perfect(loader) if way == "perfect" else loader, device)
    with mock.patch("mmdp.device.lane_to", Plain) if way == "feed, plain copies" else nullcontext():
        for _ in count():
            yield from fed


def check_wait(device: str, models: dict[str, dict[str, int]], rounds: int, steps: int) -> list[Figures]:
    """For each model and way the median over rounds."""
    source, encoder = mmdp.open_source("demo"), mmdp.Encoder()
    plan = mmdp.plan(mmdp.measure(source, encoder), mmdp.Budget(1024, 9))
    found = []
    for name, shape in models.items():
        model = tiny_vlm(encoder, **shape).to(device)
        runs: dict[str, list[Figures]] = {way: [] for way in WAYS[device]}
        for number in range(rounds):
            for way in (*WAYS[device][number:], *WAYS[device][:number]):  # in turns, since machines drift
                loader = mmdp.Loader(source, encoder, plan, batch_size=ROWS[device])
                runs[way].append(train(way, model, loader, device, steps))
        for way, each in runs.items():
            medians = {figure: statistics.median(one[figure] for one in each) for figure in each[0]}
            found.append({"model": name, **shape, "way": way, **medians, "ok": all(one["finite"] for one in each)})
    return found


def train(way: str, model: Any, loader: mmdp.Loader, device: str, steps: int) -> Figures:
    """So many steps; nothing in the loop waits for the device."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    meter = WaitMeter(device)
    losses, samples = [], []
    for batch in islice(meter.over(epochs(way, loader, device)), steps):
        with torch.autocast(device, DTYPE, enabled=device == "cuda"):
            value = loss(model, batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.detach())
        samples.append(sum(map(len, batch.samples)))
    loader.close()
    figures = meter.as_dict()
    seconds = figures["wait_seconds"] + figures["train_seconds"]  # without the first batch, which stands apart
    return {
        **figures,
        "seconds_a_step": seconds / (steps - 1),
        "samples_per_second": sum(samples[1:]) / seconds,
        "finite": bool(torch.stack(losses).isfinite().all()),
    }


# What is shown


def show(console: Console, found: Figures) -> None:
    if "layouts" in found:
        title = f"packed in {DTYPE} against alone in float32, in standard deviations; limit {LIMIT}"
        table = made_table(title, "family", "attention", "batch", "layout", "samples", "error", "alone", "")
        for one in found["layouts"]:
            if one["kernel"] is None:
                table.add_row(one["family"], one["attention"], "", "", one["why"])
                continue
            numbers = (f"{one['error']:.2g}", f"{one['alone']:.2g}")
            samples = "apart" if one["apart"] else "leak"
            table.add_row(one["family"], one["kernel"], one["rows"], one["layout"], samples, *numbers, mark(one))
        console.print(table)
    if "feed" in found:
        table = made_table("the feed", "check", "", "seconds", "saw")
        for name, one in found["feed"].items():
            saw = {key: value for key, value in one.items() if key not in ("ok", "seconds")}
            table.add_row(name, mark(one), f"{one.get('seconds', 0):.1f}", json.dumps(saw, default=str)[:300])
        console.print(table)
    if "wait" in found:
        table = made_table("stage 05", "model", "way", "wait ratio", "samples/s", "s to first batch", "ms a step", "")
        for one in found["wait"]:
            table.add_row(
                f"{one['hidden']} wide, {one['layers']} layers",
                one["way"],
                f"{one['wait_ratio']:.1%}",
                f"{one['samples_per_second']:,.0f}",
                f"{one['seconds_to_first']:.2f}",
                f"{1000 * one['seconds_a_step']:.1f}",
                mark(one),
            )
        console.print(table)


def made_table(title: str, *headings: str) -> Table:
    return Table(*headings, title=title, box=box.SIMPLE_HEAD)


def mark(one: Figures) -> str:
    return "[green]ok" if one["ok"] else "[red]NO"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="check what a CPU can")
    parser.add_argument("--quick", action="store_true", help="one round of a few steps")
    parser.add_argument("--only", choices=["layouts", "feed", "wait"], help="one of the three parts")
    parser.add_argument("--report", type=Path, help="write the figures here instead of into benchmarks/results/")
    flags = parser.parse_args()
    if not flags.cpu and not torch.cuda.is_available():
        print("no CUDA device here: run this on a machine with one, or give --cpu to check what a CPU can")
        return 2
    device = "cpu" if flags.cpu else "cuda"
    shapes = {"tiny": SMALL} if flags.cpu else {"tiny": SMALL, "large": LARGE}
    rounds, steps = (1, 4) if flags.quick or flags.cpu else (ROUNDS, STEPS)
    parts: dict[str, Callable[[], Any]] = {
        "layouts": lambda: check_layouts(device),
        "feed": lambda: check_feed(device),
        "wait": lambda: check_wait(device, shapes, rounds, steps),
    }
    found: Figures = {"machine": machine(device)}
    broken = 0
    for name, part in parts.items():
        if flags.only in (None, name):
            try:
                found[name] = part()
            except Exception:  # the other parts are still of interest
                traceback.print_exc()
                broken += 1
    console = Console(width=None if Console().is_terminal else 170)
    show(console, found)
    entries = [*found.get("layouts", []), *found.get("feed", {}).values(), *found.get("wait", [])]
    failed = broken + sum(one.get("ok") is False for one in entries)
    console.print(f"{sum(one.get('ok') is True for one in entries)} checks hold on {device}, {failed} do not")
    report = flags.report or ROOT / "benchmarks" / "results" / f"gpu_check_{device}.json"
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text(json.dumps(found | {"failed": failed}, indent=1, default=str) + "\n")
    return 1 if failed else 0


def machine(device: str) -> Figures:
    import transformers

    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"device": name, "cpus": os.cpu_count(), "python": platform.python_version(), **versions}


if __name__ == "__main__":
    sys.exit(main())
