"""Laws of calibration: a trace that was made from numbers gives them back, and one that tells nothing is refused."""

from dataclasses import astuple, replace

import numpy as np
import pytest
from made_trace import trace

from mmdp.calibration import Used, calibrate, read_trace
from mmdp.span_table import NO_NUMBER, Lane
from mmdp.trace_file import write_trace


def test_calibration_gives_back_what_a_trace_was_made_from():
    """Every number; what rows, calls and copies do not account for is left to fetches."""
    found = calibrate(trace(), latency=0.04, used=Used(actor=0.05, others=0.02, background=0.25))
    assert {2} == {row.images for row in found.rows}
    assert pytest.approx(np.array([(2, 0.045, 3.0)] * 22)) == np.array(found.rows[2:])
    assert (2, 9000, 40000, 1, 4, 2) == (
        *(found.step_rows, found.fetch.num_bytes, found.row_bytes, found.workers, found.depth),
        found.processors,
    )
    told = (found.train, found.fetch.latency, found.fetch.overhead, found.copy, found.background)
    assert pytest.approx((0.2, 0.04, 0.01, 0.004, 0.25), rel=1e-6) == told
    assert pytest.approx((0.003, 0.012, 0.01), rel=1e-6) == astuple(found.call)
    assert pytest.approx((0.05 - 0.045) / 2) == found.fetch.compute
    assert pytest.approx((0.02 - 0.003 - 0.004) / 2) == found.fetch.around
    assert pytest.approx(0.0, abs=1e-6) == found.fetch.spread
    assert found.epoch_rows == 0


def test_an_epoch_that_ends_in_the_trace_is_as_long_as_that():
    """Its rows, and no others; a trace that ends before tells no length."""
    found = calibrate(trace(epoch=9), latency=0.04)
    assert 18 == found.epoch_rows == len(found.rows)
    assert pytest.approx(18 * 3.0) == sum(row.samples for row in found.rows)


def test_spans_that_share_a_processor_are_not_counted_twice():
    """Two that compute on one processor for two seconds took one second of it each."""
    spans = trace(decode=0.02)
    crowded = replace(spans, lanes=tuple(lane._replace(processors=1) for lane in spans.lanes))
    doubled = replace(
        crowded,
        lanes=(*crowded.lanes, Lane("host", 4, 40, "other", 1)),
        **{
            key: np.concatenate([getattr(crowded, key), getattr(crowded.named("decode"), key)])
            for key in ("name", "start", "end")
        },
        lane=np.concatenate([crowded.lane, np.full(len(crowded.named("decode")), 4)]),
        numbers={
            key: np.concatenate([values, np.full(len(crowded.named("decode")), NO_NUMBER)])
            for key, values in crowded.numbers.items()
        },
    )
    alone, shared = (np.median([row.compute for row in calibrate(one).rows]) for one in (crowded, doubled))
    assert pytest.approx(0.02, rel=0.01) == alone - shared


def test_a_trace_file_gives_the_same_numbers(tmp_path):
    """Written and read back, to a microsecond."""
    spans = trace()
    again = read_trace(write_trace(spans, tmp_path / "trace.json"), processors=2)
    assert len(spans) == len(again)
    direct, read = (calibrate(one, latency=0.04) for one in (spans, again))
    assert pytest.approx(np.array(direct.rows), rel=1e-3, abs=1e-5) == np.array(read.rows)
    assert pytest.approx(astuple(direct.fetch), rel=1e-3, abs=1e-5) == astuple(read.fetch)
    assert pytest.approx(astuple(direct.call), rel=1e-3, abs=1e-5) == astuple(read.call)
    assert pytest.approx(astuple(direct)[5:], rel=1e-3, abs=1e-5) == astuple(read)[5:]


def test_traces_that_tell_nothing_are_refused():
    """Too few steps, rows or fetches; two ranks; a run without a coordinator."""
    with pytest.raises(ValueError, match="record at least 4"):
        calibrate(trace(steps=2))
    with pytest.raises(ValueError, match="record more steps"):
        calibrate(trace(steps=4))
    spans = trace()
    with pytest.raises(ValueError, match="record rung references"):
        calibrate(spans.named("train", "wait", "fetch", "decode", "join"))
    second = (np.array(spans.names)[spans.name] == "train") & (np.arange(len(spans)) % 2 == 0)
    with pytest.raises(ValueError, match="2 ranks train in the trace: record one alone"):
        calibrate(replace(spans, lane=np.where(second, 0, spans.lane)))
