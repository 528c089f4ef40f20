"""How a loop over a loader ends, and what it lives through: left early, closed, Ctrl-C, workers that are killed."""

import contextlib
import copy
import gc
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import psutil
import pytest
from odd_sources import Kills
from runs import Parts, Road, digest, trained
from small import tokenizer, write_data

import mmdp
from mmdp.device import feed
from mmdp.executors import Processes, Threads, WorkerDied
from mmdp.loader import Loader
from mmdp.refusals import Reason

pytestmark = pytest.mark.timeout(120)

SECONDS = 10  # in which a thing that ends "within seconds" must have ended, however busy the machine is
TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def wanted(parts) -> list[str]:
    """Digests of the undisturbed run's batches, epoch after epoch."""
    loader = Loader(*parts, batch_size=2, executor="inline")
    return [digest(batch) for _ in range(30) for batch in loader]


def workers() -> list:
    """Threads of executors, and processes of this one, that run now."""
    threads = [thread for thread in threading.enumerate() if thread.name == "mmdp-worker"]
    return [*threads, *(one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE)]


def new_workers(before: list) -> list:
    """Those that came since, and have not ended in time."""
    end = time.monotonic() + SECONDS
    while (left := [one for one in workers() if one not in before]) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def take_one(loader: Loader, end: str, before: list) -> None:
    """Begins a loop, and ends it early."""
    for _ in loader:
        assert len(workers()) > len(before), "the case did not arise"
        if end == "close":
            loader.close()
        elif end == "raise":
            raise ZeroDivisionError
        else:
            break


@pytest.mark.parametrize(
    ("executor", "times"), [("threads", 20), (Processes(2, "fork"), 5)], ids=["threads", "processes"]
)
@pytest.mark.parametrize("end", ["break", "drop the loader", "close", "raise"])
def test_a_loop_that_ends_early_leaves_no_worker(parts, executor, times, end):
    """WRK-02: at once, without the garbage collector; and the loader goes on after it."""
    before = workers()
    gc.disable()
    try:
        loader = Loader(*parts, batch_size=2, executor=executor, num_workers=2)
        for _ in range(times):
            with contextlib.suppress(ZeroDivisionError):
                take_one(loader, end, before)
            if end == "drop the loader":
                loader = Loader(*parts, batch_size=2, executor=executor, num_workers=2)
                next(iter(loader))
            assert [] == new_workers(before)
    finally:
        gc.enable()


@pytest.mark.parametrize("is_fed", [False, True], ids=["loader", "feed"])
def test_the_end_of_a_with_block_is_a_close(parts, is_fed):
    """Also where it ends with an error, while somebody holds the loop still."""
    before = workers()
    loader = Loader(*parts, batch_size=2, num_workers=2)
    with contextlib.suppress(ZeroDivisionError), feed(loader, "cpu") if is_fed else loader as batches:
        loop = iter(batches)
        next(loop)
        assert len(workers()) > len(before), "the case did not arise"
        raise ZeroDivisionError
    assert [] == new_workers(before)
    assert next(loop, None) is None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["deep", "pickle"])
@pytest.mark.parametrize("executor", ["inline", "threads", "processes"])
def test_a_copy_stands_where_the_loader_does_and_has_no_loop_open(parts, wanted, executor, copied):
    """In the midst of a loop, behind it, and behind `close`: the original goes on unharmed."""
    with Loader(*parts, batch_size=2, executor=executor, num_workers=1) as loader:
        loop = iter(loader)
        seen = [digest(next(loop)) for _ in range(3)]
        with copied(loader) as other:
            assert loader.state_dict() == other.state_dict()
            seen += [digest(batch) for batch in loop]
            assert wanted[3 : len(seen)] == [digest(batch) for batch in other]
            assert len(seen) > 4, "the case did not arise: the loop was over"
        ended = copied(loader)
        again = [digest(batch) for batch in ended]
        assert again
        assert wanted[len(seen) : len(seen) + len(again)] == again
        ended.close()
        assert wanted[len(seen)] == digest(next(iter(loader)))
    assert wanted[: len(seen)] == seen
    assert loader.state_dict() == copied(loader).state_dict()


ENDS = {
    "close": lambda loader: loader.close(),
    "set_epoch": lambda loader: loader.set_epoch(loader.state_dict()["epoch"]),
    "a new loop": lambda loader: None,
}


@pytest.mark.parametrize("executor", ["inline", "threads"])
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_what_ends_a_loop_ends_that_of_a_feed_too(parts, wanted, executor, end):
    """In the midst of a loop over the feed, whose thread is in the loader: nothing is lost or comes twice."""
    before = workers()
    loader = Loader(*parts, batch_size=2, executor=executor, num_workers=2)
    seen, fed = [], feed(loader, "cpu")
    for batch in fed:
        seen.append(digest(batch))
        if len(seen) == 3:
            end(loader)
            seen += [digest(batch) for batch in islice(loader, 2)]
    assert wanted[:5] == seen
    seen += [digest(batch) for batch in islice(fed, 2)]  # and the feed goes on where the loader is
    assert wanted[:7] == seen
    fed.close()
    assert [] == new_workers(before)
    assert not [thread for thread in threading.enumerate() if thread.name == "mmdp-ahead"]


def test_a_loader_that_loses_most_of_its_samples_says_so(tmp_path):
    """Images that went away since they were measured, between rows of text: no failure follows a hundred others."""
    path = write_data(tmp_path / "data", (1, 0, 1, 1), repeat=10)
    source, encoder = mmdp.open_source(path), mmdp.Encoder(tokenizer(), "fixed:16")
    plan = mmdp.plan(mmdp.measure(source, encoder, cache=tmp_path), mmdp.Budget(64, 3))
    loader = Loader(source, encoder, plan, batch_size=2, executor="inline")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert 40 == sum(len(row) for batch in loader for row in batch.samples)
    for image in path.parent.glob("*.png"):
        image.unlink()
    loader = Loader(source, encoder, plan, batch_size=2, executor="inline")
    with pytest.warns(UserWarning, match="are left out") as said:
        delivered = [len(row) for _ in range(2) for batch in loader for row in batch.samples]
    assert 20 == sum(delivered)
    (one,) = said  # and not in each epoch
    wanted = "30 of the 40 samples of which rows were built are left out: {'missing_image': 30}. `Loader.messages` says"
    assert wanted in str(one.message)


def test_a_loop_in_another_thread_is_not_torn_apart(parts):
    """Closed at the very moment in which another thread takes a batch: an error that says where to end it."""
    taken, go = threading.Event(), threading.Event()

    class Slow(Threads):
        def run(self, function, items, **options):
            for row in super().run(function, items, **options):
                taken.set()
                go.wait(SECONDS)
                yield row

    loader = Loader(*parts, batch_size=2, executor=Slow(1))
    reader = threading.Thread(target=next, args=(iter(loader),))
    reader.start()
    assert taken.wait(SECONDS)
    with pytest.raises(RuntimeError, match="another thread takes a batch of this loader"):
        loader.close()
    go.set()
    reader.join()
    loader.close()


def test_an_executor_of_your_own_stays(parts, wanted):
    """Two loaders share processes; the end of one is not the end of the other, nor of the processes."""
    with Processes(2, "fork") as shared:
        one, other = (Loader(*parts, batch_size=2, executor=shared) for _ in range(2))
        loop = iter(one)
        seen = [digest(next(loop))]
        assert wanted[0] == digest(next(iter(other)))
        other.close()
        seen += [digest(batch) for batch in loop]
        one.close()
        seen += [digest(batch) for batch in one]
    assert wanted[: len(seen)] == seen
    assert len(seen) > 10


# Workers that die


def test_workers_killed_from_outside(parts, wanted):
    """WRK-09, law 11: `kill -9` of all workers in mid-epoch costs a warning, and no batch."""
    others = set(psutil.Process().children())  # such as the fork server of an earlier test
    seen = []
    with Processes(2, "fork") as processes:
        loader = Loader(*parts, batch_size=2, executor=processes)
        for _ in range(2):  # by the second epoch, the new workers have started
            with pytest.warns(RuntimeWarning, match="signal 9"):
                seen += digests_of_a_loop_with_kills(loader, others)
    assert wanted[: len(seen)] == seen
    assert {} == loader.skipped


def digests_of_a_loop_with_kills(loader: Loader, others: set[psutil.Process]) -> list[str]:
    seen = []
    for batch in loader:
        seen.append(digest(batch))
        if len(seen) == 2:  # most rows are still to be built
            victims = set(psutil.Process().children()) - others
            assert len(victims) == 2
            for victim in victims:
                victim.kill()
    return seen


def test_a_sample_that_kills_its_worker_is_left_out_and_its_neighbours_are_not(parts):
    """WRK-09: a row that kills is built sample by sample in a process of its own."""
    first, lost = [row.tolist() for row in parts.plan.epoch(0) if len(row) == 3][:2]
    bad = (first[1], *lost)
    source = Kills(parts.source, bad, os.getpid())
    loader = Loader(source, *parts[1:], batch_size=2, executor=Processes(2, "fork"))
    with pytest.warns(RuntimeWarning, match="exit code 7"):
        batches = list(loader)
    assert {"killed_worker": len(bad)} == loader.skipped
    assert set(bad) == set(loader.messages())  # and none of them is built once more
    assert dict.fromkeys(bad, Reason.KILLED_WORKER) == {i: why for batch in batches for i, why in batch.skipped.items()}
    seen = [samples for batch in batches for samples in batch.samples]
    assert (first[0], first[2]) in seen
    assert () in seen, "a row that loses all its samples stays"
    assert sorted(set(range(len(source))) - set(bad)) == sorted(sample for samples in seen for sample in samples)
    whole = {batch.samples: digest(batch) for batch in Loader(*parts, batch_size=2, executor="inline")}
    untouched = [batch for batch in batches if not batch.skipped]
    assert [whole[batch.samples] for batch in untouched] == [digest(batch) for batch in untouched]
    hit = [rows for rows in whole if set(bad) & {sample for row in rows for sample in row}]
    assert len(whole) - len(hit) == len(untouched) > 0


def test_in_strict_mode_a_dead_worker_is_an_error(parts):
    """WRK-09: it names the row, and the exit code."""
    bad = int(parts.plan.epoch(0)[3][0])
    source = Kills(parts.source, (bad,), os.getpid())
    loader = Loader(source, *parts[1:], executor=Processes(1, "fork"), batch_size=1, strict=True)
    with (
        pytest.warns(RuntimeWarning, match="tried once more"),
        pytest.raises(WorkerDied, match=rf"{bad}.* ended two worker processes.*exit code 7"),
    ):
        list(loader)


# The end of the program

MAIN = """
import json, os, pickle, signal, sys
from pathlib import Path
import runs

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs these tests in the background ignores it
parts = pickle.loads(Path(sys.argv[1]).read_bytes())
print("ready", flush=True)
for line in sys.stdin:
    road, total, pace, out = pickle.loads(bytes.fromhex(line))
    if os.fork() == 0:
        break
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
else:
    sys.exit()
os.setsid()
print(os.getpid(), flush=True)
if total:
    runs.train(road, parts, 2, total, out, pace)
else:
    loop = iter(road.batches(parts, 2))
    print(next(loop).samples, file=sys.stderr)
"""


class Program:
    """A fresh interpreter with all imports done, whose forks run `MAIN` to its end as a script does: many for one."""

    def __init__(self, parts: Parts, folder: Path) -> None:
        (folder / "parts").write_bytes(pickle.dumps(parts))
        self.errors = folder / "errors"
        self.process = subprocess.Popen(
            [sys.executable, "-c", MAIN, folder / "parts"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors.open("a"),
            text=True,
            env={**os.environ, "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"},
        )
        self.line()

    def line(self) -> str:
        text = self.process.stdout.readline()
        assert text, self.errors.read_text()
        return text.strip()

    def start(self, *arguments: object) -> int:
        """The number of a new process, leader of its own group."""
        self.errors.write_text("")
        self.process.stdin.write(pickle.dumps(arguments).hex() + "\n")
        self.process.stdin.flush()
        return int(self.line())


@pytest.fixture(scope="module")
def program(parts, tmp_path_factory) -> Iterator[Program]:
    program = Program(parts, tmp_path_factory.mktemp("program"))
    yield program
    program.process.kill()
    program.process.communicate()


def group_of(leader: int) -> list[psutil.Process]:
    """The processes of a session that still run after a while."""
    end = time.monotonic() + SECONDS
    while True:
        left = []
        for pid in psutil.pids():
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getsid(pid) == leader and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    left.append(psutil.Process(pid))
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.05)


ROADS = {
    "threads": Road("threads", 2),
    "processes": Road(Processes(2, "fork")),
    "processes that start slowly": Road(Processes(2)),
}


@pytest.mark.parametrize("name", ROADS)
def test_ctrl_c_at_any_moment(program, wanted, tmp_path, name):
    """Law 9, law 12: the program ends as Python ends it, nothing is left of it, and the next one goes on exactly."""
    out = tmp_path / "trained.jsonl"
    chance = random.Random(name)
    progress = []
    for _ in range(2 if "slowly" in name else 6):
        leader = program.start(ROADS[name], len(wanted), 0.02, out)
        time.sleep(chance.uniform(0, 0.6))
        os.killpg(leader, signal.SIGINT)
        assert -signal.SIGINT == int(program.line())
        errors = program.errors.read_text()
        assert 1 == errors.count("Traceback (most recent call last)")
        assert errors.rstrip().endswith("KeyboardInterrupt")
        assert [] == group_of(leader)
        progress.append(len(trained(out)))
    seen = [entry["batch"] for entry in trained(out)]
    assert wanted[: len(seen)] == seen
    assert "slowly" in name or len(set(progress)) > 2, f"the case did not arise: {progress}"


@pytest.mark.parametrize("name", ["threads", "processes"])
def test_a_program_may_end_in_the_midst_of_a_loop(program, tmp_path, name):
    """WRK-02: nobody needs to close anything for the interpreter to exit, and with code 0."""
    leader = program.start(ROADS[name], 0, 0, tmp_path / "unused")
    assert 0 == int(program.line())
    assert program.errors.read_text().startswith("(("), "the loop did not begin"
    assert [] == group_of(leader)


def test_processes_stay_for_the_next_epoch_and_end_with_the_loader(parts, wanted):
    """Starting a process takes seconds: the ones of the first epoch build the second one too, as well as any other."""
    before = set(psutil.Process().children())
    loader = Loader(*parts, batch_size=2, executor="processes", num_workers=1)
    workers, seen = [], []
    for _ in range(2):
        seen += [digest(batch) for batch in loader]
        workers.append({child.pid for child in set(psutil.Process().children()) - before})
    assert 1 == len(workers[0])
    assert workers[0] == workers[1]
    assert wanted[: len(seen)] == seen
    assert len(loader) < len(seen)
    del loader
    gc.collect()
    deadline = time.monotonic() + SECONDS
    while set(psutil.Process().children()) - before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert set() == set(psutil.Process().children()) - before
