"""Decode and resize to 256 x 256: `mmdp.images` against plain Pillow, and the header's size against Pillow's.

    uv run benchmarks/decode.py [--rounds 7] [--every 8] [--report FILE.json]

Every contender decodes the same files in every round, taking turns at each file, so that a busy machine slows them all.
A ratio is plain Pillow's time over the contender's, within one round. Times are CPU seconds of this one-threaded
process, with the wall clock beside them. PSNR is against the full decode with the same filter, and against an area
average of the full decode; the worst image counts. Photographs come from the handed real set (`MMDP_SHARED`, by default
`../shared`); without it they are made by seed.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import PIL
from PIL import Image, ImageOps
from rich.console import Console
from rich.table import Table

from mmdp.image_sizes import image_size, upright_size
from mmdp.images import decode, simplejpeg

SIDE = 256  # pixels, of the square that a `fixed:N` family wants
QUALITY = 90  # of the JPEG files made here, with 4:2:0 chroma
SIZES = ((512, 384), (1024, 768), (2048, 1536))
SHARED = Path(os.environ.get("MMDP_SHARED", Path(__file__).resolve().parent.parent.parent / "shared"))

Contender = Callable[[bytes], np.ndarray]


def plain_pillow(data: bytes) -> np.ndarray:
    """Full decode, upright, white behind transparency, bicubic: what one writes without this package."""
    im = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    if im.has_transparency_data:
        im = Image.alpha_composite(Image.new("RGBA", im.size, "white"), im.convert("RGBA"))
    im = im.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    return np.ascontiguousarray(np.asarray(im).transpose(2, 0, 1))


CONTENDERS: dict[str, Contender] = {
    "plain Pillow": plain_pillow,
    "decode": lambda data: decode(data, size=(SIDE, SIDE)),
    "decode, draft": lambda data: decode(data, size=(SIDE, SIDE), draft=True),
}
if importlib.util.find_spec("simplejpeg"):
    CONTENDERS["decode, draft, simplejpeg"] = lambda data: decode(
        data, size=(SIDE, SIDE), draft=True, decoder=simplejpeg
    )


def encode(im: Image.Image, kind: str) -> bytes:
    buffer = io.BytesIO()
    im.save(buffer, kind, **({"quality": QUALITY} if kind == "JPEG" else {}))
    return buffer.getvalue()


def synthetic_photo(seed: int, width: int = 3072, height: int = 2304) -> Image.Image:
    """Smooth fields, edges and grain."""
    rng = np.random.default_rng(seed)
    layers = [
        np.asarray(Image.fromarray(rng.integers(0, 256, (n, n, 3), dtype=np.uint8)).resize((width, height), kind))
        for n, kind in ((7, Image.Resampling.BICUBIC), (40, Image.Resampling.NEAREST), (300, Image.Resampling.BICUBIC))
    ]
    mixed = np.average(layers, axis=0, weights=(7, 1, 1)) + rng.normal(0, 3, (height, width, 1))
    return Image.fromarray(mixed.clip(0, 255).astype(np.uint8))


def photographs() -> tuple[str, list[Image.Image]]:
    """Where they come from, and pictures of 4:3."""
    edge = SHARED / "data" / "real-vqa" / "edge"
    names = ["college-physics-Picture 3-16f3.jpg", "exif-Landscape_1.jpg"]
    if not all((edge / name).exists() for name in names):
        return "made by seed", [synthetic_photo(seed) for seed in (0, 1)]
    found = [Image.open(edge / name).convert("RGB") for name in names]
    return "real", [ImageOps.fit(im, (im.height * 4 // 3, im.height)) for im in found]


def corpora(every: int) -> tuple[str, dict[str, list[bytes]]]:
    origin, pictures = photographs()
    sets: dict[str, list[bytes]] = {}
    for kind, sizes in (("JPEG", SIZES), ("PNG", SIZES[1:2]), ("WEBP", SIZES[1:2])):
        for size in sizes:
            fitting = [im.resize(size, Image.Resampling.LANCZOS) for im in pictures if im.width >= size[0]]
            sets[f"{kind} {size[0]} x {size[1]}"] = [encode(im, kind) for im in fitting]
    folder = SHARED / "data" / "real-vqa" / "images"
    if folder.is_dir():
        files = [path.read_bytes() for path in sorted(folder.iterdir())][::every]
        jpegs = [data for data in files if data.startswith(b"\xff\xd8")]
        sets["real set, JPEG"] = jpegs
        sets[f"the same from {3 * SIDE} on"] = [data for data in jpegs if min(image_size(data)) >= 3 * SIDE]
        sets["real set, PNG"] = [data for data in files if not data.startswith(b"\xff\xd8")]
    return origin, {name: files for name, files in sets.items() if files}


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    error = float(np.mean((a.astype(np.float64) - b) ** 2))
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)


def spread(values: list[float]) -> tuple[float, float, float]:
    return min(values), statistics.median(values), max(values)


def race(names: list[str], files: list[bytes], rounds: int) -> dict[str, dict[str, list[float]]]:
    """CPU and wall seconds of each contender in each round, over all files."""
    seconds = {name: {"cpu": [0.0] * rounds, "wall": [0.0] * rounds} for name in names}
    order = [(name, CONTENDERS[name]) for name in names]
    for number in range(rounds):
        for data in files:
            order = order[1:] + order[:1]
            for name, contender in order:
                wall, cpu = time.perf_counter(), time.process_time()
                contender(data)
                seconds[name]["cpu"][number] += time.process_time() - cpu
                seconds[name]["wall"][number] += time.perf_counter() - wall
    return seconds


def judge(name: str, files: list[bytes], rounds: int) -> list[dict[str, object]]:
    """One record a contender: speed, ratios within a round, and quality."""
    areas, fulls = [], []
    for data in files:
        area = Image.fromarray(decode(data).transpose(1, 2, 0)).resize((SIDE, SIDE), Image.Resampling.BOX)
        areas.append(np.asarray(area).transpose(2, 0, 1))
        fulls.append(plain_pillow(data))  # also warms up
    are_jpeg = all(data.startswith(b"\xff\xd8") for data in files)
    seconds = race(list(CONTENDERS)[: None if are_jpeg else 2], files, rounds)  # the others draft, which is for JPEG
    records: list[dict[str, object]] = []
    for contender, times in seconds.items():
        base = seconds["plain Pillow"]
        pixels = [CONTENDERS[contender](data) for data in files]
        records.append(
            {
                "set": name,
                "files": len(files),
                "contender": contender,
                "images_per_cpu_second": len(files) / statistics.median(times["cpu"]),
                "images_per_second": len(files) / statistics.median(times["wall"]),
                "cpu_ratio": spread([a / b for a, b in zip(base["cpu"], times["cpu"], strict=True)]),
                "wall_ratio": spread([a / b for a, b in zip(base["wall"], times["wall"], strict=True)]),
                "psnr_full": min(psnr(full, got) for full, got in zip(fulls, pixels, strict=True)),
                "psnr_area": min(psnr(area, got) for area, got in zip(areas, pixels, strict=True)),
            }
        )
    return records


def time_headers(files: list[bytes], rounds: int) -> list[dict[str, object]]:
    """Microseconds a file: our parser on what it needs, ours on the file, Pillow's size, Pillow's upright size."""

    def pillow_size(data: bytes) -> None:
        with Image.open(io.BytesIO(data)) as im:
            assert im.width > 0

    def pillow_upright(data: bytes) -> None:
        with Image.open(io.BytesIO(data)) as im:
            im.getexif()

    ways: dict[str, Callable[[bytes], object]] = {
        "upright_size(64 KiB)": upright_size,
        "image_size(file)": image_size,
        "Pillow, size": pillow_size,
        "Pillow, size and EXIF": pillow_upright,
    }
    heads = [data[:65536] for data in files]
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            given = heads if way is upright_size else files
            start = time.process_time()
            for data in given:
                way(data)
            seconds[name].append((time.process_time() - start) / len(files) * 1e6)
    base = seconds["Pillow, size and EXIF"]
    return [
        {
            "way": name,
            "files": len(files),
            "microseconds": spread(values),
            "ratio": spread([a / b for a, b in zip(base, values, strict=True)]),
        }
        for name, values in seconds.items()
    ]


def show(value: object) -> str:
    if isinstance(value, tuple):
        return " / ".join(f"{number:.2f}" if number < 100 else f"{number:.0f}" for number in value)
    if isinstance(value, float):
        return "same" if math.isinf(value) else f"{value:.1f}"
    return str(value)


def print_table(console: Console, title: str, records: list[dict[str, object]], headings: dict[str, str]) -> None:
    table = Table(title=title)
    for key, heading in headings.items():
        table.add_column(heading, justify="left" if isinstance(records[0][key], str) else "right")
    last = None
    for record in records:
        if last is not None and record.get("set") != last:
            table.add_section()
        last = record.get("set")
        table.add_row(*(show(record[key]) for key in headings))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="rounds; ratios are taken within each")
    parser.add_argument("--every", type=int, default=8, help="take every so many-th file of the real set")
    parser.add_argument("--report", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args()
    console = Console(width=None if Console().is_terminal else 150)
    if not SHARED.is_dir():
        console.print("no handed inputs (set MMDP_SHARED): photographs are made by seed, the real set is left out")
    origin, sets = corpora(options.every)
    records = [record for name, files in sets.items() for record in judge(name, files, options.rounds)]
    print_table(
        console,
        f"bytes to {SIDE} x {SIDE} RGB, Pillow {PIL.__version__}, photographs: {origin}; ratios: min / median / max",
        records,
        {
            "set": "set",
            "files": "files",
            "contender": "contender",
            "images_per_cpu_second": "images/CPU s",
            "images_per_second": "images/s",
            "cpu_ratio": "x plain (CPU)",
            "wall_ratio": "x plain (wall)",
            "psnr_full": "dB to full",
            "psnr_area": "dB to area",
        },
    )
    headers = [
        {"format": kind, **record}
        for kind, magic in (("JPEG", b"\xff\xd8"), ("PNG", b"\x89PNG"), ("WEBP", b"RIFF"))
        if (files := [data for name in sets for data in sets[name] if data.startswith(magic)])
        for record in time_headers(files, options.rounds)
    ]
    print_table(
        console,
        "upright size, microseconds a file: min / median / max over rounds",
        headers,
        {
            "format": "format",
            "files": "files",
            "way": "way",
            "microseconds": "us a file (CPU)",
            "ratio": "x Pillow with EXIF",
        },
    )
    if options.report:
        report = {"side": SIDE, "photographs": origin, "pillow": PIL.__version__, "cpus": os.cpu_count()}
        finite = [{key: None if value == math.inf else value for key, value in record.items()} for record in records]
        options.report.write_text(json.dumps(report | {"decode": finite, "headers": headers}, indent=1) + "\n")


if __name__ == "__main__":
    main()
