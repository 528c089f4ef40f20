"""Stage 06's job by mmdp's coordinator and by Ray Data, the peer that a user would pick instead: in one run, in turns.

Usage: `uv run benchmarks/ray_data.py [--quick] [--scenes NAME ...] [--report FILE.json]`, on Linux.

Both read the same samples from the same object store 40 ms away, pack them to rows of 1024 tokens and 9 images, and
hand batches of 8 rows to ranks, which are Ray actors with a trainer that sleeps. Both have a Ray of their own with four
CPUs in name, of which two actors decode. Encoder, obstore, Pillow, joining and batching are the same code.

| contender | is |
|---|---|
| mmdp | `Coordinator` and `RankReader`; the sizes were measured once, before |
| ray data | `ray_data_pipeline.TUNED`: packs from text, then builds rows; `streaming_split`, two batches prefetched |
| ray data, plain | `ray_data_pipeline.PLAIN`: decodes first, packs then, all else as Ray Data has it; in one round |

| scene | is |
|---|---|
| flat | one rank that trains on nothing: what can be made |
| one | one rank, 1000 ms a step: about half to two thirds of that is wanted |
| two | two ranks, 2000 ms a step: as much in all |
| long | as flat, over four times the samples: what starting costs weighs less |

Each contender makes one epoch in a process of its own, and rounds take turns. Time to the first batch starts when Ray
and the ranks are up, and ends when every rank has one; for mmdp it has opening, a warm `measure` and the plan in it.
What measuring costs when nothing lies there is told apart: it is paid once for a data set. Samples/s are those behind
each rank's first batch. Memory is the sum over all processes of Ray of what no file backs, the driver's and the ranks'
too, and what lies in the object store, looked at twice a second. A sample is lost if it fits a row and no rank got it.

Real rows and the SmolLM2 tokenizer come from the folder that `MMDP_SHARED` names (by default `shared` beside the
checkout); without it the demo set is taken; each sample comes several times. `--quick` is one round of the scene flat.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import ray_data_pipeline
from child_process import run_child
from rich.console import Console
from rich.table import Table

import mmdp
from mmdp import ladder
from mmdp.config import Config, cache_folder
from mmdp.demo import demo_jsonl
from mmdp.local_store import serve
from mmdp.metrics import Tally, padding_share
from mmdp.ray_coordinator import Coordinator
from mmdp.ray_reader import RankReader
from mmdp.ray_start import Session, load_ray, used_store_bytes
from mmdp.records import Batch, ImageRef
from mmdp.store import read
from mmdp.wait_meter import WaitMeter

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("MMDP_SHARED", ROOT.parent / "shared"))
LATENCY_MS = 40.0
ROUNDS = 3
CPUS, WORKERS = 4, 2
STORE_BYTES = 2 * 2**30
BATCH = 8  # rows
BUDGET = mmdp.Budget(1024, 9)
VISION = "fixed:64"
LOOK_SECONDS = 0.5
TIMEOUT = 300  # seconds a contender may take

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Scene:
    """How many ranks, how long each trains on a batch, and how often a sample comes."""

    ranks: int
    train_ms: float
    repeats: int = 2

    @property
    def file(self) -> str:
        """Its rows."""
        return f"train-{self.repeats}.jsonl"


SCENES = {"flat": Scene(1, 0), "one": Scene(1, 1000), "two": Scene(2, 2000), "long": Scene(1, 0, 8)}
RECIPES = {"ray data": ray_data_pipeline.TUNED, "ray data, plain": ray_data_pipeline.PLAIN}
CONTENDERS = ("mmdp", *RECIPES)
ONCE = ("ray data, plain",)


def prepare(folder: Path, scenes: Iterable[Scene]) -> Figures:
    """Writes rows, images and tokenizer for all contenders, and tells what the data is."""
    real = SHARED.is_dir()
    rows = SHARED / "data" / "real-vqa" / "train.jsonl" if real else demo_jsonl(cache_folder())
    shutil.copytree(rows.parent / "images", folder / "images")
    given = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    for scene in scenes:
        with (folder / scene.file).open("w", encoding="utf-8") as file:
            for repeat in range(scene.repeats):
                for row in given:
                    file.write(json.dumps(row | {"id": f"{row['id']}-{repeat}"}) + "\n")
    encoder = mmdp.Encoder(str(SHARED / "tokenizers" / "smollm2") if real else "demo", VISION, chat_template="chatml")
    encoder.tokenizer.chat_template = encoder.chat.template.text
    encoder.tokenizer.save_pretrained(folder / "tokenizer")
    return {"origin": "real-vqa" if real else "the demo set", "samples": len(given)}


def planned(folder: Path, uri: str, scene: Scene) -> tuple[Any, mmdp.Encoder, Any]:
    """Source, encoder and plan over the store; what was measured before is not measured again."""
    source = mmdp.open_source(f"{uri}/{scene.file}", config=Config(cache_dir=folder / "cache"))
    encoder = mmdp.Encoder(str(folder / "tokenizer"), VISION)
    return source, encoder, mmdp.plan(mmdp.measure(source, encoder, cache=folder / "cache"), BUDGET)


class Rank:
    """A trainer that sleeps, in a process of its own."""

    def is_up(self) -> bool:
        """Once all is imported."""
        return True

    def read_mmdp(self, name: str, rank: int, scene: Scene) -> Figures:
        """One epoch from a coordinator."""
        with RankReader(name, rank, scene.ranks) as reader, closing(iter(reader)) as batches:
            return self._trained(batches, scene)

    def read_ray_data(self, iterator: Any, recipe: Any, pad_id: int, scene: Scene) -> Figures:
        """One epoch from Ray Data."""
        made = ray_data_pipeline.batches(iterator, recipe, batch_size=BATCH, length=BUDGET.tokens, pad_id=pad_id)
        return self._trained(made, scene)

    def _trained(self, batches: Iterable[Batch], scene: Scene) -> Figures:
        meter, tally, train = WaitMeter("cpu"), Tally(), ladder.simulated(scene.train_ms)
        samples: list[int] = []
        first = ended = 0.0
        before = 0
        for number, batch in enumerate(meter.over(batches)):
            if not number:
                first = time.monotonic()
            tally.add(batch)
            samples += [sample for row in batch.samples for sample in row]
            if not number:
                before = len(samples)
            train(batch)
            ended = time.monotonic()
        return {
            "first": first,
            "ended": ended,
            "steps": meter.steps,
            "samples": samples,
            "samples_per_second": (len(samples) - before) / (ended - first),
            "wait": sum(meter.waits),
            "train": sum(meter.trains),
            "rows": tally.rows,
            "tokens": tally.tokens,
            "padded_tokens": tally.padded_tokens,
        }


@dataclass(slots=True)
class Watch:
    """What all processes hold, at most; processor seconds of all, as last seen."""

    over: threading.Event = field(default_factory=threading.Event)
    own_bytes: int = 0
    store_bytes: int = 0
    peak_bytes: int = 0
    processes: int = 0
    cpu_seconds: float = 0.0

    def look(self) -> None:
        """Again and again, until it is over."""
        me = psutil.Process()
        while not self.over.wait(LOOK_SECONDS):
            own, cpu, processes = 0, 0.0, (me, *me.children(recursive=True))
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, IndexError, ProcessLookupError):
                    own += _own_bytes(process.pid)
                    cpu += sum(process.cpu_times()[:4])  # with the children that have ended
            store = used_store_bytes()
            self.processes = max(self.processes, len(processes))
            self.cpu_seconds = max(self.cpu_seconds, cpu)
            self.own_bytes, self.store_bytes = max(self.own_bytes, own), max(self.store_bytes, store)
            self.peak_bytes = max(self.peak_bytes, own + store)


def _own_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


@contextlib.contextmanager
def watched() -> Iterator[Watch]:
    watch = Watch()
    thread = threading.Thread(target=watch.look, daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        watch.over.set()
        thread.join()


def contend(name: str, scene: Scene, folder: Path, uri: str) -> Figures:
    """One contender in this process: one epoch."""
    with closing(Session(num_cpus=CPUS, store_bytes=STORE_BYTES)) as session, watched() as watch:
        ray = session.ray
        ranks = [ray.remote(Rank).options(num_cpus=0).remote() for _ in range(scene.ranks)]
        ray.get([rank.is_up.remote() for rank in ranks])
        time.sleep(2 * LOOK_SECONDS)
        cpu, began = watch.cpu_seconds, time.monotonic()
        if name == "mmdp":
            source, encoder, plan = planned(folder, uri, scene)
            with Coordinator(
                source, encoder, plan, batch_size=BATCH, world_size=scene.ranks, num_workers=WORKERS
            ) as coordinator:
                reading = [rank.read_mmdp.remote(coordinator.name, at, scene) for at, rank in enumerate(ranks)]
                told = ray.get(reading)
        else:
            recipe = RECIPES[name]
            encoder = mmdp.Encoder(str(folder / "tokenizer"), VISION)
            lines = read(ImageRef(scene.file, uri)).decode().splitlines()
            task = ray_data_pipeline.Task(encoder, BUDGET, uri, WORKERS)
            iterators = ray_data_pipeline.opened(lines, task, recipe, ranks=scene.ranks, seed=0)
            reading = [
                rank.read_ray_data.remote(iterator, recipe, encoder.pad_id, scene)
                for rank, iterator in zip(ranks, iterators, strict=True)
            ]
            told = ray.get(reading)
        time.sleep(2 * LOOK_SECONDS)
        found = _together(told, began)
        return found | {
            "cpu_seconds": watch.cpu_seconds - cpu,
            "peak_bytes": watch.peak_bytes,
            "own_bytes": watch.own_bytes,
            "store_bytes": watch.store_bytes,
            "processes": watch.processes,
        }


def _together(told: Sequence[Figures], began: float) -> Figures:
    """All ranks."""
    wait, train = (sum(one[key] for one in told) for key in ("wait", "train"))
    tokens, padded = (sum(one[key] for one in told) for key in ("tokens", "padded_tokens"))
    return {
        "samples": [sample for one in told for sample in one["samples"]],
        "samples_per_second": sum(one["samples_per_second"] for one in told),
        "wait_ratio": wait / (wait + train) if wait + train else 0.0,
        "seconds_to_first": max(one["first"] for one in told) - began,
        "seconds": max(one["ended"] for one in told) - began,
        "rows": sum(one["rows"] for one in told),
        "steps": [one["steps"] for one in told],
        "tokens": tokens,
        "padding_share": padding_share(padded, tokens),
    }


def frozen(folder: Path) -> Path:
    """A copy of this script and of the package: who works on them meanwhile changes nothing half-way."""
    for name in ("mmdp", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    return folder / "benchmarks" / Path(__file__).name


def spawn(script: Path, job: str, *words: str) -> Figures:
    """Does a job in a process of its own."""
    command = [sys.executable, str(script), "--child", job, *words]
    environment = os.environ | {"PYTHONPATH": str(script.parent.parent), "MMDP_SHARED": str(SHARED)}
    return run_child(command, environment, timeout=TIMEOUT)[0]


def child(job: str, words: Sequence[str]) -> Figures:
    folder, uri, scene = Path(words[0]), words[1], SCENES[words[2]]
    if job != "measure":
        return contend(job, scene, folder, uri)
    start = time.perf_counter()
    _, _, plan = planned(folder, uri, scene)
    rows = plan.epoch(0)
    kept = sorted(int(sample) for row in rows for sample in row)
    tokens = plan.sizes.tokens.tolist()
    return {"seconds": time.perf_counter() - start, "kept": kept, "tokens": tokens}


def judged(told: Figures, measured: Figures) -> Figures:
    """Samples counted instead of named."""
    seen = told.pop("samples")
    once = set(seen)
    return told | {
        "samples": len(seen),
        "lost": len(set(measured["kept"]) - once),
        "repeated": len(seen) - len(once),
        "not_asked_for": len(once - set(measured["kept"])),
        "tokens_off": told["tokens"] - sum(measured["tokens"][sample] for sample in seen),
    }


def three(values: Sequence[float]) -> list[float]:
    return [min(values), statistics.median(values), max(values)]


def show(console: Console, scene: str, runs: Mapping[str, Sequence[Figures]]) -> None:
    heading = SCENES[scene]
    title = f"{scene}: {heading.ranks} rank(s), {heading.train_ms:g} ms a step; median (least to most)"
    table = Table("", title=title, box=None)
    lines = {
        "rounds": lambda of: f"{len(of('rows'))}",
        "samples/s behind the first batch": lambda of: _spread(of("samples_per_second"), "{:.1f}"),
        "wait ratio": lambda of: _spread(of("wait_ratio"), "{:.1%}"),
        "seconds to the first batch": lambda of: _spread(of("seconds_to_first"), "{:.1f}"),
        "seconds of the epoch, that included": lambda of: _spread(of("seconds"), "{:.1f}"),
        "padding share": lambda of: _spread(of("padding_share"), "{:.1%}"),
        "rows": lambda of: _spread(of("rows"), "{:.0f}"),
        "CPU seconds of all processes": lambda of: _spread(of("cpu_seconds"), "{:.0f}"),
        "peak memory, MB": lambda of: _spread([value / 1e6 for value in of("peak_bytes")], "{:,.0f}"),
        "  of processes": lambda of: _spread([value / 1e6 for value in of("own_bytes")], "{:,.0f}"),
        "  in the object store": lambda of: _spread([value / 1e6 for value in of("store_bytes")], "{:,.0f}"),
        "processes": lambda of: _spread(of("processes"), "{:.0f}"),
        "samples lost": lambda of: _spread(of("lost"), "{:.0f}"),
        "samples repeated": lambda of: _spread(of("repeated"), "{:.0f}"),
    }
    for name in runs:
        table.add_column(name, justify="right")
    for what, say in lines.items():
        table.add_row(what, *(say(lambda key, one=one: [run[key] for run in one]) for one in runs.values()))
    console.print(table)


def _spread(values: Sequence[float], form: str) -> str:
    least, middle, most = map(form.format, three(values))
    return middle if least == most else f"{middle} ({least} to {most})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of the scene flat")
    parser.add_argument("--scenes", nargs="+", choices=tuple(SCENES), default=tuple(SCENES), help="these scenes")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of each scene")
    parser.add_argument("--report", type=Path, help="JSON file for the figures; scenes not run now stay in it")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.child:
        print(json.dumps(child(flags.child[0], flags.child[1:])))
        return
    console = Console(width=None if Console().is_terminal else 120)
    if not SHARED.is_dir():
        console.print("no handed inputs (set MMDP_SHARED): the demo set and its tokenizer are taken")
    found: Figures = {"scenes": {}}
    if flags.report and flags.report.exists():
        found = json.loads(flags.report.read_text())
    machine = {"python": platform.python_version(), "processors": os.cpu_count(), "ray": load_ray().__version__}
    with tempfile.TemporaryDirectory() as made:
        script = frozen(Path(made) / "code")
        scenes = ("flat",) if flags.quick else flags.scenes
        data = prepare(Path(made), [SCENES[scene] for scene in scenes])
        with serve(made, latency_ms=LATENCY_MS) as uri:
            for scene in scenes:
                measured = spawn(script, "measure", made, uri, scene)
                figures = {"samples_that_fit": len(measured["kept"]), "measured_seconds": measured["seconds"]}
                repeats = SCENES[scene].repeats
                console.print(f"{data['samples']:,} samples of {data['origin']}, each {repeats} times: {figures}")
                load, runs = os.getloadavg(), {name: [] for name in CONTENDERS}
                for number in range(1 if flags.quick else flags.rounds):
                    names = [name for name in CONTENDERS if name not in ONCE or number == flags.rounds - 1]
                    for name in (*names[number % 2 :], *names[: number % 2]):
                        runs[name].append(judged(spawn(script, name, made, uri, scene), measured))
                        found["scenes"][scene] = figures | {"runs": runs, "load": [load, os.getloadavg()]}
                        if flags.report:  # after each: they take minutes
                            flags.report.write_text(
                                json.dumps(found | {"machine": machine, "data": data}, indent=1) + "\n"
                            )
                show(console, scene, {name: one for name, one in runs.items() if one})


if __name__ == "__main__":
    main()
