"""A loop goes on in the process that it began in, and nowhere else."""

import os
import select

import pytest
from runs import digest, in_child, make_parts

import mmdp
from mmdp.executors import Processes

SECONDS = 20  # for what takes a moment


def answer_of_fork(function) -> str:
    """What the function gives or raises in a fork of this process; "nothing" where that waits."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        try:
            said = str(function())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writes, said.encode())
        os._exit(0)
    try:
        if not select.select([reads], [], [], SECONDS)[0]:
            os.kill(child, 9)
            return "nothing"
        return os.read(reads, 10_000).decode()
    finally:
        os.waitpid(child, 0)
        os.close(reads)
        os.close(writes)


def fork_within(parts, executor, is_fed: bool) -> tuple[str, str, list[str]]:
    """The process forks after a batch: what the fork gets of that loop and of one of its own; all batches here."""
    loader = mmdp.Loader(*parts, batch_size=2, executor=executor)
    with loader, mmdp.feed(loader, "cpu") as fed:
        loop = iter(fed if is_fed else loader)
        got = [digest(next(loop))]
        old = answer_of_fork(lambda: next(loop))
        new = answer_of_fork(lambda: sum(1 for _ in mmdp.Loader(*parts, batch_size=2)))
        return old, new, got + [digest(batch) for batch in loop]


@pytest.mark.parametrize(
    ("executor", "is_fed"),
    [("inline", True), ("threads", False), (Processes(2, "forkserver"), False)],
    ids=["feed", "threads", "processes"],
)
def test_an_open_loop_is_refused_in_a_fork(tmp_path, executor, is_fed):
    """Law 9: its threads are not there, so it would wait for ever. A new loop there works; this one goes on here."""
    parts = make_parts(tmp_path)
    with mmdp.Loader(*parts, batch_size=2) as loader:
        alone = [digest(batch) for batch in loader]
    old, new, batches = in_child(fork_within, parts, executor, is_fed)
    assert old.startswith("RuntimeError: this loop began in process ")
    assert "Begin a loop here" in old
    assert str(len(alone)) == new
    assert alone == batches
