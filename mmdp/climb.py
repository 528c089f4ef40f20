"""What a rung of the ladder is worth: one is run for some steps, measured, and explained.

Adds: `run_rung`, from a rung to its `RungFigures`; `fastest_step`, what no loader can beat.
Leaves out: the rungs (`ladder`), their figures (`rung_figures`), drawing them (`plots`).

The processor time of the trainer is that of its whole process between the first step and the last: what feeding takes
away from training. The first batch is apart, since it waits for actors to start.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from mmdp import spans
from mmdp.diagnosis import diagnose
from mmdp.ladder import RUNGS, Opened, Setup, open_rung
from mmdp.metrics import Tally
from mmdp.progress import track
from mmdp.records import Batch
from mmdp.refusals import shorten
from mmdp.rung_figures import RungFigures
from mmdp.span_table import Spans
from mmdp.wait_meter import WaitMeter

if TYPE_CHECKING:
    pass

_LEAST_STEPS = 5  # fewer tell no pace
_LOOK_SECONDS = 0.5  # between two looks at Ray's shared memory, which its nodes report about once a second


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
        if step_floor is not None:
            step_floor = min(step_floor, median(trains))  # the machine may have been busier when it was taken
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
