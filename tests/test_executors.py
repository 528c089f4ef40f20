"""Laws of the executors, each for all of them: order, errors, the end of a run, what is in flight, and no hang."""

import gc
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
from pathlib import Path

import psutil
import pytest
import work
from executor_laws import *  # noqa: F403 -- laws 7 and 8
from in_flight import Watched, most_at_once
from processes import children, still_running

from mmdp import in_order
from mmdp.executors import Executor, Inline, Processes, Threads, WorkerDied, WorkerError, executor
from mmdp.wire import name_exit

pytestmark = pytest.mark.timeout(60)

TESTS = Path(__file__).parent
SECONDS = 10  # in which a thing that ends "promptly" must have ended, however busy the machine is


@pytest.fixture(scope="module")
def kept() -> Iterator[Processes]:
    """Two processes for many tests, since each takes a while to start."""
    with Processes(2) as processes:
        yield processes


@pytest.fixture(params=["threads", "processes"])
def with_workers(request, kept) -> Executor:
    return {"threads": Threads(2), "processes": kept}[request.param]


def started(executor: Executor, function, items, **limits):
    """A run that has given its first result."""
    run = executor.run(function, items, **{"depth": 4, **limits})
    return run, next(run)


def worker_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "mmdp-worker"]


# Laws 7 and 8, the order of results and errors at their places: `executor_laws`


# Law 9: the end of a run


def end_by_close(run) -> None:
    run.close()


def end_by_dropping(run) -> None:
    del run


def end_by_garbage(run) -> None:
    ring = [run]
    ring.append(ring)
    del run, ring


def end_by_error(run) -> None:
    try:
        for _ in run:
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass


def end_by_using_up(run) -> None:
    list(itertools.islice(run, 40))
    run.close()


@pytest.mark.parametrize("end", [end_by_close, end_by_dropping, end_by_garbage, end_by_error, end_by_using_up])
@pytest.mark.parametrize("make", [Threads, Processes])
def test_a_run_that_ends_early_leaves_nothing(make, end):
    """Law 9: no thread and no process is left, however the run ended."""
    before = children()
    assert [] == worker_threads()
    runs = [started(make(2), work.short, itertools.count(), depth=8)[0]]
    mine = children() - before
    assert 2 == len(worker_threads())
    assert (1 if make is Processes else 0) <= len(mine)
    end(runs.pop())
    gc.collect()
    assert [] == worker_threads()
    assert [] == still_running(mine)


def test_nothing_starts_before_the_first_result_is_asked_for(with_workers):
    """A run that is never begun costs nothing and takes no item."""
    taken = []
    run = with_workers.run(work.double, (taken.append(item) or item for item in range(3)), depth=2)
    assert [] == taken
    assert [] == worker_threads()
    run.close()
    assert [] == taken


def test_closing_does_not_wait_for_a_stuck_process(tmp_path):
    """Law 9: an item that takes for ever is killed with its process."""
    before = children()
    run = Processes(2).run(work.Stuck(tmp_path), [0, work.BAD, work.BAD], depth=3)
    assert 0 == next(run)
    time.sleep(0.5)
    mine = children() - before
    assert mine
    run.close()
    assert [] == still_running(mine)
    assert [] == worker_threads()


def test_closing_tells_of_a_stuck_thread(tmp_path, monkeypatch):
    """Nothing stops a thread: it is left behind, and that is said."""
    monkeypatch.setattr(in_order, "_END_SECONDS", 0.2)
    run = Threads(1).run(work.Stuck(tmp_path), [0, work.BAD], depth=2)
    assert 0 == next(run)
    time.sleep(0.1)
    with pytest.warns(RuntimeWarning, match="stuck in the function that they run: 1 thread, which"):
        run.close()
    (tmp_path / "let go").touch()
    for thread in worker_threads():
        thread.join(SECONDS)
    assert [] == worker_threads()


def test_closing_the_executor_ends_its_runs(tmp_path):
    """The end of the block is the end of all; a run that goes on says why it can't."""
    for make in (Threads, Processes):
        before = children()
        with make(2) as pool:
            run, _ = started(pool, work.short, itertools.count())
            mine = children() - before
        assert [] == worker_threads()
        assert [] == still_running(mine)
        with pytest.raises(RuntimeError, match="executor was closed"):
            list(run)
        assert [0, 2] == list(pool.run(work.double, range(2), depth=1)), "it may be used again"


def test_closing_the_executor_wakes_a_consumer_elsewhere(tmp_path):
    """Law 11: a consumer that waits in another thread is told, and does not wait for ever."""
    pool = Threads(1)
    caught = []

    def consume():
        try:
            list(pool.run(work.Stuck(tmp_path), [work.BAD], depth=1))
        except RuntimeError as error:
            caught.append(error)

    consumer = threading.Thread(target=consume)
    consumer.start()
    while not worker_threads():
        time.sleep(0.01)
    time.sleep(0.1)
    threading.Timer(0.3, (tmp_path / "let go").touch).start()
    pool.close()
    consumer.join(SECONDS)
    assert not consumer.is_alive()
    assert ["the executor was closed, and with it this run"] == [str(error) for error in caught]


class Program:
    """A script in a fresh interpreter, leader of its own process group, as a shell starts it."""

    def __init__(self, folder: Path, code: str) -> None:
        path = folder / "program.py"
        path.write_text(textwrap.dedent(code))
        self.process = subprocess.Popen(
            [sys.executable, str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"},
        )

    def wait_for(self, word: str) -> set[psutil.Process]:
        """Its processes, once it has printed the word."""
        for line in self.process.stdout:
            if line.strip() == word:
                return {psutil.Process(self.process.pid), *children(self.process.pid)}
        raise AssertionError(f"it never said {word}: {self.process.stderr.read()}")

    def end(self) -> tuple[int, str, str]:
        """Its exit code and what it printed."""
        out, err = self.process.communicate(timeout=30)
        return self.process.returncode, out, err


LOOP = """
import itertools, signal, time
import work
from mmdp.executors import Processes, Threads

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs these tests in the background ignores it

def main():
    global run  # open when the program ends
    run = {pool}.run(work.{function}, itertools.count(), depth=8)
    print("before", flush=True)
    for result in run:
        if result == 4:
            print("within", flush=True)
        {consume}

if __name__ == "__main__":
    main()
    {ending}
"""
WAYS = ["Threads(2)", "Processes(2)", 'Processes(2, "fork")', 'Processes(2, "forkserver")']


@pytest.mark.parametrize("consume", ["pass", "time.sleep(0.02)"], ids=["waiting for a result", "at work itself"])
@pytest.mark.parametrize("pool", WAYS[:2])
def test_ctrl_c_ends_all(tmp_path, pool, consume):
    """Law 9: a SIGINT to the group ends the program as Python ends it, with no process left and no noise of workers."""
    program = Program(tmp_path, LOOP.format(pool=pool, function="short", consume=consume, ending=""))
    family = program.wait_for("within")
    assert len(family) == (1 if "Threads" in pool else 3)
    os.killpg(program.process.pid, signal.SIGINT)
    code, _, err = program.end()
    assert -signal.SIGINT == code
    assert 1 == err.count("Traceback (most recent call last)")
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert [] == still_running(family)


@pytest.mark.parametrize("wait", [0.02, 0.1, 0.3])
def test_ctrl_c_while_workers_start(tmp_path, wait):
    """Law 9 at any moment: workers that are about to start print nothing and stay nowhere."""
    program = Program(tmp_path, LOOP.format(pool="Processes(3)", function="short", consume="pass", ending=""))
    family = program.wait_for("before")
    time.sleep(wait)
    family |= children(program.process.pid)
    os.killpg(program.process.pid, signal.SIGINT)
    code, _, err = program.end()
    assert -signal.SIGINT == code
    assert 1 == err.count("Traceback (most recent call last)"), err
    assert [] == still_running(family)


@pytest.mark.parametrize(
    ("pool", "function"), [(WAYS[1], "short"), (WAYS[1], "forever"), (WAYS[2], "short"), (WAYS[3], "forever")]
)
def test_a_killed_parent_leaves_no_orphan(tmp_path, pool, function):
    """Law 9: `kill -9` of the parent ends idle workers and ones in the midst of an item."""
    program = Program(tmp_path, LOOP.format(pool=pool, function=function, consume="time.sleep(0.1)", ending=""))
    family = program.wait_for("within")
    assert len(family) >= 3
    program.process.kill()
    assert -signal.SIGKILL == program.end()[0]
    assert [] == still_running(family)


@pytest.mark.parametrize(
    ("pool", "ending", "code"),
    [
        *((pool, "", 0) for pool in [*WAYS, "Processes(2).__enter__()"]),
        (WAYS[1], "raise SystemExit(5)", 5),
        (WAYS[0], "1 / 0", 1),
    ],
)
def test_a_program_may_end_with_a_run_open(tmp_path, pool, ending, code):
    """Law 9: nobody needs to close anything for the interpreter to exit with the right code."""
    consume = "if result == 4: break"
    program = Program(tmp_path, LOOP.format(pool=pool, function="short", consume=consume, ending=ending))
    family = program.wait_for("within")
    exit_code, _, err = program.end()
    assert code == exit_code, err
    assert [] == still_running(family)
    assert err.count("Traceback") == (1 if code == 1 else 0), err


# Law 10: what is in flight


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_never_more_items_in_flight_than_said(any_executor, depth):
    """Law 10, seen from the source, and from the function; the consumer is slow, so that the window fills."""
    items = Watched(range(20))
    begun, received = [], []
    for item, start, _ in any_executor.run(work.start_and_end, items, depth=depth):
        begun.append(start)
        received.append(time.monotonic())
        items.received(item)
        time.sleep(0.02)
    expected = depth if any_executor.num_workers else 1
    assert expected == items.most
    assert expected == most_at_once(begun, received)


def test_never_more_weight_in_flight_than_said(with_workers):
    """Law 10 for what results weigh; one that is too heavy runs alone; order and results stay."""
    weights = [*([2] * 12), 3, 3, 3, 3, 20, 1, 1, 1, 8, 9, 30, 5, 5]
    begun, received = [], []
    for item, start, _ in with_workers.run(
        work.start_and_end, range(len(weights)), depth=6, weight=weights.__getitem__, max_weight=10
    ):
        begun.append((start, weights[item]))
        received.append((time.monotonic(), -weights[item]))
        time.sleep(0.02)
    assert len(weights) == len(received)
    load, held, most = 0, 0, 0
    for _, step in sorted(begun + received):
        load, held = load + step, held + (1 if step > 0 else -1)
        assert load <= 10 or held == 1
        most = max(most, held)
    assert 5 == most, "the case did not arise: five light items fill the window"


def test_weight_is_given_back(with_workers):
    """Law 10, the other way round: late in a run as many are at work as at its start, whatever has gone through."""
    begun, ended = [], []
    run = with_workers.run(work.start_and_end, range(40), depth=16, weight=lambda _: 1, max_weight=8)
    for _, start, end in run:
        begun.append(start)
        ended.append(end)
    assert 2 == most_at_once(begun[20:], ended[20:]), "two workers"


def test_items_may_be_endless(any_executor):
    """Items are pulled when there is room, never ahead of it."""
    items = Watched(itertools.count())
    run = any_executor.run(work.double, items, depth=3)
    assert [0, 2, 4, 6] == list(itertools.islice(run, 4))
    run.close()
    assert items.in_flight <= 4 + 3


def test_a_slow_source_does_not_hold_back_what_is_ready():
    """The window is not filled first where the source takes its time: two items, and the first result comes."""
    pulled = []

    def items():
        for item in range(8):
            pulled.append(item)
            yield item
            time.sleep(0.2)

    run = Threads(2).run(work.double, items(), depth=8)
    assert 0 == next(run)
    assert 4 >= len(pulled), "two, if the machine is not too busy"
    run.close()


# Law 11: nothing waits for ever


def test_an_innocent_item_outlives_its_worker(kept, tmp_path):
    """Law 11: a worker that dies once costs nothing but a warning."""
    with pytest.warns(RuntimeWarning, match=r"ended with exit code 1 while it worked on 3; .* tried once more"):
        assert list(range(8)) == list(kept.run(work.DiesOnce(tmp_path), range(8), depth=4))
    assert (tmp_path / "died").exists()


@pytest.mark.filterwarnings("ignore:a worker process ended:RuntimeWarning")
def test_an_item_that_kills_is_named_and_its_neighbours_live(kept):
    """Law 11: the two that kill are reported with their exit code, at their places; all others are there."""
    errors = []
    results = list(kept.run(work.dies, range(8), depth=8, on_error=lambda item, error: errors.append(error)))
    assert [0, 1, 2, None, None, 5, 6, 7] == results
    assert [WorkerDied, WorkerDied] == [type(error) for error in errors]
    assert [(3, 7), (4, -9)] == [(error.item, error.exit_code) for error in errors]
    assert "3 ended two worker processes, the second with exit code 7" in str(errors[0])
    assert "SIGKILL" in str(errors[1])
    again = pickle.loads(pickle.dumps(errors[1]))
    assert (str(errors[1]), 4, -9) == (str(again), again.item, again.exit_code)


@pytest.mark.filterwarnings("ignore:a worker process ended:RuntimeWarning")
def test_the_parts_of_a_deadly_item_may_be_tried_alone(kept):
    """Law 11 as the loader uses it: a row kills its worker, and loses only the sample that does."""

    def sample_by_sample(row, error):
        assert isinstance(error, WorkerDied)
        parts = kept.run(work.row_dies, [[sample] for sample in row], depth=1, on_error=lambda *_: [])
        return [sample for part in parts for sample in part]

    rows = [[0, 1], [2, work.BAD, 4], [5, 6]]
    assert [[0, 1], [2, 4], [5, 6]] == list(kept.run(work.row_dies, rows, depth=3, on_error=sample_by_sample))


@pytest.mark.filterwarnings("ignore:a worker process ended:RuntimeWarning")
def test_a_death_is_raised_where_nobody_replaces_it(kept):
    """Law 11 without `on_error`; the executor serves the next run."""
    results = []
    with pytest.raises(WorkerDied, match="exit code 7"):
        results.extend(kept.run(work.dies, range(8), depth=4))
    assert [0, 1, 2] == results
    assert [0, 2] == list(kept.run(work.double, range(2), depth=2))


def test_workers_killed_from_outside(kept):
    """Law 11: idle between two runs, and at work: the run goes on with new ones."""
    before = set(kept.run(work.process_id, range(8), depth=8))
    assert 2 == len(before)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    run, first = started(kept, work.process_id, range(30), depth=8)
    assert first not in before

    def kill_and_go_on():
        os.kill(first, signal.SIGKILL)
        return list(run)

    with pytest.warns(RuntimeWarning, match="SIGKILL"):
        rest = kill_and_go_on()
    assert 29 == len(rest)
    assert len({first, *rest}) >= 2


@pytest.mark.filterwarnings("ignore:a worker process ended:RuntimeWarning")
def test_a_death_goes_unseen_by_no_helper_that_it_leaves(tmp_path):
    """Law 11: the socket stays open in a child of the dead worker, and the death is noticed all the same."""
    code = """
    import os, time
    from mmdp.executors import Threads, Processes, WorkerDied

    def forks_and_dies(item):
        if os.fork() == 0:
            os.closerange(0, 3)
            time.sleep(8)
            os._exit(0)
        os._exit(9)

    if __name__ == "__main__":
        start = time.monotonic()
        try:
            list(Processes(1).run(forks_and_dies, [0], depth=1))
        except WorkerDied as death:
            print("code", death.exit_code, "in time" if time.monotonic() - start < 8 else "late")
    """
    exit_code, out, err = Program(tmp_path, code).end()
    assert (0, "code 9 in time\n") == (exit_code, out), err


def test_too_slow_an_item_is_an_error_of_its_own(with_workers, tmp_path):
    """Law 11: `timeout` frees a run from an item that never ends, and names it; the others come."""
    errors = []
    limits = {"depth": 4, "timeout": 1.0, "on_error": lambda _, error: errors.append(error)}
    results = list(with_workers.run(work.Stuck(tmp_path), [0, 1, 2, work.BAD, 4, work.BAD, 6], **limits))
    (tmp_path / "let go").touch()
    assert [0, 1, 2, None, 4, None, 6] == results
    assert [TimeoutError, TimeoutError] == [type(error) for error in errors]
    assert "no result within 1.0 s" in str(errors[0])
    assert "item 3 of the run" in "".join(errors[0].__notes__)
    assert [0, 2] == list(with_workers.run(work.double, range(2), depth=2))


def test_a_function_that_can_not_be_sent(kept):
    """Law 11: an error that names the cause and the way out."""
    with pytest.raises(WorkerError, match=r"lambda.*can't be sent to a process.*or use threads"):
        kept.run(lambda item: item, range(3), depth=2)


def test_a_function_that_can_not_be_loaded(monkeypatch):
    """Law 11: a module that the worker does not have is named."""
    module = types.ModuleType("module_of_this_process")
    module.double = types.FunctionType(work.double.__code__, module.__dict__, "double")
    module.double.__module__ = module.__name__
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(WorkerError, match=r"can't load the function: ModuleNotFoundError.*module_of_this_process"):
        list(Processes(2).run(module.double, range(3), depth=2))


def test_a_worker_that_ends_while_it_starts(monkeypatch, tmp_path):
    """Law 11: the exit code is told; nothing is tried for ever."""
    lines = ["import os", f"if os.getpid() != {os.getpid()}: os._exit(5)", "def f(x): return x"]
    (tmp_path / "deadly.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    import deadly

    with (
        pytest.raises(WorkerError, match="3 worker processes ended while they started, the last with exit code 5"),
        pytest.warns(RuntimeWarning, match="exit code 5 while it started; a new one starts"),
    ):
        list(Processes(2).run(deadly.f, range(3), depth=2))


def test_a_worker_killed_while_it_starts(monkeypatch, tmp_path):
    """Law 11: a new one starts, and no item is lost; what ended the first was not the item."""
    lines = [
        "import os, pathlib, signal",
        f"mark = pathlib.Path({str(tmp_path / 'mark')!r})",
        f"if os.getpid() != {os.getpid()} and not mark.exists():",
        "    mark.touch()",
        "    os.kill(os.getpid(), signal.SIGKILL)",
        "def f(x): return x",
    ]
    (tmp_path / "once_deadly.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    import once_deadly

    with pytest.warns(RuntimeWarning, match="signal 9, SIGKILL .* while it started"):
        assert [0, 1, 2] == list(Processes(1).run(once_deadly.f, range(3), depth=2))
    assert (tmp_path / "mark").exists()


# Processes: what travels, and how they start


def test_the_function_is_sent_once_to_each_worker(tmp_path):
    """Not with each item, and not again for a second run with the same function."""
    function = work.Arrives(tmp_path)
    with Processes(2) as pool:
        pids = [*pool.run(function, range(20), depth=8), *pool.run(function, range(20), depth=8)]
    assert len(set(pids)) == len(list(tmp_path.iterdir())) == 2


def test_kept_results_hold_no_file_handles(tmp_path):
    """MEM-02: two thousand results kept under a limit of 256 handles."""
    code = """
    import resource
    import work
    from mmdp.executors import Processes

    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    kept = list(Processes(2).run(work.array, [2**16] * 2000, depth=8))
    print(len(kept), sum(array.nbytes for array in kept))
    """
    exit_code, out, err = Program(tmp_path, code).end()
    assert (0, f"2000 {2000 * 2**16}\n") == (exit_code, out), err


SCRIPT = """
import os
import work
from mmdp.executors import Processes

def own(item):
    return -item

def main():
    print(list(Processes(2, {method!r}).run({function}, range(4), depth=2)))

{guard}
"""
GUARDED, BARE = 'if __name__ == "__main__":\n    main()', "main()"


@pytest.mark.parametrize(
    ("method", "function", "guard"),
    [
        ("spawn", "work.double", GUARDED),
        ("spawn", "work.double", BARE),
        ("spawn", "own", GUARDED),
        ("fork", "own", BARE),
        ("forkserver", "own", GUARDED),
    ],
)
def test_ways_to_start(tmp_path, method, function, guard):
    """All start methods; and a spawned worker needs the main script only for a function that is defined there."""
    exit_code, out, err = Program(tmp_path, SCRIPT.format(method=method, function=function, guard=guard)).end()
    assert (0, "[0, 2, 4, 6]\n" if "double" in function else "[0, -1, -2, -3]\n") == (exit_code, out), err


def test_a_bare_script_with_a_function_of_its_own_is_told_how_to_mend(tmp_path):
    """No bomb of processes, and no riddle."""
    program = Program(tmp_path, SCRIPT.format(method="spawn", function="own", guard=BARE))
    exit_code, _, err = program.end()
    assert 1 == exit_code
    assert 'put what the script does under `if __name__ == "__main__":`' in err


def test_processes_live_for_a_run_or_for_a_block():
    """Outside a block each run has new ones; inside they serve every run."""
    pool = Processes(1)
    alone = [set(pool.run(work.process_id, range(2), depth=2)) for _ in range(2)]
    assert alone[0].isdisjoint(alone[1])
    with pool:
        together = [set(pool.run(work.process_id, range(2), depth=2)) for _ in range(2)]
        assert together[0] == together[1]
    assert [] == still_running(together[0])


def test_executors_pickle_without_their_workers(with_workers):
    """A data set that holds one can go to another process."""
    run, _ = started(with_workers, work.double, range(6))
    again = pickle.loads(pickle.dumps(with_workers))
    run.close()
    assert (type(with_workers), 2) == (type(again), again.num_workers)


def test_no_torch():
    """A worker that needs no torch doesn't pay for it."""
    code = "import sys, mmdp.executors; print(sorted({'torch', 'numpy', 'PIL'} & set(sys.modules)))"
    assert "[]\n" == subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    code = code.replace("executors", "worker_process")
    assert "[]\n" == subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout


# What a user may get wrong


def test_executors_by_name():
    """`executor` makes them, with a worker for each processor by default."""
    assert isinstance(executor("inline"), Inline)
    assert isinstance(executor("threads", 3), Threads)
    assert 3 == executor("processes", 3).num_workers
    assert 1 <= executor("threads").num_workers <= os.cpu_count()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: executor("thread", 2), "no executor is called 'thread': choose inline, threads, processes or ray"),
        (lambda: executor("threads", 0), "0 workers do nothing"),
        (lambda: Processes(-1), "-1 workers do nothing"),
        (lambda: Processes(2, "fork server"), "no start method 'fork server' here"),
        (lambda: Threads(2).run(work.double, [], depth=0), "a depth of 0"),
        (lambda: Inline().run(work.double, [], depth=0), "a depth of 0"),
        (lambda: Threads(2).run(work.double, [], depth=1, max_weight=5), "give `weight` too"),
        (lambda: Threads(2).run(work.double, [], depth=1, weight=abs, max_weight=0), "a max_weight of 0"),
        (lambda: Threads(2).run(work.double, [], depth=1, timeout=0), "a timeout of 0 s"),
    ],
)
def test_wrong_arguments_are_told(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_exits_have_names():
    assert "exit code 3" == name_exit(3)
    assert "signal 11, SIGSEGV" == name_exit(-11)
    assert "signal 40" == name_exit(-40)
    assert "an unknown exit code" == name_exit(None)
