"""What each resource did in a step, read off spans.

Adds: `measure_steps`, from spans to `StepWork`: the works, how much went on at a time, how long a step took.
Leaves out: how these make a step (`pace`), what to do about it (`diagnosis`).

Works count from the end of the first fifth of the steps, since the first are slow for other reasons, to the last that
rows were still made in. Spans of several ranks are taken together: a step is then that of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mmdp.pace import Pace
from mmdp.refusals import counted
from mmdp.span_table import NO_NUMBER, Spans

KINDS: Mapping[str, tuple[str, ...]] = {
    "I/O": ("fetch",),
    "CPU": ("decode", "encode", "join"),
    "transport": ("transfer",),
}
"""The spans of each resource."""

_WAITS = "row_fetch"
"""The span of a worker that waits for the images of its row."""

_MADE = tuple(name for names in KINDS.values() for name in names)
_MIN_STEPS = 3
_REACHED = 0.98
"""Of the time in which anything of a kind goes on, so much has at most the number that counts as reached: a moment when
one span ends and the next has begun is no worker more."""

_HIDDEN = 0.02
"""With a smaller share of the work done while the trainer is busy, nothing is made ahead."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What steps had in them, on average.

    Attributes:
        steps: that were counted.
        seconds: of a step.
        wait: seconds of it that the trainer waited.
        train: seconds of it that it trained.
        busy: by span name, seconds of work in a step, summed over all who did it.
        reached: by resource, how many at a time.
        samples: of a step; None where no loader told.
        row_fetch: seconds that the fetches of a row would take, all at once.
        waits_by_row: who makes rows waits for all images of one at once, as a loader over a store does.
        is_alone: nobody but the consumer, or the feed between the two, makes rows.
        window: rows that lay ahead when training began, and that may; None where no loader told.
        full: share of steps at which the rows, and the bytes, in flight were as many as may be; None likewise.
        is_fed_ahead: the loader has room for more rows than those of a step: it makes rows ahead, or would.
        epoch_steps: of an epoch; None where none was seen to end, of several ranks, or where no loader told.
        cold: seconds of the wait of a step that went by at the beginnings of epochs, where nothing lies ready.
        pace: the works as the model wants them.
    """

    steps: int
    seconds: float
    wait: float
    train: float
    busy: Mapping[str, float]
    reached: Mapping[str, float]
    samples: float | None
    row_fetch: float
    waits_by_row: bool
    is_alone: bool
    window: tuple[float, float] | None
    pace: Pace
    full: tuple[float, float] | None
    is_fed_ahead: bool
    epoch_steps: float | None
    cold: float


class _Timeline:
    """Numbers that change with time: how many spans of a choice are open, between any two ends of spans."""

    def __init__(self, spans: Spans, start: int, end: int) -> None:
        self._starts, self._ends = np.clip(spans.start, start, end), np.clip(spans.end, start, end)
        self._cuts = np.unique(np.concatenate([[start, end], self._starts, self._ends]))
        self.seconds = np.diff(self._cuts) / 1e9

    def open(self, chosen: np.ndarray) -> np.ndarray:
        """How many of the chosen spans, a mask (N,) bool, are open in each interval."""
        steps = np.zeros(len(self._cuts))
        np.add.at(steps, np.searchsorted(self._cuts, self._starts[chosen]), 1)
        np.add.at(steps, np.searchsorted(self._cuts, self._ends[chosen]), -1)
        count: np.ndarray = np.cumsum(steps)[:-1]
        return count

    def reached(self, count: np.ndarray) -> float:
        """The most at a time, moments aside; 0 where nothing was."""
        on = np.flatnonzero(count > 0)
        if not len(on):
            return 0.0
        on = on[np.argsort(count[on], kind="stable")]
        passed = np.cumsum(self.seconds[on])
        return float(count[on[np.searchsorted(passed, _REACHED * passed[-1])]])


def measure_steps(spans: Spans) -> StepWork:
    """The works of a step.

    Raises:
        ValueError: no spans, too few steps, or nothing that tells why the trainer waits.
    """
    train = spans.named("train")
    if not len(spans) or not len(train) or not len(spans.named("wait")):
        raise ValueError(
            f"{len(spans)} spans, and none of them `wait` and `train`: call `mmdp.spans.start()` before the loop, and "
            "run it under a WaitMeter"
        )
    ranks = len(np.unique(train.lane))
    first = train[train.lane == train.lane[0]]
    if len(first) < _MIN_STEPS:
        raise ValueError(
            f"{counted(len(first), 'step')} of training: at least {_MIN_STEPS} tell a pace; train for longer"
        )
    made = spans.named(*_MADE)
    start, end, steps = _period(spans, first, made)
    if end <= start:
        raise ValueError(f"{counted(steps, 'step')} of training that took no time: nothing can be said of their pace")
    kept = spans[(spans.end > start) & (spans.start < end)]
    line = _Timeline(kept, start, end)
    is_own = np.isin(kept.lane, np.unique(train.lane))
    is_kind = {kind: _is_named(kept, *names) for kind, names in KINDS.items()}
    is_image, is_row = is_kind["I/O"], _is_named(kept, _WAITS)
    if is_row.any():  # the fetches are on a loop of their own, and what a worker does is to wait for them
        is_kind["I/O"] = is_row

    def work(count: np.ndarray) -> float:
        return float((count * line.seconds).sum()) / steps

    is_made = np.logical_or.reduce(list(is_kind.values()))
    all_made, own_made = (work(line.open(chosen)) for chosen in (is_made, is_made & is_own))
    is_inline = own_made > all_made / 2
    away = np.ones_like(is_own) if is_inline else ~is_own
    io, cpu, transport = (line.open(chosen & away) for chosen in is_kind.values())
    training = line.open(_is_named(kept, "train")) > 0
    waiting = work(line.open(_is_named(kept, "wait"))) / ranks
    seconds = float(line.seconds.sum()) / steps
    if not len(made) and waiting > seconds / 20:
        raise ValueError(
            f"the trainer waits {waiting / seconds:.0%} of the time, and no span says for what: start the spans before "
            "the loader's loop, so that its workers record too"
        )
    making = (io + cpu + transport) * line.seconds
    hidden = making[training].sum() / max(making.sum(), 1e-12)
    gather = kept.named("gather")
    ahead, depth = gather.number("ahead"), gather.number("depth")
    rows = _sum(gather, "rows", steps) or float((_is_named(kept, "join") & away).sum()) / steps or 1.0
    processors = sum({lane.host: lane.processors for lane in spans.lanes}.values())
    images = line.open(is_image & away)
    reached = dict(zip(KINDS, map(line.reached, (images, cpu, transport)), strict=True))
    shared = _share_of_time(kept, is_kind["I/O"] & away, np.isin(kept.lane, kept.lane[is_kind["CPU"] & away])) > 0.5
    fetch, compute = work(io), work(np.minimum(cpu, processors))  # more than the processors only wait for each other
    fetched = kept.seconds[is_image & away]
    at_once = _longest(fetched, len(fetched) / (rows * steps))
    most_fetches, in_air = _most(gather, "fetches") or max(1.0, reached["I/O"]), 0.0
    if is_row.any():
        most_fetches = _fetches_of_workers(kept[is_row], train)
        in_air = work(np.minimum(images, most_fetches))  # more than may be in the air stand in line, and are no work
        fetch *= in_air / work(images) if images.any() else 1.0
        at_once = fetch / rows
    pace = Pace(
        rows=rows,
        train=seconds - waiting,
        fetch=fetch,
        compute=compute,
        transfer=work(transport),
        own_compute=work(line.open(is_kind["CPU"] & ~away)) / ranks,
        own_transfer=work(line.open(is_kind["transport"] & ~away)) / ranks,
        row_fetch=fetch / rows if shared or is_inline else at_once,
        in_air=in_air,
        fetches=most_fetches,
        workers=_most(gather, "workers") or max(1.0, reached["CPU"]),
        processors=processors,
        channels=max(1.0, reached["transport"]),
        is_shared=shared,
        is_inline=is_inline,
        is_ahead=bool(hidden > _HIDDEN or ahead.any()),
    )
    by_rows, by_bytes = gather.number("by_rows"), gather.number("by_bytes")
    epoch_steps, cold = _cold_starts(spans, kept) if ranks == 1 else (None, 0.0)
    return StepWork(
        steps=steps,
        seconds=seconds,
        wait=waiting,
        train=work(training),
        busy={name: work(line.open(_is_named(kept, name))) for name in _MADE if _is_named(kept, name).any()},
        reached=reached,
        samples=_sum(gather, "samples", steps),
        row_fetch=at_once,
        waits_by_row=bool(is_row.any()),
        is_alone=is_inline or (len(gather.number("workers")) > 0 and not _most(gather, "workers")),
        window=(float(ahead.mean()), float(depth.mean())) if len(ahead) and len(depth) else None,
        pace=pace,
        full=(float(by_rows.mean()), float(by_bytes.mean())) if len(by_rows) and len(by_bytes) else None,
        is_fed_ahead=not is_inline and len(depth) > 0 and bool(depth.max() > gather.number("rows").max(initial=0)),
        epoch_steps=epoch_steps,
        cold=cold / steps,
    )


def _fetches_of_workers(row_fetches: Spans, train: Spans) -> float:
    """How many images the workers that wait like this may have in the air: none bounds those of separate processes.

    Threads share the bound of their trainer's process; a process that builds rows has one of its own, for one row.
    """
    workers, trainers = ({one.lanes[lane][:2] for lane in np.unique(one.lane)} for one in (row_fetches, train))
    return max(1.0, _most(row_fetches, "max_fetches")) * len(workers) if workers <= trainers else math.inf


def _cold_starts(spans: Spans, kept: Spans) -> tuple[float | None, float]:
    """Steps of an epoch, and the seconds that the trainer waited because epochs begin with nothing at hand.

    Each beginning counts as the lower median of them: one that met an outage of the store says nothing of the others.

    Args:
        spans: of one rank.
        kept: those of them that are looked at.
    """
    gather = spans.named("gather")
    epochs = gather.numbers.get("epoch", np.full(len(gather), NO_NUMBER))
    gather, epochs = gather[epochs != NO_NUMBER], epochs[epochs != NO_NUMBER]
    begins = np.flatnonzero(np.diff(epochs)) + 1
    if not len(begins):
        return None, 0.0
    ready = gather.end[begins]  # a first step comes into an empty loop: whoever waits then, waits for it
    wait = kept.named("wait")
    is_cold = ((wait.start[:, None] <= ready) & (ready <= wait.end[:, None])).any(axis=1)
    whole = np.diff([0, *begins])  # the last one may go on
    cold = np.sort(wait.seconds[is_cold])
    return float(whole.max()), float(cold[(len(cold) - 1) // 2] * len(cold)) if len(cold) > 1 else 0.0


def _period(spans: Spans, train: Spans, made: Spans) -> tuple[int, int, int]:
    """From when, until when, and how many steps."""
    skip = max(1, len(train) // 5)
    if spans.dropped and len(made):  # before that, not all of what happened is left
        skip = max(skip, int(np.searchsorted(train.end, made.start[0])) + 1)
    last = len(train)
    if len(made):  # the last rows of an epoch are made before the last steps: nothing is left to wait for
        last = int(np.searchsorted(train.end, made.end.max(), side="right"))
    if last - skip < 2:
        skip, last = min(skip, len(train) - 2), len(train)
    return int(train.end[skip - 1]), int(train.end[last - 1]), last - skip


def _is_named(spans: Spans, *names: str) -> np.ndarray:
    chosen: np.ndarray = np.isin(spans.name, [at for at, name in enumerate(spans.names) if name in names])
    return chosen


def _share_of_time(spans: Spans, chosen: np.ndarray, within: np.ndarray) -> float:
    seconds = spans.seconds
    return float(seconds[chosen & within].sum() / max(seconds[chosen].sum(), 1e-12))


def _longest(durations: np.ndarray, count: float) -> float:
    """The longest of `count` durations, as expected when they are drawn from those seen; 0 where none was.

    >>> _longest(np.array([1.0, 3.0]), 2)
    2.5
    """
    if not len(durations):
        return 0.0
    chance = (np.arange(len(durations) + 1) / len(durations)) ** max(1.0, count)  # that all are among the shortest
    return float((np.sort(durations) * np.diff(chance)).sum())


def _sum(gather: Spans, key: str, steps: int) -> float | None:
    values = gather.number(key)
    return float(values.sum()) / steps if len(values) else None


def _most(gather: Spans, key: str) -> float:
    return float(gather.number(key).max(initial=0))
