"""Laws of `wait_meter.py`: what the trainer waits for is counted, all of it, and nothing else."""

import gc
import math
from array import array

import feed_checks
import pytest
import torch
from feed_checks import Counted, have_ended, threads

from mmdp import spans
from mmdp.device import feed
from mmdp.wait_meter import WaitMeter

pytestmark = pytest.mark.timeout(60)


class World:
    """A host and a device whose time passes only when somebody works or waits.

    The device does what is queued in order; the host goes on meanwhile. An event notes when the device gets to it.
    """

    def __init__(self) -> None:
        self.now = 0.0  # of the host, seconds
        self.free = 0.0  # when the device is through with what is queued

    def clock(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        """On the host."""
        self.now += seconds

    def launch(self, seconds: float) -> None:
        """On the device; the host returns at once."""
        self.free = max(self.now, self.free) + seconds

    def batches(self, *seconds: float):
        """One after each time; every time is the host's."""
        for number, one in enumerate(seconds):
            self.work(one)
            yield number

    def event(self, *, enable_timing: bool):
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, world: World) -> None:
        self.world = world

    def record(self, stream: object) -> None:
        assert stream == "stream"
        self.at = max(self.world.now, self.world.free)

    def query(self) -> bool:
        return self.at <= self.world.now

    def synchronize(self) -> None:
        self.world.now = max(self.world.now, self.at)

    def elapsed_time(self, other: "Event") -> float:
        assert self.query()
        assert other.query(), "CUDA tells no time of an event that was not reached"
        return 1000 * (other.at - self.at)


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def cuda(world, monkeypatch) -> World:
    """The world's device in the place of CUDA."""
    monkeypatch.setattr(torch.cuda, "Event", world.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
    return world


def test_wait_and_train_are_told_apart(world):
    """Wait ratio = wait / (wait + train); the first batch, its step too, stands apart."""
    meter = WaitMeter(clock=world.clock)
    for number in meter.over(world.batches(7, 1, 0, 2)):
        world.work(100 if number == 0 else 3)
    assert (7.0, 4) == (meter.seconds_to_first, meter.steps)
    assert (array("d", [1, 0, 2]), array("d", [3, 3, 3])) == (meter.waits, meter.trains)
    assert 3 / 12 == meter.wait_ratio
    assert {
        "steps": 4,
        "seconds_to_first": 7.0,
        "wait_seconds": 3.0,
        "train_seconds": 9.0,
        "wait_ratio": 0.25,
    } == meter.as_dict()


def test_it_equals_the_formula_of_the_talk_where_nothing_overlaps(world):
    """(prepare + transfer) / (prepare + transfer + train)."""
    prepare, transfer, train = 0.4, 0.1, 0.7

    def batches():
        for number in range(5):
            world.work(prepare)
            world.work(transfer)
            yield number

    meter = WaitMeter(clock=world.clock)
    for _ in meter.over(batches()):
        world.work(train)
    assert (prepare + transfer) / (prepare + transfer + train) == pytest.approx(meter.wait_ratio)


def test_nothing_measured_is_none_and_never_waiting_is_zero(world):
    """NaN-safe: no batch, one batch, and steps that take no time at all."""
    for count in (0, 1):
        meter = WaitMeter(clock=world.clock)
        assert count == len(list(meter.over(range(count))))
        assert (None, count) == (meter.wait_ratio, meter.steps)
        assert {"steps": count, "wait_ratio": None, "wait_seconds": None}.items() <= meter.as_dict().items()
        assert (meter.seconds_to_first is None) == (count == 0)
    list(meter.over(range(3)))
    assert 0.0 == meter.wait_ratio
    for _ in meter.over(range(3)):
        world.work(1)
    assert 0.0 == meter.wait_ratio


def test_a_loop_may_be_left_and_measured_on(world):
    """`break` ends the last step; what passes between two loops is nobody's; the turn of an epoch is a wait."""
    meter = WaitMeter(clock=world.clock)
    for number in meter.over(world.batches(1, 1, 1, 1)):
        world.work(2)
        if number == 2:
            break
    world.work(50)  # an evaluation
    for _ in meter.over(world.batches(4, 1)):
        world.work(2)
    assert (array("d", [1, 1, 4, 1]), array("d", [2, 2, 2, 2])) == (meter.waits, meter.trains)
    assert (5, 1.0) == (meter.steps, meter.seconds_to_first)


def test_the_end_of_a_loop_is_no_wait(world):
    """It brings no batch."""

    def batches():
        yield from world.batches(1, 1)
        world.work(9)

    meter = WaitMeter(clock=world.clock)
    for _ in meter.over(batches()):
        world.work(1)
    assert array("d", [1]) == meter.waits


def test_queued_kernels_are_train_time(cuda):
    """GPU-06: the host waits 60 % of its time for batches, and the device 10 %; where it lags behind, not at all."""
    meter, host = WaitMeter("cuda"), WaitMeter("cpu", clock=cuda.clock)
    for _ in meter.over(host.over(cuda.batches(*[0.6] * 20))):
        cuda.launch(0.9)
        cuda.work(0.4)
    assert 0.6 == pytest.approx(host.wait_ratio)
    assert 0.1 == pytest.approx(meter.wait_ratio, abs=0.01)
    for _ in meter.over(cuda.batches(*[0.5] * 2000)):
        cuda.launch(1.5)
    assert 0.01 > meter.wait_ratio


def test_a_device_that_is_done_waits(cuda):
    """Where kernels are short, or the loop reads the loss at each step, wait is what the host waits."""
    meter = WaitMeter("cuda", clock=cuda.clock)
    for _ in meter.over(cuda.batches(5, *[0.6] * 10)):
        cuda.launch(0.4)
        cuda.now = max(cuda.now, cuda.free)  # loss.item()
    assert 5 == meter.seconds_to_first
    assert 0.6 == pytest.approx(meter.wait_ratio)
    assert [0.4] * 10 == pytest.approx(list(meter.trains))


def test_the_meter_never_holds_the_host_up(cuda):
    """A host that runs ahead may go on doing so: only the first batch, and whoever reads a figure, waits."""
    meter = WaitMeter("cuda")
    for number in meter.over(cuda.batches(*[0.001] * 100)):
        cuda.launch(1.0)
        assert cuda.now == pytest.approx(0.001 * (number + 1))
    assert len(meter._open) > 90, "the case did not arise"
    assert 0.0 == pytest.approx(meter.wait_ratio, abs=1e-9)
    assert cuda.now >= 100
    assert 99 == len(meter.waits) == len(meter.trains)


def test_figures_may_be_read_in_the_midst_of_a_loop(cuda):
    """They are those of the steps that are done."""
    meter, ratios = WaitMeter("cuda"), []
    for _ in meter.over(cuda.batches(1, 1, 1, 1)):
        cuda.launch(1.0)
        ratios.append(meter.wait_ratio)
    assert [None, None] == ratios[:2]
    assert all(0 <= ratio <= 1 for ratio in ratios[2:])
    assert 3 == len(meter.waits)


def test_the_device_is_that_of_the_feed(cuda):
    """Nobody has to say it twice; and it can be said."""

    class Fed:
        device = torch.device("cuda")

        def __iter__(self):
            return cuda.batches(1, 1)

    for meter in (WaitMeter(), WaitMeter("cuda:0")):
        for _ in meter.over(Fed()):
            cuda.launch(3.0)
        assert [3.0] == pytest.approx(list(meter.trains)), "the host's clock was read"


def test_a_loop_through_the_meter_ends_as_without_it(world):
    """Batches untouched, errors as they are, and a loop that is left early ends the feed's thread at once."""
    before = threads()
    given = [object(), object()]
    assert given == list(WaitMeter().over(given))

    def breaks():
        yield 1
        raise OSError("cut short")

    with pytest.raises(OSError, match="cut short"):
        list(WaitMeter().over(breaks()))
    gc.disable()
    try:
        source = Counted()
        for batch in WaitMeter().over(feed(source, "cpu")):
            del batch
            break
        assert have_ended(before)
        assert 0 == source.alive
    finally:
        gc.enable()


def test_steps_are_spans_too():
    """Where spans are recorded, wait and train follow one another, step by step."""
    spans.start()
    try:
        list(WaitMeter().over([1, 2, 3]))
    finally:
        noted = spans.stop()
    names = [noted.names[at] for at in noted.name]
    assert ["wait", "train", "wait", "train"] == names
    assert (noted.end >= noted.start).all()


def test_on_a_real_clock():
    """GPU-06 with real sleeps on the CPU: what an observer outside sees, within 0.05, on a busy machine too."""
    figures = feed_checks.check_wait_ratio("cpu", busy=0.01, count=25, quiet=False)
    fed = {name: one["measured"] for name, one in figures.items() if name.endswith("fed")}
    assert fed["0, fed"] <= fed["double, fed"] - 0.1, "the case did not arise"
    assert all(math.isfinite(ratio) for ratio in fed.values())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_real_device():
    """GPU-06 with kernels of a known time."""
    assert feed_checks.check_wait_ratio("cuda")
