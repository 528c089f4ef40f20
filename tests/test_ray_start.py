"""Laws of a Ray that is started, joined and left: whoever starts it ends it, and nothing of it stays."""

import ast
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import mmdp
from mmdp import ray_start
from mmdp.ray_start import Session, load_ray

TESTS = Path(__file__).parent
SECONDS = 30  # in which a thing that ends "promptly" must have ended, however busy the machine is

PROGRAM = """
import itertools, signal
import work
from mmdp import ray_start
from mmdp.ray_executor import RayExecutor

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs these tests in the background ignores it

with RayExecutor(1) as actors:
    for result in actors.run(work.short, itertools.count(), depth=4):
        if result == 3:
            print(ray_start._hold.folder, flush=True)
"""


def test_a_ray_of_our_own_ends_with_the_program(tmp_path):
    """Law 9: after Ctrl-C there is no process, no file and no shared memory left, and nothing was printed by Ray."""
    shared_before = set(Path("/dev/shm").iterdir())
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])},
    )
    folder = Path(process.stdout.readline().strip() or "nothing was printed")
    family = psutil.Process(process.pid).children(recursive=True)
    assert folder.is_dir(), process.stderr.read()
    assert len(family) > 4, "the case did not arise"
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert -signal.SIGINT == process.returncode, err
    assert err.startswith("Traceback"), err
    assert err.rstrip().endswith("KeyboardInterrupt"), err
    _, alive = psutil.wait_procs(family, SECONDS)
    assert [] == alive
    assert not folder.exists()
    assert set() == {path for path in Path("/dev/shm").iterdir() if "plasma" in path.name} - shared_before


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
