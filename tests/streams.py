"""Streams for tests: samples as they come, some without end. A module of their own, for workers to import."""

import itertools
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from runs import digest, epochs, trained

from mmdp.encode import Encoder
from mmdp.records import Batch, Budget, Encoded, ImageLayout, Sample, Turn
from mmdp.refusals import DataError, Reason
from mmdp.sources import Source, open_source
from mmdp.stream_loader import StreamLoader


@dataclass(frozen=True)
class Listed:
    """The samples of a source with a length, one after the other; a bad row is its error."""

    source: Source

    name = "listed"

    def __iter__(self) -> Iterator[Sample | DataError]:
        for number in range(len(self.source)):
            try:
                yield self.source[number]
            except DataError as error:
                yield error


def exact(number: int, tokens: int, images: int = 0) -> Sample:
    """A sample for `ExactEncoder`."""
    return Sample(f"{number}:{tokens}:{images}", (), (Turn("assistant", ("x",)),), f"exact[{number}]")


def bad(number: int) -> DataError:
    """A row that is no sample."""
    return DataError(Reason.NO_ANSWER, "nothing to learn", source=f"exact[{number}]")


@dataclass(frozen=True)
class ExactEncoder:
    """Encodes what `exact` makes: so many tokens, the first of them the sample's number + 10, and so many images.

    The pixels of the deadly samples end any process but the one that made this.
    """

    side: int = 2  # pixels
    deadly: tuple[int, ...] = ()
    home: int = 0

    pad_id = 0

    @property
    def fingerprint(self) -> str:
        return f"exact {self.side}"

    def encode(self, sample: Sample) -> Encoded:
        number, tokens, images = map(int, sample.id.split(":"))
        ids = np.ones(tokens, dtype=np.int32)
        ids[0] = number % 2**30 + 10
        labels = ids.copy()
        labels[0] = -100
        return Encoded(ids, labels, (ImageLayout(0, 1, self.side, self.side),) * images)

    def pixels(self, sample: Sample, encoded: Encoded) -> list[np.ndarray]:
        number = int(sample.id.split(":")[0])
        if number in self.deadly and os.getpid() != self.home:
            os._exit(7)
        return [np.full((3, at.height, at.width), number % 256, dtype=np.uint8) for at in encoded.layouts]


@dataclass(frozen=True)
class Drawn:
    """`count` samples of sizes that a seed decides, or endlessly many; with marks, it goes on anywhere.

    Of 4 to `longest` tokens, and 0 to 2 images. One in `flaws` is bad, and one in `flaws` is of 10,000 tokens.
    """

    count: int | None
    longest: int = 60
    flaws: int = 0
    seed: int = 0

    name = "drawn"

    def sample(self, number: int) -> Sample | DataError:
        drawn = (number * 2654435761 + self.seed * 97) % 2**32 >> 8
        if self.flaws and drawn // 11 % self.flaws == 0:
            return bad(number)
        if self.flaws and drawn // 11 % self.flaws == 1:
            return exact(number, 10_000)
        return exact(number, 4 + drawn % (self.longest - 3), drawn // 7 % 3)

    def __iter__(self) -> Iterator[Sample | DataError]:
        return map(self.sample, itertools.count() if self.count is None else range(self.count))


@dataclass(frozen=True)
class Marked(Drawn):
    """The same, and goes on from any place."""

    def start_pass(self, mark: Mapping[str, Any] | None = None) -> "MarkedPass":
        return MarkedPass(self, mark["number"] if mark is not None else 0)


class MarkedPass:
    def __init__(self, stream: Drawn, number: int) -> None:
        self.stream = stream
        self.number = number

    def __iter__(self) -> "MarkedPass":
        return self

    def __next__(self) -> Sample | DataError:
        if self.number == self.stream.count:
            raise StopIteration
        self.number += 1
        return self.stream.sample(self.number - 1)

    def mark(self) -> dict[str, Any]:
        return {"number": self.number}


def stream_parquet(path: Path, encoder: Encoder, **options: Any) -> StreamLoader:
    """A loader of a Parquet file, opened anew."""
    options = {"executor": "inline", "window": 8, "batch_size": 4, **options}
    return StreamLoader(open_source(path, streaming=True), encoder, Budget(64, 3), **options)


def content(batch: Batch) -> str:
    """The digest of a batch, less the source's own account of its place: `datasets` has several for one place."""
    assert batch.state is not None
    mark = batch.state["mark"]
    return digest(replace(batch, state={**batch.state, "mark": mark and mark["number"]}))


def rest_of_parquet(path: Path, encoder: Encoder, state: dict[str, Any]) -> list[str]:
    """The content of the batches behind a state."""
    loader = stream_parquet(path, encoder, executor="threads", num_workers=2)
    loader.load_state_dict(state)
    return list(map(content, loader))


def train_stream(path: Path, encoder: Encoder, num_workers: int, total: int, out: Path) -> None:
    """Trains up to `total` batches, from where the file says; writes digest and state of each that is trained on."""
    done = trained(out)
    os.truncate(out, out.read_bytes().rfind(b"\n") + 1)
    options = {"executor": "threads", "num_workers": num_workers, "window": 8}
    loader = StreamLoader(Listed(open_source(path)), encoder, Budget(64, 3), **options)
    if done:
        loader.load_state_dict(done[-1]["state"])
    with out.open("a") as file:
        for batch in islice(epochs(loader, 9), total - len(done)):
            time.sleep(0.02)
            file.write(json.dumps({"batch": digest(batch), "state": batch.state}) + "\n")
            file.flush()
