"""What took how long, and where: spans of every thread, process and host on one clock.

Adds: `span` and `record`, which note one piece of work; `start` and `stop`, the switch; `take` and `receive`, by which
another process gives what it has noted.
Leaves out: how the spans of worker processes travel (`traced`), the file that Perfetto shows (`trace_file`), what the
spans say (`diagnosis`), figures (`plots.timeline`).

    spans.start()
    with span("decode", sample=7) as work:
        pixels = decode(data)
        work.add(num_bytes=pixels.nbytes)
    noted = spans.stop()

Off by default: then `span` hands out one and the same object, which does nothing. The names that the pipeline uses:

| name | is |
|---|---|
| fetch | the bytes of an image, or of its header, from the store |
| row_fetch | who builds a row waits for all of its images; its number is how many a process may fetch at a time |
| decode, encode, join | an image to pixels; a sample to ids and labels; samples to a row, and rows to a batch |
| transfer | a row from process to process, or a batch to the device |
| gather | a loader waits for the rows of a batch; its numbers say how far rows are ahead (`Loader`) |
| wait, train | the training loop waits for a batch; it works on one |

Any other name will do. The numbers that go with a span (`num_bytes=`, `step=`) are integers.

The clock is `time.monotonic_ns`, which all processes of a host share, moved once to wall time. So spans of one host are
right to what reading it takes, about a microsecond. Those of another host are off by as much as its wall clock is:
some milliseconds where NTP runs. Memory: the last `capacity` spans are kept, the older ones counted.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from mmdp.machine import num_processors
from mmdp.span_table import NO_NUMBER, Lane, Spans, merge

CAPACITY = 2**17
"""Spans a recorder keeps, some 300 bytes each: the last minute at 2,000 a second."""


class Clock(NamedTuple):
    """What turns the monotonic clock of a host into wall time.

    Attributes:
        host: since its last start; on one host all processes read the same monotonic clock.
        offset: nanoseconds since 1970 minus those of the monotonic clock.
    """

    host: str
    offset: int


@cache
def own_clock() -> Clock:
    """The clock of this process, fixed at its first use."""
    tries = []
    for _ in range(5):  # the quickest reading is the one that nothing came between
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        tries.append((after - before, wall - (before + after) // 2))
    boot = Path("/proc/sys/kernel/random/boot_id")  # Linux; elsewhere the name has to do
    suffix = f"-{boot.read_text()[:8]}" if boot.exists() else ""
    return Clock(f"{platform.node() or 'host'}{suffix}", min(tries)[1])


class Recorder:
    """Keeps the spans of this process, and what others have sent. All methods but `take` from any thread.

    Args:
        capacity: spans it keeps of its own, and as many of others; the oldest go first.
        clock: to tell the time by.

    Raises:
        ValueError: no room for a span.
    """

    def __init__(self, capacity: int, clock: Clock) -> None:
        if capacity < 1:
            raise ValueError(f"a recorder for {capacity} spans keeps nothing: give at least 1")
        self.pid = os.getpid()
        self._capacity = capacity
        self._clock = clock
        self._kept: deque[tuple[str, int, int, int, dict[str, int]]] = deque(maxlen=capacity)
        self._tickets = count()  # one a span: a full deque does not tell that it drops
        self._num_told = 0  # tickets of spans that were taken, or counted as dropped
        self._threads: dict[int, str] = {}
        self._received: deque[Spans] = deque()

    def add(self, name: str, start: int, end: int, numbers: dict[str, int]) -> None:
        """Notes a span; `start` and `end` in nanoseconds of `time.monotonic_ns`."""
        thread = threading.get_ident()
        if thread not in self._threads:
            self._threads[thread] = threading.current_thread().name
        self._kept.append((name, start, end, thread, numbers))
        next(self._tickets)

    def receive(self, spans: Spans) -> None:
        """Takes what another process or host has recorded."""
        if len(spans) or spans.dropped:
            self._received.append(spans)

    def take(self) -> Spans:
        """All that is kept, once: the recorder is empty then."""
        kept = [self._kept.popleft() for _ in range(len(self._kept))]
        num_recorded = next(self._tickets)
        dropped = max(0, num_recorded - self._num_told - len(kept))
        self._num_told = num_recorded + 1
        received = [self._received.popleft() for _ in range(len(self._received))]
        return merge([replace(self._pack(kept), dropped=dropped), *self._last(received)])

    def _last(self, received: Sequence[Spans]) -> Sequence[Spans]:
        """The newest parts that `capacity` has room for; the others only as a count."""
        room, first = self._capacity, len(received)
        while first and len(received[first - 1]) <= room:
            first -= 1
            room -= len(received[first])
        lost = sum(len(part) + part.dropped for part in received[:first])
        return [replace(merge([]), dropped=lost), *received[first:]]

    def _pack(self, kept: Sequence[tuple[str, int, int, int, dict[str, int]]]) -> Spans:
        names = {name: at for at, name in enumerate(dict.fromkeys(one[0] for one in kept))}
        threads = {thread: at for at, thread in enumerate(dict.fromkeys(one[3] for one in kept))}
        processors = num_processors()
        times = np.array([one[1:3] for one in kept], dtype=np.int64).reshape(-1, 2) + self._clock.offset
        return Spans(
            names=tuple(names),
            lanes=tuple(
                Lane(self._clock.host, self.pid, thread, self._threads[thread], processors) for thread in threads
            ),
            name=np.array([names[one[0]] for one in kept], dtype=np.int64),
            lane=np.array([threads[one[3]] for one in kept], dtype=np.int64),
            start=times[:, 0],
            end=times[:, 1],
            numbers={
                key: np.array([one[4].get(key, NO_NUMBER) for one in kept], dtype=np.int64)
                for key in dict.fromkeys(key for one in kept for key in one[4])
            },
        )


_recorder: Recorder | None = None


def is_on() -> bool:
    """Whether spans are recorded in this process."""
    return _recorder is not None and _recorder.pid == os.getpid()  # a fork inherits one that is its parent's


def start(capacity: int = CAPACITY, clock: Clock | None = None) -> None:
    """Records from now on. A loader takes notice at its next loop.

    Args:
        capacity: spans to keep, at least 1.
        clock: of the process that the spans go to; it counts where that runs on this same host.

    Raises:
        RuntimeError: it is on already.
        ValueError: no room for a span.
    """
    global _recorder
    if is_on():
        raise RuntimeError("spans are recorded already: stop them first, or nothing would tell two recordings apart")
    own = own_clock()
    _recorder = Recorder(capacity, clock if clock is not None and clock.host == own.host else own)


def stop() -> Spans:
    """Records no more, and gives what there is; nothing where it was off."""
    global _recorder
    recorder, _recorder = _recorder, None
    return recorder.take() if recorder is not None else merge([])


def take() -> Spans:
    """What was recorded since the last `take`, and goes on recording. For a worker, to send with its results."""
    return _recorder.take() if _recorder is not None else merge([])


def receive(spans: Spans) -> None:
    """Adds what a worker took; nothing happens where recording is off."""
    if _recorder is not None:
        _recorder.receive(spans)


class Span:
    """A piece of work that is going on; made by `span`."""

    __slots__ = ("_name", "_numbers", "_recorder", "_start")

    def __init__(self, recorder: Recorder, name: str, numbers: dict[str, int]) -> None:
        self._recorder = recorder
        self._name = name
        self._numbers = numbers

    def add(self, **numbers: int) -> None:
        """Adds numbers that were not known before."""
        self._numbers.update(numbers)

    def __enter__(self) -> Self:
        self._start = time.monotonic_ns()
        return self

    def __exit__(self, *exception: object) -> None:
        self._recorder.add(self._name, self._start, time.monotonic_ns(), self._numbers)


class _NoSpan(Span):
    __slots__ = ()

    def __init__(self) -> None:
        pass

    def add(self, **numbers: int) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


_NO_SPAN = _NoSpan()


def span(name: str, **numbers: int) -> Span:
    """A context whose time is recorded under this name, also where it ends with an error."""
    recorder = _recorder
    return _NO_SPAN if recorder is None else Span(recorder, name, numbers)


def record(name: str, start: int, end: int, **numbers: int) -> None:
    """Records what was timed already; `start` and `end` in nanoseconds of `time.monotonic_ns`."""
    recorder = _recorder
    if recorder is not None:
        recorder.add(name, start, end, numbers)
