"""Samples to a row: joined back to back, those that fail left out.

Adds: `join` puts encoded samples into one row; `build_row` takes them from wherever they come, with patience for a disk
that fails; `RowBuilder` makes a row from sample indices, the pure function that every executor runs.
Leaves out: which samples share a row (`planner.py`), and batches of rows (`batching.py`). Nothing here needs torch, so
that a worker starts in half the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np

from mmdp.encode import Encoder
from mmdp.fetch_loop import wait as wait_for
from mmdp.fingerprints import fingerprint_of
from mmdp.records import IGNORE, Encoded, Row, Sample
from mmdp.refusals import DataError, Reason
from mmdp.remote import FetchError
from mmdp.samples_ahead import fetch_samples
from mmdp.sizes import Sizes
from mmdp.sources import Source
from mmdp.spans import span

_WAITS = (0.1, 0.5)
"""Seconds before another try, where a file could not be read."""

Result = TypeVar("Result")


def join(
    encoded: Sequence[Encoded],
    images: Sequence[Sequence[np.ndarray]],
    samples: Sequence[int],
    skipped: Mapping[int, Reason] | None = None,
) -> Row:
    """One row of samples back to back; nothing given is written to.

    Args:
        encoded: k samples.
        images: for each sample its pixels, arrays (3, H, W) uint8.
        samples: the index of each sample.
        skipped: samples that were meant for this row and failed, with their reason.

    Returns:
        A row whose positions restart at 0 in each segment, and whose segments start with the label -100.
    """
    lengths = [len(one.ids) for one in encoded]
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if lengths else 0
    starts = ends - lengths if lengths else ends
    labels = np.concatenate([one.labels for one in encoded]) if lengths else np.empty(0, dtype=np.int32)
    labels[starts] = IGNORE
    return Row(
        ids=np.concatenate([one.ids for one in encoded]) if lengths else np.empty(0, dtype=np.int32),
        labels=labels,
        positions=np.arange(total, dtype=np.int32) - np.repeat(starts, lengths).astype(np.int32),
        segments=np.repeat(np.arange(1, len(lengths) + 1, dtype=np.int32), lengths),
        images=tuple(image for group in images for image in group),
        image_segments=np.repeat(np.arange(1, len(lengths) + 1, dtype=np.int32), [len(group) for group in images]),
        samples=tuple(samples),
        skipped=dict(skipped or {}),
        layouts=tuple(
            layout for one, group in zip(encoded, images, strict=True) for layout in one.layouts[: len(group)]
        ),
    )


def merge(rows: Sequence[Row]) -> Row:
    """One row of rows that hold one sample, or the failure of one."""
    whole = [row for row in rows if row.samples]
    return join(
        [Encoded(row.ids, row.labels, row.layouts) for row in whole],
        [row.images for row in whole],
        [sample for row in whole for sample in row.samples],
        {index: reason for row in rows for index, reason in row.skipped.items()},
    )


def build_row(
    samples: Iterable[int], one: Callable[[int], tuple[Encoded, list[np.ndarray]]], *, name: str, strict: bool = False
) -> Row:
    """The row of these samples, wherever they come from. One that fails leaves it; the others move up.

    Args:
        samples: the index of each.
        one: gives tokens and pixels of a sample.
        name: what a person calls the source, for errors.
        strict: raise a sample's error instead of counting it.

    Raises:
        DataError: in strict mode, for the first sample that fails.
        OSError: a file that exists could not be read, three times over.
    """
    encoded: list[Encoded] = []
    images: list[list[np.ndarray]] = []
    kept: list[int] = []
    skipped: dict[int, Reason] = {}
    for index in samples:
        try:
            tokens, pixels = with_patience(one, index, name=name)
        except DataError as error:
            if strict:
                raise
            skipped[index] = error.reason
            continue
        encoded.append(tokens)
        images.append(pixels)
        kept.append(index)
    with span("join"):
        return join(encoded, images, kept, skipped)


def with_patience(function: Callable[[int], Result], index: int, *, name: str) -> Result:
    """What the function makes of a sample. An `OSError` is tried again after a moment, twice, and then raised."""
    for wait in _WAITS:
        try:
            return function(index)
        except FetchError:
            raise  # the store was asked again as often as that may help
        except OSError:
            time.sleep(wait)
    try:
        return function(index)
    except OSError as error:
        error.add_note(f"sample {index} of {name}, {len(_WAITS) + 1} times over")
        raise


@dataclass(frozen=True, slots=True)
class RowBuilder:
    """Sample indices to a row, pixels included. Pure and picklable: every worker of every kind runs it.

    A sample that fails while it is built leaves its row: the others move up, the failure is counted with its reason.
    An `OSError` is no failure of the sample: it is tried again after a moment, and then raised.

    Attributes:
        source: the samples.
        encoder: makes tokens and pixels of them.
        sizes: what was measured; ids and labels come from its cache. None encodes anew.
        pixels: False leaves the images out, for counting only.
        strict: raise a sample's error instead of counting it.
        side_by_side: fetch all images of a row at once, where they lie in a store.

    Raises:
        ValueError: sizes of another source or encoder.
    """

    source: Source
    encoder: Encoder
    sizes: Sizes | None = None
    pixels: bool = True
    strict: bool = False
    side_by_side: bool = True

    def __post_init__(self) -> None:
        if self.sizes is not None and self.sizes.fingerprint != fingerprint_of(self.source, self.encoder):
            raise ValueError("these sizes are of another source or encoder: measure this one, and plan from its sizes")

    def __call__(self, indices: Sequence[int] | np.ndarray) -> Row:
        """The row of these samples.

        Raises:
            DataError: in strict mode, for the first sample that fails.
            OSError: a file that exists could not be read, three times over.
        """
        max_fetches = getattr(self.source, "max_fetches", 1)
        if self.side_by_side and max_fetches > 1:
            with span("row_fetch", max_fetches=max_fetches):  # the fetches themselves are on the loop's thread
                fetched = wait_for(self.fetch(indices))
            return self.assemble(fetched)
        return build_row(map(int, indices), self._one, name=self.source.name, strict=self.strict)

    def messages(self, failed: Mapping[int, Reason]) -> dict[int, str]:
        """Index to message, for samples that failed for these reasons: file, line, id, field, what was found.

        Each is built once more for it, which takes a moment; only one that killed its worker is not.
        """
        return {index: self.complaint(index, reason) for index, reason in failed.items()}

    def complaint(self, index: int, reason: Reason) -> str:
        """The message of a sample that failed for this reason. It is built again, and may pass now."""
        if reason == Reason.KILLED_WORKER:
            return f"sample {index} of {self.source.name}: building it ended the process, twice"
        try:
            replace(self, strict=True)([index])
        except DataError as error:
            return str(error)
        return f"sample {index} of {self.source.name}: {reason} before, and nothing is wrong with it now"

    async def fetch(self, indices: Sequence[int] | np.ndarray) -> tuple[tuple[int, ...], Mapping[int, Sample]]:
        """The first half of building a row, for an executor with an event loop: what must be waited for."""
        wanted = tuple(map(int, indices))
        return wanted, await fetch_samples(self.source, [at for at in wanted if at >= 0], images=self.pixels)

    def assemble(self, fetched: tuple[tuple[int, ...], Mapping[int, Sample]]) -> Row:
        """The other half. Both together give the row that a call gives, and raise what it raises."""
        wanted, samples = fetched
        one = partial(self._one, samples=samples)
        return build_row(wanted, one, name=self.source.name, strict=self.strict)

    def _one(self, index: int, samples: Mapping[int, Sample] | None = None) -> tuple[Encoded, list[np.ndarray]]:
        if index < 0:
            raise IndexError(f"sample {index}: a row names its samples by their place from the start")
        sample = samples[index] if samples is not None and index in samples else self.source[index]
        one = self.sizes.encoded(index) if self.sizes is not None else self.encoder.encode(sample)
        return one, self.encoder.pixels(sample, one) if self.pixels else []
