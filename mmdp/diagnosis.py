"""Why the trainer waits, how one knows, what to do next, and what that should give.

Adds: `diagnose`, from the spans of a run to a `Diagnosis`, whose text is for a person.
Leaves out: recording (`spans`), the works of a step (`step_work`), the model that predicts (`pace`).

The bound is the resource that, twice as good, would make the step shortest: a store, processors, links or a trainer
twice as fast, or twice the window. The next lever is another question: reading ahead of the trainer can be worth more
than any of these. So the levers are tried in the model one by one, each just as far as it helps, and the best is named;
of two that are as good, the earlier rung of the ladder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from mmdp.pace import RESOURCES, Pace, explained
from mmdp.refusals import counted
from mmdp.span_table import Spans
from mmdp.step_work import KINDS, StepWork, measure_steps

_WORTH = 1.02
"""A lever that makes the step less than 2 % shorter is not worth a word; nor is one better by less than another."""

_MUCH = 1.5
"""With a trainer twice as fast, at least so many times the steps: the feeding would keep up with most of it."""

_DOUBLING = 1.1
"""A number is doubled again as long as steps become 10 % shorter: beyond that, the next bound is near."""

_ENOUGH = 0.05
"""Wait ratio below which nobody needs to do anything."""

_MOST_FETCHES = 256
"""At a time: beyond it, client and server are what is slow (1,600 gets/s at 256 in the air over a link of 40 ms)."""

_MOST_THREADS = 64
"""That fetch and decode: they cost a stack and a switch each."""

_MOST_PROCESSES = 8
"""That wait for a store, for each processor: each has memory, and modules loaded, of its own."""

_MOSTLY = 0.5
"""Share from which on a window counts as full, or cold starts as the cause of waiting."""

_MOST_TIMES = 64
"""As wide as a window may become."""

_BY_REFERENCE = 0.25
"""What passing a row costs by reference, over by value. Ray 2.60 on one node, 24 MB: 11.3 against 2.0 ms of processor
time, 15.7 against 8.7 ms in all; between the two."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the model says of a pipeline that was not run.

    Attributes:
        seconds: of a step.
        wait_ratio: 0 to 1.
        gain: steps a second over those that were seen.
        samples_per_second: None where no loader told how many samples a step has.
    """

    seconds: float
    wait_ratio: float
    gain: float
    samples_per_second: float | None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What bounds a pipeline.

    Attributes:
        bound: `I/O`, `CPU`, `transport`, `memory` (the window of rows and bytes in flight) or `trainer`.
        gains: for each resource, steps a second over those seen, were it twice as good.
        work: what was measured.
        pace: the same as the model has it, the window solved for.
        lever: what to do next, in words.
        changed: the pace with that done.
        rung: of the ladder that does it; "" where none does.
    """

    bound: str
    gains: Mapping[str, float]
    work: StepWork
    pace: Pace
    lever: str
    changed: Pace
    rung: str = ""

    @property
    def wait_ratio(self) -> float:
        """Exposed wait over exposed wait and training, 0 to 1."""
        return _ratio(self.work.wait, self.work.train)

    @property
    def samples_per_second(self) -> float | None:
        """None where no loader told how many samples a step has."""
        return None if self.work.samples is None else self.work.samples / self.work.seconds

    @property
    def _bound_in_words(self) -> str:
        """The bound; where a faster trainer is worth most, and it waits nevertheless, also why."""
        if _is_cold(self.work):
            return f"cold starts ({_each_cold(self.work)})"
        if self.wait_ratio > _ENOUGH and max(self.gains.values()) < _WORTH:
            return "nothing that was measured (a busy machine, say)"
        if self.bound != "trainer" or self.wait_ratio <= _ENOUGH:
            return self.bound
        if self.pace.is_inline or not self.pace.is_ahead:
            return "the order of work (feeding and training take turns)"
        return "trainer (no part of the feeding is worth more alone)"

    @property
    def after(self) -> Prediction:
        """What the lever should give."""
        return self.predict(self.changed)

    def predict(self, pace: Pace) -> Prediction:
        """What a changed pipeline should do: `predict(replace(diagnosis.pace, fetches=64))`."""
        return _predict(self.work, self.pace, pace)

    def __str__(self) -> str:
        work, after = self.work, self.after
        lines = [
            f"bound by {self._bound_in_words}: the trainer waits {self.wait_ratio:.0%} of the time, {_time(work.wait)} "
            f"of a step of {_time(work.seconds)}, over the {counted(work.steps, 'step')} looked at",
            f"a step has {', '.join(_evidence(work))}",
            f"twice as much or as fast would give: {_by_gain(self.gains)}",
            f"next: {self.lever}",
        ]
        if after.gain >= _WORTH:
            lines[-1] += f"; predicted: waits {after.wait_ratio:.0%}, {after.gain:.2f} times as fast"
        return "\n".join(lines)


def diagnose(spans: Spans, rungs: Collection[str] = ()) -> Diagnosis:
    """What bounds the run that these spans are of.

    Args:
        spans: `wait` and `train` of the trainer, and what its loader's workers did meanwhile. How many of these there
            are, a loader notes in its `gather` spans; without those, it is what was seen at a time.
        rungs: of the ladder that the run has climbed already: none of them is what to do next.

    Raises:
        ValueError: no spans, fewer than three steps, or none that say why the trainer waits.
    """
    work = measure_steps(spans)
    pace = explained(work.pace, work.seconds, work.window[0] if work.window else None)
    gains = {resource: _predict(work, pace, pace.doubled(resource)).gain for resource in RESOURCES}
    if _is_cold(work) or (work.full is not None and max(work.full) < _MOSTLY):
        gains["memory"] = 1.0  # more may be in flight than is: a wider window would stay as empty
    bound = max(RESOURCES, key=lambda resource: gains[resource])
    lever = _best_lever(work, pace, gains, rungs)
    return Diagnosis(bound, gains, work, pace, lever.words, lever.changed, lever.rung)


class _Lever(NamedTuple):
    """What can be done.

    Attributes:
        words: for a person.
        changed: what it makes of the pace.
        rung: of the ladder that does it.
    """

    words: str
    changed: Pace
    rung: str = ""


def _is_cold(work: StepWork) -> bool:
    """Whether the trainer waits mostly because epochs begin with nothing at hand."""
    waits = _ratio(work.wait, work.train) > _ENOUGH
    return waits and work.is_fed_ahead and work.epoch_steps is not None and work.cold > _MOSTLY * work.wait


def _each_cold(work: StepWork) -> str:
    steps = work.epoch_steps or 0
    return f"an epoch is {steps:,.0f} {'step' if steps == 1 else 'steps'}, and each begins cold"


def _predict(work: StepWork, pace: Pace, changed: Pace) -> Prediction:
    # Relative to what the model says of the run as it was, so that what it can't explain stays as it is.
    gain = pace.seconds / changed.seconds if changed.seconds > 0 else 1.0
    seconds = max(work.seconds / gain, changed.consumer)  # nothing makes a step shorter than the consumer is busy
    if changed == replace(pace, train=changed.train):  # nor does training that is saved save more than itself
        seconds = max(seconds, work.seconds - (pace.train - changed.train))
    gain = work.seconds / seconds if seconds > 0 else 1.0
    train = work.train * changed.train / pace.train if pace.train > 0 else 0.0
    samples = None if work.samples is None else work.samples / seconds
    return Prediction(seconds, _ratio(max(0.0, seconds - changed.train), train), gain, samples)


def _best_lever(work: StepWork, pace: Pace, gains: Mapping[str, float], rungs: Collection[str]) -> _Lever:
    if _is_cold(work) and work.window is not None:
        words = f"longer epochs, of more samples: {_each_cold(work)}, since nothing is made ahead over its end"
        return _Lever(words, replace(pace, is_ahead=True, ahead=max(pace.ahead, work.window[1])))
    best = _Lever("", pace)
    is_fed = _ratio(work.wait, work.train) <= _ENOUGH
    for lever in () if is_fed else _levers(work, pace):
        if lever.rung not in rungs and lever.changed.seconds * _WORTH < best.changed.seconds:
            best = lever
    if best.words:
        return best
    bound = max(RESOURCES, key=lambda resource: gains[resource])
    if not is_fed and gains[bound] < _WORTH:
        return _Lever("look again on a quiet machine, over more steps: what was measured is no reason to wait", pace)
    if not is_fed and bound != "trainer":
        return _Lever(f"no lever of the loader helps: {bound} itself has to become faster", pace)
    if not is_fed:
        return _Lever("no lever of the loader alone helps much: look again on a quiet machine, over more steps", pace)
    if work.window is None or round(work.window[0]) >= pace.rows:  # a batch, as it is printed
        return _Lever("nothing to do for the feeding: the trainer is busy, and rows lie ready", pace)
    if gains["trainer"] >= _MUCH:
        return _Lever("nothing to do for the feeding: the trainer is busy, and rows come in time", pace)
    words = "nothing to do for the feeding now; rows come just in time, so a faster trainer would wait for them"
    return _Lever(words, pace)


def _levers(work: StepWork, pace: Pace) -> Iterator[_Lever]:
    """What can be done, in the order of the rungs."""
    processors = pace.processors
    is_over = work.epoch_steps is not None and work.epoch_steps < 2  # nothing is made ahead over an epoch's end
    own = list(_of_workers_that_fetch(work, pace, is_over=is_over))
    yield from own
    if pace.fetch and not (pace.is_inline and own):
        apart = replace(pace, is_inline=False, is_shared=False, row_fetch=work.row_fetch)
        apart = replace(apart, fetch=pace.in_air) if work.waits_by_row else apart
        if pace.is_inline:
            apart = replace(apart, is_ahead=False, workers=processors)
        at_once = pace.workers if pace.is_shared else pace.fetches
        count, changed = _least(at_once, _MOST_FETCHES, lambda count: replace(apart, fetches=count))
        words = f"concurrent fetches, {count:,.0f} images at a time"
        if pace.is_inline:
            words = f"build rows concurrently: fetch {count:,.0f} images at a time, decode in {processors:,.0f} workers"
            yield _Lever(words, changed, "concurrent")
        elif not own:
            yield _Lever(words, changed)
        elif changed.seconds * _DOUBLING < min(lever.changed.seconds for lever in own):  # else a number is easier
            yield _Lever(f'{words}, apart from decoding: `executor="ray"`', changed)
    if not pace.is_inline and not pace.is_shared:
        count, changed = _least(pace.workers, processors, lambda count: replace(pace, workers=count))
        yield _Lever(f"more workers or processes, {count:,.0f} in place of {pace.workers:,.0f}", changed)
    if not is_over and (pace.is_inline or (not pace.is_ahead and not work.is_fed_ahead)):
        alone = replace(pace, is_inline=False, is_shared=True) if pace.is_inline else pace
        changed = replace(alone, is_ahead=True, ahead=2 * pace.rows)
        yield _Lever("prefetch: make rows while the trainer works", changed, "prefetch")
    elif pace.is_ahead and (knob := _full(work)):
        count, changed = _least(1, _MOST_TIMES, pace.widened)
        yield _Lever(f"{count:,.0f} times the rows in flight, as far as memory allows: raise {knob}", changed)
    if pace.transfer:
        words = "pass rows by reference, with workers spread over the nodes or near the ranks"
        yield _Lever(words, replace(pace, transfer=pace.transfer * _BY_REFERENCE), "references")
    if pace.own_transfer:
        words = "move batches one step ahead, on a stream of their own: `mmdp.feed`"
        yield _Lever(words, replace(pace, own_transfer=0.0))
    if (pace.compute + pace.own_compute) / processors >= _MOSTLY * pace.seconds:
        words = "smaller images or more nodes: every processor here is busy"
        yield _Lever(words, replace(pace, compute=pace.compute / 2, own_compute=pace.own_compute / 2))


def _of_workers_that_fetch(work: StepWork, pace: Pace, *, is_over: bool) -> Iterator[_Lever]:
    """Numbers of a loader whose workers wait for what they fetch, and need no processor meanwhile."""
    if work.is_alone and (work.waits_by_row if pace.is_inline else pace.is_shared):
        count, changed = _least(1, _MOST_THREADS, partial(_in_threads, pace, is_ahead=not is_over))
        ahead = "" if is_over else " and ahead"
        yield _Lever(f'build rows concurrently{ahead}: `executor="threads"`, `num_workers={count:.0f}`', changed)
    elif pace.is_shared and not pace.is_inline:
        most = _MOST_THREADS if pace.fetches < math.inf else _MOST_PROCESSES * pace.processors
        count, changed = _least(pace.workers, most, partial(_with_workers, work, pace))
        words = f"more workers: {count:,.0f} in place of {pace.workers:,.0f}{_and_depth(work, pace)}"
        yield _Lever(f"{words}, since each waits for what it fetches", changed)
        if pace.in_air and pace.fetches < _MOST_FETCHES:
            count, changed = _least(pace.fetches, _MOST_FETCHES, lambda count: replace(pace, fetches=count))
            yield _Lever(f"more fetches: `max_fetches` {count:,.0f} in place of {pace.fetches:,.0f}", changed)


def _in_threads(pace: Pace, count: float, *, is_ahead: bool) -> Pace:
    """Rows that nobody else made, made by so many threads, as deep as a loader has it by default."""
    ahead = 2 * pace.rows + count - 1
    return replace(pace, is_inline=False, is_shared=True, is_ahead=is_ahead, workers=count, ahead=ahead)


def _with_workers(work: StepWork, pace: Pace, count: float) -> Pace:
    """With so many workers, and as many rows more in flight where their number is what bounds these."""
    more = count - pace.workers if _full(work) != "`max_bytes`" and _full(work) else 0.0
    return replace(pace, workers=count, ahead=pace.ahead + more)


def _and_depth(work: StepWork, pace: Pace) -> str:
    """What else to raise for more workers: a `depth` that was given does not grow with them."""
    is_given = work.window is not None and round(work.window[1]) != round(2 * pace.rows + pace.workers)
    return ", and as much more `depth`" if is_given else ""


def _full(work: StepWork) -> str:
    """What to raise for more rows in flight: the bound that most steps met; "" where they met none."""
    if work.full is None:
        return "`depth` or `max_bytes`, whichever is full"
    by_rows, by_bytes = work.full
    if max(by_rows, by_bytes) < _MOSTLY:
        return ""
    return "`depth`" if by_rows >= by_bytes else "`max_bytes`"


def _least(now: float, most: float, change: Callable[[float], Pace]) -> tuple[float, Pace]:
    """Twice, four times, ... of what there is now, up to `most`, as long as each doubling helps."""
    best = (now, change(now))
    number = 2 * now
    while number <= most:
        changed = change(number)
        if changed.seconds * _DOUBLING >= best[1].seconds:
            break
        best = (number, changed)
        number *= 2
    return best


def _ratio(wait: float, train: float) -> float:
    return wait / (wait + train) if wait + train > 0 else 0.0


def _evidence(work: StepWork) -> Iterator[str]:
    """Work of each kind, how much of it went on at a time, and how far rows were ahead."""
    for resource, names in KINDS.items():
        seconds = [f"{name} {_time(work.busy[name])}" for name in names if name in work.busy]
        if seconds:
            at_once = work.reached[resource]
            yield " + ".join(seconds) + (f" (up to {at_once:.0f} at a time)" if at_once > 1 else "")
    yield f"train {_time(work.train)}"
    if work.window is not None:
        yield f"{work.window[0]:.0f} of at most {work.window[1]:.0f} rows ahead when it trains"


def _by_gain(gains: Mapping[str, float]) -> str:
    named = [f"{name} x{gains[name]:.2f}" for name in sorted(gains, key=lambda name: -gains[name])]
    return f"{', '.join(named)} steps a second"


def _time(seconds: float) -> str:
    """Seconds with three figures.

    >>> _time(1.234), _time(0.0456), _time(0)
    ('1.23 s', '45.6 ms', '0 ms')
    """
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
