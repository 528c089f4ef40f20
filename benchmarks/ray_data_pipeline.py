"""Stage 06's job on Ray Data, as one of its users would write it: the peer in `ray_data.py`.

Adds: `opened`, an iterator over batches for each rank; `Recipe`, the numbers of a pipeline, and two of them.
In: the lines of a JSONL file, whose images lie in an object store. Out: `mmdp.Batch`es of packed rows.
Leaves out: measuring it, and mmdp's own way (`ray_data.py`).

Lines become blocks, blocks pass through `map_batches`, `streaming_split` deals them to ranks, and a rank iterates. What
a sample costs is mmdp's own in both contenders: its encoder, fetching (obstore), decoding, joining and batching. So
what differs is the pipeline alone.

| recipe | operators |
|---|---|
| plain | lines -> fetch, decode and tokenise (actors) -> pack -> ranks, and Ray Data's own defaults otherwise |
| tuned | lines -> tokenise and pack (one actor) -> blocks of a few rows -> fetch and decode (actors) -> ranks |

Packing sees the samples of one batch of `map_batches`: nothing is carried over to the next one, since a map does not
hear when it has seen its last, and what it holds then would be lost. `tuned` packs from text, so no pixel passes
through the packer; that needs a family whose images cost the same whatever their size, as `fixed:N` does.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import mmdp
from mmdp import knapsack
from mmdp.images import decode
from mmdp.ray_start import load_ray
from mmdp.records import IGNORE, Batch, Budget, Encoded, ImageRef, Row, Sample
from mmdp.refusals import DataError
from mmdp.row_builder import join
from mmdp.rows import parse_row
from mmdp.store import read_many

Columns = Mapping[str, Any]
"""A batch of Ray Data: name to an array or a list, all of one length."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a pipeline is cut.

    Attributes:
        packs_first: pack from text, before any pixel is fetched; else behind decoding.
        blocks: of lines, at the start.
        pack: samples that are packed together.
        rows: packed rows that an actor is given at a time; 0 where actors take samples.
        samples: likewise samples; 0 where they take rows.
        calls: batches that an actor works on at a time.
        queued: batches that lie with an actor or on their way to it.
        block_bytes: of a block, at most; 0 for Ray Data's own 128 MiB.
        prefetch: batches that a rank fetches ahead.
    """

    packs_first: bool
    blocks: int
    pack: int
    rows: int
    samples: int
    calls: int
    queued: int
    block_bytes: int
    prefetch: int


PLAIN = Recipe(packs_first=False, blocks=32, pack=256, rows=0, samples=32, calls=1, queued=0, block_bytes=0, prefetch=1)
TUNED = Recipe(
    packs_first=True, blocks=8, pack=512, rows=8, samples=0, calls=4, queued=8, block_bytes=16 * 2**20, prefetch=2
)


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be made.

    Attributes:
        encoder: makes tokens and pixels of samples.
        budget: of a row.
        root: where the images are.
        num_workers: actors that decode.
    """

    encoder: mmdp.Encoder
    budget: Budget
    root: str
    num_workers: int


def opened(lines: Sequence[str], task: Task, recipe: Recipe, *, ranks: int, seed: int) -> list[Any]:
    """For each rank what `batches` iterates over; Ray runs.

    Args:
        lines: of the JSONL file.
        task: what is to be made of them.
        recipe: how.
        ranks: that share them.
        seed: of the order.
    """
    data = load_ray().data
    context = data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_options.preserve_order = False  # which block is ready first goes first
    if recipe.block_bytes:
        context.target_max_block_size = recipe.block_bytes
    order = list(range(len(lines)))
    random.Random(seed).shuffle(order)  # noqa: S311 - the order of samples is no secret
    items = [{"index": index, "line": lines[index]} for index in order]
    actors = {
        "compute": data.ActorPoolStrategy(
            size=task.num_workers,
            **({"max_tasks_in_flight_per_actor": recipe.queued} if recipe.queued else {}),
            **({"max_concurrent_calls_per_actor": recipe.calls} if recipe.calls > 1 else {}),
        ),
        "num_cpus": 1,
        "fn_constructor_args": (task,),
    }
    source = data.from_items(items, override_num_blocks=min(recipe.blocks, len(items)))
    if recipe.packs_first:
        packed = source.map_batches(
            PackText,
            batch_size=recipe.pack,
            compute=data.ActorPoolStrategy(size=1),
            num_cpus=0.5,
            fn_constructor_args=(task,),
        )
        # In blocks of a few rows, so that every actor has some, and a rank gets them as they come.
        made = packed.repartition(target_num_rows_per_block=recipe.rows).map_batches(
            BuildRows, batch_size=recipe.rows, **actors
        )
    else:
        prepared = source.map_batches(PrepareSamples, batch_size=recipe.samples, **actors)
        made = prepared.map_batches(pack_pixels, batch_size=recipe.pack, fn_kwargs={"task": task})
    # Equal: else ranks take different numbers of steps, and the first all-reduce without a partner hangs.
    return list(made.streaming_split(ranks, equal=ranks > 1))


def batches(iterator: Any, recipe: Recipe, *, batch_size: int, length: int, pad_id: int) -> Iterator[Batch]:
    """The batches of one rank; joined in a thread of Ray Data's, as far ahead as the recipe says."""
    load_ray()
    from ray.data.collate_fn import NumpyBatchCollateFn

    from mmdp.batching import batch  # it loads torch, which no actor needs: each would start some seconds later

    class Joined(NumpyBatchCollateFn):
        def __call__(self, given: Columns) -> Batch:
            return batch(_rows(given), pad_id=pad_id, length=length)

    yield from iterator.iter_torch_batches(
        batch_size=batch_size, prefetch_batches=recipe.prefetch, collate_fn=Joined(), device="cpu"
    )


# What runs in actors and tasks. A bad line is left out; an image that can't be had ends the run.


class PackText:
    """Lines to packed rows without pixels: tokens, and the names of images."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def __call__(self, given: Columns) -> dict[str, Any]:
        """The rows of one batch of lines; what fits no row is left out."""
        encoded = list(_encoded(given, self._task))
        rows = _packed([(index, one, [np.empty(0)] * len(sample.images)) for index, sample, one in encoded], self._task)
        names = {index: [image.name for image in sample.images] for index, sample, _ in encoded}
        images = ["\n".join(name for index in row.samples for name in names[index]) for row in rows]
        return _columns(rows, self._task) | {"images": np.array(images, dtype=object)}


class BuildRows:
    """Packed rows to packed rows with pixels."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def __call__(self, given: Columns) -> dict[str, Any]:
        """The same columns, with pixels instead of names."""
        names = [text.split("\n") if text else [] for text in given["images"].tolist()]
        kept = {name: column for name, column in given.items() if name != "images"}
        return kept | {"pixels": _ragged(_pixels(names, self._task))}


class PrepareSamples:
    """Lines to samples: tokens and pixels."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def __call__(self, given: Columns) -> dict[str, Any]:
        """One item a sample."""
        encoded = list(_encoded(given, self._task))
        names = [[image.name for image in sample.images] for _, sample, _ in encoded]
        return {
            "index": np.array([index for index, _, _ in encoded], dtype=np.int64),
            "ids": _ragged([one.ids for _, _, one in encoded]),
            "labels": _ragged([one.labels for _, _, one in encoded]),
            "pixels": _ragged(_pixels(names, self._task)),
        }


def pack_pixels(given: Columns, *, task: Task) -> dict[str, Any]:
    """Samples with pixels to packed rows with pixels."""
    columns = (given["index"].tolist(), *(given[name] for name in ("ids", "labels", "pixels")))
    samples = zip(*columns, strict=True)
    rows = _packed([(index, Encoded(ids, labels, ()), list(pixels)) for index, ids, labels, pixels in samples], task)
    return _columns(rows, task) | {"pixels": _ragged([_stacked(row.images, task) for row in rows])}


def _encoded(given: Columns, task: Task) -> Iterator[tuple[int, Sample, Encoded]]:
    for index, line in zip(given["index"].tolist(), given["line"].tolist(), strict=True):
        try:
            sample = parse_row(json.loads(line), root=task.root, source=f"line {index + 1}", number=index)
            # Images of `fixed:N` cost the same whatever their size, so no header is fetched.
            yield index, sample, task.encoder.encode(sample, [(1, 1)] * len(sample.images))
        except DataError:
            continue


def _packed(samples: Sequence[tuple[int, Encoded, list[np.ndarray]]], task: Task) -> list[Row]:
    tokens = [len(encoded.ids) for _, encoded, _ in samples]
    images = [len(pixels) for _, _, pixels in samples]
    made = []
    for places in knapsack.pack(np.array(tokens, dtype=np.int64), np.array(images, dtype=np.int64), task.budget):
        chosen = [samples[place] for place in places]
        made.append(join([one[1] for one in chosen], [one[2] for one in chosen], [one[0] for one in chosen]))
    return made


def _pixels(names: Sequence[Sequence[str]], task: Task) -> list[np.ndarray]:
    """For each list of names (N, 3, H, W) uint8: all fetched side by side, then decoded one by one."""
    refs = [ImageRef(name, root=task.root) for row in names for name in row]
    side = task.encoder.family.layout(1, 1)
    decoded = []
    for data in read_many(refs):
        if isinstance(data, DataError):
            raise data
        decoded.append(decode(data, size=(side.height, side.width), draft=task.encoder.family.draft))
    rest = iter(decoded)
    return [_stacked([next(rest) for _ in row], task) for row in names]


def _stacked(images: Sequence[np.ndarray], task: Task) -> np.ndarray:
    side = task.encoder.family.layout(1, 1)
    return np.stack(images) if len(images) else np.empty((0, 3, side.height, side.width), dtype=np.uint8)


def _ragged(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """(N,) arrays of one rank and different lengths, as Ray Data takes them."""
    column = np.empty(len(arrays), dtype=object)
    for place, array in enumerate(arrays):
        column[place] = array
    return column


def _columns(rows: Sequence[Row], task: Task) -> dict[str, Any]:
    """Rows without their images: tokens padded to the budget, so that every column but the ragged ones is dense."""
    filled = {"ids": task.encoder.pad_id, "labels": IGNORE, "positions": 0, "segments": 0}
    columns: dict[str, Any] = {}
    for name, value in filled.items():
        columns[name] = np.full((len(rows), task.budget.tokens), value, dtype=np.int32)
        for place, row in enumerate(rows):
            columns[name][place, : len(row)] = getattr(row, name)
    columns["length"] = np.array([len(row) for row in rows], dtype=np.int64)
    columns["samples"] = _ragged([np.array(row.samples, dtype=np.int64) for row in rows])
    columns["image_segments"] = _ragged([row.image_segments.astype(np.int64) for row in rows])
    return columns


# What runs in a rank


def _rows(given: Columns) -> list[Row]:
    """The rows of one batch, as views of its columns."""
    rows = []
    for place, end in enumerate(given["length"].tolist()):
        tokens = {name: given[name][place][:end] for name in ("ids", "labels", "positions", "segments")}
        samples = tuple(given["samples"][place].tolist())
        segments = given["image_segments"][place]
        rows.append(Row(**tokens, images=tuple(given["pixels"][place]), image_segments=segments, samples=samples))
    return rows
