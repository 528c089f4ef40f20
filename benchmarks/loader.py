"""Packed batches of images and text: mmdp against the blog's pipeline, and against decoding alone.

    uv run benchmarks/loader.py [--quick] [--report FILE.json]

All make batches of the same samples: 2 workers, 8 rows a batch, 1024 tokens and 9 images a row, 64 tokens and 256 x 256
pixels an image, the same tokenizer with ChatML. Each makes one epoch in a process of its own. Rounds take turns, and a
ratio is taken within its round, since machines differ and are shared.

| contender | is |
|---|---|
| blog | `blog_pipeline.py`: DataLoader workers that decode and pack; float32 pixels |
| blog, mended | the same with its worst faults mended, in one round of three |
| mmdp | `Loader(executor="threads")`; index and token cache lie there from an earlier run |
| mmdp, no cache | the same with `measure(lazy=True)`, and nothing lies there |
| mmdp, processes | as mmdp, with `executor="processes"`, in one round of three |

The ceiling is `images.decode` and nothing else: on the same pool of threads, the images of one copy of the samples that
fit a row. It runs in mmdp's own process, before its epoch, between its thirds and after it, while mmdp rests and its
clock stands still. mmdp's share of it is told by the clock and by CPU time. Where other work leaves less than two
processors the clock jumps, and CPU time is the better judge; but it does not show a worker that waits.

The time to the first batch starts after the imports, and once more with them. Images a second count from the first
request for a batch to the last batch, without a cache from opening the source on. CPU time is that of all processes,
from the imports to the end. Memory is what no file backs, summed over all processes and looked at ten times a second;
off it, for each process, goes what the first process holds after its imports. The files lie in the system's own cache:
the disk is not measured. Padding includes the token that the blog puts behind each sample.

Real rows and the SmolLM2 tokenizer come from the folder that `MMDP_SHARED` names (by default `shared` beside the
checkout); without it the demo set is taken. The samples with images are repeated six times over. `--quick` is one round
of them twice over: the blog's buffer, and with it its memory and its first wait, are then a third, and opening counts
for more, so that most goals are not judged.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
from child_process import run_child
from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    import numpy as np

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("MMDP_SHARED", ROOT.parent / "shared"))
REPEATS, QUICK_REPEATS = 6, 2
ROUNDS, QUICK_ROUNDS = 3, 1
PARTS = 3  # of an epoch, with the ceiling between them
WORKERS = 2
BATCH = 8  # rows
MAX_TOKENS = 1024  # a row
MAX_IMAGES = 9  # a row
SIDE = 256  # pixels
VISION = "fixed:64"
LOOK_EVERY = 0.1  # seconds, at the memory
IDLE = 0.002  # CPU seconds in a fifth of that, at most: nothing works
TIMEOUT = 600  # seconds a contender may take

Counts = dict[str, int]
Figures = dict[str, Any]


# What runs in a child imports what it needs by itself: when imports end is part of what is measured.


def prepare(folder: Path, repeats: int) -> Figures:
    """Writes what the contenders share, rows, images, tokenizer and caches, and tells what the data is."""
    import mmdp
    from mmdp.config import cache_folder
    from mmdp.demo import demo_jsonl

    real = SHARED.is_dir()
    rows = SHARED / "data" / "real-vqa" / "train.jsonl" if real else demo_jsonl(cache_folder())
    shutil.copytree(rows.parent / "images", folder / "images")
    given = [row for line in rows.read_text(encoding="utf-8").splitlines() if (row := json.loads(line))["images"]]
    encoder = mmdp.Encoder(str(SHARED / "tokenizers" / "smollm2") if real else "demo", VISION, chat_template="chatml")
    encoder.tokenizer.chat_template = encoder.chat.template.text
    encoder.tokenizer.save_pretrained(folder / "tokenizer")
    for name, times in (("once.jsonl", 1), ("train.jsonl", repeats)):
        with (folder / name).open("w", encoding="utf-8") as file:
            for repeat in range(times):
                for row in given:
                    file.write(json.dumps(row | {"id": f"{row['id']}-{repeat}"}) + "\n")
    source, encoder = opened(folder, "once.jsonl")
    rows_once = planned(source, encoder).steps.plan.epoch(0)
    kept = [image.name for row in rows_once for sample in row for image in source[int(sample)].images]
    (folder / "kept.json").write_text(json.dumps(kept))
    loader = planned(*opened(folder, "train.jsonl"))  # its caches stay for all
    return {
        "origin": "real-vqa" if real else "the demo set",
        "repeats": repeats,
        "samples": repeats * len(given),
        "images": repeats * sum(len(row["images"]) for row in given),
        "steps": len(loader),
    }


def opened(folder: Path, name: str) -> tuple[Any, Any]:
    """A source, and an encoder."""
    import mmdp

    return mmdp.open_source(folder / name), mmdp.Encoder(str(folder / "tokenizer"), VISION)


def planned(source: Any, encoder: Any, executor: str = "threads", *, lazy: bool = False) -> Any:
    """A loader, and before it all that it needs."""
    import mmdp

    sizes = mmdp.measure(source, encoder, lazy=lazy)
    plan = mmdp.plan(sizes, mmdp.Budget(MAX_TOKENS, MAX_IMAGES), seed=0)
    return mmdp.Loader(source, encoder, plan, batch_size=BATCH, executor=executor, num_workers=WORKERS)


def import_mmdp() -> None:
    """Also what mmdp imports only when it is needed."""
    from transformers import PreTrainedTokenizerFast  # noqa: F401

    import mmdp

    for name in mmdp.__all__:
        getattr(mmdp, name)


def run_blog(folder: Path, *, mended: bool = False) -> Iterator[Counts]:
    from blog_pipeline import blog_loader, count

    yield {}
    loader = blog_loader(
        folder / "train.jsonl", str(folder / "tokenizer"), mended=mended, num_workers=WORKERS, batch_size=BATCH
    )
    yield {}
    yield from map(count, loader)


def run_mmdp(folder: Path, *, executor: str = "threads", lazy: bool = False) -> Iterator[Counts]:
    import_mmdp()
    yield {}
    loader = planned(*opened(folder, "train.jsonl"), executor, lazy=lazy)
    yield {}
    for batch in loader:
        yield {
            "images": len(batch.images),
            "samples": sum(map(len, batch.samples)),
            "rows": len(batch.samples) - batch.filler_rows,
            "tokens": batch.num_tokens,
            "padding": batch.padded_tokens,
            "counted": len(batch.skipped),
        }
    loader.close()
    yield {"counted": len(loader.steps.plan.skipped)}


class Lap(NamedTuple):
    """Images, and what they took."""

    images: int
    seconds: float
    cpu_seconds: float


def ceiling(folder: Path) -> Lap:
    """Decodes the images of one copy of the samples that fit a row, and does nothing else."""
    from mmdp.executors import Threads
    from mmdp.images import decode

    def decode_one(name: str) -> np.ndarray:
        return decode((folder / name).read_bytes(), size=(SIDE, SIDE), draft=True)

    names = json.loads((folder / "kept.json").read_text())
    start = clock()
    done = sum(1 for _ in Threads(WORKERS).run(decode_one, names, depth=2 * BATCH + WORKERS))
    return Lap(done, *since(start))


@dataclass(frozen=True, slots=True)
class Contender:
    """Who runs.

    Attributes:
        run: yields once after its imports, once before it asks for the first batch, and then the counts of each batch.
        cached: index and token cache lie there.
        each_round: else it runs once, and not at all where there is one round only.
        by_ceiling: its ceiling runs between the parts of its epoch.
    """

    run: Callable[[Path], Iterator[Counts]]
    cached: bool = True
    each_round: bool = True
    by_ceiling: bool = False


CONTENDERS = {
    "blog": Contender(run_blog),
    "blog, mended": Contender(partial(run_blog, mended=True), each_round=False),
    "mmdp": Contender(run_mmdp, by_ceiling=True),
    "mmdp, no cache": Contender(partial(run_mmdp, lazy=True), cached=False, by_ceiling=True),
    "mmdp, processes": Contender(partial(run_mmdp, executor="processes"), each_round=False),
}


def contend(name: str, folder: Path, steps: int, spawned: float) -> Figures:
    """Runs a contender in this process.

    Args:
        name: its name.
        folder: what `prepare` wrote.
        steps: of mmdp's epoch.
        spawned: when this process was asked for, by the clock on the wall.
    """
    contender = CONTENDERS[name]
    batches = contender.run(folder)
    next(batches)
    seconds_of_imports, bytes_of_imports = time.time() - spawned, memory_of(os.getpid())[0]
    begin_cpu = cpu_seconds()
    ceilings = [ceiling(folder)] if contender.by_ceiling else []
    laps: list[Lap] = []
    total: Counter[str] = Counter()
    images, first = 0, 0.0

    opened = lap = clock()
    next(batches)
    if contender.cached:
        lap = clock()
    for number, counts in enumerate(batches, 1):
        total.update(counts)
        if "rows" not in counts:
            continue  # the last words, after the last batch
        images += counts["images"]
        last = since(lap)
        first = first or since(opened)[0]
        if contender.by_ceiling and number % math.ceil(steps / PARTS) == 0 and number < steps:
            rest()
            laps.append(Lap(images, *since(lap)))
            ceilings.append(ceiling(folder))
            images, lap = 0, clock()
    laps.append(Lap(images, *last))
    if contender.by_ceiling:
        ceilings.append(ceiling(folder))

    seconds = sum(lap.seconds for lap in laps)
    return {
        "images": total["images"],
        "images_per_second": total["images"] / seconds,
        "samples": total["samples"],
        "samples_per_second": total["samples"] / seconds,
        "samples_counted_as_left_out": total["counted"],
        "rows": total["rows"],
        "tokens": total["tokens"],
        "padding_share": total["padding"] / (total["tokens"] + total["padding"]),
        "seconds_to_first": first,
        "seconds_to_first_with_imports": seconds_of_imports + first,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds() - begin_cpu - sum(one.cpu_seconds for one in ceilings),
        "bytes_of_imports": bytes_of_imports,
        **(compare(laps, ceilings) if ceilings else {}),
    }


def compare(laps: list[Lap], ceilings: list[Lap]) -> Figures:
    """Each lap with the ceiling before and after it, and all laps together."""
    shares = {}
    for figure in ("seconds", "cpu_seconds"):
        an_image = [getattr(one, figure) / one.images for one in ceilings]
        best = sum(lap.images * (an_image[k] + an_image[k + 1]) / 2 for k, lap in enumerate(laps))
        shares[figure] = best / sum(getattr(lap, figure) for lap in laps)
    seconds = sum(one.seconds for one in ceilings)
    return {
        "share_of_ceiling": shares["seconds"],
        "share_of_ceiling_by_cpu_time": shares["cpu_seconds"],
        "images_per_second_of_ceiling": sum(one.images for one in ceilings) / seconds,
        "processors_of_ceiling": sum(one.cpu_seconds for one in ceilings) / seconds,
    }


def clock() -> tuple[float, float]:
    """Seconds, and CPU seconds."""
    return time.perf_counter(), cpu_seconds()


def since(start: tuple[float, float]) -> tuple[float, float]:
    seconds, cpu = clock()
    return seconds - start[0], cpu - start[1]


def rest() -> None:
    """Waits until no thread of this process works any more: what was begun is part of the lap."""
    before, spent = 0.0, cpu_seconds()
    while spent - before > IDLE:
        time.sleep(LOOK_EVERY / 5)
        before, spent = spent, cpu_seconds()


def cpu_seconds() -> float:
    """CPU time of this process, and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def memory_of(pid: int) -> tuple[int, int]:
    """Bytes of a process that no file backs: its own, and shared ones. Elsewhere than on Linux all that is resident."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        own, shared = (1024 * int(status.split(f"{field}:")[1].split()[0]) for field in ("RssAnon", "RssShmem"))
    except (OSError, IndexError):
        return psutil.Process(pid).memory_info().rss, 0
    return own, shared


def spawn(job: str, folder: Path, *words: str) -> tuple[Any, list[list[tuple[int, int]]]]:
    """Does a job in a process of its own: what it tells, and the memory that was seen."""
    command = [sys.executable, __file__, "--child", job, str(folder), *words]
    with tempfile.TemporaryDirectory() as fresh:
        cached = job not in CONTENDERS or CONTENDERS[job].cached
        environment = {
            **os.environ,
            "MMDP_CACHE": str(folder / "cache") if cached else fresh,
            "TOKENIZERS_PARALLELISM": "false",  # else they warn when the DataLoader forks
        }
        return run_child(command, environment, timeout=TIMEOUT, look=watch)


def watch(pid: int) -> list[list[tuple[int, int]]]:
    """Memory of a process and of its descendants, the process first, until it has ended."""
    parent, seen = psutil.Process(pid), []
    end = time.monotonic() + TIMEOUT
    while parent.is_running() and parent.status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > end:
            raise TimeoutError(f"{' '.join(parent.cmdline())} took more than {TIMEOUT} s")
        with contextlib.suppress(psutil.NoSuchProcess):  # a worker may end while we look
            seen.append([memory_of(one.pid) for one in (parent, *parent.children(recursive=True))])
        time.sleep(LOOK_EVERY)
    return seen


def peak_bytes(seen: list[list[tuple[int, int]]], imports: int) -> int:
    """The most that all processes held at one time, without what each holds after its imports."""
    most = 0
    for processes in seen:
        # Batches on their way lie in shared memory, which sender and receiver both may map: counted once.
        parent, *workers = (shared for _, shared in processes)
        most = max(most, sum(max(0, own - imports) for own, _ in processes) + max(parent, sum(workers)))
    return most


def one_round(number: int, folder: Path, data: Figures) -> Figures:
    """Figures of each contender that runs in this round."""
    names = [name for name, contender in CONTENDERS.items() if contender.each_round or number == 1]
    found: Figures = {}
    for name in (*names[number:], *names[:number]):
        told, seen = spawn(name, folder, str(data["steps"]), str(time.time()))
        found[name] = told | {
            "peak_bytes_above_imports": peak_bytes(seen, told["bytes_of_imports"]),
            "peak_bytes": peak_bytes(seen, 0),
            "images_left_out": data["images"] - told["images"],
            "samples_left_out": data["samples"] - told["samples"],
        }
    return found


@dataclass(frozen=True, slots=True)
class Ratio:
    """One figure over another, in each round or turn; the median decides. `met` is None where no goal is judged."""

    what: str
    least: float
    median: float
    greatest: float
    count: int
    goal: str = ""
    met: bool | None = None


def ratio(what: str, values: list[float], at_least: float = 0, at_most: float = 0) -> Ratio:
    middle = statistics.median(values)
    met = middle >= at_least if at_least else middle <= at_most if at_most else None
    goal = f">= {at_least:.3g}" if at_least else f"<= {at_most:.3g}" if at_most else ""
    return Ratio(what, min(values), middle, max(values), len(values), goal, met)


def judge(rounds: list[Figures], *, whole: bool) -> list[Ratio]:
    """All ratios.

    Args:
        rounds: of `one_round`.
        whole: the data is as large as the goals suppose; with less, the blog's buffer and its first wait are smaller,
            and opening counts for more.
    """
    memory, first = "peak_bytes_above_imports", "seconds_to_first"
    ratios = []
    for name, least in (("mmdp", 0.9), ("mmdp, no cache", 0.8)):
        shares = [each[name]["share_of_ceiling"] for each in rounds]
        judged = whole or CONTENDERS[name].cached
        ratios.append(ratio(f"{name} / ceiling: images/s", shares, at_least=least if judged else 0))
        shares = [each[name]["share_of_ceiling_by_cpu_time"] for each in rounds]
        ratios.append(ratio(f"{name} / ceiling: images per CPU second", shares))
    for figure, what, name, most in (
        (memory, "memory above the imports", "mmdp", 1 / 10),
        (memory, "memory above the imports", "mmdp, no cache", 1 / 10),
        (first, "time to the first batch", "mmdp", 1 / 20),
        (first, "time to the first batch", "mmdp, no cache", 1 / 10),
    ):
        values = [each[name][figure] / each["blog"][figure] for each in rounds]
        ratios.append(ratio(f"{name} / blog: {what}", values, at_most=most if whole else 0))
    for name in contenders(rounds):
        if not CONTENDERS[name].by_ceiling:
            values = [each[name]["images_per_second"] / ceiling_of([each]) for each in rounds if name in each]
            ratios.append(ratio(f"{name} / ceiling in other processes: images/s", values))
    return ratios


def contenders(rounds: list[Figures]) -> list[str]:
    return [name for name in CONTENDERS if any(name in each for each in rounds)]


def ceiling_of(rounds: list[Figures], figure: str = "images_per_second_of_ceiling") -> float:
    return statistics.median(told[figure] for each in rounds for told in each.values() if figure in told)


def show(console: Console, rounds: list[Figures], ratios: list[Ratio], data: Figures) -> None:
    title = (
        f"{data['samples']:,} samples with {data['images']:,} images: {data['origin']}, {data['repeats']} times over"
    )
    table = Table("", title=f"{title}; medians of {len(rounds)} rounds", box=box.SIMPLE_HEAD)
    for heading in (
        "images/s",
        "samples/s",
        "padding",
        "images\nleft out",
        "samples left\nout (counted)",
        "s to first batch\n(with imports)",
        "CPU s",
        "peak MB above\nimports (in all)",
    ):
        table.add_column(heading, justify="right")
    for name in contenders(rounds):
        here = [each[name] for each in rounds if name in each]
        of = {figure: statistics.median(one[figure] for one in here) for figure in here[0]}
        table.add_row(
            name,
            f"{of['images_per_second']:,.0f}",
            f"{of['samples_per_second']:,.0f}",
            f"{of['padding_share']:.1%}",
            f"{of['images_left_out'] / data['images']:.1%}",
            f"{of['samples_left_out']:.0f} ({of['samples_counted_as_left_out']:.0f})",
            f"{of['seconds_to_first']:.2f} ({of['seconds_to_first_with_imports']:.1f})",
            f"{of['cpu_seconds']:.1f}",
            f"{of['peak_bytes_above_imports'] / 1e6:,.0f} ({of['peak_bytes'] / 1e6:,.0f})",
        )
    table.add_row("ceiling: decode alone", f"{ceiling_of(rounds):,.0f}")
    console.print(table)
    table = Table("ratio", "min / median / max", "of", "goal", "met", title="ratios", box=box.SIMPLE_HEAD)
    for one in ratios:
        met = "" if one.met is None else "[green]yes" if one.met else "[red]NO"
        spread = f"{one.least:.3f} / {one.median:.3f} / {one.greatest:.3f}"
        table.add_row(one.what, spread, str(one.count), one.goal, met)
    console.print(table)
    console.print(
        f"{sum(one.met is True for one in ratios)} goals met, {sum(one.met is False for one in ratios)} missed"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round with a third of the samples")
    parser.add_argument("--report", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.child:
        job, folder, *words = flags.child
        if job == "prepare":
            told = prepare(Path(folder), repeats=int(words[0]))
        else:
            told = contend(job, Path(folder), steps=int(words[0]), spawned=float(words[1]))
        print(json.dumps(told))
        return
    console = Console(width=None if Console().is_terminal else 150)
    if not SHARED.is_dir():
        console.print("no handed inputs (set MMDP_SHARED): the demo set and its tokenizer are taken")
    with tempfile.TemporaryDirectory() as made:
        data = spawn("prepare", Path(made), str(QUICK_REPEATS if flags.quick else REPEATS))[0]
        rounds = [one_round(number, Path(made), data) for number in range(QUICK_ROUNDS if flags.quick else ROUNDS)]
    ratios = judge(rounds, whole=not flags.quick)
    show(console, rounds, ratios, data)
    if flags.report:
        machine = {"python": platform.python_version(), "cpus": os.cpu_count(), "load": os.getloadavg()}
        report = {"machine": machine, "data": data, "rounds": rounds, "ratios": [asdict(one) for one in ratios]}
        flags.report.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
