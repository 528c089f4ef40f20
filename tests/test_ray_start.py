"""Laws of a Ray that is started, joined and left: whoever starts it ends it, and nothing of it stays."""

import ast
import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from pathlib import Path

import psutil
import pytest

import mmdp
from mmdp import ray_local, ray_start
from mmdp.ray_start import Session, load_ray

TESTS = Path(__file__).parent
SECONDS = 30  # in which a thing that ends "promptly" must have ended, however busy the machine is

PROGRAM = """
import itertools, signal, threading
import work
from mmdp import ray_start
from mmdp.ray_executor import RayExecutor

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs these tests in the background ignores it

sessions = []
starts = threading.Thread(target=lambda: sessions.append(ray_start.Session()))
starts.start()
starts.join()
with RayExecutor(1) as actors:
    for result in actors.run(work.short, itertools.count(), depth=4):
        if result == 3:
            sessions.pop().close()
            print(ray_start._hold.local.folder, flush=True)
"""


def environment() -> dict[str, str]:
    """For a program that has no Ray yet, and imports what tests do."""
    path = os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {"PYTHONPATH": path}


def listening(processes: list[psutil.Process]) -> dict[str, set[str]]:
    """Names of processes, to the addresses where they listen."""
    found: dict[str, set[str]] = {}
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            for at in process.net_connections("inet"):
                if at.status == psutil.CONN_LISTEN:
                    address = at.laddr.ip.removeprefix("::ffff:")  # of a socket that could do IPv6 as well
                    found.setdefault(process.name().split(".")[0], set()).add(address)
    return found


@pytest.fixture(scope="module")
def own() -> dict:
    """A program that starts a Ray of its own in a thread that ends, works on it, and is ended by Ctrl-C."""
    shared_before = set(Path("/dev/shm").iterdir())
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env=environment(),
    )
    folder = process.stdout.readline().strip()
    assert folder, process.communicate(timeout=60)[1]
    was_there = Path(folder).is_dir()
    program = psutil.Process(process.pid)
    family = program.children(recursive=True)
    heard = listening([program, *family])
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    _, alive = psutil.wait_procs(family, SECONDS)
    return {
        "family": len(family),
        "heard": heard,
        "code": process.returncode,
        "err": err,
        "alive": alive,
        "folder": (was_there, Path(folder).exists()),
        "shared": {path for path in Path("/dev/shm").iterdir() if "plasma" in path.name} - shared_before,
    }


def test_a_ray_of_our_own_ends_with_the_program(own):
    """Law 9: after Ctrl-C there is no process, no file and no shared memory left, and nothing was printed by Ray."""
    assert -signal.SIGINT == own["code"], own["err"]
    assert own["err"].startswith("Traceback"), own["err"]
    assert own["err"].rstrip().endswith("KeyboardInterrupt"), own["err"]
    assert [] == own["alive"]
    assert (True, False) == own["folder"]
    assert set() == own["shared"]


TERMINATED = """
import itertools, signal, sys, threading, time

whose = sys.argv[1]
if whose == "own handler":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
if whose == "own ray":
    import ray

    ray.init(address="local", include_dashboard=False, logging_level="ERROR", log_to_driver=False)

import work
from mmdp.ray_executor import RayExecutor
from mmdp.ray_start import Session

try:
    if whose == "own handler":  # and Ray is started by another thread, as below `feed`
        starts = threading.Thread(target=Session)
        starts.start()
        starts.join()
    with RayExecutor(1, num_cpus=0.1) as actors:
        for result in actors.run(work.short, itertools.count(), depth=4):
            if result == 3:
                print("at work", flush=True)
finally:
    time.sleep(4)  # writes a checkpoint
    print("saved", flush=True)
"""


@pytest.mark.parametrize(
    ("whose", "code"),
    [
        pytest.param("own handler", 7, marks=pytest.mark.long),
        pytest.param("none", signal.SIGTERM, marks=pytest.mark.long),
        pytest.param("own ray", signal.SIGTERM, marks=pytest.mark.long),
    ],
)
def test_sigterm_ends_a_program_as_it_should(whose, code):
    """Preemption is no crash: however long the end takes, it is one by SystemExit, and no process is left.

    Ray's C++ takes the signal for itself and has the program aborted after 3 s.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", TERMINATED, whose],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        assert "at work" == process.stdout.readline().strip(), process.communicate(timeout=60)[1]
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert (code, "saved") == (process.returncode, out.strip()), err
    assert "SIGTERM" not in err
    assert len(family) > 4, "the case did not arise"
    assert [] == psutil.wait_procs(family, SECONDS)[1]


def test_sigterm_stays_with_python_in_every_thread():
    """What is written in C over the handler of the user, in whichever thread, is gone afterwards."""
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(threading.current_thread()))

    def taken():
        with ray_local.sigterm_stays():
            ctypes.CDLL(None).signal(int(signal.SIGTERM), ctypes.c_void_p(int(signal.SIG_IGN)))
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        for num_heard, thread in enumerate((threading.Thread(target=taken), threading.Thread(target=taken), None)):
            if thread is None:
                taken()
            else:
                thread.start()
                thread.join()
            assert num_heard == len(heard)
            os.kill(os.getpid(), signal.SIGTERM)
        assert 3 == len(heard)
    finally:
        signal.signal(signal.SIGTERM, before)


FORKS = """
import json, multiprocessing, sys, time
import ray, work

whose = sys.argv[1]


def child(sender, goes_to_ray):
    from mmdp import ray_start
    from mmdp.ray_coordinator import Coordinator
    from mmdp.ray_executor import RayExecutor
    from mmdp.ray_reader import RankReader

    plain, plan = parts()
    goes_to_ray |= {
        "session": ray_start.Session,
        "cpus": ray_start.total_cpus,
        "executor": lambda: list(RayExecutor(1).run(work.short, range(2), depth=2)),
        "executor of all": lambda: list(RayExecutor().run(work.short, range(2), depth=2)),
        "loader": lambda: next(iter(mmdp.Loader(plain, plain, plan, batch_size=2, executor="ray", num_workers=1))),
        "reader": RankReader,
        "coordinator": lambda: Coordinator(plain, plain, plan, batch_size=2),
    }
    for name, goes in goes_to_ray.items():
        start = time.monotonic()
        try:
            goes()
            error = "none"
        except RuntimeError as raised:
            error = str(raised)
        sender.send((name, error, time.monotonic() - start))
    sender.close()


def parts():
    global mmdp
    import mmdp
    from ray_work import Plain

    plain = Plain(12)
    return plain, mmdp.plan(mmdp.measure(plain, plain), mmdp.Budget(64, 2))


def forked(**goes_to_ray):
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=child, args=(sender, goes_to_ray))
    process.start()
    sender.close()
    heard = []
    try:
        while receiver.poll(60):
            heard.append(receiver.recv())
    except EOFError:
        pass
    process.kill()
    process.join()
    return heard


found = {}
if whose == "own ray":
    ray.init(address="local", include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    assert "mmdp.ray_start" not in sys.modules
    found["in use"] = forked()
    from mmdp.ray_executor import RayExecutor

    found["goes on"] = list(RayExecutor(1).run(work.short, range(3), depth=2))
else:
    from mmdp.ray_executor import RayExecutor

    with RayExecutor(1) as actors:
        run = actors.run(work.short, range(3), depth=1)
        goes_on = [next(run)]
        found["in use"] = forked(same=lambda: list(actors.run(work.short, range(2), depth=2)), open=lambda: list(run))
        found["goes on"] = [*goes_on, *run]
    assert not ray.is_initialized()
    found["over"] = forked()
print(json.dumps(found))
"""


@pytest.mark.parametrize("whose", ["none", pytest.param("own ray", marks=pytest.mark.long)])
def test_a_fork_is_refused_at_once(whose):
    """No thread of Ray survives a fork, so each way to Ray would wait for ever there; the parent goes on.

    Whoever had started Ray, also where mmdp is imported only in the fork; and where Ray is over, since none comes up.
    """
    done = subprocess.run(
        [sys.executable, "-c", FORKS, whose], capture_output=True, text=True, timeout=240, env=environment()
    )
    assert 0 == done.returncode, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert [0, 1, 2] == found.pop("goes on")
    assert {"none": {"in use", "over"}, "own ray": {"in use"}}[whose] == found.keys()
    ways = {"session", "cpus", "executor", "executor of all", "loader", "reader", "coordinator"}
    for when, heard in found.items():
        inherited = {"same", "open"} if (whose, when) == ("none", "in use") else set()
        assert ways | inherited == {name for name, *_ in heard}, f"{when}: {heard}"
        for name, error, seconds in heard:
            assert "was forked after" in error, name
            assert 'Start processes by "spawn"' in error, name
            assert seconds < SECONDS, name


HOLDER = """
import sys, time
from pathlib import Path
from mmdp import ray_local

kept = ray_local._lock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(ray_local.fcntl is None, reason="no locks of files on this system")
def test_what_a_killed_program_left_is_removed_by_the_next(tmp_path):
    """Not what is in use, and nothing that may be another's: a folder without a lock."""
    names = ("mmdp-ray-killed", "mmdp-ray-used", "mmdp-ray-without", "other")
    killed, used, without, other = folders = [tmp_path / name for name in names]
    for folder in folders:
        (folder / "session").mkdir(parents=True)
    holders = [
        subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(folder)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(TESTS.parent)},
        )
        for folder in (killed, used)
    ]
    try:
        assert ["held", "held"] == [holder.stdout.readline().strip() for holder in holders]
        ray_local.sweep(tmp_path)
        assert all(folder.exists() for folder in folders)
        holders[0].kill()
        holders[0].wait()
        ray_local.sweep(tmp_path)
        assert sorted(tmp_path.iterdir()) == sorted([used, without, other])
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()


def test_a_ray_of_our_own_outlives_the_thread_that_started_it(own):
    """Linux kills its processes with that thread, and all that was made on it; here an actor has worked since."""
    assert own["family"] > 4, own["err"]


def test_a_ray_of_our_own_listens_on_this_machine_alone(own):
    """Whoever reaches a port of Ray can run code: none is open on a network card, of no process."""
    assert {"127.0.0.1"} == set().union(*own["heard"].values()), own["heard"]
    assert {"gcs_server", "raylet", "ray::RowWorker", "python"} <= own["heard"].keys(), "the case did not arise"


# Who holds on to Ray, with one that starts at once


class FakeRay:
    """Says whether it is up."""

    is_up = False

    def is_initialized(self) -> bool:
        return self.is_up

    def get_runtime_context(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(gcs_address="127.0.0.1:7")

    def shutdown(self) -> None:
        self.is_up = False


class FakeLocal:
    """A Ray of our own, made of that one."""

    def __init__(self, ray: FakeRay, *_: object) -> None:
        self.ray = ray
        ray.is_up = True

    def end(self) -> None:
        self.ray.shutdown()


@pytest.fixture
def fake(monkeypatch) -> FakeRay:
    ray = FakeRay()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_start, "_hold", ray_start._Hold())
    monkeypatch.setattr(ray_start, "load_ray", lambda **_: ray)
    monkeypatch.setattr(ray_start, "LocalRay", FakeLocal)
    nothing = types.SimpleNamespace(register=lambda _: None, unregister=lambda _: None)
    monkeypatch.setattr(ray_start, "atexit", nothing)  # the exit of this program is that of a real one
    return ray


def test_the_last_who_lets_go_ends_it(fake):
    """Each counts once, however often it is closed; then another one may start."""
    for _ in range(2):
        one, other = Session(), Session()
        for _ in range(3):
            one.close()
            assert fake.is_up
        other.close()
        assert not fake.is_up


def test_who_held_on_to_one_that_is_over_ends_no_other(fake):
    """A user has shut Ray down, and another was started since."""
    old = Session()
    fake.shutdown()
    new = Session()
    old.close()
    assert fake.is_up
    new.close()
    assert not fake.is_up


def test_a_copy_in_a_fork_ends_nothing(fake, monkeypatch):
    """A fork has the objects of its parent, and the garbage collector closes them there as well."""
    session = Session()
    with monkeypatch.context() as fork:
        fork.setattr(os, "getpid", lambda: -1)
        session.close()
        ray_start._end_with_program()
    assert fake.is_up
    session.close()
    assert not fake.is_up


def test_letting_go_never_waits_for_the_end_of_ray(fake, monkeypatch):
    """The garbage collector closes sessions in any thread, in one too that is waited for while Ray ends."""
    session, other = Session(), Session()
    waited = []

    def end(self):
        thread = threading.Thread(target=other.close, daemon=True)  # such as a thread of Ray
        thread.start()
        thread.join(5)
        other.close()
        waited.append(thread.is_alive())
        fake.shutdown()

    monkeypatch.setattr(FakeLocal, "end", end)
    other.close()
    session.close()
    assert [False] == waited
    assert not fake.is_up


def test_who_lets_go_while_ray_starts_is_not_forgotten(fake, monkeypatch):
    """He goes on at once; the one that starts sees to it, and ends nothing that is wanted."""
    begun, go = threading.Event(), threading.Event()

    def start(self, ray, *_):
        begun.set()
        assert go.wait(10)
        self.ray = ray
        ray.is_up = True

    monkeypatch.setattr(FakeLocal, "__init__", start)
    sessions = []
    thread = threading.Thread(target=lambda: sessions.append(Session()))
    thread.start()
    assert begun.wait(10)
    older = Session.__new__(Session)
    older._token, older._pid = object(), os.getpid()
    older.close()
    assert [older._token] == list(ray_start._hold.let_go), "it has not waited"
    go.set()
    thread.join(10)
    assert [] == list(ray_start._hold.let_go)
    assert fake.is_up
    sessions[0].close()
    assert not fake.is_up


def test_the_program_waits_for_a_thread_that_ends_ray(fake, monkeypatch):
    """A daemon is cut off with the program: the folder would stay."""
    begun, ended = threading.Event(), []

    def end(self):
        begun.set()
        time.sleep(0.3)
        ended.append(True)
        fake.shutdown()

    monkeypatch.setattr(FakeLocal, "end", end)
    session = Session()
    thread = threading.Thread(target=session.close, daemon=True)
    thread.start()
    assert begun.wait(10)
    ray_start._end_with_program()
    assert [True] == ended
    thread.join(10)


# What is there


def test_a_ray_that_is_there_is_used_and_left_alone(ray_cluster):
    """Several hold on to it; each lets go once, and it lives on."""
    sessions = [Session() for _ in range(3)]
    assert {ray_cluster.address} == {session.address for session in sessions}
    for session in [*sessions, *sessions]:
        session.close()
    assert load_ray().is_initialized()
    assert ray_start.total_cpus() >= 4
    assert ray_start.store_bytes() > 2**27
    assert 0 <= ray_start.used_store_bytes() < ray_start.store_bytes()
    assert 0 < ray_start.free_cpus() <= ray_start.total_cpus() == ray_start.expected_cpus(None)


def test_two_clusters_at_once_are_refused(ray_cluster):
    """A program is on one cluster at a time: the error names both."""
    with pytest.raises(
        ValueError, match=rf"on the Ray cluster at {ray_cluster.address}, not on the one at 127.0.0.1:1"
    ):
        Session("127.0.0.1:1")


def test_only_some_modules_know_ray():
    """Whoever does not use Ray never imports it: it is named in `ray_*.py` alone."""
    for path in Path(mmdp.__file__).parent.rglob("*.py"):
        imports = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imports |= {name.name.split(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imports.add((node.module or "").split(".")[0])
        assert "ray" not in imports or path.name.startswith("ray_"), path.name


def test_settings_are_the_users_where_he_has_set_them(monkeypatch):
    """Nothing that stands in the environment is overwritten."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED", raising=False)
    load_ray(starts=True)
    assert "token" == os.environ["RAY_AUTH_MODE"]
    assert "0" == os.environ["RAY_USAGE_STATS_ENABLED"]
    assert "0" == os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"]


@pytest.mark.parametrize("said", [None, "1"])
def test_workers_are_plain_python_whoever_imported_ray_first(said, monkeypatch):
    """Below `uv run` Ray would have uv build an environment for each of them; it reads that when it is imported."""
    from ray._private import ray_constants

    name = "RAY_ENABLE_UV_RUN_RUNTIME_ENV"
    monkeypatch.setattr(ray_constants, name, True)
    if said is None:
        monkeypatch.delenv(name, raising=False)
    else:
        monkeypatch.setenv(name, said)
    load_ray()
    assert getattr(ray_constants, name) is (said is not None)
    assert (said or "0") == os.environ[name]


def test_a_cluster_that_is_not_there_is_told():
    """Law 11: at once, with the remedy; Ray itself would try for minutes."""
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"no Ray can be joined at 127.0.0.1:1: .* Start one"):
        ray_start._join(load_ray(), "127.0.0.1:1")
    assert time.monotonic() - start < 15


def test_an_address_may_be_written_in_several_ways(ray_cluster):
    """By number, by the machine's own name for itself, or not at all."""
    port = ray_cluster.address.rsplit(":", 1)[1]
    for address in (ray_cluster.address, f"127.0.0.1:{port}", "auto"):
        Session(address).close()


# A plain `ray start`, by a user who has a token

JOINER = """
import json, os, sys, time
from mmdp import ray_start
from mmdp.ray_start import Session

address, elsewhere = sys.argv[1:]
errors, start = {}, time.monotonic()
for name, settings in {
    "said otherwise": {"RAY_AUTH_MODE": "disabled"},
    "another token": {"RAY_AUTH_TOKEN": "0" * 64},
    "no token": {"HOME": elsewhere},
    "no token, as it is said": {"HOME": elsewhere, "RAY_AUTH_MODE": "token"},
}.items():
    before = dict(os.environ)
    os.environ.update(settings)
    try:
        Session(address)
    except RuntimeError as error:
        errors[name] = str(error)
    assert before | settings == {name: os.environ[name] for name in before | settings}
    os.environ.clear()
    os.environ.update(before)
seconds = time.monotonic() - start
session = Session(address)
cpus, mode = ray_start.total_cpus(), os.environ.get("RAY_AUTH_MODE")
session.close()
print(json.dumps([errors, seconds, cpus, mode, os.environ.get("RAY_AUTH_MODE")]))
"""


@pytest.mark.long
def test_a_plain_ray_start_is_joined_as_it_is(tmp_path):
    """Its user has a token, so Ray asks for it. It is shown without a word, or the error says at once what to set."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    (home / ".ray").mkdir(parents=True)
    (home / ".ray" / "auth_token").write_text("1" * 64)
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= {"HOME": str(home), "PYTHONPATH": str(TESTS.parent)}
    ray_folder = tempfile.mkdtemp(prefix="mmdp-plain-", dir="/tmp")  # the path of a socket must be short
    options = ("--head", f"--port={port}", f"--temp-dir={ray_folder}", "--include-dashboard=false", "--num-cpus=3")
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", *options, "--disable-usage-stats", "--block"]
    node = subprocess.Popen(ray, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said = []
        for line in node.stdout:
            said.append(line)
            if "Ray runtime started" in line:
                break
        assert any("Token authentication is enabled" in line for line in said), "".join(said)
        done = subprocess.run(
            [sys.executable, "-c", JOINER, f"127.0.0.1:{port}", elsewhere],
            env=env,
            capture_output=True,
            text=True,
            timeout=100,
        )
    finally:
        node.terminate()
        node.communicate(timeout=60)
        shutil.rmtree(ray_folder, ignore_errors=True)
    assert 0 == done.returncode, done.stderr
    errors, seconds, cpus, mode, mode_after = json.loads(done.stdout.splitlines()[-1])
    assert (3, "token", None) == (cpus, mode, mode_after)
    assert "" == done.stderr
    assert seconds < 10, "Ray itself tries for 20 s"
    remedy = f"the Ray at 127.0.0.1:{port} asks for a token: set RAY_AUTH_MODE=token here (or =disabled at `ray start`)"
    assert remedy == errors["said otherwise"]
    assert errors["no token"].startswith(f"{remedy}; there is none here, in RAY_AUTH_TOKEN")
    assert "asks for another token than there is here" in errors["another token"]
    assert errors["no token, as it is said"].startswith("RAY_AUTH_MODE is token, and there is no token here")
