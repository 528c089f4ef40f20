"""The pipeline of the blog "Efficient MultiModal Data Pipeline" at its last stage, written anew to be measured against.

Adds: `blog_loader`, torch's DataLoader over packed rows, and its mended form. `loader.py` beside this file runs both.
Leaves out: training. It shares no code with mmdp, and none with the original: it does the same work in the same order.

1. `Samples`, map-style: each image is decoded whole, made RGB, resized, and a float32 tensor at once; the whole chat is
   tokenised, and then each message once more, to learn where the answers lie.
2. `PackedRows`, iterable: the samples are split over the workers. In each a thread fills a buffer with samples, pixels
   included, until they hold 512 rows' worth of tokens, then packs all of it, and puts row after row into a queue.
3. `emptiest_first`: longest sample first, into the emptiest row that can hold it. There are 5 rows more than all tokens
   need, and the rows are sorted anew for each sample.
4. `join_one_by_one`: the tokens of a row go into Python lists, each as a tensor of its own, and back into one tensor.

A sample that is too long is left out and nobody is told. What is left of a worker's rows makes no batch and is dropped.

The mended form keeps this architecture, and so its memory of decoded samples, but its worst faults are mended: images
are bytes until the batch, tokens are joined by `torch.cat`, and rows are filled first-fit decreasing.
"""

from __future__ import annotations

import json
import math
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import pad
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from transformers import AutoTokenizer, PreTrainedTokenizerBase

IMAGE_TOKEN = "<|image|>"  # noqa: S105 -- a token of text
IMAGE_TOKENS = 64  # an image
SIDE = 256  # pixels
MAX_TOKENS = 1024  # a row
MAX_IMAGES = 9  # a row
BUFFER_ROWS = 512  # 64 times the batch of 8
QUEUE_ROWS = 2
SPARE_ROWS = 5
IGNORE = -100

Tokens = dict[str, torch.Tensor]
"""`input_ids`, `labels` (shifted) and `attention_mask`, each (T,) int64."""


@dataclass(slots=True)
class Sample:
    """One sample with its tokens, and its images as (3, 256, 256) tensors, float32 in 0..1 or uint8."""

    tokens: Tokens
    images: list[torch.Tensor]

    def __len__(self) -> int:
        return len(self.tokens["input_ids"])


def float_pixels(image: Image.Image) -> torch.Tensor:
    """(3, H, W) float32 in 0..1."""
    return byte_pixels(image).to(torch.float32).div(255)


def byte_pixels(image: Image.Image) -> torch.Tensor:
    """(3, H, W) uint8."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


class Samples(Dataset[Sample]):
    """Rows of a JSON-lines file as tokens and pixels, made when they are asked for."""

    def __init__(
        self, path: Path, tokenizer: PreTrainedTokenizerBase, pixels: Callable[[Image.Image], torch.Tensor]
    ) -> None:
        self.folder = path.parent
        self.tokenizer = tokenizer
        self.pixels = pixels
        with path.open(encoding="utf-8") as file:
            self.rows = [json.loads(line) for line in file]
        self.header = len(tokenizer("<|im_start|>assistant\n").input_ids)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        row = self.rows[index]
        images = []
        for name in row["images"]:
            with Image.open(self.folder / name) as opened:
                image = opened if opened.mode == "RGB" else opened.convert("RGB")
                images.append(self.pixels(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR)))
        messages = []
        for turn in row["texts"]:
            messages.append({"role": "user", "content": turn["user"]})
            messages.append({"role": "assistant", "content": turn["assistant"]})
        messages[0]["content"] = IMAGE_TOKEN * (IMAGE_TOKENS * len(images)) + messages[0]["content"]
        return Sample(self._tokens(messages), images)

    def _tokens(self, messages: list[dict[str, str]]) -> Tokens:
        input_ids = torch.tensor(self._tokenise(messages))
        learnt = torch.zeros(len(input_ids), dtype=torch.bool)
        start = 0
        for message in messages:
            end = start + len(self._tokenise([message]))
            learnt[start + self.header : end] = message["role"] == "assistant"
            start = end
        labels = input_ids.clone().masked_fill(~learnt, IGNORE).roll(-1)
        labels[-1] = IGNORE
        return {"input_ids": input_ids, "labels": labels, "attention_mask": torch.ones_like(input_ids)}

    def _tokenise(self, messages: list[dict[str, str]]) -> list[int]:
        ids: list[int] = self.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        return ids


def emptiest_first(lengths: Sequence[int], images: Sequence[int]) -> list[list[int]]:
    """Rows of sample numbers: longest first, each into the emptiest row that can hold it."""
    rows: list[list[int]] = [[] for _ in range(math.ceil(sum(lengths) / MAX_TOKENS) + SPARE_ROWS)]
    filled, held = [0] * len(rows), [0] * len(rows)
    for sample in sorted(range(len(lengths)), key=lambda sample: lengths[sample], reverse=True):
        for row in sorted(range(len(rows)), key=lambda row: filled[row]):
            if filled[row] + lengths[sample] <= MAX_TOKENS and held[row] + images[sample] <= MAX_IMAGES:
                break
        else:
            row = len(rows)
            rows.append([])
            filled.append(0)
            held.append(0)
        rows[row].append(sample)
        filled[row] += lengths[sample]
        held[row] += images[sample]
    return [row for row in rows if row]


def first_fit_decreasing(lengths: Sequence[int], images: Sequence[int]) -> list[list[int]]:
    """Rows of sample numbers: longest first, each into the first row that can hold it."""
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []
    for sample in sorted(range(len(lengths)), key=lambda sample: lengths[sample], reverse=True):
        for row, (tokens, places) in enumerate(free):  # noqa: B007 -- the row that was found
            if lengths[sample] <= tokens and images[sample] <= places:
                break
        else:
            row = len(rows)
            rows.append([])
            free.append((MAX_TOKENS, MAX_IMAGES))
        rows[row].append(sample)
        tokens, places = free[row]
        free[row] = (tokens - lengths[sample], places - images[sample])
    return rows


def join_one_by_one(samples: Sequence[Sample]) -> Tokens:
    """The tokens of a row, each as a tensor without a dimension on its way."""
    joined = {}
    for name in samples[0].tokens:
        tokens: list[torch.Tensor] = []
        for sample in samples:
            tokens.extend(sample.tokens[name])
        joined[name] = torch.tensor(tokens)
    return joined


def join_at_once(samples: Sequence[Sample]) -> Tokens:
    """The tokens of a row."""
    return {name: torch.cat([sample.tokens[name] for sample in samples]) for name in samples[0].tokens}


class PackedRows(IterableDataset[Sample]):
    """Packed rows of the samples of this worker, padded on the left to 1024 tokens."""

    def __init__(
        self,
        samples: Samples,
        pack: Callable[[Sequence[int], Sequence[int]], list[list[int]]],
        join: Callable[[Sequence[Sample]], Tokens],
        pad_id: int,
    ) -> None:
        self.samples = samples
        self.pack = pack
        self.join = join
        self.fill = {"input_ids": pad_id, "labels": IGNORE, "attention_mask": 0}

    def __iter__(self) -> Iterator[Sample]:
        queue: Queue[Sample | None] = Queue(QUEUE_ROWS)
        threading.Thread(target=self._produce, args=(queue,), daemon=True).start()
        while (row := queue.get()) is not None:
            yield row

    def _produce(self, queue: Queue[Sample | None]) -> None:
        worker = get_worker_info()
        share = math.ceil(len(self.samples) / worker.num_workers)
        numbers = iter(range(worker.id * share, min(len(self.samples), (worker.id + 1) * share)))
        chance = random.Random(42)  # noqa: S311 -- an order, no secret
        while buffer := self._fill_buffer(numbers):
            rows = self.pack([len(sample) for sample in buffer], [len(sample.images) for sample in buffer])
            chance.shuffle(rows)
            for row in rows:
                queue.put(self._row([buffer[number] for number in row]))
        queue.put(None)

    def _fill_buffer(self, numbers: Iterator[int]) -> list[Sample]:
        buffer: list[Sample] = []
        num_tokens = 0
        for number in numbers:
            sample = self.samples[number]
            if len(sample) >= MAX_TOKENS or len(sample.images) > MAX_IMAGES:
                continue
            # One token that nothing attends to parts a sample from the next.
            sample.tokens = {
                name: torch.cat([tokens, torch.tensor([self.fill[name]])]) for name, tokens in sample.tokens.items()
            }
            buffer.append(sample)
            num_tokens += len(sample)
            if num_tokens >= BUFFER_ROWS * MAX_TOKENS:
                break
        return buffer

    def _row(self, samples: Sequence[Sample]) -> Sample:
        joined = self.join(samples)
        padded = {
            name: pad(tokens, (MAX_TOKENS - len(tokens), 0), value=self.fill[name]) for name, tokens in joined.items()
        }
        return Sample(padded, [image for sample in samples for image in sample.images])


def collate(rows: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """Tokens (B, L) int64, and the images of all rows as (N, 3, 256, 256) float32."""
    batch = {name: torch.stack([row.tokens[name] for row in rows]) for name in rows[0].tokens}
    images = torch.stack([image for row in rows for image in row.images])
    batch["images"] = images if images.dtype == torch.float32 else images.to(torch.float32).div_(255)
    return batch


def blog_loader(
    path: Path, tokenizer: str, *, mended: bool = False, num_workers: int = 2, batch_size: int = 8
) -> DataLoader[Any]:
    """Batches of packed rows.

    Args:
        path: rows `{"images": [names], "texts": [{"user", "assistant"}]}`, one a line; images lie beside the file.
        tokenizer: a folder, with a ChatML template and an image token.
        mended: with the worst faults mended.
        num_workers: processes.
        batch_size: rows.
    """
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    pad_id = loaded.pad_token_id if loaded.pad_token_id is not None else loaded.eos_token_id
    samples = Samples(path, loaded, byte_pixels if mended else float_pixels)
    pack, join = (first_fit_decreasing, join_at_once) if mended else (emptiest_first, join_one_by_one)
    rows = PackedRows(samples, pack, join, pad_id)
    return DataLoader(rows, batch_size=batch_size, collate_fn=collate, num_workers=num_workers, drop_last=True)


def count(batch: dict[str, torch.Tensor]) -> dict[str, int]:
    """Images, samples, rows, tokens and padding of a batch; the token that parts two samples is padding too."""
    attended = batch["attention_mask"].bool()
    return {
        "images": len(batch["images"]),
        "samples": int((attended[:, :-1] & ~attended[:, 1:]).sum()),
        "rows": len(attended),
        "tokens": int(attended.sum()),
        "padding": int((~attended).sum()),
    }
