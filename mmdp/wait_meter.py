"""How long training waits for data.

Adds: `WaitMeter`, which measures a training loop step by step: the wait that the trainer sees, and the train time.
Leaves out: why it waits (`diagnosis.py`), drawing it (`plots`).

    meter = WaitMeter()
    for batch in meter.over(mmdp.feed(loader, "cuda")):
        train(batch)
    print(meter.wait_ratio)

The wait ratio is exposed wait / (exposed wait + train time), and utilisation is 1 - wait ratio. Work on the next batch
that goes on while the trainer is busy costs it nothing, and is not counted. Where nothing overlaps, all of it is
exposed: then the ratio equals (prepare + transfer) / (prepare + transfer + train), the formula of the talk.

A CUDA device works on after the host has queued a step, so the host's clock tells nothing: the host waits for a batch
while the device is busy, and that is no wait. Here the device notes the time itself, by two events a step on the loop's
stream: one behind the step's kernels, one in front of the next step's. Between them it has nothing to do. That holds
nobody up; to synchronise at each step would keep the host from running ahead, and so change what is measured.
"""

from __future__ import annotations

import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from mmdp.spans import record

T = TypeVar("T")

Clock = Callable[[], float]


class WaitMeter:
    """Measures the loop that runs over `over(...)`.

    The first batch stands apart: it waits for all that is set up but once, and its step compiles and warms up. A loop's
    end, which brings no batch, is not counted; what passes between two loops is not either, and the first batch of
    every later loop is.

    Args:
        device: where training runs; by default the `device` of what `over` is given, as a `Feed` has it, else the CPU.
        clock: seconds that only go up; of the host.

    Attributes:
        seconds_to_first: from the first request to the first batch, its copy included; None before.
        steps: batches handed out, the first one too.
    """

    def __init__(self, device: torch.device | str | None = None, *, clock: Clock = time.perf_counter) -> None:
        self.seconds_to_first: float | None = None
        self.steps = 0
        self._device = device
        self._clock = clock
        self._waits = array("d")
        self._trains = array("d")
        self._open: deque[_Step] = deque()  # steps whose events the device has not reached yet

    def over(self, batches: Iterable[T]) -> Iterator[T]:
        """The batches, the time between them measured. May be used again, for the next epoch.

        Leave the loop with what is in it, by its end or by `break`: the time until then is the last step's.
        """
        timeline = _timeline(self._device if self._device is not None else _device_of(batches), self._clock)
        source = iter(batches)
        try:
            start = self._clock()
            asked = timeline.mark() if self.steps else None  # the device is left alone until workers have started
            for batch in source:
                got = timeline.mark()
                is_first = self.steps == 0
                if is_first:
                    timeline.settle(got)
                    self.seconds_to_first = self._clock() - start
                self.steps += 1
                handed = time.monotonic_ns()
                try:
                    yield batch
                finally:
                    del batch
                    now = timeline.mark()
                    if not is_first:
                        self._open.append(_Step(timeline, asked, got, now, handed))
                    self._resolve()
                    asked = now
        finally:
            if isinstance(source, Generator):
                source.close()

    def __repr__(self) -> str:
        ratio, behind = self.wait_ratio, max(0, self.steps - 1)
        if ratio is None:
            return f"<WaitMeter: {self.steps} steps, of which none behind the first>"
        return (
            f"<WaitMeter: waits {ratio:.1%} of the time over {behind} steps behind the first, which came after "
            f"{self.seconds_to_first or 0:.2f} s>"
        )

    @property
    def waits(self) -> array[float]:
        """Seconds of exposed wait before each step but the first."""
        self._resolve(settle=True)
        return self._waits[:]

    @property
    def trains(self) -> array[float]:
        """Seconds of train time of each step but the first."""
        self._resolve(settle=True)
        return self._trains[:]

    @property
    def wait_ratio(self) -> float | None:
        """Share of the time that training waits, 0 to 1; None before a second step is done."""
        if not len(self.waits):
            return None
        wait, train = math.fsum(self._waits), math.fsum(self._trains)
        return wait / (wait + train) if wait + train > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The figures of a report, in seconds; None where nothing was measured."""
        ratio = self.wait_ratio
        return {
            "steps": self.steps,
            "seconds_to_first": self.seconds_to_first,
            "wait_seconds": math.fsum(self._waits) if ratio is not None else None,
            "train_seconds": math.fsum(self._trains) if ratio is not None else None,
            "wait_ratio": ratio,
        }

    def _resolve(self, *, settle: bool = False) -> None:
        """Takes in the steps that the device is through with; all of them where it may be waited for."""
        while self._open and (settle or self._open[0].is_done()):
            step = self._open.popleft()
            wait, train = step.seconds()
            self._waits.append(wait)
            self._trains.append(train)
            # A device is behind the host: there the lengths are right, and the places early.
            record("wait", step.handed - round(1e9 * wait), step.handed)
            record("train", step.handed, step.handed + round(1e9 * train))


class _Timeline(Protocol):
    """Where marks are set, and the time between them is told."""

    def mark(self) -> Any:
        """Now, seen from whoever trains."""

    def settle(self, mark: Any) -> None:
        """Returns once the mark is reached."""

    def is_reached(self, mark: Any) -> bool:
        """Whether it is."""

    def seconds(self, first: Any, second: Any) -> float:
        """From one to the other, both reached."""


class _Step(NamedTuple):
    """What is known of a step.

    Attributes:
        timeline: of its marks.
        asked: the mark behind the step before it.
        got: in front of its own work.
        done: behind it.
        handed: when the host handed out its batch, in nanoseconds of `time.monotonic_ns`.
    """

    timeline: _Timeline
    asked: Any
    got: Any
    done: Any
    handed: int

    def is_done(self) -> bool:
        return self.timeline.is_reached(self.done)

    def seconds(self) -> tuple[float, float]:
        """Wait and train time."""
        self.timeline.settle(self.done)
        return self.timeline.seconds(self.asked, self.got), self.timeline.seconds(self.got, self.done)


class _HostTimeline:
    """The host's clock; before it is read, an accelerator that is not CUDA finishes what is queued."""

    def __init__(self, clock: Clock, device: torch.device) -> None:
        self._clock = clock
        self._device = device

    def mark(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize()
        return self._clock()

    def settle(self, mark: float) -> None:
        pass

    def is_reached(self, mark: float) -> bool:  # noqa: ARG002 - it is when it is made
        return True

    def seconds(self, first: float, second: float) -> float:
        return second - first


class _CudaTimeline:
    """Events on the loop's stream; the device notes when it gets there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def is_reached(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def seconds(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        return float(first.elapsed_time(second)) / 1000  # it tells milliseconds


def _device_of(batches: object) -> torch.device | str:
    device: torch.device | str = getattr(batches, "device", "cpu")
    return device


def _timeline(device: torch.device | str, clock: Clock) -> _Timeline:
    device = torch.device(device)
    return _CudaTimeline(device) if device.type == "cuda" else _HostTimeline(clock, device)
