"""Functions for Ray actors to run. A module of their own, so that a worker imports little."""

import asyncio
import os
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mmdp.records import Encoded, ImageLayout, Sample, Turn
from mmdp.refusals import DataError, Reason


@dataclass(frozen=True)
class TwoPhases:
    """Waits in one phase, and says in which thread each phase ran, and when it began and ended."""

    seconds: float

    async def fetch(self, item):
        start = time.monotonic()
        await asyncio.sleep(self.seconds)
        return item, start, time.monotonic()

    def assemble(self, fetched):
        time.sleep(0.01)
        return fetched

    def __call__(self, item):
        raise AssertionError("an executor with an event loop uses the phases")


@dataclass(frozen=True)
class FetchFails:
    """The first phase goes wrong at one item."""

    bad: int

    async def fetch(self, item):
        if item == self.bad:
            raise OSError(f"no answer for {item}")
        return item

    def assemble(self, fetched):
        return fetched


@dataclass(frozen=True)
class StuckSomewhere:
    """Never comes back from item 3, and says in which process that is; item 2 waits for it."""

    folder: Path

    def __call__(self, item):
        mark = self.folder / "stuck"
        if item == 3:
            mark.write_text(str(os.getpid()))
            time.sleep(1000)
        while item == 2 and not (mark.exists() and mark.read_text()):
            time.sleep(0.01)
        return item


@dataclass(frozen=True)
class CountsTries:
    """Leaves a mark for each try of each item; ends its process at the bad one."""

    folder: Path
    bad: int

    def __call__(self, item):
        (self.folder / f"{item}-{time.monotonic_ns()}").touch()
        if item == self.bad:
            time.sleep(0.3)
            os._exit(1)
        time.sleep(1 if abs(item - self.bad) < 3 else 0.01)  # so that others are in work with it
        return item

    def tries(self, item):
        return len(list(self.folder.glob(f"{item}-*")))


@dataclass(frozen=True)
class WarnsAndWaits:
    """Warns, and comes back once somebody has read it."""

    heard: Path  # a file that this one makes

    def __call__(self, item):
        warnings.warn(f"item {item} waits", RuntimeWarning, stacklevel=2)
        end = time.monotonic() + 60
        while not self.heard.exists():
            assert time.monotonic() < end, "nobody has read it"
            time.sleep(0.02)
        return item


def puts(item):
    """A reference to an object that belongs to the worker, and the worker's process."""
    import ray

    from mmdp.ray_worker import pack

    return ray.put(pack(np.full(2**20, item, np.uint8))), os.getpid()


def block(item):
    """6 MB of the item's number, and the worker's process."""
    return np.full(6_000_000, item, np.uint8), os.getpid()


def process(item):
    """The process that worked on the item."""
    return os.getpid()


@dataclass(frozen=True)
class Plain:
    """Source and encoder in one, which needs no tokenizer: sample i has 20 + i % 7 tokens and, at odd i, an image."""

    num_samples: int
    side: int = 16  # pixels
    gone: int = -1  # this sample can't be read

    name = "plain"
    pad_id = 0

    @property
    def fingerprint(self) -> str:
        return f"{self.num_samples} {self.side}"

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Sample:
        if index == self.gone:
            raise DataError(Reason.MISSING_IMAGE, f"sample {index} is gone")
        return Sample(str(index), (), (Turn("assistant", ("",)),), f"plain:{index}")

    def image_sizes(self, sample: Sample) -> list[tuple[int, int]]:
        return [(self.side, self.side)] * (int(sample.id) % 2)

    def encode(self, sample: Sample, image_sizes: object = None) -> Encoded:
        index = int(sample.id)
        ids = np.arange(20 + index % 7, dtype=np.int32)
        layout = ImageLayout(tokens=4, vision=4, height=self.side, width=self.side)
        return Encoded(ids, ids.copy(), (layout,) * (index % 2))

    def pixels(self, sample: Sample, encoded: Encoded) -> list[np.ndarray]:
        return [np.full((3, at.height, at.width), int(sample.id) % 256, dtype=np.uint8) for at in encoded.layouts]


@dataclass(frozen=True)
class PlainThatWarns(Plain):
    """At its first sample it warns, and waits until somebody has read it."""

    heard: Path = Path()

    def __getitem__(self, index: int) -> Sample:
        if index == 0:
            WarnsAndWaits(self.heard)(index)
        return super().__getitem__(index)
