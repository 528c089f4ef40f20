"""What does each rung of the ladder cost the trainer's processor, and what the coordinator's, as rows grow?

Usage: `uv run benchmarks/ladder.py [--quick] [--report FILE.json]`

The demo set in a local object store 40 ms away, decoded to 256 and to 768 pixels a side: rows of some 0.9 and 8 MB. The
rungs serial, concurrent, prefetch and references take turns for so many rounds. The trainer is simulated: it sleeps, so
that all processor time of its process is what feeding takes.

Goals, for rows of 6 MB and more: processor time of the trainer down by 10 times from serial to references, and by 3
times from prefetch to references; no byte of a row through the coordinator at references. In prefetch the coordinator
is a process beside the trainer, and most of what passing by value costs is paid there; so the sum of both is told too.
"""

import argparse
import json
import os
import statistics
import tempfile
from contextlib import closing
from pathlib import Path

from rich.console import Console
from rich.table import Table

import mmdp
from mmdp.climb import run_rung
from mmdp.config import Config
from mmdp.ladder import Setup, simulated
from mmdp.local_store import from_afar
from mmdp.ray_start import Session

RUNGS = ("serial", "concurrent", "prefetch", "references")
TRAIN_MS = {256: 400, 768: 1500}
"""By side: long enough for two processors to keep up from prefetch on."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round, fewer steps")
    parser.add_argument("--report", type=Path, help="write the figures to this JSON file")
    flags = parser.parse_args()
    rounds, steps = (1, 6) if flags.quick else (3, 10)
    found: dict = {"load": os.getloadavg(), "processors": os.cpu_count(), "sides": {}}
    with from_afar(Config()) as served, tempfile.TemporaryDirectory() as folder, closing(Session()):
        cache = Path(folder)
        source = mmdp.open_source(served.data, config=Config(cache_dir=cache))
        for side, train_ms in TRAIN_MS.items():
            encoder = mmdp.Encoder(vision=f"fixed:64:side={side}")
            plan = mmdp.plan(mmdp.measure(source, encoder, cache=cache), mmdp.Budget(tokens=1024, images=9))
            setup = Setup(source, encoder, plan)
            turns = [
                {name: run_rung(name, setup, simulated(train_ms), steps=steps).as_dict() for name in RUNGS}
                for _ in range(rounds)
            ]
            found["sides"][side] = summary(turns)
            show(side, found["sides"][side])
    found["load_at_end"] = os.getloadavg()
    if flags.report:
        flags.report.write_text(json.dumps(found, indent=1) + "\n")


def summary(turns: list[dict]) -> dict:
    """Of each rung the medians, and ratios within a round as (min, median, max)."""

    def ratios(above: str, below: str, keys: tuple[str, ...]) -> list[float]:
        sums = [[sum(turn[rung][key] or 0 for key in keys) for rung in (above, below)] for turn in turns]
        each = [high / low for high, low in sums]
        return [min(each), statistics.median(each), max(each)]

    names = ("wait_ratio", "samples_per_second", "trainer_cpu", "coordinator_cpu", "coordinator_bytes", "puts")
    mine, both = ("trainer_cpu",), ("trainer_cpu", "coordinator_cpu")
    return {
        "rungs": {
            rung: {name: statistics.median([turn[rung][name] or 0 for turn in turns]) for name in names}
            for rung in RUNGS
        },
        "trainer_cpu_serial_over_references": ratios("serial", "references", mine),
        "trainer_cpu_prefetch_over_references": ratios("prefetch", "references", mine),
        "trainer_and_coordinator_cpu_prefetch_over_references": ratios("prefetch", "references", both),
    }


def show(side: int, found: dict) -> None:
    table = Table(title=f"images of {side} x {side} pixels, a step", box=None)
    for column in (
        "rung",
        "waits",
        "samples/s",
        "trainer CPU ms",
        "coordinator CPU ms",
        "through coordinator MB",
        "puts",
    ):
        table.add_column(column, justify="right")
    for name, one in found["rungs"].items():
        table.add_row(
            name,
            f"{one['wait_ratio']:.1%}",
            f"{one['samples_per_second']:.1f}",
            f"{1000 * one['trainer_cpu']:.0f}",
            f"{1000 * one['coordinator_cpu']:.0f}",
            f"{one['coordinator_bytes'] / 1e6:.1f}",
            f"{one['puts']:.1f}",
        )
    console = Console(width=120)
    console.print(table)
    for name, values in found.items():
        if name != "rungs":
            console.print(f"{name.replace('_', ' ')}: min, median, max {', '.join(f'{value:.1f}' for value in values)}")


if __name__ == "__main__":
    main()
