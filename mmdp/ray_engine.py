"""Worker actors for a program that has no event loop of its own.

Adds: `Engine`, which holds Ray, an event loop in a thread, and a pool of actors on it.
Leaves out: what the actors are asked to do (`ray_crew`).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from mmdp import ray_start
from mmdp.ray_actor import Placement
from mmdp.ray_pool import WorkerPool
from mmdp.ray_start import Session, load_ray

_CLOSE_SECONDS = 3.0  # for the actors and the event loop to end


class Engine:
    """Ray, an event loop in a thread of its own, and the actors that it looks after. `close` it.

    Args:
        address: of a cluster, as in `Session`.
        num_workers: actors.
        num_cpus: of each.
        max_concurrency: items each has at a time.
        placement: of them.

    Attributes:
        pool: belongs to the event loop: use it by `post` and `begin`.

    Raises:
        ValueError: more CPUs are asked for than there are.
    """

    def __init__(
        self, address: str | None, num_workers: int, num_cpus: float, max_concurrency: int, placement: Placement
    ) -> None:
        self._first = threading.Lock()  # never released: whoever has it closes
        self._unregister = atexit.unregister  # a run that ends with the interpreter finds no module any more
        self._pid = os.getpid()
        self._session = Session(address, num_cpus=num_workers * num_cpus)
        try:
            check_cpus(num_workers, num_cpus)
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="mmdp-ray", daemon=True)
            self._thread.start()
            self.pool = WorkerPool(num_cpus=num_cpus, max_concurrency=max_concurrency, placement=placement)
            node = load_ray().get_runtime_context().get_node_id()
            self.post(lambda: self.pool.staff.hire(num_workers, node))
            atexit.register(self.close)  # later, the loop's thread stands still, and nothing can be ended in good order
        except BaseException:
            self._session.close()
            raise

    def post(self, action: Callable[[], object]) -> None:
        """Has something done on the event loop, soon; not at all once that is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(action)

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Has a coroutine run on the event loop; not at all once that is closed."""
        try:
            asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()

    def close(self) -> None:
        """Ends the actors and the loop, and leaves Ray; but once, whoever comes: the exit, a user, the collector."""
        if os.getpid() != self._pid:  # a fork ends nothing
            return
        if threading.current_thread() is self._thread:  # the garbage collector may close a run from any thread
            threading.Thread(target=self.close, name="mmdp-ray-close").start()
            return
        if not self._first.acquire(blocking=False):
            return
        self._unregister(self.close)
        closing = asyncio.run_coroutine_threadsafe(self.pool.staff.close(), self._loop)
        try:
            with contextlib.suppress(TimeoutError):
                closing.result(_CLOSE_SECONDS)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CLOSE_SECONDS)
            if not self._thread.is_alive():
                self._loop.close()
            self._session.close()


def check_cpus(num_workers: int, num_cpus: float) -> None:
    """ValueError where a cluster has not the CPUs that so many actors ask for: they would wait for ever."""
    wanted, there = num_workers * num_cpus, ray_start.total_cpus()
    if wanted > there:
        raise ValueError(
            f"{num_workers} workers of {num_cpus:g} CPUs ask for {wanted:g}, and the cluster has {there:g}: give fewer "
            "workers, or a smaller `num_cpus`"
        )
