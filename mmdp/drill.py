"""Faults on purpose: each is put into a real run on this machine, and the promise that must hold under it is checked.

    uv run python -m mmdp.drill [--only NAME ...] [--report FILE]

Adds: `DRILLS`; `run_drills`, which gives the `Outcome` of each; the command, which prints them.
Leaves out: how a fault is put in, and what is compared (`drill_store`, `drill_processes`), and all that it is put into
(`drill_range`).

The data is the demo set, in an object store on the loopback; a loader reads it with threads and with Ray actors, two
ranks read it through a coordinator. Processes are really killed. A fault that did not strike has shown nothing, so its
drill has failed. Each has its time; one that is not over by then ends the rest, since what hangs can't be used again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

from mmdp.cli import speak_plainly
from mmdp.config import cache_folder
from mmdp.drill_processes import kills_a_rank, kills_actors, kills_the_coordinator, poisons
from mmdp.drill_range import Range
from mmdp.drill_store import loses, measured, passes, stops
from mmdp.faulty_store import LATENCY, Fault
from mmdp.seen import Broken

_FEW = 0.05  # of the images: a fault strikes some, the rest is to come out as if nothing had been
_SOME = 0.3
_TAIL = 50  # a slow get takes so many times as long as another


@dataclass(frozen=True, slots=True)
class Drill:
    """A fault, and what must hold under it.

    Attributes:
        name: of the drill.
        fault: what is done.
        invariant: what must hold.
        run: does it; returns how often the fault struck, and raises `Broken`, or whatever else comes up.
        seconds: in which it must be over.
        needs_ray: something in it runs on Ray.
    """

    name: str
    fault: str
    invariant: str
    run: Callable[[Range], int]
    seconds: float = 120.0
    needs_ray: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a drill.

    Attributes:
        name: of the drill.
        fault: what was done.
        invariant: what had to hold.
        struck: how often the fault really struck; 0 where that is not known.
        broken: what did not hold; empty where all did.
        seconds: that it took.
    """

    name: str
    fault: str
    invariant: str
    struck: int
    broken: str
    seconds: float


_SAME = "the batches of an undisturbed run, bit for bit, each sample once"
_LEAVES = "counted by reason, its neighbours stay; all else as undisturbed, bit for bit"
_GOES_ON = "an error names key and answer; resumed from the state, as undisturbed, bit for bit"

DRILLS: Sequence[Drill] = (
    Drill(
        "measuring",
        "503 SlowDown, twice for every file, while sizes are measured",
        "the same sizes, no sample left out",
        partial(measured, Fault("refuse", times=2, suffixes=())),
        needs_ray=False,
    ),
    Drill("throttle", "503 SlowDown, twice for each", _SAME, partial(passes, Fault("refuse", share=_SOME, times=2))),
    Drill(
        "slow-tail",
        f"one get of a hundred takes {_TAIL} times as long",
        _SAME,
        partial(passes, Fault("late", seconds=_TAIL * LATENCY, every=100)),
    ),
    Drill("cut-body", "half a body, then the end", _SAME, partial(passes, Fault("cut", share=_SOME, times=1))),
    Drill("reset", "the connection is reset, twice", _SAME, partial(passes, Fault("reset", share=_SOME, times=2))),
    Drill("stall", "no answer at all, once", _SAME, partial(passes, Fault("stall", share=_FEW / 2, times=1))),
    Drill("missing", "404 for some images", _LEAVES, partial(loses, Fault("refuse", 404, "NoSuchKey", share=_FEW))),
    Drill(
        "forbidden", "403 for some images", _GOES_ON, partial(stops, Fault("refuse", 403, "AccessDenied", share=_FEW))
    ),
    Drill("outage", "503 for some images, for good", _GOES_ON, partial(stops, Fault("refuse", share=_FEW))),
    Drill("poisoned-row", "a sample that kills who reads it", _LEAVES, poisons),
    Drill("dead-actors", "kill -9 of every worker actor, while two ranks read", _SAME, kills_actors),
    Drill("dead-rank", "kill -9 of a rank; another process resumes from its state", _SAME, kills_a_rank),
    Drill(
        "dead-coordinator",
        "kill -9 of the coordinator; a new one, from the ranks' states",
        "every rank is told; then as undisturbed, bit for bit",
        kills_the_coordinator,
    ),
)


def run_drills(drills: Sequence[Drill], place: Range) -> Iterator[Outcome]:
    """What comes of each drill, one after the other. Whoever asks for them starts Ray, with the first that needs it.

    Args:
        drills: which.
        place: where. It is not to be used again where one of them was not over in time.
    """
    for number, drill in enumerate(drills):
        if drill.needs_ray:
            place.start_ray()
        outcome, is_over = _run(drill, place)
        yield outcome
        if not is_over:
            for other in drills[number + 1 :]:
                yield _outcome(other, f"not run, since {drill.name} is not over")
            return


def _run(drill: Drill, place: Range) -> tuple[Outcome, bool]:
    """The outcome, and whether the drill is over. It runs in a thread, which can be left to itself."""
    struck: list[int] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            struck.append(drill.run(place))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work, name=f"mmdp-drill-{drill.name}", daemon=True)
    start = time.monotonic()
    thread.start()
    thread.join(drill.seconds)
    seconds = time.monotonic() - start
    place.store.heal()
    if thread.is_alive():
        return _outcome(drill, f"not over within {drill.seconds:g} s", seconds), False
    for error in errors:
        what = str(error) if isinstance(error, Broken) else f"{type(error).__name__}: {error}"
        return _outcome(drill, what, seconds), True
    broken = "" if struck[0] else "the fault did not strike, so nothing was shown"
    return _outcome(drill, broken, seconds, struck[0]), True


def _outcome(drill: Drill, broken: str, seconds: float = 0.0, struck: int = 0) -> Outcome:
    return Outcome(drill.name, drill.fault, drill.invariant, struck, broken, seconds)


class _NoObituaries(io.TextIOBase):
    """A stream without what Ray says there of each process that was killed here, which no option turns off."""

    def __init__(self, there: TextIO) -> None:
        self._there = there
        self._line = ""

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        self._there.write("".join(f"{line}\n" for line in lines if "(raylet)" not in line))
        self._there.flush()
        return len(text)

    def fileno(self) -> int:
        return self._there.fileno()

    def isatty(self) -> bool:
        return False  # so that bars are lines, which come whole


def main(args: Sequence[str] | None = None) -> int:
    """Runs the drills, and prints what each of them showed; 1 where a promise was broken."""
    flags = argparse.ArgumentParser("mmdp.drill", description="Puts faults into real runs; checks what must hold.")
    names = [drill.name for drill in DRILLS]
    flags.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"some of {', '.join(names)}")
    flags.add_argument("--report", type=Path, help="write what came out to this JSON file")
    given = flags.parse_args(args)
    speak_plainly()
    os.environ.pop("RAY_ADDRESS", None)  # processes are killed by their number: those of a Ray of our own
    chosen = [drill for drill in DRILLS if given.only is None or drill.name in given.only]
    outcomes: list[Outcome] = []
    out = sys.stdout
    with (
        tempfile.TemporaryDirectory(prefix="mmdp-drill-") as folder,
        contextlib.redirect_stdout(_NoObituaries(out)),
        contextlib.redirect_stderr(_NoObituaries(sys.stderr)),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "a worker (actor died|process ended)", RuntimeWarning)  # which is the point
        from mmdp.demo import demo_jsonl

        with Range(demo_jsonl(cache_folder()), Path(folder)) as place:
            coming = run_drills(chosen, place)
            for number, drill in enumerate(chosen, 1):
                print(f"{number}/{len(chosen)} {drill.name}: {drill.fault}", end="", flush=True, file=out)
                outcome = next(coming)
                verdict = "BROKEN" if outcome.broken else "kept"
                print(f" | struck {outcome.struck} | {drill.invariant} | {verdict} | {outcome.seconds:.1f} s", file=out)
                if outcome.broken:
                    print(f"    BROKEN: {outcome.broken}", file=out)
                outcomes.append(outcome)
    counts = Counter("broken" if outcome.broken else "kept" for outcome in outcomes)
    seconds = sum(outcome.seconds for outcome in outcomes)
    print(f"[drill] {counts['kept']} kept | {counts['broken']} broken | {seconds:.0f} s")
    if given.report is not None:
        given.report.parent.mkdir(parents=True, exist_ok=True)
        report = {"kept": counts["kept"], "broken": counts["broken"], "drills": [asdict(one) for one in outcomes]}
        given.report.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if counts["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
