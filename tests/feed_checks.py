"""What a feed must keep on any device: the checks GPU-01 to GPU-06, as functions of a device.

Tests run them on the CPU, and on CUDA where there is one; `benchmarks/gpu_check.py` runs them without pytest. Each
raises `AssertionError`, or returns what it saw.
"""

import gc
import math
import os
import threading
import time
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, Dataset

from mmdp.ahead import ahead
from mmdp.device import Feed, feed
from mmdp.lanes import CudaLane, Sent, _pinned
from mmdp.nested import map_tensors, tensors_of
from mmdp.records import Batch, ImageBuffer
from mmdp.wait_meter import WaitMeter

Figures = dict[str, Any]

Named = namedtuple("Named", "weights name")


@dataclass(frozen=True, slots=True)
class Frozen:
    mask: torch.Tensor
    note: str
    rest: dict[str, Any] = field(default_factory=dict)


class Own:
    """A batch of a user's own, with no method at all."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.words = ["as", "they", "are"]


def packed_batch(value: int) -> Batch:
    """One of ours: two rows, one image of (3, 4, 5)."""
    numbers = torch.full((2, 8), value)
    one = torch.tensor([1])
    images = ImageBuffer(
        torch.full((60,), value % 256, dtype=torch.uint8), torch.tensor([0, 60]), one * 4, one * 5, one, one
    )
    return Batch(numbers, numbers, numbers, numbers.int(), images, ((0,), (1,)), 3, state={"step": value})


def nested_batch(value: int, big: int = 50_000) -> dict[str, Any]:
    """Every tensor but those of images' bookkeeping holds the value; sizes change from batch to batch."""
    return {
        "ids": torch.full((4, 64), value),
        "ragged": [[torch.full((3, 8, 8 + image), float(value)) for image in range(value % 3)] for _ in range(4)],
        "big": torch.full((big + 1000 * (value % 7),), float(value)),
        "bytes": torch.full((big,), value % 256, dtype=torch.uint8),
        "named": Named((torch.full((5,), value, dtype=torch.int32),), f"batch {value}"),
        "ordered": OrderedDict(b=torch.tensor(value), a=[torch.tensor([value])]),
        "gaps": torch.full((4, 5), value)[:, 1:3],
        "turned": torch.full((2, 3, 4, 5), float(value)).to(memory_format=torch.channels_last),
        "same": torch.tensor(value).expand(3, 4),
        "half": torch.full((7,), value % 256, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "frozen": Frozen(torch.full((2,), value), "text", {"deep": (torch.tensor([value]), None)}),
        "own": Own(torch.full((3,), value)),
        "batch": packed_batch(value),
        "packed": pack_sequence([torch.full((3,), float(value)), torch.full((1,), float(value))]),
        "none": None,
        "array": np.arange(3),
        "words": [f"{value}-{word}" for word in range(4)],
    }


def nested_batches(count: int) -> Iterator[dict[str, Any]]:
    for value in range(count):
        yield nested_batch(value)


def form_of(value: Any) -> Any:
    """Nesting, shapes and types, without what the tensors hold."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, dict):
        return type(value).__name__, [(key, form_of(part)) for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [form_of(part) for part in value]
    names = getattr(value, "__dataclass_fields__", None) or getattr(value, "__dict__", {})
    # `Batch.host` is what the batch was before it moved.
    return type(value).__name__, [(name, form_of(getattr(value, name))) for name in names if name != "host"]


def moving(batch: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that go to the device: all but what a record of its own keeps on the host."""
    host = [*tensors_of(batch["batch"]), batch["packed"].batch_sizes]
    kept = {id(tensor) for tensor in host}
    return [tensor for tensor in tensors_of(batch) if id(tensor) not in kept] + [
        batch["batch"].input_ids,
        batch["batch"].images.pixels,
    ]


def differs(tensor: torch.Tensor, value: int) -> torch.Tensor:
    """How many elements do not hold the value; stays on the device, and waits for nothing."""
    wanted = value % 256 if tensor.dtype in (torch.uint8, torch.bfloat16) else value
    return (tensor != wanted).sum()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "mmdp-ahead"]


def have_ended(before: list[threading.Thread]) -> bool:
    """Whether all threads that came since have ended, within a while."""
    end = time.monotonic() + 10
    while (left := [thread for thread in threads() if thread not in before]) and time.monotonic() < end:
        time.sleep(0.01)
    return not left


def check_nesting(device: str) -> Figures:
    """GPU-01: the same nesting and values; tensors pinned and on the device, the rest untouched, uint8 still uint8."""
    given = nested_batch(3)
    (got,) = feed([given], device)
    assert form_of(given) == form_of(got)
    kind = torch.device(device).type
    for tensor in moving(got):
        assert kind == tensor.device.type
        assert 0 == int(differs(tensor, 3))
    assert torch.uint8 == got["bytes"].dtype == got["batch"].images.pixels.dtype
    assert isinstance(got["packed"], PackedSequence)
    assert "cpu" == got["packed"].batch_sizes.device.type == got["batch"].images.offsets.device.type
    assert given["batch"].images.offsets.tolist() == got["batch"].images.offsets.tolist()
    assert got["turned"].is_contiguous(memory_format=torch.channels_last)
    for name in ("none", "array", "words"):
        assert given[name] is got[name]
    assert given["own"].words is got["own"].words
    assert "cpu" == given["own"].tensor.device.type, "the batch that was given has been written to"
    if kind == "cuda":
        pinned = map_tensors(given, _pinned)
        assert form_of(given) == form_of(pinned)
        assert all(tensor.is_pinned() for tensor in tensors_of(pinned) if tensor.numel())
    return {"tensors": len(list(tensors_of(got)))}


def count_wrong(batches: Iterator[Any] | Feed[Any], device: str, cycles: int) -> int:
    """Elements that are not what they should be, seen by a stream that lags behind the host; memory is freed early."""
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for value, batch in enumerate(batches):
        if cycles:
            torch.cuda._sleep(cycles)
        for tensor in moving(batch):
            wrong += differs(tensor, value)
        del batch, tensor
    return int(wrong)


LAG = 10_000_000  # cycles of the device: some milliseconds


def check_races(device: str, count: int = 500) -> Figures:
    """GPU-02: every value is right, where the consumer's stream lags, and where copies do."""
    is_cuda = torch.device(device).type == "cuda"
    wrong = {
        "plain" if not is_cuda else "lagging": count_wrong(feed(nested_batches(count), device), device, is_cuda * LAG)
    }
    if is_cuda:
        wrong["slow copies"] = count_wrong(through(Disturbed(LAG), count), device, 0)
    assert not any(wrong.values()), f"elements of {count} batches that are wrong: {wrong}"
    return {"batches": count, "wrong": wrong}


class Disturbed(CudaLane):
    """Copies that come late; and, to show that the checks can fail, a lane that leaves a protection out."""

    def __init__(self, lag: int = 0, leaves_out: str | None = None) -> None:
        super().__init__(torch.device("cuda"))
        self.lag = lag
        self.leaves_out = leaves_out

    def send(self, batch: Any) -> Sent:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(self.lag)
        return super().send(batch)

    def receive(self, sent: Sent) -> Any:
        if self.leaves_out == "record":
            torch.cuda.current_stream().wait_event(sent.arrived)
            return sent.take()
        if self.leaves_out == "wait":
            sent.arrived = torch.cuda.current_stream().record_event()
        return super().receive(sent)


def through(lane: CudaLane, count: int) -> Iterator[Any]:
    """Batches that a feed sends through this lane."""
    fed: Feed[Any] = feed([], "cuda")
    return (lane.receive(sent) for sent in ahead(fed._send(nested_batches(count), lane), 1))


def wrong_without(protection: str, count: int = 200) -> int:
    """How many elements are wrong where a lane leaves out the record, or the wait: so the check can fail."""
    lane = Disturbed(LAG if protection == "wait" else 0, protection)
    return count_wrong(through(lane, count), "cuda", LAG if protection == "record" else 0)


class SaysWhere(Dataset):
    """Tells of each sample the process that made it, and whether CUDA was touched there."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[int, int, bool]:
        return index, os.getpid(), torch.cuda.is_initialized()


class MadeLate:
    """A DataLoader that is made when it is first asked, long after its feed."""

    def __init__(self, context: str) -> None:
        self.context = context

    def __iter__(self) -> Iterator[Any]:
        return iter(DataLoader(SaysWhere(), batch_size=3, num_workers=2, multiprocessing_context=self.context))


def check_forks(device: str) -> Figures:
    """GPU-03: the feed is built before the loader, whose two workers are forked; they never touch the device."""
    if torch.device(device).type == "cuda":
        torch.zeros(1, device=device)  # as a model on the device does
    seen, processes = [], set()
    for index, process, touched in feed(MadeLate("fork"), device):
        assert torch.device(device).type == index.device.type
        assert not touched.any()
        seen += index.tolist()
        processes |= set(process.tolist())
    assert list(range(12)) == seen
    assert os.getpid() not in processes
    assert 2 == len(processes)
    return {"workers": len(processes)}


class Counted:
    """Batches without end; knows which of them still live."""

    def __init__(self) -> None:
        self.made = 0
        self.alive = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            batch = torch.full((100_000,), float(self.made))
            self.made += 1
            self.alive += 1
            weakref.finalize(batch, self._gone)
            yield batch
            del batch

    def _gone(self) -> None:
        self.alive -= 1


def pinned_bytes() -> int:
    """In use, of what torch has pinned; what is in its cache is free."""
    torch.cuda.synchronize()
    torch.empty(1, pin_memory=True)  # at a request, the allocator looks which blocks are free by now
    return int(torch.cuda.host_memory_stats().get("active_bytes.current", 0))


def check_ends(device: str) -> Figures:
    """GPU-05: no batches, one, an error behind three, a loop left early: the source's own ends, and no thread stays."""
    before = threads()
    assert [] == list(feed(iter(()), device))
    (only,) = feed(nested_batches(1), device)
    assert 0 == int(differs(only["ids"], 0))
    broken = OSError("source broke after 3")

    def breaks() -> Iterator[dict[str, Any]]:
        yield from nested_batches(3)
        raise broken

    seen, raised = [], None
    try:
        for batch in feed(breaks(), device):
            seen.append(int(batch["ids"][0, 0]))
    except OSError as error:
        raised = error
    assert broken is raised
    assert [0, 1, 2] == seen
    assert have_ended(before)
    del batch, only
    ends = {"break": _leave_by_break, "close": _leave_by_close, "drop": _leave_by_drop}
    is_cuda = torch.device(device).type == "cuda"
    pinned = pinned_bytes() if is_cuda else 0
    gc.disable()  # at once, without the garbage collector
    try:
        for name, leave in ends.items():
            source = Counted()
            leave(source, device)
            assert have_ended(before), name
            assert 2 <= source.made <= 5, f"{name}: {source.made} batches were made for 2"
            assert 0 == source.alive, f"{name}: {source.alive} batches are still held"
            assert not is_cuda or pinned_bytes() <= pinned, f"{name}: pinned memory is still held"
    finally:
        gc.enable()
    return {"ends": [*ends, "empty", "one", "error"]}


def _leave_by_break(source: Counted, device: str) -> None:
    for number, _ in enumerate(feed(source, device)):
        if number == 1:
            break


def _leave_by_close(source: Counted, device: str) -> None:
    one = feed(source, device)
    loop = iter(one)
    next(loop), next(loop)
    one.close()
    assert [] == list(loop), "a loop that is closed goes on"


def _leave_by_drop(source: Counted, device: str) -> None:
    loop = iter(feed(source, device))
    next(loop), next(loop)


class Watched:
    """Batches, and how long each was waited for, told from outside the meter."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches
        self.waits: list[float] = []
        self.trains: list[float] = []

    def __iter__(self) -> Iterator[Any]:
        loop = iter(self.batches)
        asked = time.perf_counter()
        for batch in loop:
            got = time.perf_counter()
            yield batch
            done = time.perf_counter()
            self.waits.append(got - asked)
            self.trains.append(done - got)
            asked = done

    @property
    def ratio(self) -> float:
        """Without the first step."""
        wait, train = sum(self.waits[1:]), sum(self.trains[1:])
        return wait / (wait + train)


def slow_batches(count: int, seconds: float) -> Iterator[torch.Tensor]:
    for number in range(count):
        time.sleep(seconds)
        yield torch.full((4,), float(number))


def busy_on_host(seconds: float) -> Callable[[], None]:
    return lambda: time.sleep(seconds)


def busy_on_cuda(seconds: float) -> Callable[[], None]:
    """A kernel of so many seconds; the host returns at once."""
    tried = 20_000_000
    for _ in range(2):  # the first one warms up
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.cuda._sleep(tried)
        end.record()
        end.synchronize()
    cycles = int(tried * seconds / (start.elapsed_time(end) / 1000))
    return lambda: torch.cuda._sleep(cycles)


def check_wait_ratio(device: str, busy: float = 0.02, count: int = 50, *, quiet: bool = True) -> Figures:
    """GPU-06: within 0.05 of the known ratio, for a source that takes 0, half and double the busy time.

    Args:
        device: where the consumer is busy.
        busy: seconds a step.
        count: steps.
        quiet: nothing else runs here, so the known ratio follows from the two times. Else what an observer on the host
            sees is taken for it, which is right where the consumer is busy on the host. Others may get the processor
            between a look at the clock of the one and of the other: then it is measured again, up to four times.
    """
    is_cuda = torch.device(device).type == "cuda"
    work = busy_on_cuda(busy) if is_cuda else busy_on_host(busy)
    figures: Figures = {"busy_seconds": busy}
    for name, seconds in (("0", 0.0), ("half", busy / 2), ("double", 2 * busy)):
        for way in ("plain", "fed"):
            error = math.inf
            for _ in range(1 if quiet else 4):
                source = slow_batches(count, seconds)
                watched = Watched(feed(source, device) if way == "fed" else source)
                meter = WaitMeter(device)
                for _ in meter.over(watched):
                    work()
                # A kernel runs on while the host makes the next batch; a busy host can't, but has a thread that does.
                exposed = max(0.0, seconds - busy) if is_cuda or way == "fed" else seconds
                known = exposed / (exposed + busy) if quiet else watched.ratio
                assert meter.wait_ratio is not None
                assert meter.seconds_to_first is not None
                error = abs(meter.wait_ratio - known)
                if error <= 0.05:
                    break
            assert error <= 0.05, f"source of {name}, {way}: {meter.wait_ratio:.3f}, known {known:.3f}"
            figures[f"{name}, {way}"] = {
                "known": known,
                "measured": meter.wait_ratio,
                "seen_from_the_host": watched.ratio,
                "seconds_to_first": meter.seconds_to_first,
            }
    return figures


CHECKS: dict[str, Callable[[str], Figures]] = {
    "GPU-01 nesting": check_nesting,
    "GPU-02 races": check_races,
    "GPU-03 forks": check_forks,
    "GPU-05 ends": check_ends,
    "GPU-06 wait ratio": check_wait_ratio,
}
