"""The demo set on disk: drawn once into the cache, whole or not at all.

Adds: `demo_jsonl`; `make_once`, which fills a folder atomically.
Leaves out: what is in a row (`rows`), and reading the file (`mmdp.sources`).
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from mmdp.demo.drawings import draw
from mmdp.demo.rows import VERSION, make_row
from mmdp.progress import track


def demo_jsonl(cache: Path, *, rows: int = 500, seed: int = 0) -> Path:
    """The path of the demo set's JSONL file; made where it is not there yet.

    Args:
        cache: the folder to keep it in.
        rows: samples.
        seed: another seed gives another set.

    Returns:
        `cache/demo-VERSION-ROWS-SEED/train.jsonl`, its images in `images/` beside it.
    """
    folder = cache / f"demo-{VERSION}-{rows}-{seed}"
    make_once(folder, lambda empty: _write_rows(empty, rows, seed))
    return folder / "train.jsonl"


def make_once(folder: Path, fill: Callable[[Path], None]) -> None:
    """Fills a folder whole or not at all, whoever else tries at the same time and whenever it is interrupted."""
    if folder.is_dir():
        return
    unfinished = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    try:
        unfinished.mkdir(parents=True)
        fill(unfinished)
        try:
            unfinished.rename(folder)
        except OSError:  # the name is taken: another process was quicker, and its files are the same
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_rows(folder: Path, rows: int, seed: int) -> None:
    (folder / "images").mkdir()
    with (folder / "train.jsonl").open("w", encoding="ascii", newline="\n") as file:
        for index in track(range(rows), "drawing the demo set"):
            row = make_row(index, seed)
            for name, facts in zip(row["images"], row["facts"]["pictures"], strict=True):
                image, facts["places"] = draw(facts)
                if name.endswith(".jpg"):
                    image.convert("RGB").save(folder / name, quality=90)
                else:
                    image.save(folder / name, compress_level=4)  # a tenth larger than 6, in half the time
            file.write(json.dumps(row) + "\n")
