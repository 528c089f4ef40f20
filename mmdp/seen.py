"""What was in the batches of a run, and whether another run saw the same.

Adds: `Seen`, a batch as digests, from `see`; `same` and `without`, which compare two runs and raise `Broken`.
Leaves out: what is run (`drill_range`), and what disturbs it (`drill`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch

from mmdp.records import Batch
from mmdp.refusals import Reason


class Broken(Exception):  # noqa: N818 - says what happened
    """An invariant does not hold. The message says where."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What was in a batch.

    Attributes:
        whole: digest of every tensor, and of all else; equal ones are equal batches, bit for bit.
        rows: the sample indices of each row.
        samples: for each sample, the digest of its ids, labels and pixels.
        skipped: samples that were left out, with the reason.
        state: of the loader, after it.
    """

    whole: str
    rows: tuple[tuple[int, ...], ...]
    samples: Mapping[int, str]
    skipped: Mapping[int, str]
    state: Mapping[str, Any]


def see(batch: Batch) -> Seen:
    """What is in a batch."""
    images = batch.images
    tensors = (batch.input_ids, batch.labels, batch.position_ids, batch.segments)
    buffers = (images.pixels, images.offsets, images.heights, images.widths, images.rows, images.samples)
    skipped = {index: str(reason) for index, reason in batch.skipped.items()}
    rest = (batch.samples, skipped, batch.filler_rows, batch.label_tokens, batch.step_label_tokens, batch.state)
    samples = {}
    for row, indices in enumerate(batch.samples):
        for segment, index in enumerate(indices, 1):
            mine = batch.segments[row] == segment
            pixels = [image for image, owner in zip(images, images.samples, strict=True) if owner == index]
            samples[index] = _digest(batch.input_ids[row][mine], batch.labels[row][mine], *pixels)
    return Seen(_digest(*tensors, *buffers, rest), batch.samples, samples, skipped, dict(batch.state or {}))


def _digest(*values: object) -> str:
    state = blake2b(digest_size=16)
    for value in values:
        is_tensor = isinstance(value, torch.Tensor)
        state.update(str((value.dtype, value.shape) if isinstance(value, torch.Tensor) else value).encode())
        if is_tensor:
            state.update(value.numpy().tobytes())  # type: ignore[attr-defined]
    return state.hexdigest()


def same(wanted: Sequence[Seen], seen: Sequence[Seen], where: str) -> None:
    """Raises `Broken` unless the same batches came, bit for bit, in the same order."""
    for number, (one, other) in enumerate(zip(wanted, seen, strict=False)):
        if one.whole != other.whole:
            raise Broken(
                f"{where}: batch {number} of samples {other.rows} is not the one of samples {one.rows} of the "
                f"undisturbed run, left out: {other.skipped or 'none'}"
            )
    if len(wanted) != len(seen):
        raise Broken(f"{where}: {len(seen)} batches came, not {len(wanted)}")


def without(wanted: Sequence[Seen], seen: Sequence[Seen], lost: Mapping[int, Reason], where: str) -> None:
    """Raises `Broken` unless the same batches came but for some samples, each of them counted by its reason.

    Args:
        wanted: the undisturbed run.
        seen: the run that was disturbed.
        lost: sample to reason.
        where: it ran.
    """
    if len(wanted) != len(seen):
        raise Broken(f"{where}: {len(seen)} batches came, not {len(wanted)}")
    for number, (one, other) in enumerate(zip(wanted, seen, strict=True)):
        skipped = {index: str(lost[index]) for row in one.rows for index in row if index in lost}
        if skipped != other.skipped:
            raise Broken(f"{where}: batch {number} left out {other.skipped or 'none'}, not {skipped or 'none'}")
        rows = tuple(tuple(index for index in row if index not in lost) for row in one.rows)
        if rows != other.rows or one.state != other.state:
            raise Broken(f"{where}: batch {number} has the samples {other.rows}, not {rows}")
        changed = [index for index, digest in other.samples.items() if digest != one.samples[index]]
        if changed or (not skipped and one.whole != other.whole):
            raise Broken(f"{where}: batch {number} has other bytes, of samples {changed}")
