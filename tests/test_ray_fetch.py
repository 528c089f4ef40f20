"""Laws of waiting for Ray's objects: each is asked for once, however long it takes; and no wait is without an end."""

import ast
import asyncio
import time
from pathlib import Path

import numpy as np
import pytest

import mmdp
from mmdp import ray_call, ray_fetch
from mmdp.ray_call import CallStopped, answer
from mmdp.ray_executor import read
from mmdp.ray_fetch import BlockLost, fetch, fetched
from mmdp.ray_job import Built
from mmdp.ray_start import load_ray
from mmdp.ray_worker import Meta, pack, unpack

pytest.importorskip("ray")

NUM_BYTES = 2**20  # more than what comes with the answer of a call


class Maker:
    """Makes a block of ones, after a while."""

    def make(self, seconds: float):
        time.sleep(seconds)
        return pack(np.ones(NUM_BYTES, np.uint8))


class Counted:
    """A reference, and how often its object is asked for."""

    def __init__(self, ref):
        self.ref = ref
        self.asked = 0

    def future(self):
        self.asked += 1
        return self.ref.future()


@pytest.fixture(scope="module")
def make(ray_cluster):
    """A block that comes after some seconds: a reference that counts."""
    ray_cluster.ray.cloudpickle.register_pickle_by_value(__import__(__name__))
    actor = ray_cluster.ray.remote(Maker).options(num_cpus=0.1).remote()
    ray_cluster.ray.get(actor.make.remote(0))  # it is up
    yield lambda seconds: Counted(actor.make.remote(seconds))
    ray_cluster.ray.kill(actor)


@pytest.fixture
def looks(monkeypatch) -> list[str]:
    """Waits look about twenty times a second; the nodes that they have looked at, of which all live."""
    seen: list[str] = []
    monkeypatch.setattr(ray_call, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(ray_fetch, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(ray_fetch, "is_alive", lambda node: not seen.append(node))
    return seen


def built(ref) -> Built:
    return Built(Meta(NUM_BYTES), ref, "a node")


@pytest.mark.parametrize(
    "wait",
    [
        lambda refs, _: fetch([*map(built, refs)], 30),
        lambda refs, _: [asyncio.run(fetched(built(ref))) for ref in refs],
        lambda refs, looks: [answer(ref, "it", 30, lambda: bool(looks.append("asked"))) for ref in refs],
    ],
    ids=["fetch", "fetched", "answer"],
)
def test_an_object_is_asked_for_once_however_long_it_takes(make, looks, wait):
    """A second request would begin the transfer anew, and over a slow link it never came. A look asks for nothing."""
    refs = [make(0.5), make(0)]
    blocks = wait(refs, looks)
    assert [1, 1] == [ref.asked for ref in refs]
    assert len(looks) > 3, "the case did not arise: nobody looked while it waited"
    assert all((unpack(block) == 1).all() for block in blocks)


def test_nothing_asks_for_an_object_in_a_loop():
    """The kind: with `get` or `wait` of Ray in a loop, each round gives up what the one before had under way."""
    in_loops, all_of_them = [], []
    for path in Path(mmdp.__file__).parent.glob("ray_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            calls = [f"{path.name}: {ast.unparse(call)}" for call in ast.walk(node) if asks(call)]
            if isinstance(node, ast.Module):
                all_of_them += calls
            elif isinstance(node, ast.For | ast.While | ast.AsyncFor | ast.comprehension):
                in_loops += calls
    assert [] == in_loops
    assert all_of_them, "the case did not arise: nobody knows such a call any more"


def asks(node: ast.AST) -> bool:
    """Whether it is a call of Ray's `get` or `wait`."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("get", "wait")
        and ast.unparse(node.func.value).endswith(("ray", "load_ray()"))
    )


def test_a_wait_that_is_given_up_gives_up_no_transfer(make):
    """The time is over: told so, in time; who asks again gets it."""
    ref = make(0.5)
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="the block has not come within 0 s"):
        read(ref, timeout=0.1)
    assert time.monotonic() - start < 0.5
    assert (read(ref) == 1).all()
    with pytest.raises(TimeoutError, match="a row has not come within 0 s"):
        fetch([built(make(0.3))], 0.1)


def test_a_wait_ends_when_nobody_wants_the_block(make, looks):
    """At once, whatever is under way."""
    start = time.monotonic()
    with pytest.raises(CallStopped):
        fetch([built(make(1))], 30, lambda: time.monotonic() > start + 0.2)
    assert time.monotonic() - start < 1


def test_a_block_whose_node_has_gone_is_lost(make, looks, monkeypatch):
    """Law 11: where Ray does not say so, the wait finds out."""
    monkeypatch.setattr(ray_fetch, "is_alive", lambda _: False)
    with pytest.raises(BlockLost, match="its node is gone"):
        fetch([built(make(0)), built(make(0.5))], 30)
    with pytest.raises(BlockLost, match="its node is gone"):
        asyncio.run(fetched(built(make(0.5))))


def test_what_a_call_raised_comes_out_as_it_is(ray_cluster, make):
    """Class and message; and the first error does not wait for what else is awaited."""
    with pytest.raises(TypeError, match="'str' object"):
        answer(make("no number").ref, "it", 30)
    fails, slow = make("no number"), make(0)
    with pytest.raises(load_ray().exceptions.RayTaskError):
        fetch([built(slow), built(fails)], 30)
