"""Packed batches of images and text: mmdp against the blog's pipeline, and against decoding alone.

    uv run benchmarks/loader.py [--quick] [--report FILE.json]

All contenders make batches of the same samples: 2 workers, 8 rows a batch, 1024 tokens and 9 images a row, 64 tokens
and 256 x 256 pixels an image, the same tokenizer with ChatML. Each makes one epoch in a process of its own. Rounds take
turns, and a ratio is taken within its round, since machines differ and are shared.

| contender | is |
|---|---|
| blog | `blog_pipeline.py`: DataLoader workers that decode and pack; float32 pixels |
| blog, mended | the same with its worst faults mended; in the first round only |
| mmdp | `Loader(executor="threads")`; index and token cache lie there from an earlier run |
| mmdp, no cache | the same, but nothing lies there |
| mmdp, processes | as mmdp, with `executor="processes"`; in the first round only |

How near mmdp comes to its ceiling is measured in one more process, in short turns of one epoch of the samples taken
once. The ceiling is `images.decode` and nothing else, on the same pool of threads, of the same images in the same
order, their bytes in memory. Beside it: mmdp with its caches; and without, from opening the source to the last batch,
measuring included.

The time to the first batch starts after the imports, and once more with them. Images a second count from the first
request for a batch to the last batch, without a cache from opening the source on. CPU time is that of all processes,
from the imports to the end. Memory is what no file backs, summed over all processes and looked at ten times a second;
off it, for each process, goes what the first process holds after its imports. The files lie in the system's own cache:
the disk is not measured.

Real rows and the SmolLM2 tokenizer come from the folder that `MMDP_SHARED` names (by default `shared` beside the
checkout); without it the demo set is taken. The samples with images are repeated six times over. `--quick` repeats them
twice: the blog's buffer, and with it its memory and its first wait, are then a third, so that no goal is set on them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from rich import box
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("MMDP_SHARED", ROOT.parent / "shared"))
REPEATS, QUICK_REPEATS = 6, 2
ROUNDS = 3
TURNS = 3  # a round, of mmdp and its ceiling
WORKERS = 2
BATCH = 8  # rows
MAX_TOKENS = 1024  # a row
MAX_IMAGES = 9  # a row
VISION = "fixed:64"
SAMPLE_EVERY = 0.1  # seconds between looks at the memory
TIMEOUT = 300  # seconds a contender may take

Counts = dict[str, int]


def prepare(folder: Path, repeats: int) -> dict[str, Any]:
    """Writes what the contenders share: rows, images, tokenizer, caches, and the list of images in mmdp's order."""
    import mmdp
    from mmdp.config import cache_folder
    from mmdp.demo import demo_jsonl

    real = SHARED.is_dir()
    rows = SHARED / "data" / "real-vqa" / "train.jsonl" if real else demo_jsonl(cache_folder())
    shutil.copytree(rows.parent / "images", folder / "images")
    given = [row for line in rows.read_text(encoding="utf-8").splitlines() if (row := json.loads(line))["images"]]
    for name, times in (("train.jsonl", repeats), ("once.jsonl", 1)):
        with (folder / name).open("w", encoding="utf-8") as file:
            for repeat in range(times):
                for row in given:
                    file.write(json.dumps(row | {"id": f"{row['id']}-{repeat}"}) + "\n")
    encoder = mmdp.Encoder(str(SHARED / "tokenizers" / "smollm2") if real else "demo", VISION, chat_template="chatml")
    encoder.tokenizer.chat_template = encoder.chat.template.text
    encoder.tokenizer.save_pretrained(folder / "tokenizer")
    for name in ("train.jsonl", "once.jsonl"):
        mmdp.measure(mmdp.open_source(folder / name), mmdp.Encoder(str(folder / "tokenizer"), VISION))
    num_images = sum(len(row["images"]) for row in given)
    return {
        "origin": "real-vqa" if real else "the demo set",
        "repeats": repeats,
        "samples": repeats * len(given),
        "images": repeats * num_images,
    }


def blog(folder: Path, *, mended: bool = False) -> Iterator[Counts]:
    from blog_pipeline import blog_loader, count

    yield {}
    loader = blog_loader(
        folder / "train.jsonl", str(folder / "tokenizer"), mended=mended, num_workers=WORKERS, batch_size=BATCH
    )
    yield {}
    yield from map(count, loader)


def mmdp_loader(folder: Path, *, executor: str = "threads") -> Iterator[Counts]:
    import_mmdp()
    yield {}
    import mmdp

    source = mmdp.open_source(folder / "train.jsonl")
    encoder = mmdp.Encoder(str(folder / "tokenizer"), VISION)
    loader = planned(source, encoder, executor)
    yield {"counted": len(loader.steps.plan.skipped)}
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


def import_mmdp() -> None:
    """Imports what mmdp imports when it is first needed, so that it does not count as work."""
    from transformers import PreTrainedTokenizerFast  # noqa: F401

    import mmdp

    for name in mmdp.__all__:
        getattr(mmdp, name)


def planned(source: Any, encoder: Any, executor: str = "threads", cache: Path | None = None) -> Any:
    """A loader of this source."""
    import mmdp

    plan = mmdp.plan(mmdp.measure(source, encoder, cache=cache), mmdp.Budget(MAX_TOKENS, MAX_IMAGES), seed=0)
    return mmdp.Loader(source, encoder, plan, batch_size=BATCH, executor=executor, num_workers=WORKERS)


def take_turns(folder: Path) -> list[dict[str, dict[str, float]]]:
    """In each turn the seconds of the ceiling, of mmdp, and of mmdp without a cache, and their CPU seconds."""
    import mmdp
    from mmdp.config import Config
    from mmdp.executors import Threads
    from mmdp.images import decode

    data = {str(path.relative_to(folder)): path.read_bytes() for path in (folder / "images").iterdir()}
    source, encoder = mmdp.open_source(folder / "once.jsonl"), mmdp.Encoder(str(folder / "tokenizer"), VISION)
    loader = planned(source, encoder)
    found = []

    def one(name: str) -> np.ndarray:
        return decode(data[name], size=(256, 256), draft=True)

    def ceiling(names: list[str]) -> int:
        return sum(1 for _ in Threads(WORKERS).run(one, names, depth=2 * BATCH + WORKERS))

    def cached(epoch: int) -> int:
        loader.set_epoch(epoch)
        return sum(len(batch.images) for batch in loader)

    def anew(epoch: int) -> int:
        with tempfile.TemporaryDirectory() as fresh:
            opened = mmdp.open_source(folder / "once.jsonl", config=Config(cache_dir=Path(fresh)))
            new = planned(opened, encoder, cache=Path(fresh))
            new.set_epoch(epoch)
            return sum(len(batch.images) for batch in new)

    for turn in range(-1, TURNS):
        rows = loader.steps.plan.epoch(turn + 1)
        names = [image.name for row in rows for sample in row for image in source[int(sample)].images]
        jobs: dict[str, Callable[[], int]] = {
            CEILING: partial(ceiling, names),
            "mmdp": partial(cached, turn + 1),
            "mmdp, no cache": partial(anew, turn + 1),
        }
        order = list(jobs)[turn:] + list(jobs)[:turn]
        times = {}
        for name in order:
            start, cpu = time.perf_counter(), time.process_time()
            num_images = jobs[name]()
            times[name] = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
            assert num_images == len(names)
        if turn >= 0:  # the first turn warms up
            found.append(times)
    return found


@dataclass(frozen=True, slots=True)
class Contender:
    """Who runs.

    Attributes:
        run: yields once after its imports, once before it asks for the first batch, and then a batch's counts.
        cached: index and token cache lie there.
        whole: images a second count opening and measuring too.
    """

    run: Callable[[Path], Iterator[Counts]]
    cached: bool = True
    whole: bool = False


CONTENDERS = {
    "blog": Contender(blog),
    "blog, mended": Contender(lambda folder: blog(folder, mended=True)),
    "mmdp": Contender(mmdp_loader),
    "mmdp, no cache": Contender(mmdp_loader, cached=False, whole=True),
    "mmdp, processes": Contender(lambda folder: mmdp_loader(folder, executor="processes")),
    "decode alone": Contender(decode_alone),
}


def child(name: str, folder: Path, spawned: float) -> dict[str, Any]:
    """Runs a contender in this process."""
    batches = prepare(folder) if name == "prepare" else CONTENDERS[name].run(folder)
    next(batches)
    imports, start, cpu = private_bytes(os.getpid()), time.perf_counter(), cpu_seconds()
    next_batches = next(batches)
    asked = last = time.perf_counter()
    total, first, first_with_imports = Counter(next_batches), None, None
    for counts in batches:
        total.update(counts)
        if counts.get("images"):
            last = time.perf_counter()
            if first is None:
                first, first_with_imports = last - start, time.time() - spawned
    return {
        "counts": dict(total),
        "first": first,
        "first_with_imports": first_with_imports,
        "seconds": last - asked,
        "seconds_with_opening": last - start,
        "cpu_seconds": cpu_seconds() - cpu,
        "imports_bytes": imports,
    }


def cpu_seconds() -> float:
    """CPU time of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def private_bytes(pid: int) -> int:
    """Memory of a process that no file backs and that it shares with none but by a fork; elsewhere than Linux its RSS."""
    return memory_of(pid)[0]


def memory_of(pid: int) -> tuple[int, int]:
    """Bytes of anonymous memory, and of shared memory, that a process holds."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        anonymous, shared = (int(status.split(f"{field}:")[1].split()[0]) for field in ("RssAnon", "RssShmem"))
    except (OSError, IndexError):
        return psutil.Process(pid).memory_info().rss, 0
    return anonymous * 1024, shared * 1024


def run(name: str, folder: Path) -> dict[str, Any]:
    """Runs a contender in a process of its own, and watches its memory."""
    with tempfile.TemporaryDirectory() as fresh, tempfile.TemporaryFile("w+") as errors:
        cached = name == "prepare" or CONTENDERS[name].cached
        environment = {
            **os.environ,
            "MMDP_CACHE": str(folder / "cache") if cached else fresh,
            "TOKENIZERS_PARALLELISM": "false",  # else tokenizers warns of the fork of the DataLoader's workers
        }
        command = [sys.executable, __file__, "--child", name, str(folder), str(time.time())]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            seen = watch(psutil.Process(process.pid))
            if process.wait():
                errors.seek(0)
                raise RuntimeError(f"{name} failed:\n{errors.read()}")
            assert process.stdout is not None
            found: dict[str, Any] = json.loads(process.stdout.read().splitlines()[-1])
        finally:
            process.kill()
    above = [
        sum(max(0, anonymous - found["imports_bytes"]) for anonymous, _ in processes) + shared_bytes(processes)
        for processes in seen
    ]
    whole = [sum(anonymous for anonymous, _ in processes) + shared_bytes(processes) for processes in seen]
    return found | {"peak_above_imports": max(above, default=0), "peak": max(whole, default=0)}


def watch(parent: psutil.Process) -> list[list[tuple[int, int]]]:
    """Memory of a process and its descendants, the parent first, until it has ended."""
    seen = []
    end = time.monotonic() + TIMEOUT
    while parent.is_running() and parent.status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > end:
            for one in (*parent.children(recursive=True), parent):
                one.kill()
            raise TimeoutError(f"{' '.join(parent.cmdline())} took more than {TIMEOUT} s")
        try:
            seen.append([memory_of(one.pid) for one in (parent, *parent.children(recursive=True))])
        except psutil.NoSuchProcess:
            pass  # a worker ended while we looked
        time.sleep(SAMPLE_EVERY)
    return seen


def shared_bytes(processes: list[tuple[int, int]]) -> int:
    """Batches on their way lie in shared memory, and sender and receiver both may map them: counted once."""
    parent, *workers = (shared for _, shared in processes)
    return max(parent, sum(workers))


def figures(name: str, found: dict[str, Any], data: dict[str, int]) -> dict[str, float | None]:
    """What the table shows of one run."""
    counts = Counter(found["counts"])
    seconds = found["seconds_with_opening"] if CONTENDERS[name].whole else found["seconds"]
    places = counts["tokens"] + counts["padding"]
    return {
        "images_per_second": counts["images"] / seconds,
        "samples_per_second": counts["samples"] / seconds if counts["samples"] else None,
        "images_per_second_with_opening": counts["images"] / found["seconds_with_opening"],
        "padding_share": counts["padding"] / places if places else None,
        "images_left_out": 1 - counts["images"] / data["images"],
        "samples_left_out": data["samples"] - counts["samples"] if counts["samples"] else None,
        "samples_counted_as_left_out": counts["counted"],
        "seconds_to_first": found["first"],
        "seconds_to_first_with_imports": found["first_with_imports"],
        "cpu_seconds": found["cpu_seconds"],
        "peak_bytes_above_imports": found["peak_above_imports"],
        "peak_bytes": found["peak"],
    }


@dataclass(frozen=True, slots=True)
class Goal:
    """A ratio of two contenders in one figure, the least, median and greatest of all rounds; the median decides."""

    what: str
    ratio: tuple[float, float, float]
    goal: float | None
    at_least: bool
    met: bool | None


def ratio(
    rounds: list[dict[str, Any]], what: str, figure: str, ours: str, theirs: str, goal: float | None, *, at_least: bool
) -> Goal:
    ratios = [each[ours][figure] / each[theirs][figure] for each in rounds]
    middle = statistics.median(ratios)
    met = None if goal is None else middle >= goal if at_least else middle <= goal
    return Goal(what, (min(ratios), middle, max(ratios)), goal, at_least, met)


def judge(rounds: list[dict[str, Any]]) -> list[Goal]:
    speed, memory, first = "images_per_second", "peak_bytes_above_imports", "seconds_to_first"
    ceiling = "decode alone"
    goals = [
        ratio(rounds, "images/s, mmdp / ceiling", speed, "mmdp", ceiling, 0.9, at_least=True),
        ratio(rounds, "images/s, mmdp without cache / ceiling", speed, "mmdp, no cache", ceiling, 0.8, at_least=True),
        ratio(rounds, "memory, mmdp / blog", memory, "mmdp", "blog", 1 / 10, at_least=False),
        ratio(rounds, "memory, mmdp without cache / blog", memory, "mmdp, no cache", "blog", 1 / 10, at_least=False),
        ratio(rounds, "time to first batch, mmdp / blog", first, "mmdp", "blog", 1 / 20, at_least=False),
        ratio(rounds, "time to first batch, no cache / blog", first, "mmdp, no cache", "blog", 1 / 10, at_least=False),
    ]
    for name in ("blog", "blog, mended", "mmdp, processes"):
        goals.append(ratio(rounds, f"images/s, {name} / ceiling", speed, name, ceiling, None, at_least=True))
    return goals


def show(console: Console, rounds: list[dict[str, Any]], goals: list[Goal], data: dict[str, int], title: str) -> None:
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for heading in (
        "",
        "images/s",
        "samples/s",
        "padding",
        "images\nleft out",
        "samples left\nout (counted)",
        "s to first batch\n(with imports)",
        "CPU s",
        "peak MB above\nimports (in all)",
    ):
        table.add_column(heading, justify="right" if heading else "left")

    def middle(name: str, figure: str) -> float | None:
        values = [each[name][figure] for each in rounds if each[name][figure] is not None]
        return statistics.median(values) if values else None

    def text(value: float | None, form: str = ",.0f", scale: float = 1) -> str:
        return "" if value is None else f"{value / scale:{form}}"

    for name in CONTENDERS:
        left_out = middle(name, "samples_left_out")
        is_loader = left_out is not None
        table.add_row(
            name,
            text(middle(name, "images_per_second")),
            text(middle(name, "samples_per_second")),
            text(middle(name, "padding_share"), ".1%"),
            text(middle(name, "images_left_out"), ".1%") if is_loader else "",
            f"{left_out:.0f} ({middle(name, 'samples_counted_as_left_out'):.0f})" if is_loader else "",
            f"{text(middle(name, 'seconds_to_first'), '.2f')} ({text(middle(name, 'seconds_to_first_with_imports'), '.1f')})"
            if is_loader
            else "",
            text(middle(name, "cpu_seconds"), ".1f"),
            f"{text(middle(name, 'peak_bytes_above_imports'), ',.0f', 1e6)} ({text(middle(name, 'peak_bytes'), ',.0f', 1e6)})",
        )
    console.print(table)
    table = Table(
        "ratio", "min / median / max", "goal", "met", title=f"ratios of {len(rounds)} rounds", box=box.SIMPLE_HEAD
    )
    for one in goals:
        met = "" if one.met is None else "[green]yes" if one.met else "[red]NO"
        goal = "" if one.goal is None else f"{'>=' if one.at_least else '<='} {one.goal:.3g}"
        table.add_row(one.what, " / ".join(f"{value:.3f}" for value in one.ratio), goal, met)
    console.print(table)
    console.print(f"{sum(one.met is True for one in goals)} goals met, {sum(one.met is False for one in goals)} missed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"one round instead of {ROUNDS}")
    parser.add_argument("--report", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.child:
        name, folder, spawned = flags.child
        print(json.dumps(child(name, Path(folder), float(spawned))))
        return
    console = Console(width=None if Console().is_terminal else 150)
    if not SHARED.is_dir():
        console.print("no handed inputs (set MMDP_SHARED): the demo set and its tokenizer are taken")
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        data = run("prepare", folder)["counts"]
        for number in range(1 if flags.quick else ROUNDS):
            names = list(CONTENDERS)
            names = names[number:] + names[:number]
            rounds.append({name: figures(name, run(name, folder), data) for name in names})
    goals = judge(rounds)
    origin = "real-vqa" if SHARED.is_dir() else "the demo set"
    title = f"{data['samples']:,} samples with {data['images']:,} images, {origin} {REPEATS} times over"
    show(console, rounds, goals, data, title)
    if flags.report:
        machine = {"python": platform.python_version(), "cpus": os.cpu_count()}
        report = {"machine": machine, "data": data | {"origin": origin}, "rounds": rounds}
        flags.report.write_text(json.dumps(report | {"goals": [asdict(one) for one in goals]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
