"""The numbers of the pipeline model, read off the spans of one real run.

Adds: `calibrate`, spans to `Numbers`; `read_trace`, spans out of a trace file.
Leaves out: recording (`spans`, `climb`), and the model (`pipeline_run`).

The run must be one rank on one of the rungs with a coordinator. A run over a whole epoch tells how long one is, and
what each of its rows costs; from a shorter one, rows are taken to go on for ever. Wall time of spans that compute
becomes processor time by how many computed at once: more than there are processors got a share each. Others that
compute leave no spans, and what is in the way of a call can't be told from the call; so the nearest to the truth is a
run in which nothing is in the way: fewer actors than processors, and a window of one step.

What no span tells is given: the latency of the store alone (a fetch takes longer, since client and server compute too),
the processor seconds of all that belongs to a row, and how busy the machine is without one.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mmdp.machine import num_processors
from mmdp.pipeline_model import CallCost, FetchCost, Numbers, RowCost
from mmdp.span_table import NO_NUMBER, Lane, Spans

FETCH_COMPUTE, FETCH_AROUND = 0.002, 0.002
"""Processor seconds a fetch, of its actor and of others: where nobody has measured them (`benchmarks/simulate.py`)."""

_Z90 = 1.2816  # standard deviations from the median to the 90th of a hundred
_LEAST_STEPS, _LEAST_ROWS, _LEAST_FETCHES = 3, 8, 10
_COMPUTES = ("decode", "encode", "join")


@dataclass(frozen=True, slots=True)
class Used:
    """Processor time that the operating system counts by process.

    Attributes:
        actor: seconds a row of the actors, `background` aside.
        others: seconds a row of all else that belongs to the run, likewise: coordinator, reader, Ray's own processes, a
            store on this machine.
        background: seconds a second of all of it while nobody asks for rows.
    """

    actor: float
    others: float
    background: float = 0.0


def calibrate(
    spans: Spans,
    *,
    latency: float | None = None,
    used: Used | None = None,
) -> Numbers:
    """What things cost in the run that left these spans.

    Args:
        spans: of one rank on rung references or above, from `run_rung` or `read_trace`; the last run, if there are
            several.
        latency: seconds, median, that its store takes to answer, where it is known; by default a whole fetch.
        used: processor time of the processes, where it is known: what spans do not account for goes to fetches. By
            default a fetch takes `FETCH_COMPUTE` of its actor, `FETCH_AROUND` of others, and there is no background.

    Raises:
        ValueError: too few steps, rows or fetches, or spans of another kind of run.
    """
    spans = _last_run(spans)
    train, gather = spans.named("train"), spans.named("gather")
    if len(train) < _LEAST_STEPS:
        raise ValueError(f"{len(train)} steps of training in the trace: record at least {_LEAST_STEPS + 1}")
    if len(np.unique(train.lane)) > 1:
        raise ValueError(f"{len(np.unique(train.lane))} ranks train in the trace: record one alone")
    if not len(gather.number("workers")) or not len(gather.number("depth")):
        raise ValueError("no `gather` of a coordinator's rank in the trace: record rung references, spread or near")
    trainer = {spans.lanes[lane].pid for lane in np.unique(train.lane)}
    own = np.array([lane.pid in trainer for lane in spans.lanes])
    away, here = spans[~own[spans.lane]], spans[own[spans.lane]]
    begun = int(train.start[0])  # before it, actors start and everything is done for the first time
    made, passing = _rows(spans, away)
    fetch = _fetches(away)
    warm = fetch[fetch.start >= begun]
    if sum(one.begin >= begun for one in made) < _LEAST_ROWS or len(warm) < _LEAST_FETCHES:
        raise ValueError(
            f"{len(made)} rows and {len(fetch)} fetches of workers, not all of them after the first step: at least "
            f"{_LEAST_ROWS} and {_LEAST_FETCHES} tell what they cost; record more steps, of data that lies in a store"
        )
    taken = float(np.median(warm.seconds))
    overhead = 0.0 if latency is None else max(0.0, taken - latency)
    tail = float(np.quantile(np.log(np.maximum(warm.seconds - overhead, 1e-6)), 0.9))
    median = taken - overhead
    step_rows = int(np.median(gather.number("rows")))
    rows, epoch_rows = _costs(made, gather, begun)
    transfer, join = here.named("transfer"), here.named("join")
    copy = float(sum(np.median(one.seconds) for one in (transfer, join) if len(one))) / step_rows
    call = _calls(gather, fetch, away.named("join"), step_rows, passing)
    computing, around = FETCH_COMPUTE, FETCH_AROUND
    if used is not None:
        images, compute, _ = np.mean(rows, axis=0).tolist()
        computing = max(0.0, used.actor - compute) / max(images, 1e-9)
        around = max(0.0, used.others - call.dispatch - copy) / max(images, 1e-9)
    return Numbers(
        rows=rows,
        step_rows=step_rows,
        train=float(np.median(train.seconds)),
        fetch=FetchCost(
            latency=median,
            overhead=overhead,
            spread=max(0.0, (tail - float(np.log(median))) / _Z90),
            compute=computing,
            around=around,
            num_bytes=_mean(warm.number("num_bytes")),
        ),
        call=call,
        row_bytes=_mean(transfer.number("num_bytes")) / step_rows,
        copy=copy,
        epoch_rows=epoch_rows,
        start=max(0, int(fetch.start.min()) - int(gather.start[0])) / 1e9,
        background=used.background if used is not None else 0.0,
        processors=max(lane.processors for lane in spans.lanes),
        workers=int(gather.number("workers").max()),
        depth=int(gather.number("depth").max()),
    )


def _last_run(spans: Spans) -> Spans:
    """The spans since the first `gather` that waited for the workers that were last at work; each run has new ones."""
    decode, gather = spans.named("decode"), spans.named("gather")
    if not len(decode) or not len(gather):
        return spans
    pids = np.array([lane.pid for lane in spans.lanes])
    last = pids[decode.lane[-1]]
    came = int(spans.start[pids[spans.lane] == last].min())
    before = gather.start[gather.start <= came]
    return spans[spans.start >= before[-1]] if len(before) else spans


class _Made(NamedTuple):
    """A row that a worker made: nanoseconds in which, images, processor seconds."""

    end: int
    begin: int
    images: int
    compute: float


def _fetches(away: Spans) -> Spans:
    """Fetches that went to the store; those of threads that decode find the bytes there already."""
    fetch, decoding = away.named("fetch"), np.unique(away.named("decode").lane)
    return fetch[~np.isin(fetch.lane, decoding)]


def _rows(spans: Spans, away: Spans) -> tuple[list[_Made], float]:
    """The rows that workers made, in the order in which they came out; and how long it takes to pass one on."""
    computing = spans.named(*_COMPUTES)
    used = _Used(computing.start, computing.end, max(lane.processors for lane in spans.lanes))
    work = away.named(*_COMPUTES)
    is_join, is_decode = (np.array([name == one for name in work.names]) for one in ("join", "decode"))
    found: list[_Made] = []
    gaps: list[float] = []  # between rows of an actor: the row before is passed on, where the next one waits already
    for lane in np.unique(work.lane):
        mine = work[work.lane == lane]
        start, images, last = -1, 0, -1
        for begins, ends, name in zip(mine.start.tolist(), mine.end.tolist(), mine.name.tolist(), strict=True):
            start = begins if start < 0 else start
            images += bool(is_decode[name])
            if is_join[name]:
                found.append(_Made(ends, start, images, used.between(start, ends)))
                if last >= 0:
                    gaps.append((start - last) / 1e9)
                start, images, last = -1, 0, ends
    passing = float(np.quantile(gaps, 0.25)) if gaps else 0.0
    return sorted(one._replace(compute=one.compute + passing) for one in found), passing


def _costs(made: list[_Made], gather: Spans, begun: int) -> tuple[tuple[RowCost, ...], int]:
    """What each row costs, and the rows of an epoch; 0 where its end was not seen.

    Rows come out nearly in their order. Those before the first step cost what others of as many images do.
    """
    told = gather.numbers["rows"] != NO_NUMBER  # at the end of an epoch, a reader is told so, and gets no rows
    ends = np.flatnonzero(~told)
    steps = gather[np.arange(int(ends[0]))] if len(ends) else gather
    samples = np.repeat(steps.number("samples") / steps.number("rows"), steps.number("rows")).tolist()
    warm = [one for one in made if one.begin >= begun]
    an_image = sum(one.compute for one in warm) / max(1, sum(one.images for one in warm))
    rows = tuple(
        RowCost(one.images, one.compute if one.begin >= begun else one.images * an_image, each)
        for one, each in zip(made, samples, strict=False)  # of the rows made ahead nobody has told the samples
    )
    return rows, len(rows) if len(ends) else 0


class _Used:
    """Processor time that one of several gets between two moments.

    Args:
        start: (N,) nanoseconds, of all that compute.
        end: (N,).
        processors: that they share.
    """

    def __init__(self, start: np.ndarray, end: np.ndarray, processors: int) -> None:
        self._cuts = np.unique(np.concatenate([start, end]))
        change = np.zeros(len(self._cuts))
        np.add.at(change, np.searchsorted(self._cuts, start), 1)
        np.add.at(change, np.searchsorted(self._cuts, end), -1)
        share = np.minimum(1.0, processors / np.maximum(1.0, np.cumsum(change)[:-1]))
        self._passed = np.concatenate([[0.0], np.cumsum(share * np.diff(self._cuts) / 1e9)])

    def between(self, start: int, end: int) -> float:
        """Seconds."""
        begun, ended = np.interp([start, end], self._cuts, self._passed)
        return float(ended - begun)


def _calls(gather: Spans, fetch: Spans, join: Spans, step_rows: int, passing: float) -> CallCost:
    """What going through the coordinator takes.

    With each call for a step, room for as many rows gets free: their fetches start one row after the other, and where
    the step that was called for lies ready, its answer waits for that.
    """
    starts, ends = np.sort(fetch.start), np.sort(join.end)
    first, spacing, late = [], [], []
    asked, answered = gather.start.tolist(), gather.end.tolist()
    for start, end, until in zip(asked[1:-1], answered[1:-1], asked[2:], strict=True):
        begun = starts[np.searchsorted(starts, start) : np.searchsorted(starts, until)]
        if len(begun):
            first.append((int(begun[0]) - start) / 1e9)
            spacing.append((int(begun[-1]) - int(begun[0])) / 1e9 / max(1, step_rows - 1))
        at = int(np.searchsorted(ends, end))
        last = int(ends[at - 1]) / 1e9 + passing if at else 0.0
        late.append((end / 1e9 - max(start / 1e9, last), last < start / 1e9))
    dispatch = float(np.median(spacing)) if spacing else 0.0
    deal = [seconds - dispatch * step_rows * was_ready for seconds, was_ready in late]
    return CallCost(
        dispatch=dispatch,
        launch=max(0.0, float(np.median(first)) - dispatch) if first else 0.0,
        deal=max(0.0, float(np.median(deal))) if deal else 0.0,
    )


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else 0.0


def read_trace(path: Path | str, *, processors: int | None = None) -> Spans:
    """Spans out of a file of `write_trace`.

    Args:
        path: of the file.
        processors: of the machine it was recorded on, which the file does not tell; by default those of this one.

    Raises:
        ValueError: no trace file of mmdp.
    """
    wrong = f"{Path(path).name} is no trace that mmdp has written: give a file of `write_trace`, or of --trace"
    try:
        read = json.loads(Path(path).read_text(encoding="utf-8"))
        events, first = read["traceEvents"], int(read["otherData"]["first_span_ns_since_1970"])
        dropped = int(read["otherData"]["dropped_spans"])
        told = [one for one in events if one["ph"] == "M"]
        noted = [one for one in events if one["ph"] == "X"]
        hosts = {one["pid"]: one["args"]["name"] for one in told if one["name"] == "process_name"}
        threads = {one["tid"]: one["args"]["name"] for one in told if one["name"] == "thread_name"}
        names = {name: at for at, name in enumerate(dict.fromkeys(one["name"] for one in noted))}
        # A thread with spans that overlap has several tracks: "name", "name (2)", "name (3)".
        tracks = {one["tid"]: one["pid"] for one in noted}
        lanes = {(pid, re.sub(r" \(\d+\)$", "", threads[tid])) for tid, pid in tracks.items()}
        places = {lane: at for at, lane in enumerate(sorted(lanes))}
        keys = dict.fromkeys(key for one in noted for key in one["args"])
        start = np.array([first + round(one["ts"] * 1000) for one in noted], dtype=np.int64)
        return Spans(
            names=tuple(names),
            lanes=tuple(
                Lane(hosts[pid].partition(" on ")[2], pid, at, thread, processors or num_processors())
                for (pid, thread), at in places.items()
            ),
            name=np.array([names[one["name"]] for one in noted], dtype=np.int64),
            lane=np.array(
                [places[one["pid"], re.sub(r" \(\d+\)$", "", threads[one["tid"]])] for one in noted], dtype=np.int64
            ),
            start=start,
            end=start + np.array([round(one["dur"] * 1000) for one in noted], dtype=np.int64),
            numbers={key: np.array([one["args"].get(key, NO_NUMBER) for one in noted], dtype=np.int64) for key in keys},
            dropped=dropped,
        )
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(wrong) from error
