"""Laws of `trace_file.py`: a file in the Trace Event Format, which says all that the spans say."""

import json
from collections import defaultdict

import numpy as np
import pytest

from mmdp.calibration import read_trace
from mmdp.span_table import NO_NUMBER, Lane, Spans, merge
from mmdp.trace_file import write_trace


def table(lane: Lane, times, name="fetch", numbers=None) -> Spans:
    start, end = np.array(times, dtype=np.int64).reshape(-1, 2).T
    zeros = np.zeros(len(start), dtype=np.int64)
    return Spans((name,), (lane,), zeros, zeros, start, end, numbers or {})


LOOP = Lane("host-a", 10, 1, "event loop", 2)
WORKER = Lane("host-a", 10, 2, "mmdp-worker", 2)
ELSEWHERE = Lane("host-b", 10, 1, "MainThread", 2)
SPANS = merge(
    [
        table(LOOP, [(1000, 9000), (2000, 9500), (3000, 4000), (9500, 9600)]),
        table(WORKER, [(1000, 2000)], "decode", {"num_bytes": np.array([7])}),
        table(ELSEWHERE, [(500, 501)], "train", {"step": np.array([NO_NUMBER])}),
    ]
)


@pytest.fixture
def trace(tmp_path):
    return json.loads(write_trace(SPANS, tmp_path / "new" / "trace.json").read_text())


def test_events_have_what_the_format_asks_for(trace):
    """Law: each slice has its phase, times in microseconds, process, track, name and numbers."""
    assert "ms" == trace["displayTimeUnit"]
    assert "500" == trace["otherData"]["first_span_ns_since_1970"]
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(SPANS) == len(slices)
    for event in slices:
        assert isinstance(event["name"], str)
        assert isinstance(event["cat"], str)
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
    decode = next(event for event in slices if event["name"] == "decode")
    assert (0.5, 1.0, {"num_bytes": 7}) == (decode["ts"], decode["dur"], decode["args"])
    train = next(event for event in slices if event["name"] == "train")
    assert (0.0, 0.001, {}) == (train["ts"], train["dur"], train["args"])
    assert {"X", "M"} == {event["ph"] for event in trace["traceEvents"]}


def test_every_process_and_track_has_a_name(trace):
    """Law: two processes of one number, on two hosts, stay two; each slice lies on a track that is named."""
    events = trace["traceEvents"]
    names = {
        kind: {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == kind}
        for kind in ("process_name", "thread_name")
    }
    assert {"worker 1, process 10 on host-a", "trainer, process 10 on host-b"} == set(names["process_name"].values())
    assert 2 == len({pid for pid, _ in names["process_name"]})
    assert {"event loop", "event loop (2)", "mmdp-worker", "MainThread"} == set(names["thread_name"].values())
    slices = [event for event in events if event["ph"] == "X"]
    assert {(event["pid"], event["tid"]) for event in slices} == set(names["thread_name"])
    assert len(names["thread_name"]) == len({tid for _, tid in names["thread_name"]})


def test_runs_and_roles_are_told_apart(tmp_path):
    """Law: who trains is the trainer, whatever else it does; workers are numbered in each run; a run has its bar."""
    trainer, one, other, new = (Lane("host", pid, 1, "MainThread", 2) for pid in (1, 2, 3, 4))
    nobody = Lane("host", 5, 1, "MainThread", 2)
    first = [
        table(trainer, [(0, 9)], "decode"),
        table(other, [(5, 6)], "fetch"),
        table(one, [(1, 2), (7, 8)], "decode"),
        table(trainer, [(10, 20)], "train"),
    ]
    second = [table(new, [(30, 31)], "join"), table(trainer, [(32, 40)], "train"), table(nobody, [(30, 31)], "wait")]
    path = write_trace({"serial": merge(first), "none": merge([]), "near": merge(second)}, tmp_path / "trace.json")
    events = json.loads(path.read_text())["traceEvents"]
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {
        1: "trainer, process 1 on host",
        2: "serial: worker 1, process 2 on host",
        3: "serial: worker 2, process 3 on host",
        4: "near: worker 1, process 4 on host",
        5: "process 5 on host",
    } == named
    order = {event["pid"]: event["args"]["sort_index"] for event in events if event["name"] == "process_sort_index"}
    assert {1: 0, 2: 1, 3: 2, 4: 3} == order
    bars = [(event["ph"], event["name"], event["ts"], event["pid"]) for event in events if event["ph"] in "be"]
    serial, near = [("b", "serial", 0.0, 1), ("e", "serial", 0.02, 1)], [("b", "near", 0.03, 1), ("e", "near", 0.04, 1)]
    assert serial + near == bars
    again = read_trace(path)
    assert (8, {"host"}) == (len(again), {lane.host for lane in again.lanes}), "a bar is no span, a role no host"


def test_several_trainers_are_numbered(tmp_path):
    """Law: ranks on one host are told apart by more than their process."""
    ranks = [table(Lane("host", pid, 1, "MainThread", 2), [(pid, 9)], "train") for pid in (2, 1)]
    events = json.loads(write_trace(merge(ranks), tmp_path / "trace.json").read_text())["traceEvents"]
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {1: "trainer 1, process 1 on host", 2: "trainer 2, process 2 on host"} == named


def test_slices_of_a_track_are_apart_or_inside_each_other(trace):
    """Law: which is what the viewer needs; spans that overlap get a track more."""
    tracks = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            tracks[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert 4 == len(tracks)
    for slices in tracks.values():
        for start, end in slices:
            for other, until in slices:
                assert (
                    until <= start
                    or end <= other
                    or (start <= other and until <= end)
                    or (other <= start <= end <= until)
                )


def test_what_no_viewer_would_open_is_refused(tmp_path):
    """Law: an error that says what to do, and no file."""
    with pytest.raises(ValueError, match=r"mmdp\.spans\.start"):
        write_trace(merge([]), tmp_path / "trace.json")
    with pytest.raises(ValueError, match=r"ends in \.json"):
        write_trace(SPANS, tmp_path / "trace.txt")
    assert [] == list(tmp_path.iterdir())
