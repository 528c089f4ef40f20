"""A pipeline in simulated time: its true bound is known, and it leaves the spans that the library would.

It holds what can make a trainer wait: rows of a few images, each fetched and decoded; one thread that does all, threads
that fetch and decode, or an event loop with workers beside it and a channel that rows pass one by one; processors that
all who compute share; a window of rows and bytes; a batch that the consumer joins and moves; a trainer. What a row
costs is drawn by its number, so that two runs of one seed differ in nothing but the resource that was changed.

Used by `diagnosis.py`. Nothing here knows how a diagnosis is made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from mmdp.event_time import Event, Places, Process, Processors, Simulation
from mmdp.span_table import NO_NUMBER, Lane, Spans

RESOURCES = ("I/O", "CPU", "transport", "memory", "trainer")


@dataclass(frozen=True)
class Workload:
    """A pipeline and its data; seconds are means.

    Attributes:
        form: `inline`, all in the trainer's thread; `threads`, workers that fetch and decode; `actors`, an event loop
            that fetches, workers that decode, and a channel from them to the trainer.
        overlap: rows are made ahead, while the trainer works; never inline, always with threads.
        rows: a step.
        images: a row, at least 1.
        fetch: seconds an image.
        fetch_spread: sigma of the logarithm of what a fetch takes.
        decode: processor seconds an image.
        decode_spread: likewise.
        join: processor seconds a row.
        pass_row: seconds that a row keeps the channel busy; actors only.
        batch: processor seconds that joining a batch takes the consumer.
        move: seconds that a batch takes to the device.
        train: seconds a step.
        workers: threads that decode.
        fetches: that the event loop has in the air at most; actors only.
        processors: of the host.
        depth: rows in flight, at most.
        window: bytes in flight at most, counted in mean rows.
        seed: of what each row costs.
    """

    form: Literal["inline", "threads", "actors"]
    overlap: bool
    rows: int
    images: float
    fetch: float
    fetch_spread: float
    decode: float
    decode_spread: float
    join: float
    pass_row: float
    batch: float
    move: float
    train: float
    workers: int
    fetches: int
    processors: int
    depth: int
    window: float
    seed: int

    def doubled(self, resource: str) -> Workload:
        """With a store, processors, links or a trainer twice as fast, or with twice the window."""
        if resource == "I/O":
            return replace(self, fetch=self.fetch / 2)
        if resource == "CPU":
            return replace(self, decode=self.decode / 2, join=self.join / 2, batch=self.batch / 2)
        if resource == "transport":
            return replace(self, pass_row=self.pass_row / 2, move=self.move / 2)
        if resource == "memory":
            return replace(self, depth=2 * self.depth, window=2 * self.window)
        return replace(self, train=self.train / 2)


@dataclass(frozen=True)
class Costs:
    """What a row costs: seconds of each fetch and each decode, its size in mean rows; and an event once it is made."""

    fetches: Sequence[float]
    decodes: Sequence[float]
    size: float
    done: Event


class Run:
    """One run of a workload.

    Attributes:
        seconds_per_step: from the end of the first quarter of the steps on.
    """

    def __init__(self, workload: Workload, num_steps: int = 40) -> None:
        self._load = workload
        self._time = Simulation()
        self._noted: list[tuple[str, str, float, float, dict[str, int]]] = []
        self._processors = Processors(self._time, workload.processors)
        self._fetches = Places(self._time, workload.fetches)
        self._workers = Places(self._time, workload.workers)
        self._channel = Places(self._time, 1)
        self._window: deque[Costs] = deque()
        self._num_ordered = 0
        self._full = ""
        self._next = self._costs(0)
        ends: list[float] = []
        over = Event()
        self._time.go(self._trainer(num_steps, ends, over))
        self._time.run(over)
        first = num_steps // 4
        self.seconds_per_step = (ends[-1] - ends[first]) / (num_steps - 1 - first)

    def _costs(self, row: int) -> Costs:
        load = self._load
        random = np.random.default_rng((load.seed, row))
        images = 1 + random.poisson(load.images - 1)
        fetches = load.fetch * random.lognormal(-(load.fetch_spread**2) / 2, load.fetch_spread, images)
        decodes = load.decode * random.lognormal(-(load.decode_spread**2) / 2, load.decode_spread, images)
        return Costs(fetches.tolist(), decodes.tolist(), images / load.images, Event())

    def _note(self, name: str, lane: str, start: float, **numbers: int) -> None:
        self._noted.append((name, lane, start, self._time.now, numbers))

    def _trainer(self, num_steps: int, ends: list[float], over: Event) -> Process:
        load, time = self._load, self._time
        for step in range(num_steps):
            start = time.now
            wanted = self._num_ordered + load.rows  # as far as it may order where nothing is made ahead
            for _ in range(load.rows):
                if load.form == "inline":
                    yield from self._make_here(self._take_next(), "trainer")
                    continue
                while self._may_order(wanted):
                    row = self._take_next()
                    self._window.append(row)
                    time.go(self._make_in_worker(row) if load.form == "threads" else self._make_in_actors(row))
                self._full = "rows" if len(self._window) >= load.depth else "bytes"
                if not self._window[0].done.happened:
                    yield self._window[0].done
                self._window.popleft()
            self._note("gather", "trainer", start, **self._gauges())
            yield from self._timed("join", "trainer", lambda: self._processors.work(load.batch))
            yield from self._timed("transfer", "trainer", lambda: time.sleep(load.move))
            self._note("wait", "trainer", start, step=step)
            start = time.now
            yield time.sleep(load.train)
            self._note("train", "trainer", start, step=step)
            ends.append(time.now)
        time.fire(over)

    def _gauges(self) -> dict[str, int]:
        load = self._load
        if load.form == "inline":
            return {"rows": load.rows, "ahead": 0, "depth": 1, "workers": 0}
        depth = load.depth if load.overlap else load.rows
        gauges = {"rows": load.rows, "ahead": len(self._window), "depth": depth, "workers": load.workers}
        gauges |= {"by_rows": int(self._full == "rows"), "by_bytes": int(self._full == "bytes")}
        return gauges | ({"fetches": load.fetches} if load.form == "actors" else {})

    def _may_order(self, wanted: int) -> bool:
        """As `in_order` has it: rows and bytes in flight are bounded, and a row that is alone always fits."""
        if not self._load.overlap:
            return self._num_ordered < wanted
        size = sum(row.size for row in self._window) + self._next.size
        return not self._window or (len(self._window) < self._load.depth and size <= self._load.window)

    def _take_next(self) -> Costs:
        row = self._next
        self._num_ordered += 1
        self._next = self._costs(self._num_ordered)
        return row

    def _timed(self, name: str, lane: str, begin: Callable[[], Event]) -> Process:
        start = self._time.now
        yield begin()
        self._note(name, lane, start)

    def _compute(self, name: str, lane: str, seconds: float) -> Process:
        return self._timed(name, lane, lambda: self._processors.work(seconds))

    def _make_here(self, row: Costs, lane: str) -> Process:
        for fetch, decode in zip(row.fetches, row.decodes, strict=True):
            yield from self._timed("fetch", lane, lambda fetch=fetch: self._time.sleep(fetch))  # type: ignore[misc]
            yield from self._compute("decode", lane, decode)
        yield from self._compute("join", lane, self._load.join)

    def _make_in_worker(self, row: Costs) -> Process:
        worker = yield from self._workers.enter()
        yield from self._make_here(row, f"worker {worker}")
        self._workers.leave(worker)
        self._time.fire(row.done)

    def _make_in_actors(self, row: Costs) -> Process:
        arrived = [Event() for _ in row.fetches]
        for seconds, event in zip(row.fetches, arrived, strict=True):
            self._time.go(self._fetch(seconds, event))
        for event in arrived:
            yield event
        worker = yield from self._workers.enter()
        for seconds in row.decodes:
            yield from self._compute("decode", f"worker {worker}", seconds)
        yield from self._compute("join", f"worker {worker}", self._load.join)
        self._workers.leave(worker)
        channel = yield from self._channel.enter()
        seconds = self._load.pass_row * row.size
        yield from self._timed("transfer", "channel", lambda: self._time.sleep(seconds))
        self._channel.leave(channel)
        self._time.fire(row.done)

    def _fetch(self, seconds: float, arrived: Event) -> Process:
        place = yield from self._fetches.enter()
        yield from self._timed("fetch", "event loop", lambda: self._time.sleep(seconds))
        self._fetches.leave(place)
        self._time.fire(arrived)

    def spans(self) -> Spans:
        """What the library would have recorded."""
        names = list(dict.fromkeys(one[0] for one in self._noted))
        lanes = list(dict.fromkeys(one[1] for one in self._noted))
        processors = self._load.processors
        return Spans(
            names=tuple(names),
            lanes=tuple(Lane("simulated", 1, place, lane, processors) for place, lane in enumerate(lanes)),
            name=np.array([names.index(one[0]) for one in self._noted]),
            lane=np.array([lanes.index(one[1]) for one in self._noted]),
            start=np.array([round(one[2] * 1e9) for one in self._noted]),
            end=np.array([round(one[3] * 1e9) for one in self._noted]),
            numbers={
                key: np.array([one[4].get(key, NO_NUMBER) for one in self._noted])
                for key in dict.fromkeys(key for one in self._noted for key in one[4])
            },
        )
