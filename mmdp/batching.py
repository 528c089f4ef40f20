"""Samples to a row, rows to a batch.

Adds: `join` puts encoded samples back to back in one row; `batch` stacks rows to (B, L), padded on the right to the
longest row or to a fixed length; `RowBuilder` makes a row from sample indices, the pure function that every executor
runs; `Rows` is the map-style data set of them, as torch's DataLoader wants it.
Leaves out: which samples share a row (`planner.py`). Naive, fixed-length and packed batches all come from here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from mmdp.encode import Encoder
from mmdp.records import IGNORE, Batch, DataError, Encoded, ImageBuffer, Reason, Row, Sample
from mmdp.remote import FetchError
from mmdp.samples_ahead import fetch_samples
from mmdp.sizes import Sizes, fingerprint_of
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


def batch(rows: Sequence[Row], *, pad_id: int, length: int | None = None) -> Batch:
    """B rows as one batch, padded on the right.

    Args:
        rows: a row longer than `length` is dropped and counted, never cut: that could split an image's tokens, or leave
            nothing to learn. Drop over-long samples before rows are made, and no batch loses one.
        pad_id: fills `input_ids` behind the end of a row.
        length: tokens a row, L; by default those of the longest row.

    Returns:
        A batch of shape (B, L). Positions restart in the tail too, so that it reads as a sample of its own.

    Raises:
        ValueError: no row is left.
        RuntimeError: in a worker of a DataLoader, where shared memory is too small for the batch.
    """
    if not rows:
        raise ValueError("a batch of no rows: give at least one")
    kept = [row for row in rows if length is None or len(row) <= length]
    dropped = [row for row in rows if length is not None and len(row) > length]
    if not kept:
        raise ValueError(
            f"no batch of {len(rows)} rows: {len(dropped)} are longer than {length} tokens. "
            "Batch to a larger length, or leave such samples out before they are batched"
        )
    skipped = {index: Reason.TOO_LONG for row in dropped for index in row.samples}
    for row in rows:
        skipped.update(row.skipped)
    shape = (len(kept), length if length is not None else max(1, *(len(row) for row in kept)))
    input_ids = np.full(shape, pad_id, dtype=np.int64)
    labels = np.full(shape, IGNORE, dtype=np.int64)
    positions = np.zeros(shape, dtype=np.int64)
    segments = np.zeros(shape, dtype=np.int32)
    for number, row in enumerate(kept):
        end = len(row)
        input_ids[number, :end] = row.ids
        labels[number, :end] = row.labels
        positions[number, :end] = row.positions
        positions[number, end:] = np.arange(shape[1] - end)
        segments[number, :end] = row.segments
    made = Batch(
        input_ids=torch.from_numpy(input_ids),
        labels=torch.from_numpy(labels),
        position_ids=torch.from_numpy(positions),
        segments=torch.from_numpy(segments),
        images=_image_buffer(kept),
        samples=tuple(row.samples for row in kept),
        label_tokens=int((labels != IGNORE).sum()),
        skipped=skipped,
        filler_rows=sum(not row.samples and not row.skipped for row in kept),
    )
    if get_worker_info() is not None:
        _share(made)
    return made


def _share(made: Batch) -> None:
    """Puts a batch into the shared memory by which a worker of a DataLoader hands it over.

    torch does so by itself, but later and in a thread of its own: where memory is lacking there, it prints a traceback,
    no batch comes, and the consumer waits for ever.
    """
    values = [getattr(part, one.name) for part in (made, made.images) for one in fields(part)]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    try:
        for tensor in tensors:
            tensor.share_memory_()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        raise RuntimeError(
            f"no shared memory for a batch of {num_bytes:,} bytes ({error}): enlarge /dev/shm (docker run --shm-size), "
            "give the DataLoader fewer workers or a smaller prefetch_factor, or use `mmdp.Loader`, which needs none"
        ) from error


def _image_buffer(rows: Sequence[Row]) -> ImageBuffer:
    images = [image for row in rows for image in row.images]
    offsets = np.zeros(len(images) + 1, dtype=np.int64)
    offsets[1:] = np.cumsum([image.size for image in images])
    pixels = np.empty(offsets[-1], dtype=np.uint8)
    for image, start, end in zip(images, offsets, offsets[1:], strict=False):
        pixels[start:end] = image.reshape(-1)
    return ImageBuffer(
        pixels=torch.from_numpy(pixels),
        offsets=torch.from_numpy(offsets),
        heights=torch.tensor([image.shape[1] for image in images], dtype=torch.int64),
        widths=torch.tensor([image.shape[2] for image in images], dtype=torch.int64),
        rows=torch.tensor([number for number, row in enumerate(rows) for _ in row.images], dtype=torch.int64),
        samples=torch.tensor(
            [row.samples[segment - 1] for row in rows for segment in row.image_segments], dtype=torch.int64
        ),
        segments=torch.tensor([int(segment) for row in rows for segment in row.image_segments], dtype=torch.int64),
        originals=torch.tensor([size for row in rows for size in _originals(row)], dtype=torch.int64).view(-1, 2),
    )


def _originals(row: Row) -> list[tuple[int, int]]:
    """(height, width) of each image before it was resized; 0 where that is not known."""
    if len(row.layouts) != len(row.images):  # a row made by hand
        return [(0, 0)] * len(row.images)
    return [(layout.original_height, layout.original_width) for layout in row.layouts]


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

    Raises:
        ValueError: sizes of another source or encoder.
    """

    source: Source
    encoder: Encoder
    sizes: Sizes | None = None
    pixels: bool = True
    strict: bool = False

    def __post_init__(self) -> None:
        if self.sizes is not None and self.sizes.fingerprint != fingerprint_of(self.source, self.encoder):
            raise ValueError("these sizes are of another source or encoder: measure this one, and plan from its sizes")

    def __call__(self, indices: Sequence[int] | np.ndarray) -> Row:
        """The row of these samples.

        Raises:
            DataError: in strict mode, for the first sample that fails.
            OSError: a file that exists could not be read, three times over.
        """
        return build_row(map(int, indices), self._one, name=self.source.name, strict=self.strict)

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


class Rows(Dataset[Row]):
    """A map-style data set of rows.

    Args:
        build: makes a row of sample indices.
        rows: the sample indices of each row; `sizes.kept()[:, None]` for rows of one sample each.
    """

    def __init__(self, build: RowBuilder, rows: Sequence[Sequence[int] | np.ndarray] | np.ndarray) -> None:
        self.build = build
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Row:
        return self.build(self.rows[number])
