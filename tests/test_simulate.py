"""Laws of the model of scale: what no pipeline can beat, what never makes it worse, and tiny cases done by hand."""

import json
import math
from dataclasses import asdict, replace
from itertools import pairwise

import numpy as np
import pytest

from mmdp.calibration import calibrate, read_trace
from mmdp.event_time import Event, Link, Simulation
from mmdp.pipeline_model import Numbers, Settings
from mmdp.pipeline_run import simulate
from mmdp.placement import Traffic, busiest
from mmdp.simulate import Tried, candidates, main, recommend, try_out
from mmdp.span_table import NO_NUMBER, Lane, Spans
from mmdp.trace_file import write_trace

NUMBERS = Numbers(
    row_images=(2, 3, 4, 3),
    row_compute=(0.02, 0.03, 0.04, 0.03),
    samples=3.0,
    rows=4,
    train=0.2,
    latency=0.04,
    spread=0.3,
    image_bytes=10e3,
    row_bytes=500e3,
    copy=0.001,
    deal=0.002,
    dispatch=0.001,
    processors=16,
    workers=2,
    depth=12,
)
PLAIN = Numbers(row_images=(1,), row_compute=(0.1,), samples=1.0, rows=1, train=1.0, latency=0.5, processors=4)
"""A row takes half a second to fetch and a tenth to decode; a step takes a second."""

FREE = replace(PLAIN, row_compute=(0.0,), latency=0.0)


def cluster(ranks: int, **more) -> Settings:
    """Hosts as in `benchmarks/cluster.py`: one that coordinates, three that build, and those of ranks."""
    rank_nodes = min(ranks, 2)
    return Settings(
        ranks=ranks,
        nodes=4 + rank_nodes,
        rank_nodes=rank_nodes,
        rank_nodes_build=False,
        workers=8,
        processors=16,
        link=50e6 / 8,
        rank_link=200e6 / 8,
        **more,
    )


def test_a_lone_step_by_hand():
    """One row in flight, nothing ahead: fetch, decode, and training that hides the next row as far as it can."""
    outcome = simulate(PLAIN, Settings(steps=5, depth=1))
    assert pytest.approx(0.6) == outcome.seconds_to_first
    assert outcome.wait_ratio == 0.0  # the next row is made while the trainer is busy
    assert pytest.approx(1.0) == outcome.samples_per_second


def test_a_store_that_is_slower_than_training_by_hand():
    """With one row in flight a step takes a fetch and a decode, so the wait is what training does not hide."""
    outcome = simulate(PLAIN, Settings(steps=9, depth=1, latency=1.9))
    assert pytest.approx(1 / 2.0) == outcome.samples_per_second
    assert pytest.approx(1.0 / 2.0) == outcome.wait_ratio


def test_processors_are_shared_by_hand():
    """Four actors on one processor build as much as one."""
    slow = replace(PLAIN, row_compute=(2.0,), latency=0.0, train=0.0, processors=1)
    for workers in (1, 4):
        outcome = simulate(slow, Settings(workers=workers, depth=8, steps=30))
        assert pytest.approx(1 / 2.0, rel=0.08) == outcome.samples_per_second
    assert pytest.approx(1.0, rel=0.01) == outcome.processors


def test_a_link_by_hand():
    """What is sent second passes behind the first, at the rate of the link."""
    time = Simulation()
    link = Link(time, 100.0)
    assert (2.0, 3.0) == (link.send(200), link.send(100))
    time.run(time.sleep(10.0))
    assert pytest.approx(10.5) == link.send(50)
    assert link.num_bytes == 350
    assert not Event().happened


def test_a_coordinator_is_a_limit_by_hand():
    """Rows a second are at most those its event loop hands out; a second coordinator doubles them."""
    busy = replace(FREE, dispatch=0.5, train=0.0)
    for coordinators in (1, 2):
        settings = Settings(ranks=4, workers=8, depth=2, steps=30, coordinators=coordinators)
        assert pytest.approx(coordinators / 0.5, rel=0.1) == simulate(busy, settings).samples_per_second


def test_nobody_waits_where_building_is_free():
    """A wait ratio of 0, for any number of ranks."""
    for ranks in (1, 2, 8):
        outcome = simulate(FREE, Settings(ranks=ranks, workers=2, depth=2))
        assert outcome.wait_ratio == 0.0
        assert pytest.approx(ranks) == outcome.samples_per_second


@pytest.mark.parametrize("latency", [0.0, 0.04, 1.0])
@pytest.mark.parametrize("ranks", [1, 4])
def test_no_setting_is_faster_than_its_steps(ranks, latency):
    """Samples/s <= ranks x rows x samples / step, and what is lost is the wait."""
    outcome = simulate(NUMBERS, Settings(ranks=ranks, latency=latency))
    ceiling = ranks * 4 * 3.0 / 0.2
    assert outcome.samples_per_second <= ceiling * (1 + 1e-9)
    assert pytest.approx(ceiling * (1 - outcome.wait_ratio), rel=0.03) == outcome.samples_per_second


def test_more_actors_and_more_depth_are_never_worse():
    """Where links are no limit: throughput goes up, noise of the latencies aside, and from something that waits."""
    hungry = Settings(ranks=4, depth=8, latency=0.2)
    actors = [simulate(NUMBERS, replace(hungry, workers=workers)).samples_per_second for workers in (1, 2, 4, 8, 16)]
    assert actors[0] < 0.6 * actors[-1]
    assert all(more > 0.97 * less for less, more in pairwise(actors))
    depths = [simulate(NUMBERS, replace(hungry, workers=16, depth=depth)).samples_per_second for depth in (4, 8, 12)]
    assert depths[0] < 0.8 * depths[-1]
    assert all(more > 0.97 * less for less, more in pairwise(depths))


def test_lockstep_waits_for_the_slowest():
    """Ranks that wait for each other are never faster, and all at one pace."""
    slow = Settings(ranks=4, workers=2, depth=4, latency=0.1)
    free, locked = (simulate(NUMBERS, replace(slow, lockstep=lockstep)) for lockstep in (False, True))
    assert locked.samples_per_second <= free.samples_per_second * 1.01
    assert pytest.approx(locked.wait_ratio, abs=0.02) == locked.slowest


def test_the_same_seed_gives_the_same():
    """Deterministic by seed; another seed draws other latencies."""
    settings = Settings(ranks=2, latency=0.2, depth=4)
    assert simulate(NUMBERS, settings, 3) == simulate(NUMBERS, settings, 3)
    assert simulate(NUMBERS, settings, 3) != simulate(NUMBERS, settings, 4)


@pytest.mark.parametrize("placement", ["together", "near"])
def test_bytes_on_cards_are_what_arithmetic_says(placement):
    """The busiest card carries what `placement.busiest` reckons, where no actor is so busy that others steal."""
    ranks, nodes = 4, 5
    numbers = replace(NUMBERS, row_images=(3,), row_compute=(0.03,), start=0.0)
    settings = Settings(ranks=ranks, nodes=nodes, workers=8, depth=4, placement=placement, steps=100)
    outcome = simulate(numbers, settings)
    assert outcome.wait_ratio == 0.0
    rows = ranks * 4 / 0.2
    traffic = Traffic(math.inf, 3 * 10e3, 500e3, rows, ranks=ranks, rank_nodes=ranks, nodes=nodes)
    most = max(*outcome.sent, *outcome.received) / outcome.row_seconds
    assert pytest.approx(busiest(traffic)[placement], rel=0.05) == most


def test_bytes_on_cards_of_spread_workers():
    """Every row leaves the node that built it, none stays; images enter where rows are built."""
    outcome = simulate(NUMBERS, cluster(2, placement="spread", steps=40))
    assert sum(outcome.sent[:4]) == sum(outcome.received[4:])
    assert sum(outcome.sent[4:]) == 0
    assert pytest.approx(outcome.num_rows * 500e3, rel=0.1) == sum(outcome.sent)
    assert pytest.approx(outcome.num_rows * 3 * 10e3, rel=0.1) == sum(outcome.received[:4])


def test_placement_matters_at_the_large_scale_only():
    """Large: together < spread by reference <= near, and neither flag alone helps; small: all are equal."""
    block = Numbers((4,), (0.02,), 4.0, 4, 0.8, 0.005, image_bytes=11e3, row_bytes=602e3, deal=0.005, processors=16)

    def rate(scale: Settings, placement: str, by_value: bool = False) -> float:
        return simulate(block, replace(scale, placement=placement, by_value=by_value)).samples_per_second

    small = cluster(1, depth=8, steps=12)
    rates = [
        rate(small, *cell) for cell in (("together", True), ("spread", True), ("together",), ("spread",), ("near",))
    ]
    assert max(rates) < 1.05 * min(rates)
    large = cluster(4, rows=16, depth=16, train=3.2, steps=8)
    assert rate(large, "spread") > 1.4 * rate(large, "together", True)
    assert rate(large, "near") >= 0.99 * rate(large, "spread")
    for cell in (("spread", True), ("together",)):
        assert rate(large, *cell) < 1.25 * rate(large, "together", True)


def trace(
    *, steps: int = 12, latency: float = 0.05, decode: float = 0.02, join: float = 0.004, deal: float = 0.01
) -> Spans:
    """A run of one actor and one rank: rows of two images and one sample each, two rows a step."""
    noted: list[tuple[str, int, float, float, dict[str, int]]] = []
    for step in range(steps):
        at = step * 1.0
        for row in range(2):
            begin = at + 0.3 * row
            noted += [("fetch", 1, begin, begin + latency, {"num_bytes": 9000})] * 2
            begin += 0.1
            for _ in range(2):
                noted.append(("decode", 2, begin, begin + decode, {}))
                begin += decode
            noted.append(("join", 2, begin, begin + join, {}))
        numbers = {"rows": 2, "samples": 6, "workers": 1, "depth": 4, "ahead": 0}
        end = begin + join + deal
        noted.append(("gather", 0, at, end, numbers))
        noted.append(("transfer", 0, end, end + 0.002, {"num_bytes": 80000}))
        noted.append(("join", 0, end + 0.002, end + 0.008, {}))
        noted.append(("wait", 3, at, end + 0.008, {}))
        noted.append(("train", 3, end + 0.008, end + 0.208, {}))
    lanes = (
        *(Lane("host", 1, 10, "reader", 2), Lane("host", 2, 20, "fetcher", 2)),
        *(Lane("host", 2, 21, "assemble", 2), Lane("host", 1, 11, "main", 2)),
    )
    names = list(dict.fromkeys(one[0] for one in noted))
    keys = dict.fromkeys(key for one in noted for key in one[4])
    return Spans(
        names=tuple(names),
        lanes=lanes,
        name=np.array([names.index(one[0]) for one in noted]),
        lane=np.array([one[1] for one in noted]),
        start=np.array([round(one[2] * 1e9) for one in noted]),
        end=np.array([round(one[3] * 1e9) for one in noted]),
        numbers={key: np.array([one[4].get(key, NO_NUMBER) for one in noted]) for key in keys},
    )


def test_calibration_gives_back_what_a_trace_was_made_from():
    """Every number but the gap between rows, which this actor spends idle."""
    found = calibrate(trace(), latency=0.04, dispatch=0.003)
    assert {2} == set(found.row_images)
    assert (2, 3.0, 9000, 40000, 1, 4, 2) == (
        *(found.rows, found.samples, found.image_bytes, found.row_bytes, found.workers, found.depth),
        found.processors,
    )
    told = (found.train, found.latency, found.overhead, found.copy, found.deal, found.dispatch)
    assert pytest.approx((0.2, 0.04, 0.01, 0.004, 0.01, 0.003), rel=1e-6) == told
    assert pytest.approx(0.0, abs=1e-6) == found.spread


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
    alone, shared = (np.median(calibrate(one).row_compute) for one in (crowded, doubled))
    assert pytest.approx(0.02, rel=0.01) == alone - shared


def test_a_trace_file_gives_the_same_numbers(tmp_path):
    """Written and read back, to a microsecond."""
    spans = trace()
    again = read_trace(write_trace(spans, tmp_path / "trace.json"), processors=2)
    assert len(spans) == len(again)
    direct, read = (asdict(calibrate(one, latency=0.04)) for one in (spans, again))
    for key, value in direct.items():
        assert pytest.approx(value, rel=1e-3, abs=1e-5) == read[key], key


def test_the_cheapest_that_feeds_is_recommended():
    """Few actors first; where nothing feeds, one of those that wait least."""
    tried = try_out(NUMBERS, candidates(NUMBERS, Settings(ranks=4, nodes=2, link=1e9, steps=6)))
    chosen = recommend(tried)
    assert chosen.outcome.wait_ratio <= 0.05
    fed = [one for one in tried if one.outcome.wait_ratio <= 0.05]
    assert min(one.settings.workers for one in fed) == chosen.settings.workers
    starved = [Tried(one.settings, replace(one.outcome, wait_ratio=0.5 + 0.02 * at)) for at, one in enumerate(tried)]
    assert starved[0] == recommend(starved)
    with pytest.raises(ValueError, match="give at least one"):
        recommend([])


def test_the_command_answers(tmp_path, capsys):
    """A table and a sentence, from a trace file; a bad one is refused in a line."""
    path = write_trace(trace(), tmp_path / "trace.json")
    main([str(path), "--ranks", "4", "--nodes", "2", "--link-gbit", "1", "--latency-ms", "40", "--steps", "3"])
    said = capsys.readouterr().out
    assert "together" in said
    assert "near" in said
    assert "4 ranks on 2 of 2 nodes" in said
    assert "unchecked" in said
    (tmp_path / "other.json").write_text(json.dumps({"traceEvents": []}))
    with pytest.raises(SystemExit):
        main([str(tmp_path / "other.json")])
    assert "no trace that mmdp has written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"ranks": 0}, "ranks is 0: it must be at least 1"),
        ({"latency": -1.0}, "latency is -1.0: it must be at least 0"),
        ({"latency": math.nan}, "latency is nan"),
        ({"link": 0}, "link is 0: it must be above 0"),
        ({"placement": "pack"}, "choose of together, spread, near"),
        ({"nodes": 2, "ranks": 4, "rank_nodes": 3}, "give no more than there are of either"),
        ({"coordinators": 2}, "at most one a rank"),
        ({"steps": 1}, "steps is 1: it must be at least 2"),
        ({"depth": 2}, "a depth of 2 rows never holds a step of 4"),
        ({"ranks": 4, "coordinators": 4, "workers": 2}, "give at least one each"),
    ],
)
def test_settings_that_cannot_be_are_refused(change, remedy):
    """A line that names the value, the limit and what to give."""
    with pytest.raises(ValueError, match=remedy):
        simulate(NUMBERS, Settings(**change))


def test_numbers_and_traces_that_tell_nothing_are_refused():
    """No rows, a number below 0, a trace without steps, or of a run without a coordinator."""
    with pytest.raises(ValueError, match="give as many, and at least one"):
        replace(NUMBERS, row_images=())
    with pytest.raises(ValueError, match="deal is -1: it must be at least 0"):
        replace(NUMBERS, deal=-1)
    with pytest.raises(ValueError, match="record at least 4"):
        calibrate(trace(steps=2))
    with pytest.raises(ValueError, match="record more steps"):
        calibrate(trace(steps=4))
    spans = trace()
    with pytest.raises(ValueError, match="record rung references"):
        calibrate(spans.named("train", "wait", "fetch", "decode", "join"))
