"""Is the diagnosis right? On simulated pipelines whose true bound is known.

    uv run benchmarks/diagnosis.py [--quick] [--first-seed N] [--report FILE.json]

Each seed draws a pipeline (`simulated_pipeline.py`): its form, rows, images, times, workers, processors and window. The
truth is found by running it six times: as it is, and with each resource doubled. The bound is the resource that makes
the most steps a second. `mmdp.diagnosis` sees the spans of the first run only.

Eight pipelines for each of the five bounds are judged, the first ones by seed whose bound is clear: doubling it gives
at least 10 % more steps a second, and 5 points more than doubling any other. Of a pipeline with two bounds of the same
worth either answer is right, and those would only blur the count; the rate over all pipelines that were drawn, clear or
not, stands beside. So does the rate where no loader tells how many workers it has.

Two predictions are compared with what comes of them: the gain of the bound doubled, and the gain of the lever that the
diagnosis names, pulled in the simulator as far as it says.

The method was made on seeds 1000 to 1299, and is judged on seeds from 0 on. Simulator and model are by the same hand,
and agree on what a pipeline is: the rate says that the bound can be read off spans, not that nothing else can go wrong.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from simulated_pipeline import RESOURCES, Run, Workload

from mmdp.diagnosis import Diagnosis, diagnose

RESULTS = Path(__file__).resolve().parent / "results" / "diagnosis.json"
EACH, QUICK_EACH = 8, 2  # pipelines a bound
MOST_DRAWN = 1500  # pipelines, before it is given up to find enough of each bound
CLEAR_GAIN = 1.10
CLEAR_LEAD = 0.05
GOAL = 0.90


def draw(seed: int) -> Workload:
    """A pipeline. Ranges are those of real stores, images and models; times are spread evenly on a log scale."""
    random = np.random.default_rng(seed)

    def spread(low: float, high: float) -> float:
        return float(np.exp(random.uniform(np.log(low), np.log(high))))

    form = str(random.choice(["inline", "threads", "actors"], p=[0.15, 0.45, 0.4]))
    rows = int(random.choice([2, 4, 8, 16]))
    images = float(random.uniform(1, 5))
    workers = int(random.choice([1, 2, 4, 8, 16, 32]))
    return Workload(
        form=form,  # type: ignore[arg-type]
        overlap=bool(form == "threads" or (form == "actors" and random.random() < 0.7)),
        rows=rows,
        images=images,
        fetch=spread(0.001, 0.1),
        fetch_spread=float(random.uniform(0.1, 0.8)),
        decode=spread(0.001, 0.04),
        decode_spread=float(random.uniform(0.1, 0.5)),
        join=spread(0.0001, 0.003),
        pass_row=spread(0.001, 0.2),
        batch=spread(0.0005, 0.01),
        move=spread(0.0001, 0.03),
        train=spread(0.02, 1),
        workers=workers,
        fetches=int(random.choice([4, 8, 16, 32, 64, 128])),
        processors=int(random.choice([2, 4, 8, 16, 32])),
        depth=int(random.choice([rows, 2 * rows, 2 * rows + workers, 4 * rows + workers])),
        window=spread(1, 64),
        seed=seed,
    )


@dataclass(frozen=True)
class Judged:
    """A pipeline, what is true of it, and what the diagnosis says."""

    seed: int
    gains: dict[str, float]
    said: Diagnosis
    said_bare: str
    lever_got: float

    @property
    def truth(self) -> str:
        """The resource that is worth most."""
        return max(self.gains, key=lambda name: self.gains[name])

    @property
    def is_clear(self) -> bool:
        """Whether it is worth something, and more than the next."""
        best, second = sorted(self.gains.values(), reverse=True)[:2]
        return best >= CLEAR_GAIN and best - second >= CLEAR_LEAD

    @property
    def is_right(self) -> bool:
        """Whether the diagnosis names it."""
        return self.said.bound == self.truth


def judge(seed: int) -> Judged:
    """Draws a pipeline, runs it in all its forms, and asks for a diagnosis."""
    load = draw(seed)
    run = Run(load)
    gains = {name: run.seconds_per_step / Run(load.doubled(name)).seconds_per_step for name in RESOURCES}
    spans = run.spans()
    said = diagnose(spans)
    bare = diagnose(spans[spans.name != spans.names.index("gather")])
    pulled = load if said.changed == said.pace else pull(load, said)
    return Judged(seed, gains, said, bare.bound, run.seconds_per_step / Run(pulled).seconds_per_step)


def pull(load: Workload, said: Diagnosis) -> Workload:
    """The pipeline with the lever pulled that the diagnosis names."""
    old, new = said.pace, said.changed
    wider = (new.ahead + 1) / (old.ahead + 1) if old.is_ahead and not old.is_inline else 1.0
    passing = new.transfer / old.transfer if load.form == "actors" and old.transfer else 0.0
    pulled = replace(
        load,
        form="inline" if new.is_inline else "threads" if new.is_shared else "actors",
        overlap=new.is_ahead and not new.is_inline,
        workers=round(new.workers),
        fetches=round(new.fetches),
        depth=round(load.depth * wider),
        window=load.window * wider,
        pass_row=load.pass_row * passing,
        move=load.move if new.own_transfer or not old.own_transfer else 0.0,
        decode=load.decode * (new.compute / old.compute if old.compute else 1.0),
    )
    if pulled.overlap and not load.overlap:
        pulled = replace(pulled, depth=2 * load.rows + 1, window=1e9)
    return pulled


def choose(first_seed: int, each: int) -> tuple[list[Judged], list[Judged]]:
    """The first `each` clear pipelines of each bound; and all that were drawn."""
    drawn: list[Judged] = []
    found: Counter[str] = Counter()
    chosen: list[Judged] = []
    for seed in range(first_seed, first_seed + MOST_DRAWN):
        drawn.append(judge(seed))
        one = drawn[-1]
        if one.is_clear and found[one.truth] < each:
            found[one.truth] += 1
            chosen.append(one)
        if len(chosen) == each * len(RESOURCES):
            return chosen, drawn
    raise SystemExit(f"{MOST_DRAWN} pipelines, and not {each} of each bound: {dict(found)}")


def rate(answers: Iterable[bool]) -> float:
    """The share that is right."""
    answers = list(answers)
    return sum(answers) / len(answers)


def errors(pairs: Iterable[tuple[float, float]]) -> dict[str, float]:
    """How far predictions are from what came of them, as shares of that."""
    off = [abs(predicted / got - 1) for predicted, got in pairs]
    return {"median": statistics.median(off), "within_25_percent": rate(one <= 0.25 for one in off)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_EACH} pipelines a bound")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--report", type=Path, default=RESULTS)
    given = parser.parse_args()
    chosen, drawn = choose(given.first_seed, QUICK_EACH if given.quick else EACH)
    confusion = {truth: Counter(one.said.bound for one in chosen if one.truth == truth) for truth in RESOURCES}
    report = {
        "first_seed": given.first_seed,
        "pipelines": len(chosen),
        "right": rate(one.is_right for one in chosen),
        "right_without_gather_spans": rate(one.said_bare == one.truth for one in chosen),
        "confusion": {truth: dict(said) for truth, said in confusion.items()},
        "wrong_seeds": [one.seed for one in chosen if not one.is_right],
        "drawn": len(drawn),
        "drawn_bounds": dict(Counter(one.truth for one in drawn)),
        "right_of_drawn": rate(one.is_right for one in drawn),
        "gain_of_the_bound_doubled": errors((one.said.gains[one.truth], one.gains[one.truth]) for one in chosen),
        "gain_of_the_lever": errors(
            (one.said.after.gain, one.lever_got) for one in chosen if one.said.changed != one.said.pace
        ),
    }
    console = Console()
    table = Table("true bound", *(f"said {name}" for name in RESOURCES), box=box.SIMPLE)
    for truth, said in confusion.items():
        table.add_row(truth, *(str(said[name]) if said[name] else "." for name in RESOURCES))
    console.print(table)
    console.print(
        f"right: {report['right']:.1%} of {len(chosen)} (goal {GOAL:.0%}); "
        f"{report['right_without_gather_spans']:.1%} where no loader tells its workers; "
        f"{report['right_of_drawn']:.1%} of all {len(drawn)} drawn, unclear ones too"
    )
    for name in ("gain_of_the_bound_doubled", "gain_of_the_lever"):
        off = report[name]
        console.print(
            f"{name.replace('_', ' ')}: predicted is off by {off['median']:.1%} (median), "
            f"{off['within_25_percent']:.0%} within 25 %"
        )
    given.report.parent.mkdir(parents=True, exist_ok=True)
    given.report.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
