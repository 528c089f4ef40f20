"""Runs to compare: a small plan over real files, batches as digests, and a child that trains."""

import ctypes
import json
import multiprocessing
import os
import random
import re
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from itertools import islice
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import NamedTuple, TypeVar

import psutil
import torch
from small import tokenizer, write_data
from torch.utils.data import DataLoader

import mmdp
from mmdp.encode import Encoder
from mmdp.loader import Loader
from mmdp.packed_dataset import PackedDataset
from mmdp.planner import Plan
from mmdp.records import Batch
from mmdp.sources import Source


def forkserver() -> BaseContext:
    """Starts processes in a moment, since it has imported what they need; a fresh interpreter takes many seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mmdp.loader", "transformers.tokenization_utils_tokenizers"])
    return context


Result = TypeVar("Result")


class Parts(NamedTuple):
    """What a loader is made of."""

    source: Source
    encoder: Encoder
    plan: Plan


def make_parts(folder: Path, num_images=(1, 0, 2, 1, 0), *, repeat=8, side=16, max_tokens=64) -> Parts:
    """Samples of 18 to 27 tokens in rows of at most 3 images; windows so small that an epoch has a few."""
    source = mmdp.open_source(write_data(folder, num_images, repeat=repeat))
    encoder = Encoder(tokenizer(), f"fixed:4:side={side}")
    sizes = mmdp.measure(source, encoder)
    return Parts(source, encoder, mmdp.plan(sizes, mmdp.Budget(max_tokens, 3), window=8, block=2, buffer=16))


def digest(batch: Batch) -> str:
    """Of all that a batch holds, its state too: equal digests are equal batches, bit for bit."""
    images = batch.images
    tensors = (batch.input_ids, batch.labels, batch.position_ids, batch.segments)
    tensors += (images.pixels, images.offsets, images.heights, images.widths, images.rows, images.samples)
    rest = (batch.samples, batch.label_tokens, dict(batch.skipped), batch.filler_rows, batch.step_label_tokens)
    return _hash(*(tensor for one in tensors for tensor in (one.dtype, one.shape, one)), rest, batch.state)


def rows_of(batch: Batch) -> list[tuple[tuple[int, ...], str]]:
    """The samples of each row, and a digest of its tokens and pixels; filler rows left out."""
    rows = []
    for row, samples in enumerate(batch.samples):
        if samples:
            tensors = (batch.input_ids[row], batch.labels[row], batch.position_ids[row], batch.segments[row])
            images = [image for place, image in enumerate(batch.images) if batch.images.rows[place] == row]
            rows.append((samples, _hash(*tensors, *images)))
    return rows


def _hash(*values: object) -> str:
    state = blake2b(digest_size=8)
    for value in values:
        state.update(value.numpy().tobytes() if isinstance(value, torch.Tensor) else str(value).encode())
    return state.hexdigest()


class Road(NamedTuple):
    """A way that batches reach a training loop.

    Attributes:
        executor: of `Loader`; None for torch's DataLoader.
        num_workers: of either.
        persistent: DataLoader workers outlive an epoch.
        context: how DataLoader workers start.
    """

    executor: object = None
    num_workers: int = 0
    persistent: bool = False
    context: str | None = None

    def batches(self, parts: Parts, batch_size: int, state: dict | None = None, **options) -> "Endless":
        """Epoch after epoch, from a state on; each loop over it is one epoch, or what is left of it."""
        if self.executor is not None:
            loader = Loader(
                *parts, batch_size=batch_size, executor=self.executor, num_workers=self.num_workers or None, **options
            )
            place = loader
        else:
            dataset = PackedDataset(*parts)
            place = dataset.sampler(batch_size, **options)
            loader = DataLoader(
                dataset,
                batch_sampler=place,
                collate_fn=dataset.collate,
                num_workers=self.num_workers,
                persistent_workers=self.persistent,
                multiprocessing_context=self.context if self.num_workers else None,
            )
        if state is not None:
            place.load_state_dict(state)
        return loader


Endless = Iterable[Batch]


def epochs(loader: Endless, count: int) -> Iterator[Batch]:
    """The batches of so many loops."""
    for _ in range(count):
        yield from loader


def trained(out: Path) -> list[dict]:
    """What a child has written; a line that a kill has cut does not count."""
    return [json.loads(line) for line in out.read_text().splitlines(keepends=True) if line.endswith("\n")]


def train(road: Road, parts: Parts, batch_size: int, total: int, out: Path, pace: float) -> None:
    """Trains `total` batches, from where the file says; writes digest and state of each batch once it is trained on."""
    out.touch()
    done = trained(out)
    os.truncate(out, out.read_bytes().rfind(b"\n") + 1)
    loader = road.batches(parts, batch_size, done[-1]["state"] if done else None)
    with out.open("a") as file:
        for batch in islice(epochs(loader, 100), total - len(done)):
            time.sleep(pace)
            file.write(json.dumps({"batch": digest(batch), "state": batch.state}) + "\n")
            file.flush()


# What runs in a child, since it changes the process, or measures it


def in_child(function: Callable[..., Result], *arguments: object) -> Result:
    """What the function returns or raises in a process of its own."""
    context = forkserver()
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(send, function, arguments))
    process.start()
    send.close()
    try:
        outcome = receive.recv()
    finally:
        process.kill()
        process.join()
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _answer(send: Connection, function: Callable, arguments: tuple) -> None:
    try:
        send.send(function(*arguments))
    except Exception as error:
        send.send(error)


def one_epoch(parts: Parts, epoch: int) -> list[str]:
    """Digests of an epoch's batches, where other numbers were drawn before."""
    random.seed(time.time_ns())
    torch.manual_seed(time.time_ns() % 2**31)
    loader = Loader(*parts, batch_size=2, executor="threads", num_workers=2)
    loader.set_epoch(epoch)
    return [digest(batch) for batch in loader]


def digests(road: Road, parts: Parts) -> list[str]:
    """Of the batches of an epoch."""
    return [digest(batch) for batch in road.batches(parts, 2)]


def keep(road: Road, parts: Parts, num_handles: int) -> int:
    """How many batches of an epoch can be kept with so many file handles."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (psutil.Process().num_fds() + num_handles, hard))
    return len(list(road.batches(parts, 2)))


def peak(road: Road, parts: Parts, batch_size: int, depth: int, max_bytes: int) -> int:
    """Bytes of memory that a loop with a slow consumer takes at most, above what the process had."""
    next(iter(road.batches(parts, 1)))  # whatever is imported or set up but once
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew: proc(5)
    for batch in road.batches(parts, batch_size, depth=depth, max_bytes=max_bytes):
        time.sleep(0.05)
        assert len(batch.images)
    text = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", text)[1]) - before


def with_small_shared_memory(road: Road, parts: Parts) -> list[str] | None:
    """Digests of an epoch's batches where /dev/shm has 1 MB; None where that can't be arranged."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, private, recursive = 0x20000, 1 << 18, 1 << 14
    if (
        libc.unshare(new_mounts)
        or libc.mount(b"none", b"/", None, private | recursive, None)
        or libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=1m")
    ):
        return None
    return [digest(batch) for batch in road.batches(parts, 4)]
