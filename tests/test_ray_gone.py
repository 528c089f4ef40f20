"""Laws of a partner that has gone: whoever asks it is told in one line, and whoever closes is not troubled.

The errors are Ray's own, with messages as Ray 2.60 writes them; but for the last test no Ray runs here.
"""

import asyncio
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest

from mmdp import ray_coordinator, ray_reader
from mmdp.ray_actor import ActorGone, patiently
from mmdp.ray_call import answer, gone_errors, told
from mmdp.ray_coordinator import Coordinator
from mmdp.ray_deal import Terms
from mmdp.ray_executor import read
from mmdp.ray_fetch import BlockLost, fetch, fetched
from mmdp.ray_job import Built
from mmdp.ray_reader import RankReader
from mmdp.ray_start import load_ray
from mmdp.ray_watch import raylet_pid, watch
from mmdp.ray_worker import Meta

pytest.importorskip("ray")

MEMORY = "1 worker(s) were killed due to the node running low on memory."
ROOM = "Memory on the node (IP: 10.0.0.7, ID: 4f1c) was 22.87GB used / 23.54GB limit (0.971)"
OUT_OF_MEMORY = "\n".join(
    [
        f"{MEMORY} {ROOM}, which exceeds the memory usage threshold of 0.95.",
        "Worker 7a11: pid 4711, ray::Dealer, 18.2 GB",
        *(f"{pid}\t0.{pid} GB\tpython" for pid in range(10)),
        "Refer to the documentation on how to address the out of memory issue: https://docs.ray.io/en/latest/",
    ]
)
KILLED = (
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker "
    "unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) OOM killer"
)
NODE = "The actor died because its node has died. Node Id: 0xabc\n\tthe actor's node was terminated unexpectedly"
CONSTRUCTOR = (
    "The actor died because of an error raised in its creation task, ray::RowWorker.__init__() (pid=3)\n"
    "  File \"mmdp/ray_worker.py\", line 3, in __init__\nModuleNotFoundError: No module named 'mine'"
)


def death(kind: str) -> Exception:
    """An error of Ray by the name of its class, or of what it tells."""
    errors = load_ray().exceptions
    if kind == "OutOfMemoryError":
        return errors.OutOfMemoryError(OUT_OF_MEMORY)
    if kind == "NodeDiedError":
        return errors.NodeDiedError("The node 4f1c has died.")
    if kind == "ActorUnavailableError":
        return errors.ActorUnavailableError("rpc error", b"1" * 16)
    if kind == "constructor":
        return errors.RayActorError("a1", CONSTRUCTOR, actor_init_failed=True)
    if kind in ("killed", "node"):
        cause = errors.ActorDiedErrorContext(
            class_name="RowWorker", actor_id=b"1" * 16, pid=7, error_message=KILLED if kind == "killed" else NODE
        )
        return errors.ActorDiedError(cause)
    return getattr(errors, kind)()


TOLD = {
    "OutOfMemoryError": re.escape(f"'{MEMORY} {ROOM}, which exceeds"),
    "NodeDiedError": "The node 4f1c has died.",
    "ActorUnavailableError": "The actor .* is unavailable: rpc error",
    "WorkerCrashedError": "The worker died unexpectedly",
    "LocalRayletDiedError": "local raylet died",
    "killed": "^'Worker unexpectedly exits with a connection error code 2. End of file.'$",
    "node": "^'The actor died because its node has died. Node Id: 0xabc'$",
    "constructor": "^\"ModuleNotFoundError: No module named 'mine'\"$",
}


@dataclass
class Ref:
    """A reference to what comes, or fails."""

    outcome: Any

    def future(self) -> Future:
        future: Future = Future()
        if isinstance(self.outcome, Exception):
            future.set_exception(self.outcome)
        else:
            future.set_result(self.outcome)
        return future


@dataclass
class Partner:
    """An actor that answers `answers`, and to all other calls says that it has gone; or Ray itself has gone.

    Attributes:
        asked: the methods that were called.
    """

    gone: Exception
    answers: dict[str, Any] = field(default_factory=dict)
    ray_is_there: bool = True
    asked: list[str] = field(default_factory=list)

    def __getattr__(self, method: str) -> Any:
        def remote(*_arguments: Any, **_more: Any) -> Ref:
            self.asked.append(method)
            if method not in self.answers and not self.ray_is_there:
                raise self.gone
            return Ref(self.answers.get(method, self.gone))

        return type("Method", (), {"remote": staticmethod(remote)})


class FakeSession:
    """A hold on Ray; says whether it was let go."""

    def __init__(self, address: str | None = None) -> None:
        self.num_closed = 0
        self.ray = self

    def close(self) -> None:
        self.num_closed += 1

    def kill(self, actor: Any) -> None: ...

    def get_runtime_context(self) -> "FakeSession":
        return self

    def get_node_id(self) -> str:
        return "node"


@pytest.fixture
def session(monkeypatch) -> FakeSession:
    made = FakeSession()
    for module in (ray_reader, ray_coordinator):
        monkeypatch.setattr(module, "Session", lambda *_, **__: made)
        monkeypatch.setattr(module, "program_id", lambda: "program")
    return made


def reader_of(partner: Partner, monkeypatch) -> RankReader:
    partner.answers["join"] = Terms("plan", 1, 1, False, 64, 0, False, 10), {"cursor": 0}
    monkeypatch.setattr(ray_reader, "find", lambda *_: partner)
    return RankReader("theirs")


def coordinator_of(partner: Partner, session: FakeSession) -> Coordinator:
    """One that this program made, with the thread that listens; without the plan that it was made of."""
    made = object.__new__(Coordinator)
    made.name, made._actor, made._session = "theirs", partner, session
    made._is_open = made._is_maker = True
    made._is_over = threading.Event()
    made._listener = threading.Thread(target=ray_coordinator._listen, args=(partner, "theirs", made._is_over))
    made._listener.start()
    return made


@pytest.mark.parametrize("kind", TOLD)
def test_whoever_asks_is_told_in_one_line_how_it_ended(kind):
    """Law: of all that mean so; what says something is quoted, not the advice behind it."""
    with pytest.raises(
        RuntimeError, match=r"it has died, and with it the rows it had .* go on from the last state"
    ) as one:
        answer(Ref(death(kind)), "it", 1)
    assert type(death(kind)).__name__ in str(one.value)
    assert told(death(kind)) in str(one.value)
    with pytest.raises(ActorGone, match=TOLD[kind]) as other:
        asyncio.run(patiently(Ref(death(kind)), 1))
    for text in (str(one.value), str(other.value)):
        assert "\n" not in text
        assert "Refer to the documentation" not in text
        assert len(text) < 500


def test_all_that_mean_so_are_met():
    """The case arises for each class of the tuple; and what is no death stays what it is."""
    assert all(any(isinstance(death(kind), gone) for kind in TOLD) for gone in gone_errors())
    full = load_ray().exceptions.ObjectStoreFullError("full")
    with pytest.raises(type(full)):
        answer(Ref(full), "it", 1)


def test_a_row_of_a_worker_that_was_killed_for_memory_is_lost():
    """Law: so it is made again, as one whose node has gone."""
    lost = Built(Meta(1), Ref(death("OutOfMemoryError")), "node")
    with pytest.raises(BlockLost, match="OutOfMemoryError"):
        fetch([lost], 1)
    with pytest.raises(BlockLost, match="OutOfMemoryError"):
        asyncio.run(fetched(lost))
    with pytest.raises(RuntimeError, match=r"the block is gone \(OutOfMemoryError\)"):
        read(lost.block)


@pytest.mark.parametrize("ray_is_there", [True, False])
@pytest.mark.parametrize("kind", ["OutOfMemoryError", "killed"])
def test_closing_a_reader_whose_partner_has_gone_is_no_error(session, monkeypatch, kind, ray_is_there):
    """Law: so a `with` is left as its body left it; and the hold on Ray is let go."""
    partner = Partner(death(kind))
    reader = reader_of(partner, monkeypatch)
    with pytest.raises(RuntimeError, match="the coordinator 'theirs' has died"):
        len(reader)
    partner.ray_is_there = ray_is_there
    reader.close()
    assert ["join", "remaining", "leave"] == partner.asked
    assert 1 == session.num_closed


@pytest.mark.parametrize("ray_is_there", [True, False])
@pytest.mark.parametrize("kind", ["OutOfMemoryError", "killed"])
def test_closing_a_coordinator_that_has_gone_is_no_error(session, kind, ray_is_there):
    """Law: nor does its listener end with a traceback; whoever asks it for numbers is told."""
    raised: list[Any] = []
    before, threading.excepthook = threading.excepthook, raised.append
    partner = Partner(death(kind))
    try:
        with coordinator_of(partner, session) as made:
            with pytest.raises(RuntimeError, match="the coordinator 'theirs' has died"):
                made.stats()
            partner.ray_is_there = ray_is_there
    finally:
        threading.excepthook = before
    assert {"heard", "stats", "all_gone"} == set(partner.asked)
    assert not made._listener.is_alive()
    assert [] == raised
    assert 1 == session.num_closed


def test_an_error_of_the_callers_own_comes_out_of_a_close(session, monkeypatch):
    """Law: Ctrl-C while it closes ends the program, and the hold on Ray is let go all the same."""
    reader = reader_of(Partner(death("killed")), monkeypatch)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ray_reader, "answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        reader.close()
    assert 1 == session.num_closed


# The Ray of this machine


@pytest.fixture
def process() -> Iterator[subprocess.Popen]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as made:
        yield made
        made.kill()


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "mmdp-raylet"]


needs_linux = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="nothing is watched but on Linux")


@needs_linux
def test_the_end_of_ray_is_told_before_it_ends_the_program(process, capsys):
    """Law: within moments, on standard error, with what to do; and no thread stays."""
    end = watch(process.pid, "rank 3")
    assert 1 == len(threads())
    process.kill()
    until = time.monotonic() + 10
    while threads() and time.monotonic() < until:
        time.sleep(0.01)
    said = capsys.readouterr()
    assert re.match("mmdp: rank 3: Ray has ended on this machine.*start again from the last state.*ray start", said.err)
    assert ("", 1) == (said.out, said.err.count("\n"))
    end()
    end()
    assert [] == threads()


@needs_linux
def test_who_has_closed_hears_nothing_of_the_end(process, capsys):
    """Law: an orderly end is none of the reader's concern; the same where there is nothing to watch."""
    end = watch(process.pid, "rank 3")
    assert 1 == len(threads()), "the case did not arise"
    end()
    assert [] == threads()
    process.kill()
    process.wait()
    for gone in (process.pid, None):
        watch(gone, "rank 3")()
    assert [] == threads()
    assert ("", "") == capsys.readouterr()


@needs_linux
def test_a_reader_watches_rays_own_process(session, monkeypatch, process, capsys):
    """Law: from when it has joined until it is closed."""
    monkeypatch.setattr(ray_reader, "raylet_pid", lambda: process.pid)
    with reader_of(Partner(death("killed")), monkeypatch):
        assert 1 == len(threads())
    assert [] == threads()


@needs_linux
def test_rays_own_process_is_found(ray_cluster):
    """The one that has the store of this machine: Ray calls it the raylet."""
    assert "raylet" == psutil.Process(raylet_pid()).name()
