"""Every knob of the pipeline once: name, unit, default and check.

Adds: `Config`, a frozen dataclass. A stage's flags are its field names in kebab-case (`cli.py`).
Leaves out: reading flags, and anything that is not a number or a name.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


def cache_folder() -> Path:
    """Where mmdp keeps what it makes once: the demo set, indices, token caches.

    `MMDP_CACHE` names it; else `mmdp` below `XDG_CACHE_HOME` or `~/.cache`.
    """
    if named := os.environ.get("MMDP_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mmdp"


@dataclass(frozen=True, kw_only=True)  # no slots: `Config.max_pixels` is the default of a knob
class Config:
    """The knobs, each with its unit.

    Attributes:
        data: what to read: `demo`, a `.jsonl` or `.parquet` file, also `s3://...`, or `hf:NAME/CONFIG`.
        image_folder: what image names are relative to, a folder or `s3://...`; None for the folder of the data file.
        tokenizer: `demo`, a local folder, or a name on the Hub.
        vision: model family that says what an image costs: `fixed:64`, `qwen3_vl`, `smolvlm`, ...
        chat_template: instead of the tokenizer's own: `chatml`, or Jinja text.
        seed: of everything random: the order of samples, the choice of a card.
        samples: read at most this many samples; None for all.
        index: show this sample; None for one by seed.
        batch_size: rows a batch.
        max_tokens: tokens a row may hold.
        max_images: images a row may hold.
        max_pixels: pixels; an image with more is refused from its header, before decoding.
        max_row_bytes: bytes; a JSONL line with more is refused unread.
        strict: raise on the first bad sample instead of counting it. What fits no row is not bad: the budget decides.
        executor: where rows are built: `inline`, `threads`, `processes` or `ray`.
        num_workers: threads or processes that build rows; 0 for none in a DataLoader, and one a processor in a Loader.
        depth: rows in flight where they are made ahead, at least a batch; None for two to three batches.
        cache_dir: where the demo set, indices and token caches lie; None for `cache_folder()`.
        max_fetches: files of a store that one process fetches at a time.
        max_fetch_bytes: bytes of files that one process fetches at a time; a larger file is fetched alone.
        connect_seconds: seconds to reach a store, for one try.
        read_seconds: seconds without a byte after which a fetch is tried again; more for a store that answers late.
        fetch_seconds: seconds for one file, all tries together.
        fetch_retries: tries after the first, where a store or the network fails; the waits between them double, from
            0.1 s to at most 15 s, so that the default outlasts an outage of 50 s.
        http_hosts: web hosts that data may be read from, `host` or `host:port`; by default none.
        train: a number: steps of training a tiny vision-language model; 0 for none.
        perfect: train on a few batches that are built once and replayed, to see the ceiling.
        rung: how batches come about: `serial`, `concurrent`, `prefetch`, `references`, `spread`, `near`, or `all`.
        steps: steps that each rung trains; 14 are one epoch of the demo set.
        trainer: a name: `simulated`, which is busy for `train_ms` and computes nothing, or `tiny`, a tiny real model.
        train_ms: milliseconds of a simulated step. The default has the serial rung wait for 80 to 90 % of the time.
        latency_ms: milliseconds from a request to its answer, in the median, of a local object store; 0 for none.
        trace: write the spans of every process to this JSON file, for https://ui.perfetto.dev.
        figures: folder for pictures.
        report: write the stage's figures to this JSON file.
    """

    data: str = "demo"
    image_folder: str | None = None
    tokenizer: str = "demo"
    vision: str = "fixed:64"
    chat_template: str | None = None
    seed: int | None = 0
    samples: int | None = None
    index: int | None = None
    batch_size: int = 8
    max_tokens: int = 1024
    max_images: int = 9
    max_pixels: int = 50_000_000
    max_row_bytes: int = 64 * 2**20
    strict: bool = False
    executor: Literal["inline", "threads", "processes", "ray"] = "threads"
    num_workers: int = 0
    depth: int | None = None
    cache_dir: Path | None = None
    max_fetches: int = 64
    max_fetch_bytes: int = 256 * 2**20
    connect_seconds: float = 5.0
    read_seconds: float = 15.0
    fetch_seconds: float = 120.0
    fetch_retries: int = 12
    http_hosts: tuple[str, ...] = ()
    train: int = 5
    perfect: bool = False
    rung: Literal["all", "serial", "concurrent", "prefetch", "references", "spread", "near"] = "all"
    steps: int = 14
    trainer: Literal["simulated", "tiny"] = "simulated"
    train_ms: float = 400.0
    latency_ms: float = 40.0
    trace: Path | None = None
    figures: Path = Path("figures")
    report: Path | None = None

    def __post_init__(self) -> None:
        at_least: dict[str, float] = {
            "samples": 1,
            "index": 0,
            "seed": 0,
            "batch_size": 1,
            "max_tokens": 1,
            "max_images": 0,
            "max_pixels": 1,
            "max_row_bytes": 1,
            "num_workers": 0,
            "depth": 1,
            "train": 0,
            "steps": 5,
            "train_ms": 0,
            "latency_ms": 0,
            "max_fetches": 1,
            "max_fetch_bytes": 1,
            "connect_seconds": 0.001,
            "read_seconds": 0.001,
            "fetch_seconds": 0.001,
            "fetch_retries": 0,
        }
        for name, least in at_least.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ValueError(f"{name} is {value}: it must be at least {least}")
            if value == math.inf:
                raise ValueError(f"{name} is {value}: it must be finite")
        if not isinstance(self.http_hosts, tuple):
            raise ValueError(f"http_hosts is {self.http_hosts!r}: it must be a tuple, such as ({self.http_hosts!r},)")
