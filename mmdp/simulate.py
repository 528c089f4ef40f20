"""How many actors, what depth, which placement? Tried in a model whose numbers come from the trace of a real run.

    uv run python -m mmdp.simulate TRACE.json --ranks 64 --nodes 16 --link-gbit 25 --latency-ms 40

Adds: `candidates`, settings worth trying; `try_out`, what each gives; `recommend`, the cheapest that feeds the ranks;
the command, which prints them.
Leaves out: the model (`pipeline_run`), its numbers (`calibration`), and how far it is right: `benchmarks/simulate.py`
compares it with real runs of up to four ranks on one node, and `CHECKED` says what came of it. Beyond that nobody has
checked it.

The data are taken to be large: an epoch's end, at which nothing is read ahead, comes only where `--epoch-rows` says so.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mmdp.calibration import calibrate, read_trace
from mmdp.cli import speak_plainly
from mmdp.pipeline_model import Numbers, Outcome, Settings
from mmdp.pipeline_run import simulate
from mmdp.placement import SLACK, Placed
from mmdp.progress import track

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Tried", "calibrate", "candidates", "read_trace", "recommend", "simulate", "try_out"]

CHECKED_WAIT, CHECKED_RATE = 0.04, 0.07
"""By how much it was off at most, in the session of its trace: the wait ratio, and samples/s. The runs are in
`benchmarks/results/simulate.json`; with a trace of another session it was off by 0.07 and 9 %."""

CHECKED = (
    "A prediction, unchecked at this scale. Where it was checked, with up to 4 ranks on one node of 2 processors and a "
    f"trace of the same session, the wait ratio was off by {CHECKED_WAIT:.2f} at most, and samples/s by "
    f"{CHECKED_RATE:.0%} (benchmarks/simulate.py)."
)

ENOUGH = 0.05
"""Wait ratio below which nobody needs to do anything, as in `diagnosis`."""

_BUSY = 0.6  # of an event loop's time, beyond which what it hands out queues
_PLACEMENTS: tuple[Placed, ...] = ("together", "spread", "near")  # the simplest first


@dataclass(frozen=True, slots=True)
class Tried:
    """A setting, and what came of it in the model."""

    settings: Settings
    outcome: Outcome


def candidates(numbers: Numbers, asked: Settings) -> list[Settings]:
    """Settings worth trying: actors around what arithmetic asks for, one to three steps in flight, each placement.

    Args:
        numbers: what things cost.
        asked: the rest; its workers, depth, placement and coordinators are replaced.
    """
    rows = asked.step_rows or numbers.step_rows
    train = numbers.train if asked.train is None else asked.train
    rate = asked.ranks * rows / max(train, 1e-3)  # rows a second that nobody waits for
    mean = sum(row.compute for row in numbers.rows) / len(numbers.rows)
    coordinators = min(asked.ranks, _power(rate * numbers.call.dispatch / _BUSY))
    least = max(coordinators, _power(SLACK * rate * mean))
    placements = _PLACEMENTS if asked.nodes > 1 else _PLACEMENTS[:1]
    actors = dict.fromkeys(max(coordinators, least * times // 2) for times in (1, 2, 4, 8))
    return [
        replace(asked, workers=many, depth=rows * steps, placement=placement, coordinators=coordinators)
        for placement in placements
        for many in actors
        for steps in (1, 2, 3)
    ]


def _power(number: float) -> int:
    """The least power of two that is not below it."""
    return 1 << max(0, math.ceil(math.log2(max(number, 1e-9))))


def try_out(numbers: Numbers, settings: Sequence[Settings], seed: int = 0) -> list[Tried]:
    """Each of the settings in the model, in their order."""
    return [Tried(one, simulate(numbers, one, seed)) for one in track(settings, "simulate")]


def recommend(tried: Sequence[Tried]) -> Tried:
    """The cheapest that leaves ranks waiting for 5 % of the time or less; else, of those that wait least.

    Cheap is few actors, then the placement that is the simplest, then few rows in flight.

    Raises:
        ValueError: nothing was tried.
    """
    if not tried:
        raise ValueError("no setting was tried: give at least one")
    limit = max(ENOUGH, min(one.outcome.wait_ratio for one in tried) + 0.01)

    def price(one: Tried) -> tuple[int, int, int]:
        return one.settings.workers or 0, _PLACEMENTS.index(one.settings.placement), one.settings.depth or 0

    return min((one for one in tried if one.outcome.wait_ratio <= limit), key=price)


def sentence(chosen: Tried) -> str:
    """The answer, for a person."""
    settings, outcome = chosen.settings, chosen.outcome
    many = f"{settings.coordinators} coordinators" if settings.coordinators > 1 else "one coordinator"
    feeds = "" if outcome.wait_ratio <= ENOUGH else "Nothing that was tried feeds them. The best: "
    return (
        f"{feeds}{settings.ranks} ranks on {settings.num_rank_nodes} of {settings.nodes} nodes: {settings.workers} "
        f"actors placed {settings.placement}, {settings.depth} rows in flight a rank, {many}. Predicted: ranks wait "
        f"{outcome.wait_ratio:.1%} of the time, {outcome.samples_per_second:,.0f} samples/s, the busiest node's "
        f"processors used to {outcome.busy.processors:.0%}, its card to {outcome.busy.links:.0%}, a coordinator to "
        f"{outcome.busy.coordinator:.0%}"
    )


def candidate_table(tried: Sequence[Tried]) -> Table:
    """A line a setting, for rich to print."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("placement", *("actors", "depth", "coordinators", "waits", "samples/s", "first batch")):
        table.add_column(column, justify="left" if column == "placement" else "right")
    for column in ("processors", "card", "coordinator"):
        table.add_column(column, justify="right")
    for one in tried:
        settings, outcome = one.settings, one.outcome
        table.add_row(
            settings.placement,
            *(str(settings.workers), str(settings.depth), str(settings.coordinators)),
            f"{outcome.wait_ratio:.1%}",
            f"{outcome.samples_per_second:,.0f}",
            f"{outcome.seconds_to_first:.1f} s",
            *(f"{share:.0%}" for share in (outcome.busy.processors, outcome.busy.links, outcome.busy.coordinator)),
        )
    return table


def main(args: Sequence[str] | None = None) -> None:
    """The command."""
    flags = argparse.ArgumentParser(
        "mmdp.simulate", description="Tries settings of a cluster in a model calibrated on a trace of a real run."
    )
    flags.add_argument("trace", type=Path, help="of one rank on rung references or above, as --trace writes it")
    flags.add_argument("--ranks", type=int, default=1, help="that train")
    flags.add_argument("--nodes", type=int, default=1, help="of the cluster; ranks are on as many as they can be")
    flags.add_argument("--processors", type=int, help="of a node; by default those of the trace's machine")
    flags.add_argument("--traced-processors", type=int, help="of that machine; by default those of this one")
    flags.add_argument("--link-gbit", type=float, default=math.inf, help="a second of a network card, each way")
    flags.add_argument("--latency-ms", type=float, help="of the store, median; by default as traced")
    flags.add_argument("--traced-latency-ms", type=float, help="of the store in the trace, without what computes")
    flags.add_argument("--train-ms", type=float, help="a step; by default as traced")
    flags.add_argument("--lockstep", action="store_true", help="ranks wait for the slowest after each step")
    flags.add_argument("--epoch-rows", type=int, default=0, help="of all ranks; by default an epoch has no end")
    flags.add_argument("--steps", type=int, default=12, help="that each rank trains in the model")
    flags.add_argument("--seed", type=int, default=0, help="of latencies")
    given = flags.parse_args(args)
    speak_plainly()
    try:
        traced = read_trace(given.trace, processors=given.traced_processors)
        numbers = calibrate(traced, latency=_seconds(given.traced_latency_ms))
        asked = Settings(
            ranks=given.ranks,
            nodes=given.nodes,
            processors=given.processors,
            link=given.link_gbit * 1e9 / 8,
            latency=_seconds(given.latency_ms),
            train=_seconds(given.train_ms),
            lockstep=given.lockstep,
            steps=given.steps,
            epoch_rows=given.epoch_rows,
        )
        tried = try_out(numbers, candidates(numbers, asked), given.seed)
    except (OSError, ValueError) as error:
        flags.error(str(error))
    from rich.console import Console

    Console(width=120).print(candidate_table(tried))
    print(sentence(recommend(tried)))
    print(CHECKED)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


if __name__ == "__main__":
    main()
