"""Laws of the executors, for Ray actors; and what Ray adds: who owns a result, where it lies, and how much may."""

import asyncio
import itertools
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil
import pytest
import ray_work
import torch
import work
from executor_laws import *  # noqa: F403 -- laws 7 and 8
from in_flight import Watched, most_at_once
from processes import still_running

from mmdp import ray_staff
from mmdp.executors import WorkerDied, WorkerError, executor
from mmdp.ray_crew import STORE_SHARE
from mmdp.ray_engine import Engine
from mmdp.ray_executor import RayExecutor, read

pytest.importorskip("ray")

TESTS = Path(__file__).parent
SECONDS = 30  # in which a thing that ends "promptly" must have ended, however busy the machine is


@pytest.fixture(scope="module")
def kept(ray_cluster) -> Iterator[RayExecutor]:
    """Two actors for many tests, since each takes a while to start."""
    with RayExecutor(2, num_cpus=0.5) as actors:
        yield actors


@pytest.fixture
def any_executor(kept) -> RayExecutor:
    return kept


@pytest.fixture(scope="module")
def stages(case_script) -> types.ModuleType:
    """Functions that misbehave; they travel by value, since no worker can import them."""
    import ray

    module = case_script("bad_stages")
    ray.cloudpickle.register_pickle_by_value(module)
    return module


# Laws 7 and 8, the order of results and errors at their places: `executor_laws`, and what only actors have


def test_what_is_defined_here_travels_by_value(kept):
    """A lambda, and a function of a script, need no module on the other side."""
    assert [0, 3, 6] == list(kept.run(lambda item: 3 * item, range(3), depth=2))


def test_an_error_of_a_function_of_a_script_is_told(kept, stages):
    """Law 8, RAY-02: class, message and item, where no process can import the class and its `__init__` is its own."""
    errors = []
    note = lambda _, error: errors.append(error)  # noqa: E731
    results = list(kept.run(stages.raises_awkwardly, range(10), depth=10, on_error=note))
    assert [*range(7), None, 8, 9] == [result and result["row"] for result in results]
    assert "NeedsTwo: key7: 403" in str(errors[0])
    assert "item 7 of the run: 7" in "".join(errors[0].__notes__)


def test_an_error_of_the_first_phase_comes_out_like_any_other(kept):
    """Law 8 for a function that fetches before it computes."""
    errors = []
    results = list(kept.run(ray_work.FetchFails(2), range(5), depth=5, on_error=lambda _, error: errors.append(error)))
    assert [0, 1, None, 3, 4] == results
    assert ["no answer for 2"] == [str(error) for error in errors]


# Law 9: the end of a run


def test_a_run_that_ends_early_leaves_nothing(ray_cluster):
    """Law 9: outside of `with` no actor and no thread is left, closed or dropped."""
    before = threading.active_count()
    runs = [RayExecutor(1, num_cpus=0.1).run(work.process_id, itertools.count(), depth=4) for _ in range(2)]
    with ThreadPoolExecutor() as threads:  # both start at once
        pids = set(threads.map(next, runs))
    assert threading.active_count() >= before + 2
    assert 2 == sum(map(psutil.pid_exists, pids))
    runs.pop().close()
    del runs[0]
    assert [] == still_running(pids, SECONDS)
    assert before == threading.active_count()


def test_nothing_starts_before_the_first_result_is_asked_for(kept):
    """A run that is never begun takes no item."""
    taken = []
    run = kept.run(work.double, (taken.append(item) or item for item in range(3)), depth=2)
    assert [] == taken
    run.close()
    assert [] == taken


def test_a_closed_run_does_not_hold_up_the_next(kept, tmp_path):
    """Law 9: what a run has not begun is dropped; an actor that is stuck is replaced."""
    run = kept.run(ray_work.StuckSomewhere(tmp_path), itertools.count(), depth=32, weight=lambda _: 1)
    assert [0, 1, 2] == list(itertools.islice(run, 3))
    stuck = int((tmp_path / "stuck").read_text())
    start = time.monotonic()
    run.close()
    assert time.monotonic() - start < 1
    assert [0, 2, 4] == list(kept.run(work.double, range(3), depth=3))
    assert [] == still_running({stuck}, SECONDS)
    assert stuck not in set(kept.run(work.process_id, range(4), depth=4))


def test_closing_the_executor_ends_its_runs(ray_cluster, tmp_path):
    """The end of the block is the end of all, of a consumer that waits elsewhere too; it may be used again."""
    caught = []

    def consume():
        try:
            list(actors.run(work.Stuck(tmp_path), [0, work.BAD], depth=2))
        except (RuntimeError, WorkerError) as error:
            caught.append(error)

    with RayExecutor(1, num_cpus=0.1) as actors:
        pids = set(actors.run(work.process_id, range(2), depth=2))
        run = actors.run(work.short, itertools.count(), depth=4)
        next(run)
        consumer = threading.Thread(target=consume)
        consumer.start()
        time.sleep(0.5)
    consumer.join(SECONDS)
    assert not consumer.is_alive()
    assert ["the executor was closed, and with it this run"] == [str(error) for error in caught]
    with pytest.raises(RuntimeError, match="executor was closed"):
        list(run)
    assert [] == still_running(pids, SECONDS)


def test_an_engine_is_closed_but_once(ray_cluster, monkeypatch):
    """The exit of the program, a user and the garbage collector may all come, in threads of their own, at once."""
    engine = Engine(None, 0, 1.0, 1, "together")
    closed = []

    async def close():
        closed.append(threading.current_thread().name)
        await asyncio.sleep(0.2)

    monkeypatch.setattr(engine.pool.staff, "close", close)
    with ThreadPoolExecutor(3) as threads:
        all_of_them = [threads.submit(engine.close) for _ in range(3)]
    assert [None] * 3 == [one.result() for one in all_of_them]
    assert ["mmdp-ray"] == closed
    engine.close()


PROGRAM = """
import itertools
import work
from mmdp.ray_executor import RayExecutor

def main():
    global run  # open when the program ends
    run = RayExecutor(1, num_cpus=0.1, address={address!r}).run(work.process_id, itertools.count(), depth=4)
    for result in run:
        print(result, flush=True)
        {consume}

if __name__ == "__main__":
    main()
"""


def start_program(folder: Path, address: str, consume: str) -> subprocess.Popen:
    """A script in a fresh interpreter, leader of its own process group, as a shell starts it."""
    path = folder / f"program_{consume}.py"
    path.write_text(PROGRAM.format(address=address, consume=consume))
    places = [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
    )


def test_programs_that_end_leave_no_actor(ray_cluster, tmp_path):
    """Law 9: by `kill -9`, and with a run open; the cluster lives on. (Ctrl-C: `test_ray_start`.)"""
    killed, ended = (start_program(tmp_path, ray_cluster.address, consume) for consume in ("pass", "break"))
    actors = {int(program.stdout.readline()) for program in (killed, ended)}
    killed.kill()
    errors = [program.communicate(timeout=60)[1] for program in (killed, ended)]
    assert [-signal.SIGKILL, 0] == [program.returncode for program in (killed, ended)], errors
    assert 0 == errors[1].count("Traceback"), errors
    assert [] == still_running(actors, SECONDS)
    assert ray_cluster.ray.nodes()[0]["Alive"]


# Law 10: what is in flight


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_never_more_items_in_flight_than_said(kept, depth):
    """Law 10, seen from the source, and from the function; the consumer is slow, so that the window fills."""
    items = Watched(range(20))
    begun, received = [], []
    for item, start, _ in kept.run(work.start_and_end, items, depth=depth):
        begun.append(start)
        received.append(time.monotonic())
        items.received(item)
        time.sleep(0.02)
    assert depth == items.most
    assert depth >= most_at_once(begun, received) > depth / 2


def test_never_more_weight_in_flight_than_said(kept):
    """Law 10 for what results weigh; one that is too heavy runs alone; order and results stay."""
    weights = [*([2] * 12), 3, 3, 3, 3, 20, 1, 1, 1, 8, 9, 30, 5, 5]
    begun, received = [], []
    for place, start, _ in kept.run(
        work.start_and_end, range(len(weights)), depth=6, weight=weights.__getitem__, max_weight=10
    ):
        assert len(received) == place
        begun.append(start)
        received.append(time.monotonic())
        time.sleep(0.01)
    assert len(weights) == len(received)
    events = [(time, weight) for time, weight in zip(begun, weights, strict=True) if weight <= 10]
    events += [(time, -weight) for time, weight in zip(received, weights, strict=True) if weight <= 10]
    assert 10 >= max(itertools.accumulate(weight for _, weight in sorted(events))) > 5
    for heavy in (weights.index(20), weights.index(30)):
        alone = [place for place in range(len(weights)) if begun[place] < received[heavy] < received[place]]
        assert [] == alone


# Law 11: nothing waits for ever


def test_a_worker_that_dies_once_costs_no_item(kept, stages, tmp_path):
    """RAY-01: the items it had come out, in their order, each once."""
    with pytest.warns(RuntimeWarning, match=r"a worker actor died at \d+ items?, tried again"):
        results = list(kept.run(partial(stages.dies_once, marker_dir=str(tmp_path)), range(20), depth=20))
    assert (tmp_path / "died").exists()
    assert list(range(20)) == [result["row"] for result in results]
    assert all((result["pixels"] == result["row"]).all() for result in results)


def test_an_item_that_kills_is_refused_by_name_and_its_neighbours_are_not(kept, tmp_path):
    """RAY-01: two tries, the second alone; every other item comes out, whoever it was in work with."""
    function = ray_work.CountsTries(tmp_path, bad=7)
    errors = []
    with pytest.warns(RuntimeWarning, match="a worker actor died"):
        results = list(
            kept.run(function, range(20), depth=20, on_error=lambda item, error: errors.append((item, error)))
        )
    assert [*range(7), None, *range(8, 20)] == results
    ((item, error),) = errors
    assert (7, 7, WorkerDied) == (item, error.item, type(error))
    assert "7 ended a worker actor that had it and nothing else" in str(error)
    assert 2 == function.tries(7)
    assert max(function.tries(item) for item in range(20)) == 2, "no item is tried without end"
    assert sum(function.tries(item) for item in range(20)) > 21, "the case did not arise: nobody was in work with it"


def test_what_an_actor_warns_of_is_read_here_while_it_waits(kept, heard):
    """Law 11: its log is read by nobody. A store that is gone, say, holds up the run, and one knows why."""
    file, texts = heard
    assert [3] == list(kept.run(ray_work.WarnsAndWaits(file), [3], depth=1))
    assert ["RuntimeWarning: told by an actor of Ray: item 3 waits"] == texts


def test_too_slow_an_item_is_an_error_of_its_own(kept, tmp_path):
    """Law 11: `timeout` frees a run from an item that never ends, and names it; the others come."""
    errors = []
    limits = {"depth": 4, "timeout": 1.0, "on_error": lambda _, error: errors.append(error)}
    results = list(kept.run(work.Stuck(tmp_path), [0, 1, 2, work.BAD, 4, 5, 6], **limits))
    assert [0, 1, 2, None, 4, 5, 6] == results
    assert [TimeoutError] == [type(error) for error in errors]
    assert "no result within 1.0 s" in str(errors[0])
    assert "item 3 of the run" in "".join(errors[0].__notes__)


def test_a_function_that_can_not_be_sent(kept):
    """Law 11: an error that names the cause and the way out."""
    with pytest.raises(WorkerError, match=r"can't be sent to an actor.*or use threads"):
        kept.run(partial(work.double, threading.Lock()), range(3), depth=2)


def test_a_function_that_can_not_be_loaded(kept, monkeypatch):
    """Law 11: a module that the worker does not have is named, at once; the actors serve the next run."""
    module = types.ModuleType("module_of_this_process")
    module.double = types.FunctionType(work.double.__code__, module.__dict__, "double")
    module.double.__module__ = module.__name__
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(WorkerError, match=r"can't load the function: ModuleNotFoundError.*module_of_this_process"):
        list(kept.run(module.double, range(3), depth=2))
    assert [0, 2] == list(kept.run(work.double, range(2), depth=1))


def test_workers_that_die_while_they_load(ray_cluster, monkeypatch, tmp_path):
    """Law 11: nothing is tried for ever, and no item is blamed."""
    (tmp_path / "deadly.py").write_text(f"import os\nif os.getpid() != {os.getpid()}: os._exit(5)\ndef f(x): return x")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(ray_staff, "_DEAD_STARTS", 2)
    import deadly

    with (
        pytest.raises(WorkerError, match="2 worker actors ended while they started, the last: "),
        pytest.warns(RuntimeWarning, match="died while it started; a new one starts"),
    ):
        list(RayExecutor(1, num_cpus=0.1).run(deadly.f, range(3), depth=2))


def test_more_cpus_than_there_are(ray_cluster):
    """Law 11: actors that could never start are refused, with the numbers."""
    with pytest.raises(ValueError, match=r"3 workers of 1000 CPUs ask for 3000, and the cluster has \d+: give fewer"):
        list(RayExecutor(3, num_cpus=1000).run(work.double, range(3), depth=2))


# Who may write where


def test_what_is_handed_out_is_no_memory_of_the_store(kept, stages):
    """RAY-03: as array and as tensor, results may be written to; the stored object stays as it is."""
    written = [stages.writes_in_place(result) for result in kept.run(stages.good, range(6), depth=6)]
    assert [2 * row for row in range(6)] == [int(result["pixels"][0, 0, 0]) for result in written]

    ((_, reference),) = kept.run_references(stages.big, [3], depth=1)
    torch.from_numpy(read(reference)["pixels"]).mul_(5)
    assert (read(reference)["pixels"] == 3).all()


def test_views_are_read_only_memory_of_the_store(kept, stages):
    """RAY-03: with `views` nothing is copied, and writing is a plain error."""
    ((meta, reference),) = kept.run_references(partial(stages.big, megabytes=2), [3], depth=1)
    view = read(reference, views=True)["pixels"]
    assert not view.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        stages.writes_in_place({"pixels": view})
    address = view.__array_interface__["data"][0]
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "plasma" in line]
    spans = [tuple(int(end, 16) for end in line[0].split("-")) for line in maps]
    assert any(start <= address < end for start, end in spans)
    assert 2 * 2**20 <= meta.num_bytes < 2.1 * 2**20


# How much lies in the store


def spilled(ray) -> list[Path]:
    folder = Path(ray._private.worker._global_node.get_session_dir_path())
    return list(folder.glob("ray_spilled_objects_*/*"))


def test_outputs_never_outrun_the_consumer(kept, stages, ray_cluster):
    """RAY-04: 40 x 32 MB through a store of 256 MB, to a slow consumer: the window is told in bytes; nothing spills."""
    import ray

    from mmdp.ray_start import store_bytes, used_store_bytes

    end = time.monotonic() + SECONDS
    while used_store_bytes() > 2**20 and time.monotonic() < end:  # what former tests have left
        time.sleep(0.2)
    peak = 0
    for _ in range(6):  # a node that is all quiet may not tell for half a minute what lies in its store
        for row, result in enumerate(kept.run(stages.big, range(40), depth=40)):
            assert (row, 32 * 2**20) == (result["row"], result["pixels"].nbytes)
            time.sleep(2 if row == 5 else 0.02)  # once, until the window is full, and Ray has told so
            peak = max(peak, used_store_bytes())
        if peak >= 32 * 2**20:
            break
    assert 32 * 2**20 <= peak <= STORE_SHARE * store_bytes() + 33 * 2**20, "in flight, and the one in hand"
    assert [] == spilled(ray)


def test_a_window_that_the_store_can_not_hold_is_refused(kept):
    """RAY-04: at the start, with the numbers and the remedy."""
    with pytest.raises(ValueError, match=r"bytes in flight are too much for an object store of .*: at most 40% of it"):
        list(kept.run(work.double, range(3), depth=2, weight=float, max_weight=10**12))


# Waiting


def test_order_is_kept_behind_a_slow_row(kept, stages):
    """RAY-05: the others wait for it, within the window; the wait shows it; every row comes once."""
    start = time.monotonic()
    run = kept.run(stages.one_slow, range(30), depth=16)
    assert 0 == next(run)["row"]
    first = time.monotonic() - start
    assert list(range(1, 30)) == [result["row"] for result in run]
    assert first > 3
    assert first / (time.monotonic() - start) > 0.7, "the wait is that of the slow row"


def test_waiting_does_not_stop_the_event_loop(kept, stages):
    """RAY-06: 16 rows that block for 0.2 s each take about as long as one, on two actors."""
    list(kept.run(stages.blocks, range(2), depth=2))
    start = time.monotonic()
    assert list(range(16)) == [result["row"] for result in kept.run(stages.blocks, range(16), depth=16)]
    assert time.monotonic() - start < 16 * 0.2 / 2


def test_many_fetches_are_in_flight_in_one_actor(kept):
    """A function of two phases waits on the event loop: 12 fetches of a second are in flight together."""
    results = list(kept.run(ray_work.TwoPhases(1), range(12), depth=12, weight=lambda _: 1000))
    assert list(range(12)) == [item for item, _, _ in results]
    assert max(begun for _, begun, _ in results) < min(ended for _, _, ended in results), "all were in flight at once"


# References


def test_references_come_in_order_and_move_nothing(kept):
    """The second form: what became of each item, and where it lies; errors at their place."""
    seen = []
    with pytest.raises(OSError, match="sample 3"):
        seen.extend(kept.run_references(work.raises, range(6), depth=4))
    assert [0, 1, 2] == [read(reference) for _, reference in seen]
    assert all(meta.num_bytes > 0 for meta, _ in seen)


def read_for_a_while(reference) -> None:
    """A store may keep what belongs to nobody for a moment."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        read(reference)
        time.sleep(0.2)


def test_results_outlive_their_worker(ray_cluster):
    """RAY-08: a block belongs to whoever asked for it; an object that a worker has put does not."""
    with RayExecutor(1, num_cpus=0.1) as actors:
        kept = [reference for _, reference in actors.run_references(ray_work.block, range(3), depth=3)]
        ((inner, pid),) = actors.run(ray_work.puts, [7], depth=1)
        os.kill(pid, signal.SIGKILL)
        assert [] == still_running({pid}, SECONDS)
        assert [0, 1, 2] == [int(read(reference)[0][0]) for reference in kept]
        with pytest.raises(RuntimeError, match=r"the block is gone \(OwnerDiedError\)"):
            read_for_a_while(inner)


# By name


def test_the_executor_has_a_name(ray_cluster):
    """`executor("ray")` makes it; it pickles without its actors."""
    made = executor("ray", 3)
    assert isinstance(made, RayExecutor)
    assert 3 == made.num_workers == pickle.loads(pickle.dumps(made)).num_workers
    assert 1 <= executor("ray").num_workers


def test_nobody_needs_ray_who_does_not_use_it():
    """Without it, `executor("ray")` says what to install. (Which modules know ray: `test_ray_start`.)"""
    code = """
    import sys
    import mmdp, mmdp.executors, mmdp.row_builder
    print("ray" in sys.modules)
    sys.modules["ray"] = None
    try:
        list(mmdp.executors.executor("ray", 1).run(abs, [1], depth=1))
    except ImportError as error:
        print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert ["False", "what runs on Ray needs the package ray, 2.55 or later: uv add ray"] == done.stdout.splitlines()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RayExecutor(0), "num_workers is 0: it must be at least 1"),
        (lambda: RayExecutor(1, num_cpus=-1), "num_cpus is -1: it must be at least 0"),
        (lambda: RayExecutor(1, max_concurrency=0), "max_concurrency is 0: it must be at least 1"),
        (lambda: RayExecutor(1, placement="far"), "no placement 'far': choose of together, spread, near"),
        (lambda: RayExecutor(1, num_cpus=0, placement="near"), "num_cpus is 0, with placement 'near': Ray puts actors"),
        (lambda: RayExecutor(1, num_cpus=0.00001, placement="spread"), "Give at least 0.0001, or 'together'"),
        (lambda: RayExecutor(1).run(work.double, [], depth=0), "a depth of 0"),
        (lambda: RayExecutor(1).run(work.double, [], depth=1, max_weight=5), "give `weight` too"),
        (lambda: RayExecutor(1).run_references(work.double, [], depth=1, timeout=0), "a timeout of 0 s"),
    ],
)
def test_wrong_arguments_are_told(make, message):
    with pytest.raises(ValueError, match=message):
        make()
