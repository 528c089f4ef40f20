"""What a leak does: the same samples packed right and packed wrong, the loss of training and that of samples alone.

    uv run benchmarks/leak.py [--quick] [--report FILE.json] [--figure FILE.png]

Each picture of the demo set that stands alone in its row gets four rows: one of four requests to say what is in it, and
an answer that names up to five of its things, each row in an order of its own. The four stand behind one another, as
the rows about one picture do in many data sets. Pictures are shuffled anew each epoch, rows stay together, and next-fit
packs them as they come, as a loader does that packs a stream. A tenth of the pictures is held out.

A tiny SmolVLM with random weights is trained on the same rows, in the same order, from the same weights, in four ways.
It sees pictures of 64 x 64 pixels, too small to read: a new picture is a guess for it, an old one it can remember.
Every trained model is then judged as it will be used: one sample at a time, right.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from PIL import Image

import mmdp
from mmdp.config import cache_folder
from mmdp.demo.files import demo_jsonl
from mmdp.families import resolve
from mmdp.leaks import LEAKS
from mmdp.plots import save
from mmdp.plots.leak import TrainedWay, leak_curves
from mmdp.records import IGNORE, Batch, Row
from mmdp.tiny_model import tiny_vlm

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "leak.json"
FIGURE = ROOT / "docs" / "figures" / "leak.png"

WAYS = ("alone", "right", "no_positions", "positions_and_mask")
"""Unpacked; what `adapt` gives; no mask and positions that run on (plain causal); a mask (B, L) of ones."""
REQUESTS = ("What does the picture show?", "Describe the picture.", "What can be seen here?", "Say what is in it.")
NAMED = 5  # things an answer names at most
SIDE, IMAGE_TOKENS = 64, 16  # pixels of a picture's side, and the tokens it costs
TOKENS, ROWS = 256, 8  # of a row, and of a step
BUDGET = mmdp.Budget(TOKENS, TOKENS)
HELD_OUT = 10  # every so manieth picture
MODEL = {"hidden": 64, "layers": 2}
RATE = 3e-3
MOST_JUDGED = 400  # samples seen in training that a model is judged on
STEPS, QUICK_STEPS = 300, 40

GROUPS = {"seen": "pictures it was trained on", "new": "new pictures"}
NAMES = {
    "alone": "samples alone, padded",
    "right": "packed right: mmdp.adapt",
    "no_positions": "packed wrong: positions run on",
    "positions_and_mask": "packed wrong: restart below a mask of ones",
}

Samples = list[int]
Build = Callable[[tuple[int, ...]], Row]


def things(facts: dict[str, Any]) -> list[str]:
    """What a picture of the demo set names."""
    match facts["family"]:
        case "bar_chart":
            return [f"{name} {value}" for name, value in facts["bars"]]
        case "cycle":
            return list(facts["stages"])
        case "labelled_parts":
            return [label["name"] for label in facts["labels"]]
    return [name for level in facts["levels"] for name in level]


def write_captions(folder: Path) -> list[Samples]:
    """`train.jsonl` with four rows a picture, and the row numbers of each picture."""
    demo, random = demo_jsonl(cache_folder()), Random(0)  # noqa: S311 - no secret hangs on it
    lines: list[str] = []
    pictures: list[Samples] = []
    for row in map(json.loads, demo.read_text("ascii").splitlines()):
        if len(row["images"]) != 1:
            continue
        name, found = f"{row['id']}.png", things(row["facts"]["pictures"][0])
        Image.open(demo.parent / row["images"][0]).convert("RGB").resize((SIDE, SIDE)).save(folder / name)
        pictures.append(list(range(len(lines), len(lines) + len(REQUESTS))))
        for request in REQUESTS:
            answer = ", ".join(random.sample(found, min(NAMED, len(found))))
            lines.append(json.dumps({"images": [name], "texts": [{"user": request, "assistant": answer}]}) + "\n")
    (folder / "train.jsonl").write_text("".join(lines), encoding="utf-8")
    return pictures


def packed_steps(pictures: list[Samples], tokens: np.ndarray) -> Iterator[list[Samples]]:
    """The rows of each step, epoch after epoch: pictures in a new order, their rows together, packed as they come."""
    epoch, waiting = 0, []
    while True:
        order = np.random.default_rng(epoch).permutation(len(pictures))
        stream = np.array([sample for place in order for sample in pictures[place]])
        rows = mmdp.knapsack.pack(tokens[stream], 0 * stream, BUDGET, strategy="greedy")
        waiting += [stream[row].tolist() for row in rows]
        while len(waiting) >= ROWS:
            yield waiting[:ROWS]
            waiting = waiting[ROWS:]
        epoch += 1


def inputs_of(way: str, batch: Batch, model: Any) -> dict[str, Any]:
    right = mmdp.adapt(batch, model)
    return LEAKS[way].spoil(right, batch, resolve(model)) if way in LEAKS else right


def loss_of(way: str, rows: list[Samples], build: Build, pad: int, model: Any) -> torch.Tensor:
    """`mmdp.loss` of these rows, with other inputs; `alone` takes the rows apart first."""
    if way == "alone":
        rows = [[sample] for row in rows for sample in row]
    batch = mmdp.batch([build(tuple(row)) for row in rows], pad_id=pad)
    with mock.patch("mmdp.objective.adapt", lambda batch, model, *_, **__: inputs_of(way, batch, model)):
        return mmdp.loss(model, batch, labelled_only=True)


@dataclass(frozen=True, slots=True)
class Data:
    """What every way trains on and is judged by.

    Attributes:
        folder: with `train.jsonl` and its cache.
        steps: the rows of each step.
        seen: samples that were trained on.
        held_out: samples of pictures that were not.
    """

    folder: Path
    steps: list[list[Samples]]
    seen: Samples
    held_out: Samples


def make_data(folder: Path, num_steps: int) -> tuple[Data, dict[str, Any]]:
    """The data, and what is to be said of it."""
    pictures = write_captions(folder)
    source, encoder = opened(folder)
    sizes = mmdp.measure(source, encoder, cache=folder / "cache")
    trained = [one for at, one in enumerate(pictures) if at % HELD_OUT]
    stream = packed_steps(trained, sizes.tokens)
    steps = [next(stream) for _ in range(num_steps)]
    seen = sorted({sample for rows in steps for row in rows for sample in row})
    held_out = [sample for one in pictures[::HELD_OUT] for sample in one]
    rows = [row for step in steps for row in step]
    with_before = sum(len(row) - len({sample // len(REQUESTS) for sample in row}) for row in rows)
    about = {
        "pictures": len(pictures),
        "rows_a_picture": len(REQUESTS),
        "held_out_pictures": len(pictures[::HELD_OUT]),
        "steps": num_steps,
        "rows_a_step": ROWS,
        "tokens_a_row": TOKENS,
        "samples_a_row": sum(map(len, rows)) / len(rows),
        "share_behind_a_row_of_its_picture": with_before / sum(map(len, rows)),
        "epochs": sum(map(len, rows)) / sum(map(len, trained)),
    }
    return Data(folder, steps, seen[:: max(1, len(seen) // MOST_JUDGED)], held_out), about


def opened(folder: Path) -> tuple[Any, mmdp.Encoder]:
    encoder = mmdp.Encoder("demo", f"fixed:{IMAGE_TOKENS}:side={SIDE}")
    return mmdp.open_source(str(folder / "train.jsonl")), encoder


def run(way: str, data: Data) -> dict[str, Any]:
    """Trains a model from the same start as all others, and judges it on samples alone."""
    torch.set_num_threads(1)  # ways run side by side, and the model is tiny
    start = time.perf_counter()
    source, encoder = opened(data.folder)
    make = mmdp.RowBuilder(source, encoder, mmdp.measure(source, encoder, cache=data.folder / "cache"), strict=True)
    build, pad = functools.cache(lambda row: make(list(row))), encoder.pad_id
    model = tiny_vlm(encoder, **MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses = []
    for rows in data.steps:
        value = loss_of(way, rows, build, pad, model)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    alone = {name: judge(model, samples, build, pad) for name, samples in (("seen", data.seen), ("new", data.held_out))}
    return {"losses": losses, "alone": alone, "seconds": time.perf_counter() - start}


@torch.no_grad()
def judge(model: Any, samples: Samples, build: Build, pad: int) -> float:
    """The mean over all label tokens of samples alone."""
    total = tokens = 0.0
    for start in range(0, len(samples), 64):
        part = samples[start : start + 64]
        labels = sum(int((build((sample,)).labels != IGNORE).sum()) for sample in part)
        total += float(loss_of("alone", [part], build, pad, model)) * labels
        tokens += labels
    return total / tokens


def drawn(found: dict[str, Any]) -> Any:
    """The figure, from what was saved."""
    ways = [
        TrainedWay(NAMES[way], one["losses"], {GROUPS[name]: one["alone"][name] for name in GROUPS})
        for way, one in found["ways"].items()
    ]
    title = "The same captions, four rows a picture, given to a tiny SmolVLM in four ways"
    return leak_curves(ways, title=title, window=min(20, found["about"]["steps"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps: too few to learn much")
    parser.add_argument("--report", type=Path, default=RESULTS, metavar="FILE.json")
    parser.add_argument("--figure", type=Path, default=FIGURE, metavar="FILE.png")
    parser.add_argument("--redraw", action="store_true", help="the figure alone, from the report that is there")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="ways that train at a time")
    given = parser.parse_args()
    if not given.redraw:
        measure(QUICK_STEPS if given.quick else STEPS, given.workers, given.report)
    print(save(drawn(json.loads(given.report.read_text("utf-8"))), given.figure))


def measure(num_steps: int, workers: int, report: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        data, about = make_data(Path(name), num_steps)
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            ways = dict(zip(WAYS, pool.map(run, WAYS, [data] * len(WAYS)), strict=True))
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text(
        json.dumps({"versions": versions, "about": about, "ways": ways}, indent=1) + "\n", encoding="utf-8"
    )
    for way, one in ways.items():
        last = sum(one["losses"][-20:]) / len(one["losses"][-20:])
        alone = ", ".join(f"{GROUPS[name]} {value:.3f}" for name, value in one["alone"].items())
        print(f"{NAMES[way]:>30}: training {last:.3f}; alone: {alone} ({one['seconds']:.0f} s)")


if __name__ == "__main__":
    main()
