"""Hosts on one machine, and what placing workers on them is worth."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import hosts as benchmark_hosts  # noqa: E402 - found by the line above
from hosts import Host, Hosts, hosts, why_not  # noqa: E402

allowed = pytest.mark.skipif(why_not() is not None, reason=f"no hosts here: {why_not()}")

WAITS = """
import sys
sys.path.insert(0, {folder!r})
from hosts import Host, hosts
with hosts([Host("a", 10), Host("b")]) as here:
    sleeper = here.start("a", ["sleep", "{seconds}"])
    print(here.folder, flush=True)
    sleeper.wait()
"""


@pytest.fixture
def fresh():
    """What was found out about this machine is forgotten, before and after."""
    for cached in (benchmark_hosts.why_not, benchmark_hosts._user):
        cached.cache_clear()
    yield
    for cached in (benchmark_hosts.why_not, benchmark_hosts._user):
        cached.cache_clear()


def links() -> set[str]:
    """Network cards outside."""
    return {path.name for path in Path("/sys/class/net").iterdir()}


def num_running(argument: str) -> int:
    """Processes that were started with an argument, on whatever host."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += f"\0{argument}\0".encode() in path.read_bytes()
        except OSError:
            continue  # it has just ended
    return found


def is_soon(condition, seconds: float = 10.0) -> bool:
    """Whether a condition holds within some seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


@pytest.mark.usefixtures("fresh")
def test_another_system_is_told_to_take_linux(monkeypatch):
    """Where there are no namespaces at all, the reason names the system."""
    monkeypatch.setattr(benchmark_hosts.sys, "platform", "darwin")
    assert "this is darwin" in str(why_not())
    with pytest.raises(RuntimeError, match="Linux"), hosts([Host("a")]):
        pass


@pytest.mark.usefixtures("fresh")
@pytest.mark.skipif(sys.platform != "linux", reason="what is said on Linux")
def test_a_missing_tool_is_named(monkeypatch, tmp_path):
    """Without `ip` or `tc` the reason names them, and the package."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "ip, tc" in str(why_not())
    assert "iproute2" in str(why_not())


@pytest.mark.usefixtures("fresh")
@pytest.mark.skipif(sys.platform != "linux", reason="what is said on Linux")
def test_a_refusal_of_the_kernel_is_passed_on(monkeypatch, tmp_path):
    """Where `unshare` fails, the reason holds what it said, and what to change."""
    for tool in benchmark_hosts._TOOLS:
        (tmp_path / tool).write_text("#!/bin/sh\necho 'unshare failed: Operation not permitted' >&2\nexit 1\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert "Operation not permitted" in str(why_not())
    assert "root" in str(why_not())


@pytest.mark.parametrize(
    "wanted", [[], [Host("a"), Host("a")], [Host("a b")], [Host("a", 0)], [Host("a", float("nan"))]]
)
def test_hosts_that_cannot_be_are_refused(wanted):
    """No host, a name twice, a name that is none, a card that carries nothing: a ValueError before anything starts."""
    with pytest.raises(ValueError, match=r"host|card"), hosts(wanted):
        pass


@allowed
def test_a_card_carries_what_it_says_and_counts_it():
    """Bytes between hosts arrive at the rate of the slower card, and `sent` counts them; no link is seen outside."""
    before, num_bytes = links(), 1_000_000
    serve = "import socket\ns = socket.create_server(('', 5000))\nprint('up', flush=True)\nc, _ = s.accept()\n"
    take = "n = 0\nwhile data := c.recv(1 << 16):\n    n += len(data)\nprint(n, flush=True)"
    give = f"import socket\nwith socket.create_connection(('b', 5000)) as c:\n    c.sendall(bytes({num_bytes}))"
    with hosts([Host("a", 8), Host("b")]) as here:
        assert before == links()
        server = here.start("b", [sys.executable, "-c", serve + take])
        assert server.stdout is not None
        assert server.stdout.readline() == "up\n"
        start, sent = time.monotonic(), here.sent()["a"]
        here.run("a", [sys.executable, "-c", give])
        assert server.stdout.readline() == f"{num_bytes}\n"
        seconds = time.monotonic() - start
        assert num_bytes <= here.sent()["a"] - sent < 1.5 * num_bytes
        assert seconds > 0.8 * 8 * num_bytes / 8e6  # what passes at once, the bucket's burst, is less than a tenth


@allowed
def test_nothing_is_left_after_an_exception():
    """An exception ends all that runs on hosts, and their cards and folders go."""
    before = links()

    def use(here: Hosts) -> None:
        here.start("a", ["sleep", "98765"])
        here.run("b", ["sh", "-c", "setsid sleep 98766 > /dev/null 2>&1 &"])  # a daemon
        assert is_soon(lambda: num_running("98765") >= 1 and num_running("98766") >= 1)
        assert str(here.folder) not in Path("/proc/mounts").read_text()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), hosts([Host("a", 10), Host("b")]) as here:
        use(here)
    assert is_soon(lambda: num_running("98765") + num_running("98766") == 0)
    assert before == links()
    assert not here.folder.parent.exists()


@allowed
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_after_a_signal(number):
    """Ctrl-C and SIGTERM end everything in order; after SIGKILL nothing runs on, and only an empty folder is left."""
    before, seconds = links(), f"9{number:02d}43"
    program = WAITS.format(folder=str(BENCHMARKS), seconds=seconds)
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        assert is_soon(lambda: num_running(seconds) >= 1)
        process.send_signal(number)
        process.communicate(timeout=30)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode != 0
    assert is_soon(lambda: num_running(seconds) == 0)
    assert before == links()
    if number == signal.SIGKILL:
        assert not list(folder.iterdir())
        for path in folder.parent.iterdir():
            path.rmdir() if path.is_dir() else path.unlink()
        folder.parent.rmdir()
    assert not folder.parent.exists()


@allowed
@pytest.mark.long
@pytest.mark.timeout(600)
def test_spread_by_reference_beats_together_by_value(tmp_path):
    """On a cluster of slow cards, spreading workers and passing references gives at least 1.4 times the samples/s."""
    report = tmp_path / "cluster.json"
    command = [sys.executable, str(BENCHMARKS / "cluster.py"), "--quick", "--report", str(report)]
    subprocess.run(command, check=True, timeout=550)
    found = json.loads(report.read_text())
    cells = found["summary"]["quick"]
    assert [6] == found["rounds"][0][0]["workers_per_node"]  # the case arose: all on one card
    assert [3, 3] == found["rounds"][0][1]["workers_per_node"]
    assert cells["spread by reference"]["gain"][0] >= 1.4
