"""What a rung of the ladder is worth: one is run for some steps, measured, and explained.

Adds: `run_rung`, from a rung to its `RungFigures`; `forecast` and `prediction_misses`, what lower rungs said of it;
`fastest_step`, what no loader can beat; `ladder_table`.
Leaves out: the rungs (`ladder`), drawing them (`plots`).

The processor time of the trainer is that of its whole process between the first step and the last: what feeding takes
away from training. The first batch is apart, since it waits for actors to start.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from mmdp import spans
from mmdp.diagnosis import Diagnosis, diagnose
from mmdp.ladder import RUNGS, Opened, Rung, Setup, open_rung
from mmdp.metrics import Tally
from mmdp.progress import track
from mmdp.records import Batch
from mmdp.refusals import shorten
from mmdp.span_table import Spans
from mmdp.wait_meter import WaitMeter

if TYPE_CHECKING:
    from rich.table import Table

_LEAST_STEPS = 5  # fewer tell no pace
_LOOK_SECONDS = 0.5  # between two looks at Ray's shared memory, which its nodes report about once a second


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


def run_rung(
    name: str,
    setup: Setup,
    train: Callable[[Batch], None],
    *,
    steps: int = 14,
    step_floor: float | None = None,
) -> RungFigures:
    """Trains for some steps on the batches of a rung.

    Args:
        name: of the rung.
        setup: what all rungs share.
        train: one step on a batch.
        steps: how many, at least 5.
        step_floor: seconds of a step that nobody waits in, from `fastest_step`, for the ceiling.

    Raises:
        ValueError: no such rung, too few steps, or what the rung itself refuses.
        RuntimeError: spans are recorded already.
    """
    if name not in RUNGS:
        raise ValueError(f"no rung {shorten(name)}: choose of {', '.join(RUNGS)}")
    if steps < _LEAST_STEPS:
        raise ValueError(f"{steps} steps tell no pace: train at least {_LEAST_STEPS}")
    spans.start()
    try:
        with _watched(RUNGS[name].has_actors) as watch:
            run = _Run(name, steps, WaitMeter(setup.device))
            start = time.perf_counter()
            with open_rung(RUNGS[name], setup) as opened:
                run.over(opened, train, watch, start)
    except BaseException:
        spans.stop()
        raise
    return run.figures(spans.stop(), watch.most if RUNGS[name].has_actors else None, step_floor)


@dataclass(slots=True)
class _Watch:
    """Looks at Ray's shared memory.

    Attributes:
        most: bytes in it, at most.
        cpu: processor seconds that looking took.
    """

    most: int = 0
    cpu: float = 0.0
    over: threading.Event = field(default_factory=threading.Event)

    def look(self) -> None:
        from mmdp.ray_start import load_ray, used_store_bytes

        while not self.over.wait(_LOOK_SECONDS):
            with contextlib.suppress(load_ray().exceptions.RayError):  # it may end this very moment
                if load_ray().is_initialized():
                    self.most = max(self.most, used_store_bytes())
            self.cpu = time.thread_time()


@contextlib.contextmanager
def _watched(is_wanted: bool) -> Iterator[_Watch]:
    watch = _Watch()
    thread = threading.Thread(target=watch.look, name="mmdp-watch", daemon=True)
    if is_wanted:
        thread.start()
    try:
        yield watch
    finally:
        watch.over.set()
        if is_wanted:
            thread.join()


class _Run:
    """A rung under measurement."""

    def __init__(self, name: str, steps: int, meter: WaitMeter) -> None:
        self._rung = RUNGS[name]
        self._steps = steps
        self._meter = meter
        self._tally = Tally()
        self._first: Batch | None = None
        self._first_samples = 0
        self._seconds_to_first = 0.0
        self._trainer_cpu = 0.0
        self._coordinator_cpu: float | None = None
        self._passed = (0, 0)
        self._stats: dict[str, Any] = {}

    def over(self, opened: Opened, train: Callable[[Batch], None], watch: _Watch, start: float) -> None:
        """Trains."""
        coordinator = opened.coordinator
        pid = coordinator.stats()["pid"] if coordinator is not None else None
        began: tuple[float, float | None] = (0.0, None)
        handed = start
        with contextlib.closing(self._meter.over(opened.batches)) as batches:  # type: ignore[type-var]
            for number in track(range(self._steps), self._rung.name, unit="steps"):
                batch = next(batches)
                self._tally.add(batch)
                if number == 0:
                    self._seconds_to_first = time.perf_counter() - start
                    self._first, self._first_samples = batch, self._tally.samples
                    handed = time.perf_counter()
                train(batch)
                del batch
                if number == 0:
                    began = time.process_time() - watch.cpu, _cpu_seconds(pid)
        self._tally.seconds = time.perf_counter() - handed
        self._trainer_cpu = (time.process_time() - watch.cpu - began[0]) / (self._steps - 1)
        now = _cpu_seconds(pid)
        if now is not None and began[1] is not None:
            self._coordinator_cpu = (now - began[1]) / (self._steps - 1)
        self._passed = opened.passed.bytes, opened.passed.objects
        self._stats = coordinator.stats() if coordinator is not None else {}

    def figures(self, recorded: Spans, store_bytes: int | None, step_floor: float | None) -> RungFigures:
        """What was measured."""
        assert self._first is not None
        waits, trains, stats = self._meter.waits, self._meter.trains, self._stats
        seconds = sum(waits) + sum(trains)
        rate = (self._tally.samples - self._first_samples) / seconds
        through = self._passed[0] / self._steps if self._rung.has_actors else None
        puts = self._passed[1] / self._steps
        if stats:
            through = (stats["bytes_by_value"] + stats["bytes_inline"]) / stats["steps"]
            puts = stats["objects"] / stats["steps"]
        return RungFigures(
            rung=self._rung,
            steps=self._steps,
            waits=waits,
            trains=trains,
            wait_ratio=self._meter.wait_ratio or 0.0,
            samples_per_second=rate,
            ceiling=rate * seconds / (len(waits) * step_floor) if step_floor else None,
            seconds_to_first=self._seconds_to_first,
            trainer_cpu=self._trainer_cpu,
            coordinator_cpu=self._coordinator_cpu,
            coordinator_bytes=through,
            puts=puts,
            coordinator_memory=stats.get("peak_memory"),
            store_bytes=store_bytes,
            workers=stats.get("workers", {}),
            tally=self._tally,
            first=self._first,
            spans=recorded,
            diagnosis=diagnose(recorded, _up_to(self._rung.name)),
        )


def _up_to(name: str) -> list[str]:
    """The rung, and those below it."""
    names = list(RUNGS)
    return names[: names.index(name) + 1]


def _cpu_seconds(pid: int | None) -> float | None:
    """Processor seconds of another process of this machine; None where the system does not tell."""
    path = Path(f"/proc/{pid}/stat")
    if pid is None or not path.exists():
        return None
    values = path.read_text().rpartition(")")[2].split()
    return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")


def fastest_step(setup: Setup, train: Callable[[Batch], None], steps: int = 6) -> float:
    """Seconds of a step on batches that are there already: what no loader can beat.

    Args:
        setup: what all rungs share.
        train: one step on a batch.
        steps: how many are timed, the first one aside.
    """
    from mmdp.loader import Loader
    from mmdp.replay import perfect

    loader = Loader(setup.source, setup.encoder, setup.plan, batch_size=setup.batch_size, strict=setup.strict)
    try:
        meter = WaitMeter(setup.device)
        for batch in meter.over(perfect(loader, steps + 1)):
            train(batch.to(setup.device))
    finally:
        loader.close()
    return median(meter.trains)  # a mean would take one step that the machine held up for the pace of all


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
