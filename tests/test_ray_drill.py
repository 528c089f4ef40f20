"""Laws of the drills: a promise that holds is said to be kept, one that does not is said to be BROKEN, and how."""

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from processes import children, still_running

import mmdp.drill
from mmdp.demo import demo_jsonl
from mmdp.drill import DRILLS, Drill, Outcome, run_drills
from mmdp.drill_range import Range
from mmdp.drill_store import passes
from mmdp.faulty_store import Fault, FaultyStore
from mmdp.loader import Loader

pytest.importorskip("ray")

BY_NAME = {drill.name: drill for drill in DRILLS}
MEND = Fault("refuse", share=0.5, times=1)


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    """The demo set, but small."""
    return demo_jsonl(tmp_path_factory.mktemp("demo"), rows=48)


@pytest.fixture(scope="module")
def place(ray_cluster, rows, tmp_path_factory) -> Iterator[Range]:
    with Range(rows, tmp_path_factory.mktemp("range"), samples=None) as made:
        yield made


def outcome(drill: Drill, place: Range) -> Outcome:
    (came,) = run_drills([drill], place)
    return came


SLOW = [pytest.param(name, marks=pytest.mark.long) for name in ("measuring", "throttle", "dead-actors")]


@pytest.mark.parametrize("name", ["cut-body", "reset", "missing", "forbidden", *SLOW])
def test_a_promise_that_holds_is_kept(place, name):
    """With threads and with real actors, whatever strikes; and it did strike."""
    came = outcome(BY_NAME[name], place)
    assert "" == came.broken
    assert came.struck > 0
    assert 0 < came.seconds < BY_NAME[name].seconds


# Loaders that break their promise, each in its own way


class DropsABatch(Loader):
    def __iter__(self):
        return (batch for number, batch in enumerate(super().__iter__()) if number != 2)


class SwapsBatches(Loader):
    def __iter__(self):
        first, second, *rest = super().__iter__()
        return iter([second, first, *rest])


class RepeatsABatch(Loader):
    def __iter__(self):
        for number, batch in enumerate(super().__iter__()):
            yield batch
            if number == 1:
                yield batch


class ChangesAPixel(Loader):
    def __iter__(self):
        for batch in super().__iter__():
            batch.images.pixels[7] ^= 1
            yield batch


class CountsNothing(Loader):
    def __iter__(self):
        return (replace(batch, skipped={}) for batch in super().__iter__())


class SwallowsErrors(Loader):
    def __iter__(self):
        with suppress(OSError):
            yield from super().__iter__()


class StartsAnew(Loader):
    def load_state_dict(self, state):
        pass


@pytest.fixture(scope="module")
def broken_place(ray_cluster, rows, tmp_path_factory):
    """A range for loaders of a kind; threads come first, so that no actor is needed to see that they fail."""
    with Range(rows, tmp_path_factory.mktemp("broken"), samples=None) as made:

        def of(loader: type[Loader]) -> Range:
            made._loader = loader
            return made

        yield of


@pytest.mark.parametrize(
    ("loader", "name", "said"),
    [
        (DropsABatch, "cut-body", r"threads: batch 2 of samples .* is not the one of samples"),
        (SwapsBatches, "cut-body", r"threads: batch 0 of samples"),
        (RepeatsABatch, "cut-body", r"threads: batch 2 of samples"),
        (ChangesAPixel, "cut-body", r"threads: batch 0 of samples"),
        (ChangesAPixel, "missing", r"threads: batch 0 has other bytes, of samples \["),
        (CountsNothing, "missing", r"threads: batch \d left out none, not \{\d+: 'missing_image'"),
        (DropsABatch, "missing", r"threads: \d batches came, not \d"),
        (SwallowsErrors, "forbidden", "threads: no error came"),
        (StartsAnew, "forbidden", "threads: (batch|.* batches came)"),
    ],
)
def test_a_broken_promise_is_said(broken_place, loader, name, said):
    """Where it was broken, and how; a wrong loader never passes."""
    came = outcome(BY_NAME[name], broken_place(loader))
    assert re.match(said, came.broken), came.broken


def test_a_fault_that_does_not_strike_shows_nothing(broken_place):
    """Then the drill has failed, however well the run went."""
    never = Drill("never", "", "", partial(passes, replace(MEND, share=0.0)))
    assert "threads: the fault did not strike, so nothing was shown" == outcome(never, broken_place(Loader)).broken
    assert "the fault did not strike" in outcome(Drill("never", "", "", lambda _: 0), broken_place(Loader)).broken


def test_what_is_not_over_in_time_ends_the_rest(broken_place):
    """Nothing waits for ever; an error of any other class is told with it."""
    over = threading.Event()
    place = broken_place(Loader)
    hangs = Drill("hangs", "", "", lambda _: int(over.wait(60)), seconds=0.3)
    fails = Drill("fails", "", "", lambda _: 1 // 0)
    came = list(run_drills([fails, hangs, fails], place))
    over.set()
    assert ["ZeroDivisionError: integer division or modulo by zero", "not over within 0.3 s"] == [
        one.broken for one in came[:2]
    ]
    assert "not run, since hangs is not over" == came[2].broken


# The command


@pytest.mark.long
def test_the_command_ends_quietly(tmp_path):
    """Exit code 0, a line for the drill and its report; no process, and nothing temporary, is left."""
    with tempfile.TemporaryDirectory(prefix="d", dir="/tmp") as folder:
        command = [sys.executable, "-m", "mmdp.drill", "--only", "measuring", "--report", str(tmp_path / "report.json")]
        before = children()
        done = subprocess.run(
            command, env={**os.environ, "TMPDIR": folder}, capture_output=True, text=True, timeout=120, check=False
        )
        assert 0 == done.returncode, done.stderr
        assert "" == done.stderr.replace("drawing the demo set", "")
        assert "measuring: 503 SlowDown" in done.stdout
        assert " | kept | " in done.stdout
        assert [] == list(Path(folder).iterdir())
        assert [] == still_running(children() - before)
    report = json.loads((tmp_path / "report.json").read_text())
    assert (1, 0) == (report["kept"], report["broken"])
    (drill,) = report["drills"]
    assert {"name", "fault", "invariant", "struck", "broken", "seconds"} == drill.keys()
    assert drill["struck"] > 0


def test_the_command_fails_where_a_promise_is_broken(monkeypatch, capsys, rows):
    """Exit code 1, and the reason."""
    monkeypatch.setattr(mmdp.drill, "DRILLS", [Drill("never", "nothing", "all is well", lambda _: 0, needs_ray=False)])
    monkeypatch.setattr("mmdp.demo.demo_jsonl", lambda _: rows)
    monkeypatch.setattr("mmdp.drill.speak_plainly", lambda: None)
    monkeypatch.setenv("RAY_ADDRESS", "nowhere")  # so that what the command does to it is undone
    assert 1 == mmdp.drill.main([])
    out = capsys.readouterr().out
    assert "1/1 never: nothing | struck 0 | all is well | BROKEN |" in out
    assert "BROKEN: the fault did not strike" in out
    assert "[drill] 0 kept | 1 broken" in out


# The store


@pytest.fixture
def asked(tmp_path):
    """A get of a store with one file, answered in full or not; and the store."""
    (tmp_path / "a.png").write_bytes(bytes(1000))
    with FaultyStore(tmp_path, latency=0.0) as store, store.asked():
        address = f"{os.environ['AWS_ENDPOINT_URL_S3']}/data/a.png"

        def get(**headers: str) -> int | str:
            try:
                request = urllib.request.Request(address, headers=headers)
                with urllib.request.urlopen(request, timeout=0.5) as answer:
                    return len(answer.read())
            except urllib.error.HTTPError as error:
                return f"{error.code} {error.read().decode().partition('<Code>')[2].partition('<')[0]}"
            except Exception as error:
                return type(error).__name__

        yield store, get


@pytest.mark.parametrize(
    ("fault", "wanted"),
    [
        (Fault("refuse", 403, "AccessDenied"), "403 AccessDenied"),
        (Fault("cut"), "IncompleteRead"),
        (Fault("reset"), "ConnectionResetError"),
        (Fault("stall"), "TimeoutError"),
        (Fault("late", seconds=0.1), 1000),
    ],
)
def test_each_kind_of_fault_is_what_it_says(asked, fault, wanted):
    """As often as it says, and counted; what it does not reach is answered."""
    store, get = asked
    assert [1000, 10] == [get(), get(Range="bytes=5-14")]
    store.play(replace(fault, times=2))
    came = [get() for _ in range(3)]
    assert came[:2] in ([wanted, wanted], ["URLError", "URLError"] if fault.kind == "reset" else [wanted] * 2)
    assert 1000 == came[2]
    assert {"a.png": 2} == store.heal()
    store.play(replace(fault, suffixes=(".jpg",)))
    assert 1000 == get()
    assert {} == store.heal()


def test_every_so_many_th_get_is_struck(asked):
    """From the middle of the first so many on."""
    store, get = asked
    store.play(Fault("refuse", every=4))
    assert ["503 SlowDown" if number % 4 == 2 else 1000 for number in range(1, 9)] == [get() for _ in range(8)]
