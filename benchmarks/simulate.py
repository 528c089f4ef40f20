"""Does the model of scale tell the truth? Calibrated on the trace of one run, compared with settings it never saw.

    uv run benchmarks/simulate.py [--quick] [--tries N] [--again] [--report FILE.json] [--figure FILE.png]

The demo set in a local object store behind a relay; Ray actors, a coordinator, and 1 to 4 ranks, each a thread that
reads and a trainer that sleeps. One setting is traced: one rank, one actor, a window of one step, so that nothing is in
the way of anything else. Its trace is written, read back and calibrated on; the processor time of its processes, and
what they take while nobody asks for rows, is the rest of what the model knows. Then other settings run for real, all
in one Ray: ranks, actors, depth, latency and step time. They take turns, so many times; the median counts, and the
spread stands beside it. A run in which programs that are not ours took over 5 % of the processors is disturbed: it is
told, and counts only where no other is there. That is decided before anybody looks at an error.

Goals: wait ratio within 0.05 and samples/s within 15 % on every one. Runs of the settings `LOOKED_AT` were looked at
while the model was made; those of the `FRESH` ones were not.

Then (`simulate_scale.py`) the table of a cluster of hosts, predicted, and the question that no machine here can answer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from simulate_runs import FRESH, LOOKED_AT, ROWS, STEPS, TRACED, Case, Ran, Traced, measure
from simulate_scale import cluster, numbers_of, scale

from mmdp.calibration import calibrate, read_trace
from mmdp.pipeline_model import Numbers, Settings
from mmdp.pipeline_run import simulate
from mmdp.trace_file import write_trace

HERE = Path(__file__).resolve().parent
WAIT_GOAL, RATE_GOAL, DISTURBED = 0.05, 0.15, 0.05
SEEDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="four settings, once each")
    parser.add_argument("--tries", type=int, default=3, help="runs of a setting")
    parser.add_argument("--again", action="store_true", help="run nothing: predict anew for the runs of the report")
    parser.add_argument("--report", type=Path, default=HERE / "results" / "simulate.json")
    parser.add_argument("--figure", type=Path, default=HERE.parent / "docs" / "figures" / "scale.png")
    flags = parser.parse_args()
    if flags.again:
        found = json.loads(flags.report.read_text())
    else:
        found = ran(LOOKED_AT[:4] if flags.quick else LOOKED_AT + FRESH, 1 if flags.quick else flags.tries)
    numbers = numbers_of(found["numbers"])
    found |= judged(numbers, found["runs"])
    found |= {"cluster": cluster(numbers), "scale": scale(numbers, flags.figure, quick=flags.quick)}
    flags.report.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")


def ran(cases: Sequence[Case], tries: int) -> dict[str, Any]:
    """What is measured: the numbers of a trace, and runs of settings."""
    begun = time.perf_counter()
    traced, runs = measure(cases, tries)
    return recorded(traced, runs) | {"seconds": time.perf_counter() - begun}


def recorded(traced: Sequence[Traced], runs: Mapping[Case, Sequence[Ran]]) -> dict[str, Any]:
    """The same, for a report: of several traced runs, that with the median processor time a row counts."""
    chosen = sorted(traced, key=lambda one: one.used.actor + one.used.others)[(len(traced) - 1) // 2]
    return {
        "processors": os.cpu_count(),
        "rows": ROWS,
        "steps": STEPS,
        "numbers": asdict(calibrated(chosen)),
        "traced": [asdict(one.ran) | asdict(one.used) for one in traced],
        "runs": [{**case._asdict(), "got": [asdict(one) for one in of]} for case, of in runs.items()],
    }


def calibrated(traced: Traced) -> Numbers:
    """What its trace tells, written and read back, as a user's would be."""
    with tempfile.TemporaryDirectory() as folder:
        read = read_trace(write_trace(traced.spans, Path(folder) / "trace.json"))
    return calibrate(read, latency=TRACED.latency / 1000, used=traced.used)


def judged(numbers: Numbers, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What was predicted of each setting that was run, and how far that is right."""
    compared = [compare(numbers, Case(*(one[key] for key in Case._fields)), one["got"]) for one in runs]
    show(compared)
    return {
        "compared": compared,
        "worst": {key: max(abs(one[key]) for one in compared) for key in ("wait_error", "rate_error")},
        "within_goals": all(map(is_within, compared)),
    }


def compare(numbers: Numbers, case: Case, runs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """A setting: predicted, run, and how far apart they are."""
    predicted = predict(numbers, case)
    quiet = [one for one in runs if one["others"] <= DISTURBED] or [min(runs, key=lambda one: one["others"])]
    values = {key: [one[key] for one in quiet] for key in predicted}
    got = {key: statistics.median(found) for key, found in values.items()}
    return {
        **case._asdict(),
        "is_fresh": case in FRESH,
        "predicted": predicted,
        "got": got,
        "spread": {key: (min(found), max(found)) for key, found in values.items()},
        "quiet": sum(one["others"] <= DISTURBED for one in runs),
        "num_runs": len(runs),
        "wait_error": predicted["wait_ratio"] - got["wait_ratio"],
        "rate_error": predicted["samples_per_second"] / got["samples_per_second"] - 1,
    }


def predict(numbers: Numbers, case: Case) -> dict[str, float]:
    """The mean over some seeds."""
    settings = Settings(
        ranks=case.ranks,
        workers=case.workers,
        depth=case.depth,
        latency=case.latency / 1000,
        train=case.train / 1000,
        steps=STEPS,
    )
    outcomes = [simulate(numbers, settings, seed) for seed in range(SEEDS)]
    return {key: statistics.mean(getattr(one, key) for one in outcomes) for key in ("wait_ratio", "samples_per_second")}


def is_within(one: Mapping[str, Any]) -> bool:
    return abs(one["wait_error"]) <= WAIT_GOAL and abs(one["rate_error"]) <= RATE_GOAL


def show(compared: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title="predicted and got (least to most of the quiet runs)", box=None)
    names = ("ranks", "actors", "depth", "latency", "step", "waits", "got", "samples/s", "got", "quiet", "")
    for name in names:
        table.add_column(name, justify="right")
    for one in compared:
        predicted, got, spread = one["predicted"], one["got"], one["spread"]
        wait, rate = spread["wait_ratio"], spread["samples_per_second"]
        table.add_row(
            *(str(one[key]) for key in ("ranks", "workers", "depth")),
            *(f"{one[key]:.0f} ms" for key in ("latency", "train")),
            f"{predicted['wait_ratio']:.3f}",
            f"{got['wait_ratio']:.3f} ({wait[0]:.3f} to {wait[1]:.3f})",
            f"{predicted['samples_per_second']:.1f}",
            f"{got['samples_per_second']:.1f} ({rate[0]:.1f} to {rate[1]:.1f})",
            f"{one['quiet']} of {one['num_runs']}",
            ("fresh " if one["is_fresh"] else "") + ("" if is_within(one) else "outside"),
        )
    Console(width=140).print(table)
    for name, some in (
        ("looked at", [one for one in compared if not one["is_fresh"]]),
        ("fresh", [one for one in compared if one["is_fresh"]]),
    ):
        if some:
            print(
                f"{name}: {sum(map(is_within, some))} of {len(some)} within {WAIT_GOAL} of the wait ratio and "
                f"{RATE_GOAL:.0%} of samples/s; worst {max(abs(one['wait_error']) for one in some):.3f} and "
                f"{max(abs(one['rate_error']) for one in some):.1%}"
            )


if __name__ == "__main__":
    main()
