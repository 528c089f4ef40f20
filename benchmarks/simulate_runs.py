"""Settings of the pipeline that are run for real, for `simulate.py`: one that is traced, and others in turn.

Adds: `Case`, `LOOKED_AT` and `FRESH`; `measure`, from settings to what each run of them gave, a `Ran`.
Leaves out: predicting them, and how far that is right (`simulate.py`).
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

import mmdp
from mmdp import spans
from mmdp.calibration import Used
from mmdp.config import Config
from mmdp.ladder import Setup, epochs, simulated
from mmdp.local_store import from_afar
from mmdp.ray_coordinator import Coordinator
from mmdp.ray_reader import RankReader
from mmdp.ray_start import Session
from mmdp.span_table import Spans
from mmdp.wait_meter import WaitMeter

ROWS, STEPS, TRACED_STEPS = 4, 20, 32
_SETTLE_SECONDS = 3.0  # for actors to import what they need
_IDLE_SECONDS = 4.0  # in which nobody asks for rows
_RANK_SECONDS = 120.0  # for a rank to train all of its steps


class Case(NamedTuple):
    """A setting; latency and step in milliseconds."""

    ranks: int
    workers: int
    depth: int
    latency: float
    train: float


TRACED = Case(1, 1, 4, 40, 300)
"""Nothing is in the way of anything else: one actor on two processors, and rows begin when those before are done."""

LOOKED_AT = tuple(
    Case(*each)
    for each in (
        (1, 1, 12, 40, 300),
        (1, 2, 4, 120, 300),
        (2, 2, 12, 40, 300),
        (4, 2, 12, 40, 500),
        (1, 2, 4, 40, 150),
        (1, 2, 8, 120, 150),
        (1, 1, 4, 120, 150),
        (1, 2, 12, 120, 100),
        (2, 2, 4, 120, 300),
        (2, 1, 8, 120, 200),
        (4, 2, 4, 120, 500),
        (4, 1, 8, 120, 500),
    )
)
"""Whose runs were looked at while the model was made."""

FRESH = tuple(Case(*each) for each in ((1, 2, 8, 40, 120), (2, 2, 8, 40, 250), (3, 2, 8, 120, 400), (4, 2, 8, 40, 450)))
"""Whose runs were not, until it was done."""


@dataclass(frozen=True)
class Ran:
    """What a run gave.

    Attributes:
        wait_ratio: 0 to 1, over all ranks.
        samples_per_second: of all ranks.
        idle: 0 to 1, of the machine's processors.
        others: 0 to 1, of them that programs took which are not ours.
        load: average of a minute.
        actors: processor seconds of them, from the first step to the last.
        ours: the same of all processes of ours, the actors too.
        seconds: from the first step to the last.
    """

    wait_ratio: float
    samples_per_second: float
    idle: float
    others: float
    load: float
    actors: float
    ours: float
    seconds: float


@dataclass(frozen=True)
class Traced:
    """The run that is calibrated on.

    Attributes:
        ran: what it gave.
        spans: of all its processes.
        background: processor seconds a second of ours while nobody asked for rows: of actors, and of all.
    """

    ran: Ran
    spans: Spans
    background: tuple[float, float]

    @property
    def used(self) -> Used:
        """Processor time of the processes, for each row."""
        rows, ran = ROWS * (TRACED_STEPS - 1), self.ran
        actors, ours = (
            all_of_it - idle * ran.seconds
            for all_of_it, idle in zip((ran.actors, ran.ours), self.background, strict=True)
        )
        return Used(actors / rows, (ours - actors) / rows, self.background[1])


def measure(cases: Sequence[Case], tries: int) -> tuple[list[Traced], dict[Case, list[Ran]]]:
    """Runs one setting with its spans, then the others, and all of it again."""
    with ExitStack() as stack:
        cache = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(closing(Session(num_cpus=4)))
        encoder = mmdp.Encoder(vision="fixed:64:side=128")
        setups = {}
        for latency in sorted({case.latency for case in (TRACED, *cases)}):
            served = stack.enter_context(from_afar(Config(latency_ms=latency)))
            source = mmdp.open_source(served.data, config=Config(cache_dir=cache))
            plan = mmdp.plan(mmdp.measure(source, encoder, cache=cache), mmdp.Budget(tokens=1024, images=9))
            setups[latency] = Setup(source, encoder, plan, batch_size=ROWS)
        run(TRACED, setups[TRACED.latency])  # Ray's own programs are still starting: it is not counted
        traced: list[Traced] = []
        ran: dict[Case, list[Ran]] = {case: [] for case in cases}
        for _ in range(tries):
            spans.start()
            one, background = run(TRACED, setups[TRACED.latency], TRACED_STEPS, _IDLE_SECONDS)
            traced.append(Traced(one, spans.stop(), background))
            print("traced", *TRACED, _told(one), traced[-1].used, flush=True)
            for case in cases:
                one, _ = run(case, setups[case.latency])
                ran[case].append(one)
                print(*case, _told(one), flush=True)
    return traced, ran


def _told(one: Ran) -> str:
    return (
        f"waits {one.wait_ratio:.3f}, {one.samples_per_second:.1f} samples/s, idle {one.idle:.0%}, others "
        f"{one.others:.0%}, load {one.load:.1f}"
    )


class Seen(NamedTuple):
    """What a rank saw: waits, train time, samples after the first step; the clock and what ours had used, twice."""

    wait: float
    train: float
    samples: int
    clock: Sequence[float]
    used: Sequence[Mapping[int, float]]


def run(case: Case, setup: Setup, steps: int = STEPS, idle_seconds: float = 0.0) -> tuple[Ran, tuple[float, float]]:
    """A setting for real: each rank is a thread that trains, on its own reader. With it, how busy ours are before."""
    train, found = simulated(case.train), list[Seen]()

    def trains(reader: RankReader) -> None:
        meter, samples, marks = WaitMeter("cpu"), list[int](), list[tuple[float, Mapping[int, float]]]()
        with closing(epochs(reader)) as made, closing(meter.over(made)) as batches:  # type: ignore[type-var]
            for number in range(steps):
                batch = next(batches)
                samples.append(sum(map(len, batch.samples)))
                train(batch)
                if number in (0, steps - 1):
                    marks.append((time.perf_counter(), used_by_ours()))
        clock, used = zip(*marks, strict=True)
        found.append(Seen(sum(meter.waits), sum(meter.trains), sum(samples[1:]), clock, used))

    with ExitStack() as stack:
        coordinator = Coordinator(
            *(setup.source, setup.encoder, setup.plan),
            name=f"simulate-{token_hex(4)}",
            batch_size=ROWS,
            world_size=case.ranks,
            num_workers=case.workers,
            depth=case.depth,
        )
        stack.enter_context(coordinator)
        readers = [
            stack.enter_context(RankReader(coordinator.name, rank, case.ranks, address=coordinator.address))
            for rank in range(case.ranks)
        ]
        while sum(coordinator.stats()["workers"].values()) < case.workers:
            time.sleep(0.1)
        actors = set[int](coordinator.stats()["worker_pids"])
        time.sleep(_SETTLE_SECONDS if idle_seconds else 0.0)
        before, idling = used_by_ours(), time.perf_counter()
        time.sleep(idle_seconds)
        idled = max(1e-9, time.perf_counter() - idling)
        background = used_between((before, used_by_ours()), actors)
        started, machine, ours = time.perf_counter(), processor_times(), used_by_ours()
        threads = [threading.Thread(target=trains, args=(reader,), daemon=True) for reader in readers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_RANK_SECONDS)
        after, seconds = processor_times(), time.perf_counter() - started
        _, ours_used = used_between((ours, used_by_ours()), actors)
    if len(found) < case.ranks:
        raise RuntimeError(f"{case}: {case.ranks - len(found)} ranks have failed, or took over two minutes")
    waits, trained = sum(one.wait for one in found), sum(one.train for one in found)
    total, idle = after[0] - machine[0], after[1] - machine[1]
    last = max(found, key=lambda one: one.clock[1])
    by_actors, by_ours = used_between(last.used, actors)
    return Ran(
        wait_ratio=waits / (waits + trained),
        samples_per_second=sum(one.samples / (one.wait + one.train) for one in found),
        idle=idle / total,
        others=max(0.0, 1 - idle / total - ours_used / (seconds * (os.cpu_count() or 1))),
        load=os.getloadavg()[0],
        actors=by_actors,
        ours=by_ours,
        seconds=last.clock[1] - last.clock[0],
    ), (background[0] / idled, background[1] / idled)


def processor_times() -> tuple[float, float]:
    """Seconds of all processors of the machine since its start, and the idle ones among them."""
    ticks = [int(value) for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(ticks) / os.sysconf("SC_CLK_TCK"), (ticks[3] + ticks[4]) / os.sysconf("SC_CLK_TCK")


def used_by_ours() -> dict[int, float]:
    """Processor seconds so far of this process and of each that came of it and still runs, by its id."""
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            values = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        parents[int(stat.parent.name)] = int(values[1])
        used[int(stat.parent.name)] = (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")
    ours, more = {os.getpid()}, {os.getpid()}
    while more:
        more = {pid for pid, parent in parents.items() if parent in more}
        ours |= more
    return {pid: used.get(pid, 0.0) for pid in ours}


def used_between(looks: Sequence[Mapping[int, float]], some: Collection[int]) -> tuple[float, float]:
    """Processor seconds of some processes, and of all, between two looks."""
    before, after = looks
    used = {pid: seconds - before.get(pid, 0.0) for pid, seconds in after.items()}
    return sum(seconds for pid, seconds in used.items() if pid in some), sum(used.values())
