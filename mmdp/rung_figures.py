"""The figures of rungs: what was measured of each, what lower ones foretold, and all of them side by side.

Adds: `RungFigures`; `forecast` and `prediction_misses`, what lower rungs said of one; `ladder_table`.
Leaves out: running a rung (`climb`), and drawing it (`plots`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmdp.diagnosis import Diagnosis
from mmdp.ladder import Rung
from mmdp.metrics import Tally
from mmdp.records import Batch
from mmdp.span_table import Spans

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class RungFigures:
    """What was measured of a rung. A step is a batch; `None` where a rung has no such thing.

    Attributes:
        rung: which.
        steps: that were trained.
        waits: seconds of exposed wait of each step but the first.
        trains: seconds of training of each step but the first.
        wait_ratio: 0 to 1, over the steps but the first.
        samples_per_second: over the steps but the first.
        ceiling: the same for a loader that costs nothing.
        seconds_to_first: from opening the rung to its first batch, the start of actors included.
        trainer_cpu: processor seconds a step of the trainer's process, all of its threads.
        coordinator_cpu: processor seconds a step of the coordinator, where it is a process of this machine.
        coordinator_bytes: of rows, that went through whoever coordinates, a step.
        puts: objects put into Ray's shared memory, a step.
        coordinator_memory: bytes, at most; shared memory that it has looked at included.
        store_bytes: in Ray's shared memory of all nodes, at most, as seen twice a second.
        workers: node to the number of actors on it.
        tally: what was delivered.
        first: the first batch.
        spans: of every process.
        diagnosis: what bounds it.
    """

    rung: Rung
    steps: int
    waits: Sequence[float]
    trains: Sequence[float]
    wait_ratio: float
    samples_per_second: float
    ceiling: float | None
    seconds_to_first: float
    trainer_cpu: float
    coordinator_cpu: float | None
    coordinator_bytes: float | None
    puts: float
    coordinator_memory: int | None
    store_bytes: int | None
    workers: Mapping[str, int]
    tally: Tally
    first: Batch
    spans: Spans
    diagnosis: Diagnosis

    @property
    def predicted(self) -> float:
        """Samples/s that the diagnosis expects of its lever."""
        return self.diagnosis.after.gain * self.samples_per_second

    def as_dict(self) -> dict[str, Any]:
        """The numbers, for a report."""
        numbers = (
            *("steps", "wait_ratio", "samples_per_second", "ceiling", "seconds_to_first", "trainer_cpu"),
            *("coordinator_cpu", "coordinator_bytes", "puts", "coordinator_memory", "store_bytes"),
        )
        return {
            **{name: getattr(self, name) for name in numbers},
            "waits": list(self.waits),
            "trains": list(self.trains),
            "workers": dict(self.workers),
            "bound": self.diagnosis.bound,
            "diagnosis": str(self.diagnosis),
            "predicted_samples_per_second": self.predicted,
            "predicted_rung": self.diagnosis.rung or None,
        }


def forecast(climbed: Sequence[RungFigures], name: str) -> tuple[str, float] | None:
    """What was predicted of a rung: by the nearest one below whose next lever it is; None where none names it.

    Args:
        climbed: rungs below it, the lowest first.
        name: of the rung.

    Returns:
        The name of the rung that has predicted, and samples/s.
    """
    for one in reversed(climbed):
        if one.diagnosis.rung == name:
            return one.rung.name, one.predicted
    return None


def prediction_misses(climbed: Sequence[RungFigures]) -> list[float]:
    """How far each prediction is off, as a share of it, for the rungs of which there is one."""
    found = ((one, forecast(climbed[:place], one.rung.name)) for place, one in enumerate(climbed))
    return [abs(one.samples_per_second / said[1] - 1) for one, said in found if said is not None]


def ladder_table(climbed: Sequence[RungFigures]) -> Table:
    """Rungs across, figures down, for rich to print."""
    from rich.table import Table

    def mb(number: float | None) -> str:
        return "-" if number is None else f"{number / 1e6:,.1f} MB"

    def ms(number: float | None) -> str:
        return "-" if number is None else f"{1000 * number:,.0f} ms"

    lines: Mapping[str, Callable[[RungFigures], str]] = {
        "wait ratio": lambda one: f"{one.wait_ratio:.1%}",
        "samples/s": lambda one: f"{one.samples_per_second:,.1f}",
        "  a perfect loader": lambda one: "-" if one.ceiling is None else f"{one.ceiling:,.1f}",
        "first batch after": lambda one: f"{one.seconds_to_first:.1f} s",
        "trainer CPU a step": lambda one: ms(one.trainer_cpu),
        "coordinator CPU a step": lambda one: ms(one.coordinator_cpu),
        "by value, one process": lambda one: mb(one.coordinator_bytes),
        "puts a batch": lambda one: f"{one.puts:.1f}" if one.rung.has_actors else "-",
        "coordinator memory": lambda one: mb(one.coordinator_memory),
        "Ray's shared memory": lambda one: mb(one.store_bytes),
    }
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for one in climbed:
        table.add_column(one.rung.name, justify="right")
    for what, say in lines.items():
        table.add_row(what, *map(say, climbed))
    return table
