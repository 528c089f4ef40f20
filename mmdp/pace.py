"""How long a step takes, from what each resource has to do in it: the model behind a diagnosis.

Adds: `Pace`, the work and the means of one step, and how long it takes; `explained`, a pace that takes as long as what
was seen.
Leaves out: reading works off spans (`step_work`), and saying what they mean (`diagnosis`).

    step   = what the consumer does + what it can't hide of making the rows
    making = the slowest of fetching, computing and passing on: the work of a step / how much of it goes on at a time.
             Where the window is too small for that: rows x the time one row takes / rows in flight
    hidden = the rows that lie ahead when training begins; they are made while the consumer is busy

A consumer that makes its rows itself hides nothing, and adds all works up. Where rows are ordered only when the trainer
asks, nothing is hidden, and the first row and the last have to go all the way.

How many rows are ahead is the one thing that is not measured but solved for: `explained` takes the window with which
the model needs as long as the run did. Whatever no resource accounts for is so laid to the window, which is where it
belongs: with a wide one the slowest resource would never rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

RESOURCES = ("I/O", "CPU", "transport", "memory", "trainer")
"""What can bound a pipeline; memory is the window, of rows and of bytes in flight."""

_WIDE = 1e6
"""Rows ahead, as good as no bound."""

_SERIAL_SLACK = 1.4
"""A step without anything made ahead may take so much longer than the model says before a window of a row or two is the
better explanation. Such steps end with a tail: the slowest fetch, the last worker. Chosen on simulated pipelines, seeds
1000 to 1299 of `benchmarks/diagnosis.py`."""


_UNEXPLAINED = 1.1
"""A step that takes at most so much longer than its busiest resource is no sign of a narrow window: rows differ."""


@dataclass(frozen=True, slots=True)
class Pace:
    """One step. Works are in seconds a step, summed over all who do them.

    Attributes:
        rows: in a step.
        train: what the consumer does besides waiting.
        fetch: work of fetching.
        compute: work of processors: decode, encode, join.
        transfer: work of passing rows on.
        own_compute: computing in the consumer's thread, while the trainer waits.
        own_transfer: moving batches there.
        row_fetch: seconds that the fetches of a row take.
        in_air: work of fetching, counted by image, where a worker waits for all images of a row at once; `fetch` is
            then how long workers wait.
        fetches: images at a time, where they are apart from the workers or `in_air`.
        workers: threads or processes that compute.
        processors: that these share.
        channels: transfers at a time.
        is_shared: workers fetch too: each waits for one image, or for those of one row, and then decodes.
        is_inline: the consumer makes the rows itself.
        is_ahead: rows are made while the trainer works.
        ahead: rows that may be in work or lie ready when training begins.
    """

    rows: float
    train: float
    fetch: float = 0.0
    compute: float = 0.0
    transfer: float = 0.0
    own_compute: float = 0.0
    own_transfer: float = 0.0
    row_fetch: float = 0.0
    in_air: float = 0.0
    fetches: float = 1.0
    workers: float = 1.0
    processors: float = math.inf
    channels: float = 1.0
    is_shared: bool = False
    is_inline: bool = False
    is_ahead: bool = True
    ahead: float = _WIDE

    @property
    def consumer(self) -> float:
        """Seconds of a step in which the consumer is busy, rows aside."""
        return self.train + self.own_compute + self.own_transfer

    @property
    def slowest(self) -> float:
        """Seconds that the busiest resource needs for the rows of a step."""
        return max(load for load, _ in self._stages())

    @property
    def seconds(self) -> float:
        """How long a step takes."""
        row = sum(seconds for _, seconds in self._stages())
        if self.is_inline:
            return self.consumer + self.slowest
        if not self.is_ahead:
            # All rows start at once. The busiest begins when the first row gets to it, and the last row has a way on.
            return self.consumer + max(load + row - seconds for load, seconds in self._stages())
        making = max(self.slowest, row * self.rows / (self.ahead + 1))  # and the one that the consumer waits for
        hidden = min(self.consumer, making * min(1.0, self.ahead / self.rows))
        return self.consumer + making - hidden

    def _stages(self) -> list[tuple[float, float]]:
        """For each stage that rows go through, the seconds it needs for a step, and those a row is in it."""
        passing = self.transfer / self.rows
        computing = self.compute / self.rows
        if self.is_inline:
            return [(self.fetch + self.compute + self.transfer, self.row_fetch + computing + passing)]
        # A row is the work of one worker: more workers than rows don't help where all rows start at once.
        workers = self.workers if self.is_ahead else min(self.workers, self.rows)
        compute = self.compute / min(workers, self.processors)
        passed = (self.transfer / self.channels, passing)
        if self.is_shared:
            both = max((self.fetch + self.compute) / workers, compute, self.in_air / self.fetches)
            return [(both, self.row_fetch + computing), passed]
        fetch = self.fetch / self.fetches
        if not self.is_ahead:
            fetch = max(fetch, self.row_fetch)
        return [(fetch, self.row_fetch), (compute, computing), passed]

    def doubled(self, resource: str) -> Pace:
        """With a store, processors, links or a trainer twice as fast, or with twice the window."""
        if resource == "I/O":
            return replace(self, fetch=self.fetch / 2, row_fetch=self.row_fetch / 2, in_air=self.in_air / 2)
        if resource == "CPU":
            return replace(self, compute=self.compute / 2, own_compute=self.own_compute / 2)
        if resource == "transport":
            return replace(self, transfer=self.transfer / 2, own_transfer=self.own_transfer / 2)
        if resource == "memory":
            return self.widened(2)
        return replace(self, train=self.train / 2)

    def widened(self, times: float) -> Pace:
        """With so many times the rows in flight."""
        return replace(self, ahead=times * (self.ahead + 1) - 1)


def explained(pace: Pace, seconds: float, seen: float | None = None) -> Pace:
    """The pace with the window, and with `is_ahead`, that come closest to what was seen.

    Args:
        pace: with all but the window.
        seconds: that a step took.
        seen: rows that lay ahead when training began. They are the window where it does not bind.
    """
    if pace.is_inline or (not pace.is_ahead and seconds <= _SERIAL_SLACK * pace.seconds):
        return pace
    low, high = 0.0, _WIDE
    widest = replace(pace, is_ahead=True, ahead=high)
    if widest.seconds * _UNEXPLAINED >= seconds:
        free = replace(widest, ahead=high if seen is None else seen)
        return free if free.seconds <= widest.seconds * _UNEXPLAINED else widest
    for _ in range(60):  # halves the bracket on the scale of log(ahead + 1)
        middle = math.sqrt((low + 1) * (high + 1)) - 1
        if replace(widest, ahead=middle).seconds > seconds:
            low = middle
        else:
            high = middle
    return replace(widest, ahead=high)
