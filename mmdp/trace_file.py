"""Spans as a trace file, for https://ui.perfetto.dev or chrome://tracing.

Adds: `write_trace`. In: `Spans`. Out: a JSON file in the Trace Event Format, a process a process, a track a thread.
Leaves out: recording (`spans`).

The format wants the slices of one track to be apart or inside each other. An event loop has many fetches in the air at
once, so a thread gets as many tracks as its spans need: "name", "name (2)".

A process is named by what it does: who trains is the trainer, who makes rows and trains not is a worker, numbered as
they began. Of several runs in one file each has a bar beside the trainer, and its workers carry its name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mmdp.span_table import NO_NUMBER, Lane, Spans, merge

_MAKES_ROWS = {"fetch", "row_fetch", "decode", "encode", "join"}
"""Spans by which a worker is known, unless it trains as well."""


def write_trace(spans: Spans | Mapping[str, Spans], path: Path | str) -> Path:
    """Writes the spans, and makes the folder.

    Args:
        spans: of any number of processes and hosts; of several runs, those of each under its name.
        path: ends in `.json`.

    Raises:
        ValueError: no span, or another ending, which the viewer would not open.
    """
    path = Path(path)
    if path.suffix != ".json":
        raise ValueError(f"{path.name}: a trace file ends in .json, since that is how Perfetto and Chrome know it")
    runs = spans if isinstance(spans, Mapping) else {"": spans}
    spans = merge([*runs.values()])
    if not len(spans):
        raise ValueError("no span to write: call `mmdp.spans.start()` before the loop, and write after it")
    first = int(spans.start.min())
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "otherData": ')
        json.dump({"first_span_ns_since_1970": str(first), "dropped_spans": str(spans.dropped)}, file)
        file.write(', "traceEvents": [')
        for number, event in enumerate(_events(spans, runs, first)):
            file.write(",\n" if number else "\n")
            json.dump(event, file)
        file.write("\n]}\n")
    return path


def _events(spans: Spans, runs: Mapping[str, Spans], first: int) -> Iterator[dict[str, Any]]:
    pids = _process_numbers(spans.lanes)
    roles = _roles(runs)
    for (host, pid), number in pids.items():
        role = roles.get((host, pid), "")
        yield _metadata("process_name", number, 0, name=f"{role}{', ' * bool(role)}process {pid} on {host}")
    for order, known in enumerate(roles):
        yield _metadata("process_sort_index", pids[known], 0, sort_index=order)
    beside = pids[next(iter(roles), next(iter(pids)))]
    for which, (run, part) in enumerate(runs.items()):
        if run and len(part):
            bar = {"cat": "run", "name": run, "id": which, "pid": beside, "tid": 0}
            yield {"ph": "b", "ts": (int(part.start.min()) - first) / 1000, **bar}
            yield {"ph": "e", "ts": (int(part.end.max()) - first) / 1000, **bar}
    track = 0
    for place, lane in enumerate(spans.lanes):
        mine = np.flatnonzero(spans.lane == place)
        mine = mine[np.lexsort((-spans.end[mine], spans.start[mine]))]
        tracks = _tracks(spans.start[mine], spans.end[mine])
        process = pids[lane.host, lane.pid]
        for more in range(max(tracks, default=-1) + 1):
            name = f"{lane.thread} ({more + 1})" if more else lane.thread
            yield _metadata("thread_name", process, track + more + 1, name=name)
            yield _metadata("thread_sort_index", process, track + more + 1, sort_index=track + more)
        for at, more in zip(mine, tracks, strict=True):
            name = spans.names[spans.name[at]]
            yield {
                "ph": "X",
                "name": name,
                "cat": "mmdp",
                "ts": (int(spans.start[at]) - first) / 1000,
                "dur": int(spans.end[at] - spans.start[at]) / 1000,
                "pid": process,
                "tid": track + more + 1,
                "args": {key: int(values[at]) for key, values in spans.numbers.items() if values[at] != NO_NUMBER},
            }
        track += max(tracks, default=-1) + 1


def _metadata(kind: str, pid: int, tid: int, **args: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _roles(runs: Mapping[str, Spans]) -> dict[tuple[str, int], str]:
    """What each process is called, given as host and number: trainers first, then the workers of each run."""
    trainers: dict[tuple[str, int], None] = {}
    workers: dict[tuple[str, int], str] = {}
    for spans in runs.values():
        trainers |= dict.fromkeys(_processes(spans.named("train")))
    for run, spans in runs.items():
        prefix, number = f"{run}: " if run else "", 0
        for process in _processes(spans.named(*_MAKES_ROWS)):
            if process not in trainers and process not in workers:
                number += 1
                workers[process] = f"{prefix}worker {number}"
    alone = len(trainers) == 1
    return {one: "trainer" if alone else f"trainer {at}" for at, one in enumerate(trainers, 1)} | workers


def _processes(spans: Spans) -> list[tuple[str, int]]:
    """Host and number of those that spans, given earliest first, are of; in the order in which they began."""
    lanes = [spans.lanes[lane] for lane in dict.fromkeys(spans.lane.tolist())]
    return list(dict.fromkeys((lane.host, lane.pid) for lane in lanes))


def _process_numbers(lanes: tuple[Lane, ...]) -> dict[tuple[str, int], int]:
    """The number of each process in the file: its own, unless one of another host has it already."""
    numbers: dict[tuple[str, int], int] = {}
    for lane in lanes:
        number = lane.pid
        while number in numbers.values() and (lane.host, lane.pid) not in numbers:
            number += 1
        numbers.setdefault((lane.host, lane.pid), number)
    return numbers


def _tracks(start: np.ndarray, end: np.ndarray) -> list[int]:
    """The track of each span, so that on none of them two overlap without one being inside the other.

    Args:
        start: (N,) ascending; of equal ones the longest first.
        end: (N,).

    >>> _tracks(np.array([0, 1, 2, 9]), np.array([5, 3, 6, 9]))
    [0, 0, 1, 0]
    """
    chosen = []
    open_ends: list[list[int]] = []  # for each track the ends of the spans that are open, innermost last
    for begins, ends in zip(start.tolist(), end.tolist(), strict=True):
        for inside in open_ends:
            while inside and inside[-1] <= begins:
                inside.pop()
        fits = (track for track, inside in enumerate(open_ends) if not inside or ends <= inside[-1])
        track = next(fits, len(open_ends))
        if track == len(open_ends):
            open_ends.append([])
        open_ends[track].append(ends)
        chosen.append(track)
    return chosen
