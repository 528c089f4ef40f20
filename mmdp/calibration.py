"""The numbers of the pipeline model, read off the spans of one real run.

Adds: `calibrate`, spans to `Numbers`; `read_trace`, spans out of a trace file.
Leaves out: recording (`spans`, `climb`), and the model (`pipeline_run`).

The run must be one of the rungs with a coordinator. Wall time of spans that compute becomes processor time by how many
computed at once: more than there are processors got a share each. What no span tells is given: the latency of the store
alone (a fetch takes longer, since client and server compute too), and what a coordinator computes a row.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np

from mmdp.pipeline_model import Numbers
from mmdp.span_table import NO_NUMBER, Lane, Spans
from mmdp.spans import num_processors

DISPATCH = 0.0035
"""Processor seconds a row of a coordinator that passes references: 28 ms a step of 8 rows (stage 06, README)."""

FETCH_COMPUTE = 0.0005
"""Processor seconds a fetch: obstore, 64 in the air."""

_Z90 = 1.2816  # standard deviations from the median to the 90th of a hundred
_LEAST_STEPS, _LEAST_ROWS, _LEAST_FETCHES = 3, 8, 10
_COMPUTES = ("decode", "encode", "join")


def calibrate(
    spans: Spans,
    *,
    latency: float | None = None,
    dispatch: float = DISPATCH,
    fetch_compute: float = FETCH_COMPUTE,
) -> Numbers:
    """What things cost in the run that left these spans.

    Args:
        spans: of a run of rung prefetch or above, from `run_rung` or `read_trace`; the last run, if there are several.
        latency: seconds, median, that its store takes to answer, where it is known; by default a whole fetch.
        dispatch: processor seconds of the coordinator a row.
        fetch_compute: processor seconds of a fetch.

    Raises:
        ValueError: too few steps, rows or fetches, or spans of another kind of run.
    """
    spans = _last_run(spans)
    train, gather = spans.named("train"), spans.named("gather")
    if len(train) < _LEAST_STEPS:
        raise ValueError(f"{len(train)} steps of training in the trace: record at least {_LEAST_STEPS + 1}")
    if not len(gather.number("workers")) or not len(gather.number("depth")):
        raise ValueError("no `gather` of a coordinator's rank in the trace: record rung references, spread or near")
    trainer = {spans.lanes[lane].pid for lane in np.unique(train.lane)}
    own = np.array([lane.pid in trainer for lane in spans.lanes])
    away, here = spans[~own[spans.lane]], spans[own[spans.lane]]
    begun = int(train.start[0])  # before it, actors start and everything is done for the first time
    images, compute = _rows(spans, away, begun)
    fetch = _fetches(away, begun)
    if len(images) < _LEAST_ROWS or len(fetch) < _LEAST_FETCHES:
        raise ValueError(
            f"{len(images)} rows and {len(fetch)} fetches of workers after the first step: at least {_LEAST_ROWS} and "
            f"{_LEAST_FETCHES} tell what they cost; record more steps, of data that lies in a store"
        )
    taken = float(np.median(fetch.seconds))
    overhead = 0.0 if latency is None else max(0.0, taken - latency)
    tail = float(np.quantile(np.log(np.maximum(fetch.seconds - overhead, 1e-6)), 0.9))
    median = taken - overhead
    rows = int(np.median(gather.number("rows")))
    transfer, join = here.named("transfer"), here.named("join")
    return Numbers(
        row_images=tuple(images),
        row_compute=tuple(compute),
        samples=float(gather.number("samples").sum() / gather.number("rows").sum()),
        rows=rows,
        train=float(np.median(train.seconds)),
        latency=median,
        overhead=overhead,
        spread=max(0.0, (tail - float(np.log(median))) / _Z90),
        fetch_compute=fetch_compute,
        image_bytes=_mean(fetch.number("num_bytes")),
        row_bytes=_mean(transfer.number("num_bytes")) / rows,
        copy=float(sum(np.median(one.seconds) for one in (transfer, join) if len(one))) / rows,
        deal=_deal(gather, away.named("join")),
        dispatch=dispatch,
        start=max(0, int(away.named("fetch").start.min()) - int(gather.start[0])) / 1e9,
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


def _fetches(away: Spans, begun: int) -> Spans:
    """Fetches that went to the store; those of threads that decode find the bytes there already."""
    fetch, decoding = away.named("fetch"), np.unique(away.named("decode").lane)
    return fetch[(fetch.start >= begun) & ~np.isin(fetch.lane, decoding)]


def _rows(spans: Spans, away: Spans, begun: int) -> tuple[list[int], list[float]]:
    """Images and processor seconds of each row that workers made, in the order in which they came out."""
    computing = spans.named(*_COMPUTES)
    used = _Used(computing.start, computing.end, max(lane.processors for lane in spans.lanes))
    work = away.named(*_COMPUTES)
    is_join, is_decode = (np.array([name == one for name in work.names]) for one in ("join", "decode"))
    found: list[tuple[int, int, float]] = []  # end, images, seconds
    gaps: list[float] = []  # between rows of an actor: the row before is passed on, where the next one waits already
    for lane in np.unique(work.lane):
        mine = work[work.lane == lane]
        start, images, last = -1, 0, -1
        for begins, ends, name in zip(mine.start.tolist(), mine.end.tolist(), mine.name.tolist(), strict=True):
            start = begins if start < 0 else start
            images += bool(is_decode[name])
            if is_join[name]:
                if start >= begun:
                    found.append((ends, images, used.between(start, ends)))
                    if last >= 0:
                        gaps.append((start - last) / 1e9)
                start, images, last = -1, 0, ends
    passing = float(np.quantile(gaps, 0.25)) if gaps else 0.0
    found.sort()
    return [images for _, images, _ in found], [seconds + passing for _, _, seconds in found]


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


def _deal(gather: Spans, join: Spans) -> float:
    """Seconds from the last row that a rank waited for, or from its asking, to its answer."""
    ends = np.sort(join.end)
    late = []
    for start, end in zip(gather.start.tolist()[1:], gather.end.tolist()[1:], strict=True):
        at = int(np.searchsorted(ends, end))
        late.append((end - max(start, int(ends[at - 1]) if at else start)) / 1e9)
    return float(np.median(late)) if late else 0.0


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
