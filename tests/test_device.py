"""Laws of `device.py`, `lanes.py`, `nested.py`, `replay.py`: batches whole, in order, on the device; no thread left.

GPU-01 to GPU-06 are in `feed_checks.py`, so that a machine with a GPU can run them without pytest.
"""

import gc
import json
import logging
import signal
import subprocess
import sys
import time
from collections import defaultdict
from itertools import islice
from pathlib import Path

import feed_checks
import pytest
import torch
from feed_checks import Counted, have_ended, nested_batches, threads
from runs import Road, digest
from streams import Listed

import mmdp
from mmdp import ahead, lanes
from mmdp.device import feed
from mmdp.executors import Processes
from mmdp.loader import Loader
from mmdp.nested import map_tensors, tensors_of
from mmdp.replay import perfect

pytestmark = pytest.mark.timeout(60)

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))
DEVICES = pytest.mark.parametrize("device", ["cpu", CUDA])


@pytest.fixture(autouse=True)
def no_thread_left():
    before = threads()
    yield
    gc.collect()
    assert have_ended(before)


@pytest.fixture(scope="module")
def wanted(parts) -> list[str]:
    """Digests of the batches of two epochs, without a feed."""
    loader = Loader(*parts, batch_size=2, executor="inline")
    return [digest(batch) for _ in range(2) for batch in loader]


# What arrives


@DEVICES
@pytest.mark.parametrize("name", [name for name in feed_checks.CHECKS if "ratio" not in name])
def test_check(name, device):
    """GPU-01, 02, 03, 05: see there."""
    assert feed_checks.CHECKS[name](device)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("what", ["record", "wait"])
def test_the_check_of_races_can_fail(what):
    """GPU-02: without the record, or without the wait, some values are wrong."""
    assert feed_checks.wrong_without(what) > 0


@DEVICES
def test_handed_batches_arrive_whole(case_script, device):
    """GPU-01, GPU-02: the handed batches, each as it was given."""
    cases = case_script("feed_cases")
    count = 0
    for number, batch in enumerate(feed(cases.batches(50), device)):
        assert [] == cases.whole(batch, number, device)
        assert cases.shape_of(cases.batch(number)) == cases.shape_of(batch)
        count += 1
    assert 50 == count


@DEVICES
@pytest.mark.parametrize("name", ["none", "one", "breaks", "stop_early"])
def test_handed_ends(case_script, device, name):
    """GPU-05: the handed bad ends."""
    make, _ = case_script("feed_cases").BAD_ENDS[name]
    fed = feed(make(), device)
    count = {"none": 0, "one": 1, "breaks": 3, "stop_early": 2}[name]
    loop = iter(fed)
    assert list(range(count)) == [int(next(loop)["input_ids"][0, 0]) for _ in range(count)]
    if name == "breaks":
        with pytest.raises(OSError, match="source broke after 3"):
            next(loop)
    fed.close()
    assert [] == list(loop)
    assert [] == threads()


@DEVICES
@pytest.mark.parametrize("ahead_by", [1, 3])
def test_a_feed_changes_no_batch_of_a_loader(parts, wanted, device, ahead_by):
    """Law 7: the same batches in the same order, epoch after epoch, from every kind of loader."""
    roads = [Road("inline"), Road("threads", 2), Road(Processes(2, "fork")), Road(num_workers=2, context="fork")]
    for road in roads:
        fed = feed(road.batches(parts, 2), device, ahead=ahead_by)
        assert wanted == [digest(batch.to("cpu")) for _ in range(2) for batch in fed]
        fed.close()


def test_on_the_cpu_it_is_the_same_with_one_note(caplog, monkeypatch):
    """GPU-04: no pinning, no crash where CUDA is asked for and absent, and one note in the life of a process."""
    monkeypatch.setattr(lanes, "_noted", set())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with caplog.at_level(logging.WARNING):
        for device in ("cuda", "cuda:3", "cpu"):
            fed = feed(nested_batches(3), device)
            assert torch.device("cpu") == fed.device
            for value, batch in enumerate(fed):
                assert all(tensor.device.type == "cpu" for tensor in tensors_of(batch))
                assert not any(tensor.is_pinned() for tensor in tensors_of(batch))
                assert [value] == batch["ids"].unique().tolist()
    (note,) = caplog.messages
    assert "torch sees no CUDA device" in note
    monkeypatch.setattr(lanes, "_noted", set())
    list(feed(nested_batches(1), "cpu"))
    assert [note] == caplog.messages  # who asks for the CPU gets it without a word
    lanes.PlainLane(torch.device("meta"))
    lanes.PlainLane(torch.device("meta"))
    assert 2 == len(caplog.messages)
    assert "on meta batches are plain ones" in caplog.messages[1]


def test_what_can_not_be_is_refused(monkeypatch):
    """A device or a number that makes no sense: the value, the limit and the remedy, at once."""
    with pytest.raises(ValueError, match=r"no device is called 'gpu'.*cuda"):
        feed([], "gpu")
    with pytest.raises(ValueError, match=r"ahead is 0.*at least 1"):
        feed([], "cpu", ahead=0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"no cuda:2.*sees 2"):
        feed([], "cuda:2")
    with pytest.raises(TypeError, match="list has no set_epoch"):
        feed([], "cpu").set_epoch(1)
    with pytest.raises(TypeError, match="list has no load_state_dict"):
        feed([], "cpu").load_state_dict({})
    with pytest.raises(RuntimeError, match="list tells no state"):
        feed([], "cpu").state_dict()
    with pytest.raises(TypeError, match="len"):
        len(feed(iter([]), "cpu"))


# Ends


def test_no_more_is_read_than_was_said():
    """Law 10: `ahead` batches wait, one is on its way, and one is in use."""
    for number in (1, 4):
        source = Counted()
        loop = iter(feed(source, "cpu", ahead=number))
        next(loop)
        time.sleep(0.2)
        assert number + 2 == source.made
        assert number + 1 == source.alive, "the batch that was handed out and dropped is still held"
        del loop


def test_an_iterator_can_be_fed_once():
    """A second loop would give nothing, and say nothing."""
    fed = feed(nested_batches(5), "cpu")
    next(iter(fed))
    with pytest.raises(RuntimeError, match="can be fed once"):
        list(fed)


def test_a_source_that_is_stuck_holds_nobody_up(monkeypatch):
    """Law 11: the loop ends with a warning; the feed refuses to go on, until the loader has answered."""
    monkeypatch.setattr(ahead, "_END_SECONDS", 0.2)
    free = threads()

    class Stuck:
        def __init__(self):
            self.release = False

        def __iter__(self):
            yield torch.zeros(1)
            while not self.release:
                time.sleep(0.01)
            yield torch.ones(1)

    stuck = Stuck()
    fed = feed(stuck, "cpu")
    loop = iter(fed)
    next(loop)
    with pytest.warns(RuntimeWarning, match="in the making for more than"):
        fed.close()
    with pytest.raises(RuntimeError, match="may be stuck"):
        next(iter(fed))
    stuck.release = True
    assert have_ended(free)
    assert [0, 1] == [int(batch) for batch in fed]


PROGRAM = """
import itertools, os, signal, sys, time, torch, mmdp
signal.signal(signal.SIGINT, signal.default_int_handler)
child = os.fork()  # imports take seconds
if child:
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
fed = mmdp.feed((torch.full((100_000,), n) for n in itertools.count()), "cuda")
loop = iter(fed)
assert next(loop)[0] == 0
if child:
    print("looping", flush=True)
    time.sleep(60)
"""


def test_a_program_may_end_in_the_midst_of_a_loop():
    """WRK-02: with code 0, and nothing to close; and by Ctrl-C as Python ends."""
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert "0\n" == program.stdout.readline()
        assert "looping\n" == program.stdout.readline()
        program.send_signal(signal.SIGINT)
        _, errors = program.communicate()
        assert -signal.SIGINT == program.returncode
        assert 1 == errors.count("Traceback")
        assert errors.rstrip().endswith("KeyboardInterrupt")
    finally:
        program.kill()


# State


@DEVICES
@pytest.mark.parametrize(
    "road", [Road("threads", 2), Road(num_workers=2, context="fork")], ids=["Loader", "DataLoader"]
)
def test_the_state_is_that_of_the_batch_handed_out(parts, wanted, device, road):
    """Law 12: after k batches, whatever was read ahead, a new run goes on with batch k + 1; also at an epoch's end."""
    first_epoch = len(Loader(*parts, batch_size=2))
    for taken in (1, 4, first_epoch, first_epoch + 1):
        fed = feed(road.batches(parts, 2), device, ahead=3)
        seen = [digest(batch.to("cpu")) for batch in islice((one for _ in range(2) for one in fed), taken)]
        time.sleep(0.05)  # so that it reads on
        state = fed.state_dict()
        fed.close()
        assert len(json.dumps(state)) < 200
        again = feed(road._replace(num_workers=1).batches(parts, 2), device)
        again.load_state_dict(json.loads(json.dumps(state)))
        assert state == again.state_dict()
        left = [digest(batch.to("cpu")) for _ in range(1 if taken >= first_epoch else 2) for batch in again]
        assert wanted == seen + left


def test_a_state_before_the_first_batch(parts, wanted):
    """It is the loader's; and a loader refuses one that comes too late."""
    fed = feed(Loader(*parts, batch_size=2), "cpu")
    fresh = fed.state_dict()
    loop = iter(fed)
    assert fresh == fed.state_dict()
    next(loop)
    assert fresh != fed.state_dict()
    with pytest.raises(RuntimeError, match="before the first loop"):
        fed.load_state_dict(fresh)
    again = feed(Loader(*parts, batch_size=2), "cpu")
    again.load_state_dict(fresh)
    assert wanted[0] == digest(next(iter(again)))


def test_a_loop_left_early_loses_nothing(parts, wanted):
    """As with a loader alone: the next loop goes on behind the last batch that was handed out, and `len` knows."""
    fed = feed(Loader(*parts, batch_size=2, executor="threads", num_workers=2), "cpu", ahead=3)
    seen, whole = [], len(fed)
    assert whole < len(wanted)
    while len(seen) < whole:
        seen += [digest(batch) for batch in islice(fed, 2)]
        assert (whole - len(seen)) in (len(fed), 0)
    assert wanted[:whole] == seen
    assert wanted[whole:] == [digest(batch) for batch in fed]


def test_an_error_of_the_loop_loses_nothing(parts, wanted):
    """A training loop that catches its own error goes on where it was."""
    fed = feed(Loader(*parts, batch_size=2), "cpu")
    with pytest.raises(ZeroDivisionError):
        [batch.label_tokens // 0 for batch in fed]
    assert wanted[1] == digest(next(iter(fed)))


@pytest.mark.parametrize("road", [Road("threads", 2), Road(num_workers=0)], ids=["Loader", "DataLoader"])
def test_epochs_are_the_loaders(parts, road):
    """`set_epoch` and `len` pass through, to the samplers of a DataLoader too; an open loop ends."""
    fed = feed(road.batches(parts, 2), "cpu")
    loop = iter(fed)
    next(loop)
    fed.set_epoch(3)
    assert [] == list(loop)
    assert len(parts.plan.epoch(3)) == pytest.approx(2 * len(fed), abs=1)
    (batch, *_) = fed
    assert 3 == batch.state["epoch"]
    alone = Loader(*parts, batch_size=2)
    alone.set_epoch(3)
    assert digest(next(iter(alone))) == digest(batch)


def test_a_stream_is_fed_as_a_loader_is(parts):
    """Law 12, for samples that are planned as they come: the state, and a loop that is left early."""

    def stream() -> mmdp.StreamLoader:
        return mmdp.StreamLoader(Listed(parts.source), parts.encoder, mmdp.Budget(64, 3), batch_size=2, window=8)

    wanted = [digest(batch) for batch in stream()]
    fed = feed(stream(), "cpu", ahead=2)
    seen = [digest(batch) for batch in islice(fed, 3)]
    state = fed.state_dict()
    seen += [digest(batch) for batch in islice(fed, 1)]
    assert wanted[:4] == seen
    assert wanted[4:] == [digest(batch) for batch in fed]
    again = feed(stream(), "cpu")
    again.load_state_dict(json.loads(json.dumps(state)))
    assert wanted[3:] == [digest(batch) for batch in again]
    with pytest.raises(TypeError, match="has no len"):
        len(fed)


class Counting:
    """A loader with a state, and no batches of ours; it goes on writing to the state it gave away."""

    def __init__(self):
        self.place = {"next": 0}

    def __iter__(self):
        while self.place["next"] < 10:
            self.place["next"] += 1
            yield torch.tensor(self.place["next"] - 1)

    def state_dict(self):
        return self.place

    def load_state_dict(self, state):
        self.place = dict(state)


def test_a_loader_that_tells_its_own_state():
    """Any loader with `state_dict` is asked after each batch, not when the state is wanted."""
    fed = feed(Counting(), "cpu", ahead=4)
    for batch in fed:
        time.sleep(0.02)
        assert {"next": int(batch) + 1} == fed.state_dict()
        if batch == 3:
            break
    again = feed(Counting(), "cpu")
    again.load_state_dict(fed.state_dict())
    assert list(range(4, 10)) == [int(batch) for batch in again]


# Nesting


def test_only_what_changes_is_copied():
    """The very same object where no tensor is replaced; nothing given is written to."""
    batch = next(nested_batches(1))
    assert map_tensors(batch, lambda tensor: tensor) is batch
    assert map_tensors("text", None) == "text"
    many = defaultdict(list, a=[torch.tensor(1)])
    mapped = map_tensors(many, lambda tensor: tensor + 1)
    assert (defaultdict, list, 2) == (type(mapped), mapped.default_factory, int(mapped["a"][0]))
    assert 1 == int(many["a"][0])
    model = torch.nn.Linear(2, 2)
    assert map_tensors({"model": model}, None)["model"] is model


# The ceiling


def test_a_perfect_loader_replays_what_it_has_built(parts, wanted):
    """As many steps as the loader, the first batches in turn, nothing built anew, and the loader at its beginning."""
    loader = Loader(*parts, batch_size=2)
    fresh = loader.state_dict()
    ideal = perfect(loader, num_batches=3)
    fed = feed(ideal, "cpu")
    assert len(loader) == len(fed)
    seen = [batch.samples for batch in fed]
    assert [ideal.batches[step % 3].samples for step in range(len(loader))] == seen
    assert fresh == fed.state_dict()
    assert 0 == sum(loader.skipped.values())
    assert 100 == len(list(feed(perfect(loader, 100), "cpu")))
    assert wanted[0] == digest(next(iter(loader)))


def test_a_perfect_loader_refuses_what_it_can_not_replay():
    """No batches, no length, no steps."""
    with pytest.raises(ValueError, match="no batch to replay"):
        perfect([], steps=3)
    with pytest.raises(ValueError, match=r"has no length.*steps"):
        perfect(iter([1]))
    with pytest.raises(ValueError, match="num_batches is 0"):
        perfect([1], num_batches=0)
    assert [1, 1, 1] == list(perfect([1], steps=3))


def test_feed_is_public():
    """Found by its name, without torch in the way of `import mmdp`."""
    assert feed is mmdp.feed
    assert "feed" in mmdp.__all__
    assert (Path(mmdp.__file__).parent / "device.py").exists()
