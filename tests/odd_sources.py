"""Sources that go wrong at one sample, and samples of an exact size. A module of their own, for workers to import."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mmdp.records import Encoded, ImageLayout, Sample, Turn
from mmdp.sources import Source


@dataclass(frozen=True)
class Wrapped:
    """Another source, read through."""

    source: Source

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def fingerprint(self) -> str:
        return self.source.fingerprint

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        return self.source[index]


@dataclass(frozen=True)
class Kills(Wrapped):
    """Ends the process that reads the bad samples, unless it is the one that made this."""

    bad: tuple[int, ...]
    home: int

    def __getitem__(self, index: int) -> Sample:
        if index in self.bad and os.getpid() != self.home:
            os._exit(7)
        return self.source[index]


@dataclass(frozen=True)
class Unreadable(Wrapped):
    """The disk fails so many times at the bad sample; each time is a file in the folder."""

    bad: int
    times: int
    folder: Path

    def __getitem__(self, index: int) -> Sample:
        tries = self.tries()
        if index == self.bad and tries < self.times:
            (self.folder / f"try {tries}").touch()
            raise OSError(5, "the disk is tired")
        return self.source[index]

    def tries(self) -> int:
        return len(list(self.folder.glob("try *")))


@dataclass(frozen=True)
class Exact:
    """Source and encoder in one: sample i has tokens[i] tokens, the first of them i + 10, and images[i] images."""

    tokens: Sequence[int]
    images: Sequence[int] | None = None
    side: int = 2  # pixels

    name = "exact"
    pad_id = 0

    @property
    def fingerprint(self) -> str:
        return f"{self.tokens} {self.images} {self.side}"

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Sample:
        return Sample(str(index), (), (Turn("assistant", ("x",)),), f"exact:{index}")

    def image_sizes(self, sample: Sample) -> list[tuple[int, int]]:
        return [(self.side, self.side)] * (self.images[int(sample.id)] if self.images is not None else 0)

    def encode(self, sample: Sample, image_sizes: Sequence[tuple[int, int]] | None = None) -> Encoded:
        index = int(sample.id)
        ids = np.ones(self.tokens[index], dtype=np.int32)
        ids[0] = index + 10
        count = self.images[index] if self.images is not None else 0
        return Encoded(ids, ids.copy(), (ImageLayout(0, 1, self.side, self.side),) * count)

    def pixels(self, sample: Sample, encoded: Encoded) -> list[np.ndarray]:
        return [np.full((3, at.height, at.width), int(sample.id) % 256, dtype=np.uint8) for at in encoded.layouts]
