"""How fast are samples measured, and what does a million-row file cost?

Usage: `uv run benchmarks/measure.py [--quick] [--report FILE.json]`

1. Samples/s of `measure` (text tokenised, image headers read, nothing decoded), against the usual way to learn a
   length: render and tokenise the whole chat, and open and decode the images. Same samples, same run, in turns.
2. Memory above the imports, and time to the first row, of a JSON-lines file with a million rows that this script
   writes: opened by byte offset (cold: no index yet; warm: index on disk) against a list of parsed rows. Each in its
   own process.

Real rows and tokenizer come from the folder that `MMDP_SHARED` names (by default `shared` beside the checkout); without
it the demo set is measured.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.table import Table

import mmdp
from mmdp.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("MMDP_SHARED", ROOT.parent / "shared"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows, three rounds")
    parser.add_argument("--report", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.child:
        print(json.dumps(child(*flags.child)))
        return
    found = {"speed": speed(rounds=3 if flags.quick else 5), "memory": memory(100_000 if flags.quick else 1_000_000)}
    show(found)
    if flags.report:
        flags.report.write_text(json.dumps(found, indent=1) + "\n")


def speed(rounds: int) -> dict:
    real = (SHARED / "data" / "real-vqa").is_dir()
    data = str(SHARED / "data" / "real-vqa" / "train.jsonl") if real else "demo"
    name = str(SHARED / "tokenizers" / "smollm2") if real else "demo"
    source, encoder, tokenizer = mmdp.open_source(data), mmdp.Encoder(name), load_tokenizer(name)
    samples = [source[index] for index in range(len(source))]

    def ours() -> None:
        with tempfile.TemporaryDirectory() as folder:
            mmdp.measure(source, encoder, cache=Path(folder))

    def usual() -> None:
        for sample in samples:
            messages = [{"role": turn.role, "content": turn.text} for turn in sample.turns]
            tokenizer.apply_chat_template(messages, return_dict=True)
            for image in sample.images:
                with Image.open(Path(image.root) / image.name) as opened:
                    opened.convert("RGB")

    times = in_turns({"ours": ours, "usual": usual}, rounds)
    ratios = [b / a for a, b in zip(times["ours"], times["usual"], strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        mmdp.measure(source, encoder, cache=Path(folder))
        start = time.perf_counter()
        mmdp.measure(source, encoder, cache=Path(folder))
        warm = time.perf_counter() - start
    return {
        "data": "real-vqa" if real else "demo",
        "samples": len(samples),
        "samples_per_cpu_second": {name: len(samples) / statistics.median(taken) for name, taken in times.items()},
        "times_as_fast": spread(ratios),
        "warm_seconds": warm,
    }


def in_turns(jobs: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each job in each round; a first, uncounted round warms caches of files."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for counted in (False, *[True] * rounds):
        for name, job in jobs.items():
            start = time.process_time()
            job()
            if counted:
                times[name].append(time.process_time() - start)
    return times


def memory(rows: int) -> dict:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "rows.jsonl"
        with path.open("w") as file:
            for number in range(rows):
                turn = {
                    "user": f"what is shown in picture {number} of this long file?",
                    "assistant": f"Answer: {number}",
                }
                file.write(json.dumps({"id": number, "images": [f"images/{number}.png"], "texts": [turn]}) + "\n")
        found = {"rows": rows, "megabytes": path.stat().st_size / 1e6}
        environment = {**os.environ, "MMDP_CACHE": str(folder / "cache")}
        for way in ("list", "cold", "warm"):
            command = [sys.executable, __file__, "--child", way, str(path), str(rows)]
            done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
            found[way] = json.loads(done.stdout)
        return found


def child(way: str, path: str, rows: str) -> dict:
    """Opens the file in one way, reads 1000 rows spread over it; gives back seconds to the first row, and memory."""
    mmdp.open_source  # noqa: B018  (imported before the clock starts)
    before = resident_megabytes()
    start = time.perf_counter()
    if way == "list":
        with Path(path).open() as file:
            source = [json.loads(line) for line in file]
    else:
        source = mmdp.open_source(path)
    source[0]
    first = time.perf_counter() - start
    for index in range(0, int(rows), int(rows) // 1000):
        source[index]
    return {"seconds_to_first_row": first, "megabytes_above_imports": resident_megabytes() - before}


def resident_megabytes() -> float:
    """Memory of this process that no file backs (Linux); elsewhere its peak."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) / 1e3
    except (OSError, IndexError):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def spread(ratios: list[float]) -> dict[str, float]:
    return {"min": min(ratios), "median": statistics.median(ratios), "max": max(ratios)}


def show(found: dict) -> None:
    console, speed, memory = Console(), found["speed"], found["memory"]
    table = Table(title=f"measuring {speed['samples']} samples of {speed['data']}")
    for column in ("way", "samples / CPU second", "times as fast (min, median, max)"):
        table.add_column(column, justify="right")
    ratio = ", ".join(f"{value:.2f}" for value in speed["times_as_fast"].values())
    table.add_row("tokenise the whole chat, decode", f"{speed['samples_per_cpu_second']['usual']:,.0f}", "1")
    table.add_row("mmdp.measure", f"{speed['samples_per_cpu_second']['ours']:,.0f}", ratio)
    console.print(table, f"measured before: {speed['warm_seconds'] * 1e3:.0f} ms in all")
    table = Table(title=f"{memory['rows']:,} rows, {memory['megabytes']:.0f} MB of JSON lines")
    for column in ("way", "seconds to the first row", "MB above the imports"):
        table.add_column(column, justify="right")
    for way, name in (("list", "list of parsed rows"), ("cold", "open_source, no index yet"), ("warm", "open_source")):
        one = memory[way]
        table.add_row(name, f"{one['seconds_to_first_row']:.3f}", f"{one['megabytes_above_imports']:.1f}")
    console.print(table)


if __name__ == "__main__":
    main()
