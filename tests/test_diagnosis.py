"""Laws of `diagnosis.py`, `pace.py` and `step_work.py`: the bound is named, its gain comes, nothing comes of nothing.

Pipelines in simulated time, whose bound is known by running them with each resource doubled; `benchmarks/diagnosis.py`
judges many more. One real loader stands beside them.
"""

import itertools
import math
import sys
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import Parts, make_parts
from small import tokenizer, write_data

import mmdp.encode
from mmdp import diagnosis, spans
from mmdp.device import feed
from mmdp.diagnosis import diagnose
from mmdp.encode import Encoder
from mmdp.ladder import epochs
from mmdp.loader import Loader
from mmdp.local_store import serve
from mmdp.pace import RESOURCES, Pace, explained
from mmdp.span_table import NO_NUMBER, Lane, Spans, merge
from mmdp.step_work import measure_steps
from mmdp.wait_meter import WaitMeter

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
from diagnosis import judge
from simulated_pipeline import Run, Workload

BALANCED = Workload(
    form="actors",
    overlap=True,
    rows=4,
    images=3.0,
    fetch=0.02,
    fetch_spread=0.3,
    decode=0.004,
    decode_spread=0.2,
    join=0.0005,
    pass_row=0.002,
    batch=0.001,
    move=0.001,
    train=0.03,
    workers=4,
    fetches=32,
    processors=8,
    depth=24,
    window=1e9,
    seed=1,
)
KNOWN = {
    "serial": ("I/O", replace(BALANCED, form="inline", overlap=False)),
    "few fetches": ("I/O", replace(BALANCED, fetches=2)),
    "threads that fetch": ("I/O", replace(BALANCED, form="threads", fetch=0.08)),
    "slow decoding": ("CPU", replace(BALANCED, decode=0.08)),
    "few processors": ("CPU", replace(BALANCED, form="threads", decode=0.03, fetch=0.005, workers=8, processors=2)),
    "serial decoding": ("CPU", replace(BALANCED, form="inline", overlap=False, fetch=0.001, decode=0.03)),
    "rows by value": ("transport", replace(BALANCED, pass_row=0.05)),
    "narrow window": ("memory", replace(BALANCED, window=1.5, images=1.0)),
    "shallow": ("memory", replace(BALANCED, form="threads", workers=16, processors=16, depth=2, train=0.01)),
    "well fed": ("trainer", replace(BALANCED, train=0.3)),
}
LEVERS = {
    "serial": "build rows concurrently",
    "few fetches": "concurrent fetches",
    "threads that fetch": "more workers",
    "slow decoding": "more workers",
    "few processors": "smaller images",
    "rows by value": "by reference",
    "narrow window": "max_bytes",
    "shallow": "depth",
    "well fed": "nothing to do",
}


@pytest.fixture(autouse=True)
def off():
    """Whatever a test leaves on."""
    yield
    spans.stop()


@pytest.mark.parametrize("name", KNOWN)
def test_the_bound_is_named_and_its_gain_comes(name):
    """Law: the resource that is worth most when doubled, and what that gives within a quarter."""
    bound, load = KNOWN[name]
    run = Run(load, 24)
    got = {resource: run.seconds_per_step / Run(load.doubled(resource), 24).seconds_per_step for resource in RESOURCES}
    assert bound == max(got, key=got.get)  # the workload is what it is meant to be
    said = diagnose(run.spans())
    assert bound == said.bound
    assert got[bound] == pytest.approx(said.gains[bound], rel=0.25)
    assert LEVERS.get(name, "") in said.lever
    assert said.after.gain >= 1


def test_a_seeded_handful_is_right():
    """Law: of pipelines drawn at random with a clear bound, nearly all; the benchmark says how many of forty."""
    judged = [one for seed in range(12) if (one := judge(seed)).is_clear]
    assert len(judged) >= 8
    assert len({one.truth for one in judged}) >= 3
    assert sum(one.is_right for one in judged) >= 0.9 * len(judged) - 1


def test_the_text_is_short_and_plain():
    """Law: four lines: the bound and the wait, the evidence, what each resource is worth, what to do next."""
    said = diagnose(Run(KNOWN["serial"][1], 20).spans())
    lines = str(said).split("\n")
    assert 4 == len(lines)
    assert f"bound by I/O: the trainer waits {said.wait_ratio:.0%}" in lines[0]
    assert "fetch" in lines[1]
    assert "I/O x" in lines[2]
    assert lines[3].startswith("next: build rows concurrently")
    assert "predicted: waits" in lines[3]


def test_taking_turns_is_no_fault_of_the_trainer():
    """Law: where rows are begun when a trainer asks that is slower than all else, the order of work is the bound."""
    load = replace(BALANCED, overlap=False, train=0.3, fetch=0.01, decode=0.01)
    said = diagnose(Run(load, 24).spans())
    assert "trainer" == said.bound
    assert said.wait_ratio > 0.05, "the case did not arise"
    first, *_, last = str(said).split("\n")
    assert first.startswith("bound by the order of work (feeding and training take turns): the trainer waits")
    assert last.startswith("next: prefetch")
    assert "samples/s" not in str(said)  # a few steps tell no rate to compare with that of all
    assert "bound by trainer:" in str(diagnose(Run(KNOWN["well fed"][1], 24).spans()))


def test_what_is_not_there_is_said():
    """Law: an error with the remedy, where the spans can't tell."""
    train = [(100 * step + 50, 100 * step + 100) for step in range(6)]
    wait = [(100 * step, 100 * step + 50) for step in range(6)]
    with pytest.raises(ValueError, match=r"0 spans.*mmdp\.spans\.start"):
        diagnose(merge([]))
    with pytest.raises(ValueError, match="none of them `wait` and `train`"):
        diagnose(_table("fetch", wait))
    with pytest.raises(ValueError, match="2 steps of training: at least 3"):
        diagnose(merge([_table("train", train[:2]), _table("wait", wait[:2])]))
    with pytest.raises(ValueError, match="waits 50% of the time, and no span says for what"):
        diagnose(merge([_table("train", train), _table("wait", wait)]))
    with pytest.raises(ValueError, match="took no time"):
        diagnose(merge([_table("train", [(5, 5)] * 6), _table("wait", [(5, 5)] * 6)]))


def test_a_trainer_that_never_waits_is_the_bound():
    """Law: also where nothing else was recorded; all numbers are numbers."""
    train = [(100 * step, 100 * step + 100) for step in range(6)]
    said = diagnose(merge([_table("train", train), _table("wait", [(start, start) for start, _ in train])]))
    assert "trainer" == said.bound
    assert 0.0 == said.wait_ratio
    assert all(map(math.isfinite, [*said.gains.values(), said.after.seconds, said.after.wait_ratio, said.after.gain]))
    assert said.samples_per_second is None
    assert "nan" not in str(said)


def test_a_trainer_of_no_time_only_waits():
    """Law: a wait ratio of 1, before and after; no division by nothing."""
    steps = [(100 * step, 100 * step + 100) for step in range(8)]
    said = diagnose(
        merge(
            [
                _table("wait", steps),
                _table("train", [(end, end) for _, end in steps]),
                _table("fetch", steps, "worker"),
            ]
        )
    )
    assert "I/O" == said.bound
    assert 1.0 == said.wait_ratio == said.after.wait_ratio
    assert "nan" not in str(said)


def test_works_are_those_of_a_step():
    """Law: busy seconds a step, how many at a time, samples and window are what the spans hold."""
    steps = range(10)
    ms = 1_000_000
    parts = [
        _table("wait", [(100 * ms * k, 100 * ms * k + 40 * ms) for k in steps]),
        _table("train", [(100 * ms * k + 40 * ms, 100 * ms * (k + 1)) for k in steps]),
        _table("fetch", [(100 * ms * k, 100 * ms * k + 30 * ms) for k in steps for _ in range(3)], "loop"),
        _table("decode", [(100 * ms * k + 30 * ms, 100 * ms * k + 50 * ms) for k in steps], "worker"),
        _table(
            "gather",
            [(100 * ms * k, 100 * ms * k + 40 * ms) for k in steps],
            numbers={"rows": 2, "samples": 5, "ahead": 3, "depth": 6, "workers": 4},
        ),
    ]
    work = measure_steps(merge(parts))
    assert pytest.approx(0.1) == work.seconds
    assert pytest.approx(0.04) == work.wait
    assert pytest.approx(0.06) == work.train
    assert {"fetch": pytest.approx(0.09), "decode": pytest.approx(0.02)} == work.busy
    assert {"I/O": 3, "CPU": 1, "transport": 0} == work.reached
    assert 5 == work.samples
    assert (3, 6) == work.window
    assert (2, 4, 3, 2) == (work.pace.rows, work.pace.workers, work.pace.fetches, work.pace.processors)
    assert not work.pace.is_shared
    assert not work.pace.is_inline


def test_all_ranks_are_one_step():
    """Law: two ranks side by side are diagnosed as one is, with twice the rows a step."""
    one = Run(KNOWN["rows by value"][1], 24).spans()
    other = replace(one, lanes=tuple(lane._replace(pid=2) for lane in one.lanes))
    alone, both = measure_steps(one), measure_steps(merge([one, other]))
    assert (alone.steps, 2 * alone.pace.rows) == (both.steps, both.pace.rows)
    assert pytest.approx(alone.wait) == both.wait
    assert pytest.approx(2 * alone.pace.transfer) == both.pace.transfer
    assert "transport" == diagnose(merge([one, other])).bound


times = st.floats(0, 10)
paces = st.builds(
    Pace,
    rows=st.integers(1, 64),
    train=times,
    fetch=times,
    compute=times,
    transfer=times,
    own_compute=times,
    own_transfer=times,
    row_fetch=times,
    in_air=times,
    fetches=st.integers(1, 64),
    workers=st.integers(1, 64),
    processors=st.integers(1, 64),
    is_shared=st.booleans(),
    is_inline=st.booleans(),
    is_ahead=st.booleans(),
    ahead=st.floats(0, 1000),
)


@given(paces)
def test_more_of_anything_never_takes_longer(pace):
    """Law: no resource, doubled, makes a step longer; none makes it shorter than half."""
    for resource in RESOURCES:
        doubled = pace.doubled(resource).seconds
        assert doubled <= pace.seconds * (1 + 1e-9)
        if resource != "memory":  # a wider window also hides what it did not
            assert doubled >= pace.seconds / 2 * (1 - 1e-9)


@given(paces, st.floats(0, 1000))
def test_the_window_explains_the_step(pace, longer):
    """Law: with the window that `explained` finds, the model takes as long as was seen, or nearly with the widest."""
    pace = replace(pace, is_inline=False, is_ahead=True)
    widest, narrowest = replace(pace, ahead=1e6).seconds, replace(pace, ahead=0.0).seconds
    seen = min(narrowest, widest + longer)
    found = explained(pace, seen).seconds
    assert found == pytest.approx(seen, rel=0.01, abs=1e-6) or seen <= 1.1 * widest * (1 + 1e-9)


DEEP = replace(BALANCED, fetch=0.3, fetches=256, depth=8, workers=8, train=0.01)
SAID = diagnose(Run(KNOWN["few fetches"][1], 24).spans())


@given(paces, paces)
def test_no_step_is_foretold_shorter_than_its_trainer_is_busy(pace, changed):
    """Law: also where the model takes the run for longer than it was, and so would divide by too much."""
    said = replace(SAID, pace=pace)
    after = said.predict(changed)
    assert after.seconds >= changed.consumer
    assert after.gain == pytest.approx(said.work.seconds / after.seconds)
    assert 0 <= after.wait_ratio <= 1


def test_a_case_from_the_field_is_not_foretold_faster_than_its_trainer():
    """Rows of a step of 1.1 s, 401 ms of it training: 353 ms were foretold, and 104 samples/s of at most 87."""
    busy = {"train": 0.401, "fetch": 8.55, "compute": 0.678, "row_fetch": 0.515}
    pace = Pace(rows=8, **busy, fetches=44, workers=2, processors=2, is_ahead=False)
    work = replace(SAID.work, seconds=1.104, train=0.401, wait=0.703, pace=pace)
    assert pace.seconds > work.seconds, "the case did not arise"
    after = replace(SAID, work=work, pace=pace).predict(replace(pace, is_ahead=True, ahead=16))
    assert (0.401, 0.0) == (after.seconds, after.wait_ratio)


@given(paces)
def test_a_faster_trainer_saves_no_more_than_its_own_time(pace):
    """Law: twice as fast, at most half of the training; wait that the model can't explain does not shrink with it."""
    said = replace(SAID, pace=pace, work=replace(SAID.work, seconds=1.3 * pace.seconds + 0.1, train=pace.train))
    assert said.predict(pace.doubled("trainer")).seconds >= (said.work.seconds - pace.train / 2) * (1 - 1e-9)


def seen(load: Workload, **numbers: int) -> Spans:
    """What the library would have recorded, but with other numbers in its `gather` spans."""
    recorded = Run(load, 24).spans()
    is_gather = recorded.name == recorded.names.index("gather")
    changed = {key: np.where(is_gather, value, recorded.numbers[key]) for key, value in numbers.items()}
    return replace(recorded, numbers={**recorded.numbers, **changed})


def test_the_knob_is_the_one_that_binds():
    """Law: rows that are taken as fast as they come are not few because of bytes: `max_bytes` only where it is full."""
    by_rows = diagnose(seen(DEEP, ahead=0))
    assert "memory" == by_rows.bound, "the case did not arise"
    assert by_rows.lever.endswith("raise `depth`")
    assert diagnose(seen(DEEP, ahead=0, by_rows=0, by_bytes=1)).lever.endswith("raise `max_bytes`")
    got = Run(DEEP, 24).seconds_per_step / Run(replace(DEEP, depth=2 * DEEP.depth), 24).seconds_per_step
    assert got > 1.5, "who follows it gains"


def test_a_window_that_was_not_full_is_not_to_blame():
    """Law: where more rows had room, more room is worth nothing: neither the bound nor the lever."""
    said = diagnose(seen(DEEP, ahead=0, by_rows=0, by_bytes=0))
    assert "memory" != said.bound
    assert 1.0 == said.gains["memory"]
    assert "in flight" not in said.lever


def test_the_lever_is_a_rung_or_none_and_never_one_that_was_climbed():
    """Law: who has climbed a rung is not told to do so; a knob is no rung."""
    assert "concurrent" == diagnose(Run(KNOWN["serial"][1], 24).spans()).rung
    assert "" == diagnose(Run(KNOWN["few fetches"][1], 24).spans()).rung
    by_value = Run(KNOWN["rows by value"][1], 24).spans()
    assert "references" == diagnose(by_value).rung
    climbed = diagnose(by_value, ("serial", "concurrent", "prefetch", "references"))
    assert "" == climbed.rung
    assert "by reference" not in climbed.lever
    turns = Run(replace(BALANCED, overlap=False, train=0.3, fetch=0.01, decode=0.01), 24).spans()
    assert "prefetch" == diagnose(turns).rung
    assert "prefetch" not in diagnose(turns, ("serial", "concurrent", "prefetch")).lever


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    return make_parts(tmp_path_factory.mktemp("data"), (1, 1, 1), repeat=20)


@pytest.mark.parametrize(("executor", "lever"), [("inline", "build rows concurrently"), ("threads", "more workers")])
def test_a_real_loader_over_a_slow_store_is_bound_by_it(parts, monkeypatch, executor, lever):
    """Law: spans of a real run say the same: here each image takes 30 ms to come."""
    read = mmdp.encode.read
    monkeypatch.setattr(mmdp.encode, "read", lambda ref: (time.sleep(0.03), read(ref))[1])
    loader = Loader(*parts, batch_size=2, executor=executor, num_workers=2)
    spans.start()
    meter = WaitMeter()
    for _ in islice(meter.over(loader), 8):
        time.sleep(0.01)
    loader.close()
    said = diagnose(spans.stop())
    assert "I/O" == said.bound
    assert said.work.busy["fetch"] >= 0.03
    assert lever in said.lever
    assert said.samples_per_second > 0


def by_row(load: Workload, num_fetches: int = 3, max_fetches: int = 64) -> Spans:
    """What a loader over a store would have recorded: its workers wait, and the fetches are on a loop's own thread."""
    recorded = Run(load, 24).spans()
    names, lanes = list(recorded.names), list(recorded.lanes)
    waits = recorded.name == names.index("fetch")
    fetches = recorded[np.repeat(np.flatnonzero(waits), num_fetches)]
    fetches = replace(fetches, lanes=(*lanes, lanes[0]._replace(ident=999)), lane=np.full(len(fetches), len(lanes)))
    told = np.where(waits, max_fetches, NO_NUMBER)
    waiting = replace(
        recorded,
        names=(*names, "row_fetch"),
        name=np.where(waits, len(names), recorded.name),
        numbers={**recorded.numbers, "max_fetches": told},
    )
    return merge([waiting, fetches])


FAR = replace(BALANCED, form="threads", rows=2, images=1.0, fetch=0.25, decode=0.005, train=0.02, processors=2)


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_more_workers_than_processors_help_where_they_wait_for_a_store(workers):
    """Law: a worker that waits for its row needs no processor; what the lever foretells comes within a quarter."""
    load = replace(FAR, workers=workers, depth=4 + workers)
    said = diagnose(by_row(load))
    assert "I/O" == said.bound
    assert said.pace.is_shared, "a worker waits, whosever thread the fetch is on"
    more = round(said.changed.workers)
    assert more > load.processors, "the case did not arise"
    words = f"next: more workers: {more} in place of {workers}, since each waits for what it fetches; predicted: "
    assert str(said).split("\n")[-1].startswith(words)
    got = Run(load, 24).seconds_per_step / Run(replace(load, workers=more, depth=4 + more), 24).seconds_per_step
    assert got == pytest.approx(said.after.gain, rel=0.25)
    assert got > 1.5, "who follows it gains"
    assert not any("every processor" in lever.words for lever in diagnosis._levers(said.work, said.pace))


def test_a_depth_that_was_given_is_to_be_raised_with_the_workers():
    """Law: only a depth by default grows with the workers."""
    assert ", and as much more `depth`, since" in diagnose(by_row(replace(FAR, workers=2, depth=4))).lever
    assert "depth" not in diagnose(by_row(replace(FAR, workers=2, depth=6))).lever


def test_processors_are_busy_only_where_they_are():
    """Law: it is said of those that compute for most of the time, and never of as many workers that wait."""
    words = "every processor here is busy"
    waits = replace(FAR, fetch=3.0, workers=64, depth=68)
    for load, is_busy in ((waits, False), (replace(waits, fetch=0.01, decode=0.1), True)):
        said = diagnose(by_row(load))
        assert is_busy == any(words in lever.words for lever in diagnosis._levers(said.work, said.pace))
        assert is_busy == (words in said.lever)


def test_the_bound_of_a_process_is_named_where_it_binds():
    """Law: what stands in line for `max_fetches` is no work of the store; threads share the bound, processes do not."""
    load = replace(FAR, workers=16, depth=20)
    free, bound = diagnose(by_row(load)), diagnose(by_row(load, max_fetches=12))
    assert 64 == free.pace.fetches
    assert free.pace.in_air == pytest.approx(3 * free.pace.fetch)
    assert 12 == bound.pace.fetches
    assert bound.pace.in_air == pytest.approx(12 * bound.work.seconds, rel=0.1)
    assert free.pace.in_air > 1.5 * bound.pace.in_air, "the case did not arise"
    assert "more fetches: `max_fetches` 24 in place of 12" in bound.lever
    recorded = by_row(load, max_fetches=12)
    is_trainer = np.isin(np.arange(len(recorded.lanes)), np.unique(recorded.named("train").lane))
    apart = [lane if mine else lane._replace(pid=7) for lane, mine in zip(recorded.lanes, is_trainer, strict=True)]
    assert math.inf == diagnose(replace(recorded, lanes=tuple(apart))).pace.fetches


def test_processes_are_not_asked_for_without_end():
    """Law: threads that wait cost little; of processes at most eight a processor are named."""
    recorded = by_row(replace(FAR, fetch=2.0, workers=2, depth=6), num_fetches=1)
    is_trainer = np.isin(np.arange(len(recorded.lanes)), np.unique(recorded.named("train").lane))
    apart = [lane if mine else lane._replace(pid=7) for lane, mine in zip(recorded.lanes, is_trainer, strict=True)]
    threads, processes = diagnose(recorded), diagnose(replace(recorded, lanes=tuple(apart)))
    assert (64, 16) == tuple(
        max(lever.changed.workers for lever in diagnosis._levers(said.work, said.pace)) for said in (threads, processes)
    )


@pytest.fixture(scope="module")
def far_parts(tmp_path_factory):
    """Samples whose images lie in a real store, 50 ms away."""
    path = write_data(tmp_path_factory.mktemp("far"), (1, 1, 1), repeat=20)
    with serve(path.parent, latency_ms=50) as uri:
        source = mmdp.open_source(f"{uri}/{path.name}")
        encoder = Encoder(tokenizer(), "fixed:4:side=16")
        sizes = mmdp.measure(source, encoder)
        yield Parts(source, encoder, mmdp.plan(sizes, mmdp.Budget(64, 3), window=8, block=2, buffer=16))


@pytest.mark.parametrize(
    ("executor", "is_fed", "lever"),
    [
        ("threads", False, "more workers: "),
        ("processes", False, "more workers: "),
        ("inline", False, "build rows concurrently and ahead: `executor="),
        ("inline", True, "build rows concurrently and ahead: `executor="),
    ],
)
def test_a_real_loader_over_a_far_store_is_bound_by_it(far_parts, executor, is_fed, lever):
    """Law: its workers wait for what they fetch, and more of them are the lever, whoever they are."""
    loader = Loader(*far_parts, batch_size=2, executor=executor, num_workers=2)
    made = feed(loader, "cpu") if is_fed else loader
    spans.start()
    meter = WaitMeter()
    for _ in islice(meter.over(epochs(made)), 9):
        time.sleep(0.01)
    made.close()
    recorded = spans.stop()
    said = diagnose(recorded)
    assert "I/O" == said.bound
    assert said.lever.startswith(lever)
    assert said.changed.workers >= 8
    assert said.after.gain > 2
    waits, decodes, fetches = (recorded.named(name) for name in ("row_fetch", "decode", "fetch"))
    assert set(waits.lane.tolist()) == set(decodes.lane.tolist()), "who waits, decodes"
    assert not set(fetches.lane[fetches.seconds > 0.03].tolist()) & set(decodes.lane.tolist()), "and does not fetch"
    assert (executor != "inline") == (not said.work.is_alone)
    assert said.work.waits_by_row


def nine_steps(loader: Loader):
    """The spans of nine steps, epoch after epoch, and the waits in front of all but the first."""
    spans.start()
    meter = WaitMeter()
    for _ in islice(meter.over(epochs(loader)), 9):
        time.sleep(0.15)
    loader.close()
    return spans.stop(), meter.waits


@pytest.mark.parametrize(("per_epoch", "words"), [(1, "an epoch is 1 step,"), (2, "an epoch is 2 steps,"), (20, "")])
def test_epochs_of_few_steps_begin_cold(parts, monkeypatch, per_epoch, words):
    """Law: what makes rows ahead, and waits at the beginning of each epoch, is not told to make rows ahead."""
    read = mmdp.encode.read
    monkeypatch.setattr(mmdp.encode, "read", lambda ref: (time.sleep(0.01), read(ref))[1])
    rows = len(parts.plan.epoch(0))
    batch_size = -(-rows // per_epoch)
    loader = Loader(*parts, batch_size=batch_size, executor="threads", num_workers=8, depth=3 * batch_size)
    recorded, _ = nine_steps(loader)
    said = diagnose(recorded)
    begins = len(set(recorded.named("gather").number("epoch").tolist()))
    assert -(-9 // per_epoch) == begins, "the case did not arise"
    assert said.work.is_fed_ahead
    if not words:
        assert "cold" not in str(said)
        return
    first, *_, last = str(said).split("\n")
    assert first.startswith(f"bound by cold starts ({words} and each begins cold)")
    assert last.startswith(f"next: longer epochs, of more samples: {words} and each begins cold, since nothing is made")
    assert said.after.wait_ratio < said.wait_ratio
    assert "" == said.rung


@pytest.mark.parametrize("per_epoch", [1, 20])
def test_reading_ahead_is_no_lever_where_an_epoch_is_one_step(parts, per_epoch):
    """Law: rows of the next epoch are not made before this one ends, so the rung of prefetch would give nothing."""
    loader = Loader(*parts, batch_size=-(-len(parts.plan.epoch(0)) // per_epoch), executor="inline")
    recorded, _ = nine_steps(loader)
    work = diagnose(recorded).work
    assert (1 == per_epoch) == (1 == work.epoch_steps)
    assert (1 == per_epoch) == ("prefetch" not in {lever.rung for lever in diagnosis._levers(work, work.pace)})


def test_an_outage_at_the_start_of_an_epoch_is_no_cold_start(parts, monkeypatch):
    """One beginning that waited long says nothing of how the others begin."""
    read, reads = mmdp.encode.read, itertools.count()
    images = int(parts.plan.sizes.images.sum())
    monkeypatch.setattr(mmdp.encode, "read", lambda ref: (time.sleep(1.5 * (next(reads) == 2 * images)), read(ref))[1])
    batch_size = -(-len(parts.plan.epoch(0)) // 2)
    loader = Loader(*parts, batch_size=batch_size, executor="threads", num_workers=2, depth=3 * batch_size)
    recorded, waits = nine_steps(loader)
    said = diagnose(recorded)
    assert max(waits) > 1, "the case did not arise"
    assert said.wait_ratio > 0.05
    assert "cold" not in str(said)


def test_a_trainer_that_hardly_waits_needs_nothing(monkeypatch):
    """Below 5 % no lever is named, whatever the model makes of it: here all levers would promise twice the pace."""
    fed = Run(KNOWN["well fed"][1], 24).spans()
    monkeypatch.setattr(
        diagnosis, "_levers", lambda _, pace: iter([diagnosis._Lever("anything", replace(pace, train=pace.train / 2))])
    )
    assert diagnose(fed).wait_ratio <= 0.05
    assert "next: nothing to do for the feeding" in str(diagnose(fed))


def test_a_trainer_that_is_fed_in_time_may_become_faster():
    """Law: that a faster one would wait is said only where the model says so too."""
    in_time = diagnose(seen(KNOWN["well fed"][1], ahead=0))
    assert in_time.gains["trainer"] >= 1.5, "the case did not arise"
    assert "next: nothing to do for the feeding: the trainer is busy, and rows come in time" in str(in_time)
    lever = diagnosis._best_lever(in_time.work, in_time.pace, {**in_time.gains, "trainer": 1.2}, ())
    assert "a faster trainer would wait for them" in lever.words


def test_a_trainer_that_waits_is_never_told_that_rows_come_in_time(monkeypatch):
    """Law: above 5 % rows are late, also where the trainer is what bounds it and no lever helps."""
    monkeypatch.setattr(diagnosis, "_levers", lambda *_: iter(()))
    late = replace(SAID.work, wait=1.0, train=9.0)
    for trainer in (1.2, 1.9):
        gains = {**dict.fromkeys(RESOURCES, 1.0), "trainer": trainer}
        assert diagnosis._best_lever(late, SAID.pace, gains, ()).words.startswith("no lever of the loader alone helps")


def test_a_wait_that_nothing_explains_is_called_so(monkeypatch):
    """Law: a trainer whose doubling gains nothing is no bound, and to make it faster no advice."""
    monkeypatch.setattr(diagnosis, "_levers", lambda *_: iter(()))
    none = dict.fromkeys(RESOURCES, 1.0)
    lever = diagnosis._best_lever(SAID.work, SAID.pace, none, ())
    assert lever.words.startswith("look again on a quiet machine")
    assert str(replace(SAID, gains=none)).startswith("bound by nothing that was measured (a busy machine, say): ")


def test_a_loader_says_what_is_full(parts, monkeypatch):
    """Law: rows, bytes, or neither where the rows of an epoch are all begun."""
    read = mmdp.encode.read  # slow, so that the window is full before its first row is done
    monkeypatch.setattr(mmdp.encode, "read", lambda ref: (time.sleep(0.03), read(ref))[1])
    weigh = 3 * 16 * 16  # bytes of an image of `parts`, of which a row has three
    got = {}
    for name, options in {
        "rows": {"depth": 8},
        "bytes": {"depth": 100, "max_bytes": 12 * weigh},
        "neither": {"depth": 1000},
    }.items():
        loader = Loader(*parts, batch_size=2, executor="threads", num_workers=2, **options)
        spans.start()
        assert 4 == len(list(islice(loader, 4)))
        loader.close()
        gather = spans.stop().named("gather")
        got[name] = (gather.number("by_rows").tolist(), gather.number("by_bytes").tolist())
    assert {"rows": ([1] * 4, [0] * 4), "bytes": ([0] * 4, [1] * 4), "neither": ([0] * 4, [0] * 4)} == got


def _table(name: str, times_of: list, lane: str = "trainer", numbers: dict[str, int] | None = None) -> Spans:
    """Spans of one name and one lane, from (start, end) in nanoseconds."""
    start, end = np.array(times_of, dtype=np.int64).reshape(-1, 2).T
    zeros = np.zeros(len(start), dtype=np.int64)
    return Spans(
        (name,),
        (Lane("host", 1, hash(lane) % 1000, lane, 2),),
        zeros,
        zeros,
        start,
        end,
        {key: np.full(len(start), value) for key, value in (numbers or {}).items()},
    )
