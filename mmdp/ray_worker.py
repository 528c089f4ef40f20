"""What an actor does with an item, and how values travel between it and the consumer.

Adds: `RowWorker`, the class of every worker actor; `pack` and `unpack`, a value as a block and back; `Meta`, the few
bytes that say what became of an item; `TwoPhase`, a function that fetches before it computes.
Leaves out: who asks which worker (`ray_pool`), what a program sees of it (`ray_executor`, `ray_coordinator`).

A worker never waits on its event loop (an actor whose loop stands still fetches nothing):

| function | runs |
|---|---|
| any callable | in the actor's threads, as many as it takes items at a time: it may wait for a disk or a net |
| with `fetch` and `assemble` | `fetch` on the event loop, many at a time; `assemble` in a thread for each of its CPUs |

A result is a block of plain memory: a pickle, and beside it the memory of its large arrays as they are. It goes into
Ray's object store as the result of a task, so it belongs to whoever asked, and outlives the worker. Only `Meta` comes
back at once; a block is moved when somebody asks for it, straight to him.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np

from mmdp.ray_start import load_ray
from mmdp.ray_warnings import Heard, Warned
from mmdp.wire import Report

_INSIDE_BYTES = 16 * 2**10  # below this, a copy inside the pickle is cheaper than a part of its own

Item = TypeVar("Item", contravariant=True)
Fetched = TypeVar("Fetched")
Result = TypeVar("Result", covariant=True)


@runtime_checkable
class TwoPhase(Protocol[Item, Fetched, Result]):
    """A function that waits for the net in one phase, and computes in the other."""

    async def fetch(self, item: Item) -> Fetched:
        """What the item needs from afar. It runs on an event loop, and must never block it."""

    def assemble(self, fetched: Fetched) -> Result:
        """The result of it. It runs in a thread."""


class Block(NamedTuple):
    """A value as plain memory.

    Attributes:
        pickled: the value without its large arrays.
        arrays: the memory of each, (bytes,) uint8.
    """

    pickled: bytes
    arrays: tuple[np.ndarray, ...]

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return len(self.pickled) + sum(array.nbytes for array in self.arrays)


def pack(value: Any) -> Block:
    """A value as a block. Large arrays are not copied, so they must stay as they are until the block has gone.

    What is defined in a script or a notebook travels by value.
    """
    arrays: list[np.ndarray] = []

    def stays_inside(buffer: pickle.PickleBuffer) -> bool:
        memory = buffer.raw()
        if memory.nbytes < _INSIDE_BYTES:
            return True
        arrays.append(np.frombuffer(memory, dtype=np.uint8))
        return False

    pickled = load_ray().cloudpickle.dumps(value, protocol=5, buffer_callback=stays_inside)
    return Block(pickled, tuple(arrays))


def unpack(block: Block, *, views: bool = False) -> Any:
    """The value back.

    Args:
        block: from `pack`, out of the object store or not.
        views: leave large arrays where they are. They are read-only then, and live as long as the block. Else all
            memory is the value's own, and writable where it was.
    """
    arrays = block.arrays if views else [array.copy() for array in block.arrays]
    return pickle.loads(block.pickled, buffers=arrays)  # noqa: S301 - from our own workers


@dataclass(frozen=True, slots=True)
class Meta:
    """What became of an item.

    Attributes:
        num_bytes: of the block; 0 where there is none.
        failure: what the function raised.
    """

    num_bytes: int
    failure: Report | None = None


_Answer: TypeAlias = "tuple[Meta, Block | None]"


class Place(NamedTuple):
    """Where a worker is."""

    node: str
    pid: int


class RowWorker:
    """An actor that runs functions over items, several items at a time.

    Args:
        max_concurrency: items at a time.
        num_cpus: threads that compute, where a function says what computing is.
        path: where whoever asks finds modules; what this process does not know of it comes behind its own.
    """

    def __init__(self, max_concurrency: int, num_cpus: float, path: Sequence[str]) -> None:
        add_to_path(path)
        self._heard = Heard()
        self._waiting = ThreadPoolExecutor(max_concurrency, "mmdp-call")
        self._computing = ThreadPoolExecutor(max(1, math.ceil(num_cpus)), "mmdp-assemble")
        self._functions: dict[str, Any] = {}
        self._fetching: dict[int, set[asyncio.Future[Any]]] = {}
        self._dropped: set[int] = set()

    async def where(self) -> Place:
        """Where it is; answers once it has started."""
        return Place(load_ray().get_runtime_context().get_node_id(), os.getpid())

    async def heard(self) -> list[Warned]:
        """What this process has warned of since the last call, once there is something."""
        return await self._heard.next()

    async def load(self, digest: str, pickled: np.ndarray) -> Report | None:
        """Takes a function; the error where it can't be rebuilt here.

        Args:
            digest: by which `work` knows it.
            pickled: (bytes,) uint8.
        """
        if digest in self._functions:
            return None
        try:
            loop = asyncio.get_running_loop()
            self._functions[digest] = await loop.run_in_executor(self._computing, pickle.loads, pickled.data)
        except Exception as error:
            return Report.of(error)
        return None

    async def forget(self, digest: str) -> None:
        """Lets a function go."""
        self._functions.pop(digest, None)

    async def drop(self, run: int) -> None:
        """Nobody wants results of this run any more: what is not begun is not begun."""
        self._dropped.add(run)
        for task in self._fetching.get(run, ()):
            task.cancel()

    async def work(self, digest: str, item: Block, run: int) -> _Answer:
        """What the function makes of the item.

        Args:
            digest: of the function.
            item: packed.
            run: what it is worked on for.
        """
        function = self._functions[digest]
        if not inspect.iscoroutinefunction(getattr(function, "fetch", None)):
            return await self._in_thread(self._waiting, run, _call, function, item)
        fetching = asyncio.ensure_future(function.fetch(unpack(item)))
        self._fetching.setdefault(run, set()).add(fetching)
        try:
            fetched = await fetching
        except asyncio.CancelledError:
            if run not in self._dropped:
                raise
            return Meta(0), None
        except BaseException as error:
            return Meta(0, Report.of(error)), None
        finally:
            self._fetching[run].discard(fetching)
        return await self._in_thread(self._computing, run, _done, function.assemble, fetched)

    async def _in_thread(
        self, threads: ThreadPoolExecutor, run: int, work: Callable[..., _Answer], *arguments: Any
    ) -> _Answer:
        def unless_dropped() -> _Answer:
            return work(*arguments) if run not in self._dropped else (Meta(0), None)

        return await asyncio.get_running_loop().run_in_executor(threads, unless_dropped)


def add_to_path(path: Sequence[str]) -> None:
    """Finds modules in these places too, behind those where this process looks already."""
    sys.path += [place for place in path if place not in sys.path]


def _call(function: Callable[[Any], Any], item: Block) -> _Answer:
    try:
        value = unpack(item)
    except BaseException as error:
        return Meta(0, Report.of(error)), None
    return _done(function, value)


def _done(function: Callable[[Any], Any], value: Any) -> _Answer:
    try:
        block = pack(function(value))
        return Meta(block.num_bytes), block
    except BaseException as error:  # SystemExit too: it is the function's, and the consumer's to judge
        return Meta(0, Report.of(error)), None
