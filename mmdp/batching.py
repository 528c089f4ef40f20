"""Rows to a batch.

Adds: `batch` stacks rows to (B, L), padded on the right to the longest row or to a fixed length; `Rows` is the
map-style data set of rows, as torch's DataLoader wants it. What makes a row is found here as well.
Leaves out: how a row is made of samples (`row_builder.py`), and which samples share one (`planner.py`). Naive,
fixed-length and packed batches all come from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from mmdp.records import IGNORE, Batch, ImageBuffer, Row
from mmdp.refusals import Reason, counted
from mmdp.row_builder import RowBuilder, build_row, join, merge, with_patience

__all__ = ["RowBuilder", "Rows", "batch", "build_row", "join", "merge", "with_patience"]


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
            f"no batch of {counted(len(rows), 'row')}: all are longer than {length} tokens. "
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
