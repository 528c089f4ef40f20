"""What runs on the hosts of `cluster.py`: the program that coordinates, and that of a rank.

Usage: `python cluster_programs.py coordinate|read CLUSTER_ADDRESS`, then commands as lines of JSON on standard input.
Each is answered by lines of JSON on standard output. Both stay on the cluster until their input ends, so that a cell
of the table costs no new start of Ray.

A rank runs the loop of stage 06: batches of a reader, measured by a `WaitMeter`, and a trainer that is simulated.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import mmdp
from mmdp import ladder
from mmdp.config import Config
from mmdp.local_store import s3_environment
from mmdp.ray_coordinator import Coordinator
from mmdp.ray_reader import RankReader
from mmdp.ray_start import Session, load_ray
from mmdp.wait_meter import WaitMeter

SIDE = 224
"""Pixels: an image is 150 KB once it is decoded."""

SAMPLES = 4
"""A row: small blocks go through a card side by side, and no card waits for a large one."""

_TOKENS = 1024  # a row; images are what fills it
_READER_SECONDS = 90.0  # for a step: at the slowest rate of all cells it takes some seconds


@dataclass(frozen=True)
class Pace:
    """What a rank has seen in a stretch of time.

    Attributes:
        samples: that it was given.
        seconds: in which.
        wait, train: of them, in seconds.
    """

    samples: int
    seconds: float
    wait: float
    train: float


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def coordinate(commands: Callable[[], dict | None], address: str) -> None:
    """Plans once, then opens one coordinator after the other."""
    setup: ladder.Setup | None = None
    opened: Coordinator | None = None
    try:
        while (given := commands()) is not None:
            match given.pop("do"):
                case "plan":
                    setup = _plan(address, given["endpoint"], Path(given["cache"]), given["uri"])
                    say(rows=len(setup.plan.epoch(0)))
                case "nodes":
                    say(nodes=sum(node["Alive"] for node in load_ray().nodes()))
                case "open":
                    assert setup is not None
                    opened = Coordinator(setup.source, setup.encoder, setup.plan, address=address, **given)
                    say(placement=opened.placement, reason=opened.reason)
                case "stats":
                    assert opened is not None
                    say(**{name: opened.stats()[name] for name in ("workers", "ranks", "deaths", "bytes_by_value")})
                case "close":
                    assert opened is not None
                    opened.close()
                    opened = None
                    say(closed=True)
    finally:
        if opened is not None:
            opened.close()


def _plan(address: str, endpoint: str, cache: Path, uri: str) -> ladder.Setup:
    with s3_environment(endpoint):
        source = mmdp.open_source(uri, config=Config(cache_dir=cache))
    encoder = mmdp.Encoder(vision=f"fixed:64:side={SIDE}")
    budget = mmdp.Budget(tokens=_TOKENS, images=SAMPLES)
    return ladder.Setup(
        source, encoder, mmdp.plan(mmdp.measure(source, encoder, budget=budget, cache=cache), budget), address=address
    )


def read(commands: Callable[[], dict | None], address: str) -> None:
    """Reads for one coordinator after the other, each until the end of the stretch that is measured."""
    while (given := commands()) is not None:
        with RankReader(
            given["name"], given["rank"], given["ranks"], address=address, ahead=1, timeout=_READER_SECONDS
        ) as reader:
            pace = train(reader, given["train_ms"], commands)
        say(**asdict(pace))


def train(reader: RankReader, train_ms: float, commands: Callable[[], dict | None]) -> Pace:
    """The loop; after its first batch it hears when to measure, and goes on until that is over."""
    step = ladder.simulated(train_ms)
    stretch: Queue[dict | None] = Queue()
    begin = end = float("inf")
    handed: list[float] = []
    samples: list[int] = []
    meter = WaitMeter("cpu")
    with closing(ladder.epochs(reader)) as endless, closing(meter.over(endless)) as batches:  # type: ignore[type-var]
        for batch in batches:
            handed.append(time.monotonic())  # the same on all hosts: they share a kernel
            samples.append(sum(map(len, batch.samples)))
            if len(handed) == 1:
                say(first=True)
                threading.Thread(target=lambda: stretch.put(commands()), daemon=True).start()
            step(batch)
            try:
                given = stretch.get_nowait()
            except Empty:
                pass
            else:
                if given is None:
                    sys.exit("standard input has ended")
                begin, end = given["begin"], given["end"]
            if time.monotonic() >= end:
                break
    inside = [number for number, when in enumerate(handed) if number and begin <= when < end]
    if len(inside) < 3:
        raise RuntimeError(f"{len(inside)} steps in {end - begin:.0f} s tell no pace: measure longer")
    first, last = inside[0], inside[-1]
    return Pace(
        samples=sum(samples[first:last]),
        seconds=handed[last] - handed[first],
        wait=sum(meter.waits[first:last]),  # before steps first + 1 to last: the first step of all has none
        train=sum(meter.trains[first - 1 : last - 1]),  # of steps first to last - 1
    )


def main() -> None:
    role, address = sys.argv[1:]

    def commands() -> dict | None:
        line = sys.stdin.readline()
        return json.loads(line) if line else None

    with closing(Session(address)):
        say(pid=os.getpid())
        {"coordinate": coordinate, "read": read}[role](commands, address)


if __name__ == "__main__":
    main()
