"""The records that flow through the pipeline.

Adds: Sample -> Encoded -> Row -> Batch, each a frozen, slotted dataclass, with the shape and dtype on every field.
Leaves out: how a record is made (`sources`, `encode`, `batching`), and what a bad sample raises (`refusals`).
All of them stand here, in the order of the flow, so that one file answers for every shape; over half of it says shapes.

Every record down to the batch carries sample indices, so that a test can say "each sample exactly once" and a person
can ask "what is in this row?".

Shapes: B rows, L tokens a row, T tokens a sample, N images, H and W pixels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import index
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from mmdp.refusals import Reason, counted

if TYPE_CHECKING:
    import torch

IGNORE = -100
"""Label of a token that carries no loss; the default `ignore_index` of torch's cross entropy."""


@dataclass(frozen=True, slots=True)
class ImageRef:
    """Where the bytes of one image are; never its pixels.

    Attributes:
        name: the name the row gives, relative to `root`; only a label where `data` is given.
        root: the folder, or the URI of one in a store, that the name may not leave.
        data: the file's own bytes, where the row carries them (Parquet, the Hub), or they were fetched ahead.
        failure: what came in place of bytes that were fetched ahead; whoever reads the image meets it.
    """

    name: str
    root: str = ""
    data: bytes | None = field(default=None, repr=False)
    failure: Exception | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation.

    Attributes:
        role: "system", "user" or "assistant".
        parts: text and image places in reading order; an int is an index into `Sample.images`.
        learnt: False for an answer that the model is to read, and not to learn.
    """

    role: str
    parts: tuple[str | int, ...]
    learnt: bool = True

    @property
    def text(self) -> str:
        """The text of the turn without its image places."""
        return "".join(part for part in self.parts if isinstance(part, str))


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of the data set, as read: nothing decoded, nothing tokenised.

    Attributes:
        id: the row's own id, or its number as text.
        images: 0..n references; the turns hold each index exactly once, in rising order.
        turns: 1..n turns.
        source: where the row stands, such as `train.jsonl:17`; the head of every message about it.
    """

    id: str
    images: tuple[ImageRef, ...]
    turns: tuple[Turn, ...]
    source: str


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """What one image costs and how large its pixels become, from its width and height alone.

    Attributes:
        tokens: tokens of the language model, marks around the image included.
        vision: patches or tiles of the vision tower.
        height: pixels after resize.
        width: pixels after resize.
        original_height: pixels before it; 0 where no model asks for them (only LLaVA-OneVision does).
        original_width: likewise.
    """

    tokens: int
    vision: int
    height: int
    width: int
    original_height: int = field(default=0, repr=False)
    original_width: int = field(default=0, repr=False)


@dataclass(frozen=True, slots=True)
class Encoded:
    """One sample as tokens, with the layout of its images; still no pixel.

    Attributes:
        ids: (T,) int32 token ids, image placeholders included.
        labels: (T,) int32, UNSHIFTED: `labels[t]` equals `ids[t]` where token t is learnt, else -100. The model shifts.
        layouts: one a picture, in reading order.
    """

    ids: np.ndarray
    labels: np.ndarray
    layouts: tuple[ImageLayout, ...]

    @property
    def size(self) -> Size:
        """What the sample asks of a row."""
        return Size(
            tokens=len(self.ids),
            images=len(self.layouts),
            vision=sum(layout.vision for layout in self.layouts),
            label_tokens=int(np.count_nonzero(self.labels != IGNORE)),
        )


@dataclass(frozen=True, slots=True)
class Size:
    """What a sample asks of a row.

    Attributes:
        tokens: image placeholders included.
        images: pictures.
        vision: patches or tiles of the vision tower.
        label_tokens: tokens that are learnt.
    """

    tokens: int
    images: int
    vision: int
    label_tokens: int


@dataclass(frozen=True, slots=True)
class Budget:
    """What one row may hold.

    Attributes:
        tokens: at most this many tokens, at least 1.
        images: at most this many images; 0 means text only, None no limit.
    """

    tokens: int
    images: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("tokens", self.tokens), ("images", self.images)):
            if value is None and name == "images":
                continue
            if value is None or not hasattr(value, "__index__"):
                raise ValueError(f"a budget whose {name} are {value!r} can't be counted with: give a whole number")
            object.__setattr__(self, name, index(value))  # a NumPy integer would overflow where the packer shifts bits
        if self.tokens < 1:
            raise ValueError(f"a budget of {self.tokens} tokens holds nothing: give at least 1")
        if self.images is not None and self.images < 0:
            raise ValueError(f"a budget of {self.images} images makes no sense: give 0 or more, or None for no limit")

    def refusal(self, tokens: int, images: int) -> Reason | None:
        """Why a sample of this size fits no row, or None where one can hold it."""
        if tokens > self.tokens:
            return Reason.TOO_LONG
        if self.images is not None and images > self.images:
            return Reason.TOO_MANY_IMAGES
        return None


def check_batch(batch: object) -> None:
    """Refuses what is no batch of ours, such as the mapping that `adapt` makes of one.

    Raises:
        ValueError: the message says what to give.
    """
    if not isinstance(batch, Batch):
        kind = type(batch).__name__
        raise ValueError(f"the batch is of the type {kind}: give one as mmdp.Loader or mmdp.batch makes it (a Batch)")


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of the batch: one sample, or several packed back to back. No padding yet.

    Attributes:
        ids: (T,) int32.
        labels: (T,) int32, unshifted; the first label of each segment is -100.
        positions: (T,) int32, 0 at the start of each segment.
        segments: (T,) int32, 1..k: which sample of the row a token belongs to.
        images: N arrays (3, H, W) uint8, in reading order; empty where a stage needs no pixels.
        image_segments: (N,) int32, the segment of each image.
        samples: the sample index of each segment.
        skipped: samples that were meant for this row and failed while it was built, with their reason.
        after: (epoch, row of the plan) where the next step starts, and the digest of all rows before; None for a row
            that belongs to no step.
        step_label_tokens: label tokens of its step over all ranks, as measured; None likewise.
        layouts: what was promised of each image; empty where that is not known.
    """

    ids: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    images: tuple[np.ndarray, ...]
    image_segments: np.ndarray
    samples: tuple[int, ...]
    skipped: Mapping[int, Reason] = field(default_factory=dict)
    after: tuple[int, int, str] | None = None
    step_label_tokens: int | None = None
    layouts: tuple[ImageLayout, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class ImageBuffer:
    """The images of a batch as one flat buffer: one pin, one copy to the device, whatever their sizes.

    Attributes:
        pixels: (sum of 3*H*W,) uint8, each image as (3, H, W).
        offsets: (N + 1,) int64, where each image starts.
        heights: (N,) int64.
        widths: (N,) int64.
        rows: (N,) int64, the batch row of each image.
        samples: (N,) int64, the sample index of each image.
        segments: (N,) int64, the segment of its row that each image belongs to; None in a buffer made by hand.
        originals: (N, 2) int64, height and width before the resize; 0 where no model asks for them. None likewise.
    """

    pixels: torch.Tensor
    offsets: torch.Tensor
    heights: torch.Tensor
    widths: torch.Tensor
    rows: torch.Tensor
    samples: torch.Tensor
    segments: torch.Tensor | None = None
    originals: torch.Tensor | None = None

    def __repr__(self) -> str:
        return f"<ImageBuffer of {counted(len(self), 'image')}, {self.pixels.numel():,} values>"

    def __len__(self) -> int:
        return len(self.heights)

    def __getitem__(self, index: int) -> torch.Tensor:
        """(3, H, W) uint8, a view of the buffer."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"image {index} of {len(self)}")
        index %= len(self)
        start, end = int(self.offsets[index]), int(self.offsets[index + 1])
        return self.pixels[start:end].view(3, int(self.heights[index]), int(self.widths[index]))

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self[index] for index in range(len(self)))

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """Moves the pixels; the bookkeeping stays on the host, where it is read."""
        return replace(self, pixels=self.pixels.to(device, non_blocking=non_blocking))


@dataclass(frozen=True, slots=True)
class Batch:
    """B rows of L tokens, padded on the right.

    Attributes:
        input_ids: (B, L) int64; the pad id on the tail.
        labels: (B, L) int64, unshifted; -100 outside assistant text, on the first token of each segment, on the tail.
        position_ids: (B, L) int64; restart at 0 in each segment and in the tail.
        segments: (B, L) int32; 1..k, 0 on the tail.
        images: the images of all rows, in reading order.
        samples: for each row, the sample index of each of its segments.
        label_tokens: how many labels are not -100.
        skipped: samples left out while this batch was made: index to reason.
        filler_rows: all-padding rows that complete the last step of an epoch.
        step_label_tokens: label tokens of the whole step over all ranks, as measured; None outside of a step.
        state: the loader's state after this batch; None outside of a step.
        host: `input_ids` and `segments` as they were before `to` moved them, so that what is derived from them never
            waits for the device; None in a batch that was not moved.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    segments: torch.Tensor
    images: ImageBuffer
    samples: tuple[tuple[int, ...], ...]
    label_tokens: int
    skipped: Mapping[int, Reason] = field(default_factory=dict)
    filler_rows: int = 0
    step_label_tokens: int | None = None
    state: Mapping[str, Any] | None = None
    host: tuple[torch.Tensor, torch.Tensor] | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        rows, length = self.input_ids.shape
        filler = f", {self.filler_rows} filler rows" if self.filler_rows else ""
        has = f"{counted(sum(map(len, self.samples)), 'sample')}, {counted(len(self.images), 'image')}"
        return f"<Batch of {counted(rows, 'row')} x {length} tokens: {has}, {self.label_tokens:,} label tokens{filler}>"

    @property
    def num_tokens(self) -> int:
        """Real tokens: all but padding."""
        return int((self.segments > 0).sum())

    @property
    def padded_tokens(self) -> int:
        """Padding tokens, those of filler rows aside."""
        return (len(self.samples) - self.filler_rows) * self.segments.shape[1] - self.num_tokens

    def on_host(self) -> tuple[np.ndarray, np.ndarray]:
        """(B, L) int64 ids and (B, L) int32 segments; a device that the batch was moved to is not waited for."""
        ids, segments = self.host or (self.input_ids, self.segments)
        return ids.cpu().numpy(), segments.cpu().numpy()

    @property
    def cu_seqlens(self) -> np.ndarray:
        """(n + 1,) int32: where each segment of the flattened batch starts, and its end. A tail is one of its own."""
        segments = self.on_host()[1]
        starts = np.ones(segments.shape, dtype=bool)
        starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
        return np.append(np.flatnonzero(starts), segments.size).astype(np.int32)

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest segment, tails among them; at most L."""
        return int(np.diff(self.cu_seqlens).max(initial=0))

    def shifted_labels(self) -> torch.Tensor:
        """(B, L) int64: at each token the label of the next, for models that do not shift; -100 at the end of a row.

        The first label of a segment is -100, so that no target comes from the next sample.
        """
        shifted = self.labels.roll(-1, dims=1)
        shifted[:, -1] = IGNORE
        return shifted

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """The same batch with its tensors on the device."""
        input_ids = self.input_ids.to(device, non_blocking=non_blocking)
        host = (self.input_ids, self.segments) if self.input_ids.device.type == "cpu" else self.host
        return replace(
            self,
            host=None if input_ids.device.type == "cpu" else host,
            input_ids=input_ids,
            labels=self.labels.to(device, non_blocking=non_blocking),
            position_ids=self.position_ids.to(device, non_blocking=non_blocking),
            segments=self.segments.to(device, non_blocking=non_blocking),
            images=self.images.to(device, non_blocking=non_blocking),
        )
