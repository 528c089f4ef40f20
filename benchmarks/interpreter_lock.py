"""Which parts of a data pipeline run side by side in threads, which need processes, and which only wait.

    uv run benchmarks/interpreter_lock.py [--rounds 5] [--report FILE.json]

Each kind of work is done on the same items one after the other, by two threads, and by two processes; what waits is
also done by 32 threads at once and on one event loop. A ratio is the time of one after the other over the contender's,
within one round, so 2 is the most that two processors can give to work, and 32 what 32 can give to waiting. Workers
are started before the clock is. The wait is that for an object 40 ms away: `mmdp.relay` has the distribution.

The ratio of two threads says what share of the work holds the interpreter's lock: 2 none of it, 1 all. Below 1 the two
are in each other's way.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import io
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console
from rich.progress import track
from rich.table import Table

import mmdp
from mmdp.executors import Executor, Inline, Processes, Threads
from mmdp.images import decode
from mmdp.records import Row
from mmdp.sources import Source
from mmdp.store import read

WAIT_SECONDS = 0.04  # the median of an object store in the cloud: the talk's, and stage 06's
AT_ONCE = 32  # waits in the air
SIDE = 256  # pixels
LENGTH = 1024  # tokens a row


@functools.cache
def opened() -> tuple[Source, mmdp.Encoder]:
    """The demo set and its tokenizer, once in each process."""
    return mmdp.open_source("demo"), mmdp.Encoder(tokenizer="demo", vision="fixed:64")


@functools.cache
def picture(number: int) -> bytes:
    """A JPEG of 1024 x 768 with something in it."""
    rng = np.random.default_rng(number)
    coarse = Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype=np.uint8)).resize((1024, 768))
    file = io.BytesIO()
    coarse.save(file, "JPEG", quality=90)
    return file.getvalue()


@functools.cache
def rows() -> list[Row]:
    """Rows of packed samples, without pixels."""
    source, encoder = opened()
    sizes = mmdp.measure(source, encoder)
    build = mmdp.RowBuilder(source, encoder, sizes, pixels=False)
    return [build(samples) for samples in mmdp.plan(sizes, mmdp.Budget(LENGTH, 9)).epoch(0)[:8]]


def wait(_: int) -> None:
    time.sleep(WAIT_SECONDS)


def unpack_jpeg(number: int) -> int:
    return decode(picture(number % 4), size=(SIDE, SIDE)).nbytes


def tokenize(number: int) -> int:
    source, encoder = opened()
    sample = source[number % len(source)]
    return len(encoder.encode(sample, encoder.image_sizes(sample)).ids)


def parse(number: int) -> int:
    source, _ = opened()
    return len(source[number % len(source)].turns)


def join(number: int) -> int:
    made = mmdp.batch(rows(), pad_id=0, length=LENGTH)
    return made.input_ids.numel() + number


def read_file(number: int) -> int:
    source, _ = opened()
    return sum(len(read(image)) for image in source[number % len(source)].images)


KINDS: dict[str, tuple[Callable[[int], Any], int]] = {
    "wait for a store": (wait, 1),
    "decode and resize a JPEG": (unpack_jpeg, 3),
    "read an image file": (read_file, 200),
    "tokenise a sample": (tokenize, 20),
    "read a row of JSONL": (parse, 150),
    "join a batch": (join, 25),
}
"""The work, and how often it is done for an item: so often that handing items to workers is little beside it."""

ITEMS = 32  # a round


@dataclass(frozen=True)
class Often:
    """The same work, some times over: as workers get it."""

    work: Callable[[int], Any]
    times: int

    def __call__(self, number: int) -> None:
        """Does it."""
        for again in range(self.times):
            self.work(number * self.times + again)


def seconds(executor: Executor, work: Callable[[int], Any], items: Sequence[int], depth: int) -> float:
    """From the first item to the last, with warm workers."""
    for batch in (items[:8], items):
        begin = time.perf_counter()
        with closing(executor.run(work, batch, depth=depth)) as results:
            for _ in results:
                pass
    return time.perf_counter() - begin


async def on_a_loop(count: int) -> None:
    """So many waits on one event loop, `AT_ONCE` at a time."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one() -> None:
        async with gate:
            await asyncio.sleep(WAIT_SECONDS)

    await asyncio.gather(*(one() for _ in range(count)))


def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Kind to contender to the ratios of all rounds."""
    found: dict[str, dict[str, list[float]]] = {}
    contenders: dict[str, tuple[Executor, int]] = {
        "2 threads": (Threads(2), 8),
        "2 processes": (Processes(2), 8),
    }
    many = Threads(AT_ONCE)
    with Inline() as inline, many, contenders["2 threads"][0], contenders["2 processes"][0]:
        for _ in track(range(rounds), "rounds", console=Console(stderr=True)):
            for kind, (once, times) in KINDS.items():
                items, ratios, work = range(ITEMS), found.setdefault(kind, {}), Often(once, times)
                alone = seconds(inline, work, items, 1)
                for name, (executor, depth) in contenders.items():
                    ratios.setdefault(name, []).append(alone / seconds(executor, work, items, depth))
                if once is wait:
                    ratios.setdefault("32 threads", []).append(alone / seconds(many, work, items, AT_ONCE))
                    begin = time.perf_counter()
                    asyncio.run(on_a_loop(ITEMS))
                    ratios.setdefault("event loop", []).append(alone / (time.perf_counter() - begin))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--report", type=Path)
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds}: at least 1")
    load = os.getloadavg()[0]
    found = measure(arguments.rounds)
    names = ("2 threads", "2 processes", "32 threads", "event loop")
    table = Table(
        "work", *names, width=110, title=f"times as fast as one by one: min / median / max of {arguments.rounds}"
    )
    for kind, ratios in found.items():
        cells = (
            f"{min(ratios[name]):.1f} / {statistics.median(ratios[name]):.1f} / {max(ratios[name]):.1f}"
            if name in ratios
            else ""
            for name in names
        )
        table.add_row(kind, *cells)
    Console(width=110).print(table)
    if arguments.report:
        told = {"ratios": found, "load": load, "processors": os.cpu_count(), "wait_seconds": WAIT_SECONDS}
        arguments.report.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
