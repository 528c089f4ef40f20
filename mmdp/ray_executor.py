"""The executor contract on Ray actors, and a second form that moves no result.

Adds: `RayExecutor`, reached by its name: `executors.executor("ray")`, `Loader(..., executor="ray")`.
Leaves out: who works on what and what becomes of an actor that dies (`ray_pool`), several ranks (`ray_coordinator`).

    with RayExecutor(2) as ray:
        for row in ray.run(build, rows, depth=16):
            ...
        for meta, reference in ray.run_references(build, rows, depth=16):
            ...

All that `executors` says of a run holds here, with these differences:

- An actor has up to `max_concurrency` items at a time, so that many may wait for the net together; `depth` counts them
  all. A slow item holds back the results behind it, as everywhere, and the window fills while it does: order has its
  price, and the wait that the consumer sees shows it.
- `weight` is in bytes, since results lie in Ray's object store. At most 40 % of the smallest store may be in flight,
  so that Ray never spills to disk in a normal run; a larger `max_weight` is refused. Without `weight`, each result is
  taken to be as heavy as the heaviest that the function gave so far; before its first one, an item for each actor fills
  the window.
- `timeout` counts from when an actor gets the item.
- What is defined in a script or a notebook travels by value. An error of a class that is defined there comes out as
  `WorkerError` with the name and the message.

**Results are copies by default**: memory of their own, writable where it was, theirs alone. In the object store lies
the one block that everybody reads, and it must never change. A view of it is read-only, but torch does not know that:
`torch.from_numpy` of a view warns, and writing to the tensor changes the block for all. `views=True` saves the copy for
a consumer that copies anyway, as `Loader` does into its batch; never hand such arrays on.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Generator, Iterable
from hashlib import blake2b
from typing import Any, Self, TypeVar

from mmdp import ray_start
from mmdp.executors import check_run
from mmdp.in_order import in_order, name_item
from mmdp.ray_actor import Placement, Ref, check_placement
from mmdp.ray_call import arrived, lost_errors
from mmdp.ray_crew import RayCrew, Window
from mmdp.ray_engine import Engine
from mmdp.ray_start import load_ray
from mmdp.ray_worker import Meta, unpack
from mmdp.wire import WorkerError

MAX_CONCURRENCY = 16
"""Items an actor has at a time. A row fetches its images together, so that is some 64 images in flight."""

Item = TypeVar("Item")
Result = TypeVar("Result")


class RayExecutor:
    """Runs functions in Ray actors, here or on other machines.

    Ray is started or joined with the first run (`ray_start` says which), and left after it; inside `with executor:`
    Ray and the actors stay for the next run, and end with the block.

    Args:
        num_workers: actors, at least 1; by default as many as the cluster's CPUs allow.
        address: of a cluster; by default `RAY_ADDRESS`, or a Ray of our own on this machine.
        num_cpus: that Ray counts for each actor. It is a number for placing them, not a limit.
        placement: "together", "spread" or "near", as in `ray_actor`; near is this machine.
        max_concurrency: items an actor has at a time.
        views: results are read-only views of the object store.

    Raises:
        ValueError: a number out of range, no such placement, or one that needs a larger `num_cpus`.
    """

    def __init__(
        self,
        num_workers: int | None = None,
        *,
        address: str | None = None,
        num_cpus: float = 1.0,
        placement: Placement = "together",
        max_concurrency: int = MAX_CONCURRENCY,
        views: bool = False,
    ) -> None:
        for name, value, least in (
            ("num_workers", num_workers, 1),
            ("num_cpus", num_cpus, 0),
            ("max_concurrency", max_concurrency, 1),
        ):
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}: it must be at least {least}")
        self._num_workers = num_workers
        self._address = address
        self._num_cpus = num_cpus
        self._placement = check_placement(placement, num_cpus)
        self._max_concurrency = max_concurrency
        self._views = views
        self._keeps = False
        self._kept: Engine | None = None
        self._heaviest: dict[bytes, float] = {}  # by function
        self._crews: weakref.WeakSet[RayCrew] = weakref.WeakSet()

    @property
    def num_workers(self) -> int:
        """Actors. Where no number was given, the cluster is asked."""
        if self._num_workers is None:
            self._num_workers = max(1, int(ray_start.expected_cpus(self._address) / (self._num_cpus or 1)))
        return self._num_workers

    def run(
        self,
        function: Callable[[Item], Result],
        items: Iterable[Item],
        *,
        depth: int,
        weight: Callable[[Item], float] | None = None,
        max_weight: float = math.inf,
        timeout: float | None = None,
        on_error: Callable[[Item, Exception], Result] | None = None,
    ) -> Generator[Result, None, None]:
        """As `Executor.run` says, with the differences above.

        Raises:
            WorkerError: the function can't be sent.
            ValueError: more CPUs are asked for than there are, or `max_weight` is more than the object store can hold.
        """
        check_run(depth, weight, max_weight, timeout)
        limits = (depth, weight, max_weight)
        return self._in_order(_pickle(function), items, limits, timeout, on_error, keeps_references=False)

    def run_references(
        self,
        function: Callable[[Item], Any],
        items: Iterable[Item],
        *,
        depth: int,
        weight: Callable[[Item], float] | None = None,
        max_weight: float = math.inf,
        timeout: float | None = None,
    ) -> Generator[tuple[Meta, Ref], None, None]:
        """For each item, in order, what became of it and a reference to its result, which stays where it was made.

        `read` makes the result of it, in this program or in any other on the cluster. A reference belongs to this
        program: its block lives as long as somebody holds it and no longer than this program, and counts as in flight
        only until it is handed over. So drop it in time; `Meta.num_bytes` says what it holds.

        Args and errors: as `run`.
        """
        check_run(depth, weight, max_weight, timeout)
        limits = (depth, weight, max_weight)
        return self._in_order(_pickle(function), items, limits, timeout, None, keeps_references=True)

    def _in_order(
        self,
        pickled: bytes,
        items: Iterable[Any],
        limits: tuple[int, Callable[[Any], float] | None, float],
        timeout: float | None,
        on_error: Callable[[Any, Exception], Any] | None,
        *,
        keeps_references: bool,
    ) -> Generator[Any, None, None]:
        engine = self._engine()
        digest = blake2b(pickled, digest_size=16).digest()
        window = Window(*limits, heaviest=self._heaviest.get(digest, 0))
        try:
            window.measure(ray_start.store_bytes(), self.num_workers)
            crew = RayCrew(engine, pickled, window, timeout, views=self._views, keeps_references=keeps_references)
            self._crews.add(crew)
            yield from in_order(
                crew,
                items,
                depth=window.depth,
                weight=window.weigh,
                max_weight=window.max_bytes,
                timeout=None,  # the pool sees to it
                on_error=on_error,
            )
        finally:
            self._heaviest[digest] = window.heaviest
            if engine is not self._kept:
                engine.close()

    def _engine(self) -> Engine:
        if self._kept is not None and self._kept.pool.staff.failure is None:
            return self._kept
        engine = Engine(self._address, self.num_workers, self._num_cpus, self._max_concurrency, self._placement)
        if self._keeps:
            if self._kept is not None:
                self._kept.close()
            self._kept = engine
        return engine

    def workers_per_node(self) -> dict[str, int]:
        """Node to the number of actors on it that have come up; empty outside of `with` and of a run."""
        return self._kept.pool.staff.per_node() if self._kept is not None else {}

    def close(self) -> None:
        """Ends every run and every actor, and leaves Ray."""
        for crew in list(self._crews):
            crew.stop()
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def __enter__(self) -> Self:
        self._keeps = True
        return self

    def __exit__(self, *exception: object) -> None:
        self._keeps = False
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        options = (self._address, self._num_cpus, self._placement, self._max_concurrency, self._views)
        return _rebuild, (self._num_workers, *options)  # its actors stay behind


def _rebuild(
    num_workers: int | None,
    address: str | None,
    num_cpus: float,
    placement: Placement,
    max_concurrency: int,
    views: bool,
) -> RayExecutor:
    return RayExecutor(
        num_workers,
        address=address,
        num_cpus=num_cpus,
        placement=placement,
        max_concurrency=max_concurrency,
        views=views,
    )


def read(block: Ref, *, views: bool = False, timeout: float = 600.0) -> Any:
    """The result that a reference of `run_references` stands for.

    Args:
        block: the reference.
        views: its arrays are read-only views of the object store, and keep the block alive.
        timeout: seconds to wait; after a node was lost, Ray does not always say so. A transfer that is under way goes
            on behind it, for the next try.

    Raises:
        RuntimeError: it is gone, with the program or the node it belonged to.
        TimeoutError: the time is over.
    """
    try:
        (value,) = arrived([block], timeout, f"the block has not come within {timeout:.0f} s")
    except lost_errors() as error:
        raise RuntimeError(
            f"the block is gone ({type(error).__name__}): the program that asked for it has ended, or the node where "
            "it lay"
        ) from error
    return unpack(value, views=views)


def _pickle(function: Callable[[Any], Any]) -> bytes:
    pickler = load_ray().cloudpickle
    try:
        pickled: bytes = pickler.dumps(function, protocol=5)
    except Exception as error:
        raise WorkerError(
            f"{name_item(function)} can't be sent to an actor: {type(error).__name__}: {error}. It may hold no locks "
            "and no open files; or use threads"
        ) from error
    return pickled
