"""The coordinator itself: an actor that knows the plan, has its rows built, and deals references to ranks.

Adds: `Dealer`, the actor's class.
Leaves out: how it is started (`ray_coordinator`), what a rank gets (`ray_deal`) and does with it (`ray_reader`), the
windows (`ray_window`).

It touches no tensor: a rank gets references, and reads the rows where they were built. What it does see of a row is
`Meta`, and the few bytes of rows under 100 KB, which Ray sends along with the answer of a call. With `by_value` it
fetches every row and sends it on: that is what it costs to pass data through one process.
"""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmdp import ray_start
from mmdp.ray_deal import Dealt, DealtRow, Finished, Job, Terms
from mmdp.ray_fetch import fetched
from mmdp.ray_pool import WorkerPool
from mmdp.ray_warnings import Heard, Warned
from mmdp.ray_window import Row, Window
from mmdp.ray_worker import Block, add_to_path
from mmdp.steps import Place, Position, Steps
from mmdp.wire import WorkerDied

_INLINE_BYTES = 100 * 2**10  # `max_direct_call_object_size` of Ray: up to here a result comes with the answer
_KEPT_EPOCHS = 2


class Dealer:
    """The actor. Its methods belong to its event loop; a rank calls them one after the other.

    Args:
        job: what to do.
    """

    def __init__(self, job: Job) -> None:
        add_to_path(job.path)
        self._heard = Heard()
        self._job = job
        self._plan = pickle.loads(job.plan)  # noqa: S301 - from whoever made this actor
        self._epochs: dict[int, Any] = {}
        self._windows: dict[int, Window] = {}
        self._nodes: dict[int, str] = {}
        self._programs: dict[int, str] = {}
        self._hired: set[int] = set()
        self._num_loops = 0
        self._pool: WorkerPool | None = None
        self._counts = {"steps": 0, "rows": 0, "bytes": 0, "bytes_inline": 0, "bytes_by_value": 0, "objects": 0}
        self._peak_bytes = 0

    async def heard(self) -> list[Warned]:
        """What it and its workers have warned of since the last call, once there is something."""
        return await self._heard.next()

    async def terms(self) -> tuple[Terms, str]:
        """What ranks must agree on, and who made this."""
        return self._job.terms, self._job.maker

    async def join(self, rank: int, world_size: int, node: str, program: str) -> tuple[Terms, Mapping[str, Any]]:
        """A rank introduces itself, once or again; the terms, and the state at the start.

        Raises:
            ValueError: another world size, or no such rank.
        """
        if world_size != self._job.terms.world_size:
            raise ValueError(
                f"rank {rank} is of {world_size} ranks, and this coordinator deals to {self._job.terms.world_size}: "
                "give all the same world size, or the coordinator another name"
            )
        steps = self._steps(rank)
        self._nodes[rank] = node
        self._programs[rank] = program
        pool = self._workers()
        if self._job.placement == "near" and rank not in self._hired:  # each rank has its share of workers beside it
            self._hired.add(rank)
            share, rest = divmod(self._job.num_workers, world_size)
            pool.staff.hire(share + (rank < rest), node)
        return self._job.terms, Position(steps).state()

    async def leave(self, rank: int) -> None:
        """A rank wants nothing more."""
        self._nodes.pop(rank, None)
        self._programs.pop(rank, None)
        self._drop_window(rank)

    async def all_gone(self, seconds: float, program: str) -> None:
        """Returns once every rank that has joined has left, those of one program aside; or after so many seconds."""
        end = asyncio.get_running_loop().time() + seconds
        while {*self._programs.values()} - {program} and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.02)

    async def begin(self, rank: int, state: Mapping[str, Any]) -> int:
        """A rank begins a loop at a state; rows that were read ahead for an earlier one are let go.

        Returns:
            The number of the loop.

        Raises:
            ValueError: no state of this plan, or an epoch without a step.
        """
        self._drop_window(rank)
        position = await asyncio.to_thread(self._begun, rank, state)
        self._drop_window(rank)  # another loop may have begun meanwhile
        self._num_loops += 1
        window = Window(self._num_loops, self._job.depth, self._job.max_bytes, self._workers(), self._job.build)
        self._windows[rank] = window
        window.start(self._produce(rank, position, window))
        return window.loop

    async def take(self, rank: int, loop: int, released: int) -> Dealt | Finished:
        """The rank's next step, once it is built.

        Args:
            rank: who asks.
            loop: that it began.
            released: steps that it has copied since it last asked.

        Raises:
            RuntimeError: it has begun another loop since.
            WorkerError: rows can't be built.
        """
        window = self._window(rank, loop)
        try:
            return await self._next(rank, window, released)
        except asyncio.CancelledError:
            self._window(rank, loop)  # another loop has let go of these rows, and this says so
            raise

    async def _next(self, rank: int, window: Window, released: int) -> Dealt | Finished:
        full = window.full
        window.release(released)
        step = await window.next()
        if step is None:
            position = await asyncio.to_thread(self._position, rank, window.state)
            epoch = position.epoch.number
            return Finished(window.state, epoch, position.steps.left_out(position.epoch, position.cursor))
        rows = await asyncio.gather(*map(self._dealt, step.rows))
        self._counts["steps"] += 1
        if self._job.by_value:  # the answer is an object too
            self._counts["objects"] += 1
        job = self._job
        first = step.places[0]
        return Dealt(
            number=step.number,
            rows=rows,
            step_label_tokens=first.step_label_tokens,
            state=step.state,
            ready=window.num_ready,
            depth=job.depth,
            num_workers=job.num_workers,
            epoch=first.epoch,
            full=full,
        )

    async def again(self, rank: int, loop: int, step: int, row: int) -> DealtRow:
        """A row whose block was lost, with the node it lay on, built anew."""
        window = self._window(rank, loop)
        held = window.held(step)
        new = Row(held.places[row].samples, held.rows[row].num_bytes)
        held.rows[row] = new
        await self._build(new, window, self._nodes.get(rank, ""))
        return await self._dealt(new)

    async def checked(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """The same state; ValueError where it is of another plan."""
        return await asyncio.to_thread(lambda: self._position(0, state).state())

    async def remaining(self, state: Mapping[str, Any]) -> int:
        """Steps of a loop that begins at a state."""
        return await asyncio.to_thread(lambda: len(self._position(0, state)))

    async def at_epoch(self, state: Mapping[str, Any], epoch: int, *, resumes: bool) -> tuple[Mapping[str, Any], bool]:
        """The state at the start of an epoch, or the same one in its middle; and whether that epoch is over."""

        def move() -> tuple[Mapping[str, Any], bool]:
            position = self._position(0, state, resumes=resumes)
            position.set_epoch(epoch)
            return position.state(), position.is_over

        return await asyncio.to_thread(move)

    async def stats(self) -> dict[str, Any]:
        """Counters since the start; see `Coordinator.stats`."""
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
        kilobytes = {name: int(status.get(name, "0").split()[0]) * 1024 for name in ("VmHWM", "RssAnon", "RssShmem")}
        pool = self._workers()
        return {
            **self._counts,
            "peak_bytes": self._peak_bytes,
            "store_bytes": ray_start.used_store_bytes(),
            "ready": {rank: window.num_ready for rank, window in self._windows.items()},
            "ranks": dict(self._nodes),
            "workers": pool.staff.per_node(),
            "worker_pids": pool.staff.pids(),
            "deaths": pool.staff.deaths,
            "pid": os.getpid(),
            "peak_memory": kilobytes["VmHWM"],
            "own_memory": kilobytes["RssAnon"],
            "store_memory": kilobytes["RssShmem"],
        }

    async def close(self) -> None:
        """Ends the workers."""
        for window in self._windows.values():
            window.end()
        if self._pool is not None:
            await self._pool.staff.close()

    # How a step comes about

    async def _produce(self, rank: int, position: Position, window: Window) -> None:
        """Has the rows of a rank built, as far ahead as its window allows."""
        steps = position.steps
        places = steps.places(position.epoch, position.cursor)
        while (step := await asyncio.to_thread(next, places, None)) is not None:
            state = steps.state(step[0].epoch, step[0].after, step[0].digest)
            weights = await asyncio.to_thread(list, map(self._num_bytes, step))
            held = window.add(step, state)
            for place, weight in zip(step, weights, strict=True):
                await window.room(held, weight)
                row = Row(place.samples, weight)
                window.begin(held, row, self._build(row, window, self._nodes.get(rank, "")))

    async def _build(self, row: Row, window: Window, node: str) -> None:
        pool = self._workers()
        try:
            row.parts = [await pool.call(window.run, row.samples, node=node)]
        except WorkerDied:
            if self._job.terms.strict:
                raise
            for sample in row.samples:  # one by one, so that one image does not cost its neighbours
                try:
                    row.parts.append(await pool.call(window.run, (sample,), node=node, is_suspect=True))
                except WorkerDied:
                    row.killed.append(sample)
        for part in row.parts:
            self._counts["objects"] += part.meta.num_bytes > _INLINE_BYTES
            self._counts["bytes_inline"] += part.meta.num_bytes if part.meta.num_bytes <= _INLINE_BYTES else 0
        self._peak_bytes = max(self._peak_bytes, sum(window.num_bytes for window in self._windows.values()))

    async def _dealt(self, row: Row) -> DealtRow:
        """A row for its rank, once it is built; raises what the pool raised."""
        if row.work is not None:
            await row.work
        blocks: list[Block] = []
        num_bytes = sum(part.meta.num_bytes for part in row.parts)
        if self._job.by_value:
            blocks = await asyncio.gather(*map(fetched, row.parts))
            self._counts["bytes_by_value"] += num_bytes
            row.parts = [part._replace(block=None) for part in row.parts]  # the references go
        self._counts["rows"] += 1
        self._counts["bytes"] += num_bytes
        return DealtRow(row.samples, row.parts, tuple(row.killed), blocks)

    def _num_bytes(self, place: Place) -> int:
        sizes = self._plan.sizes
        return sum(3 * at.height * at.width for sample in place.samples for at in sizes.encoded(sample).layouts)

    def _workers(self) -> WorkerPool:
        if self._pool is None:
            job = self._job
            self._pool = WorkerPool(num_cpus=job.num_cpus, max_concurrency=job.max_concurrency, placement=job.placement)
            if job.placement != "near":
                self._pool.staff.hire(job.num_workers)
            self._pool.begin(job.build)  # never ended: workers load it as soon as they come up, and keep it
        return self._pool

    def _drop_window(self, rank: int) -> None:
        window = self._windows.pop(rank, None)
        if window is not None:
            window.end()

    def _window(self, rank: int, loop: int) -> Window:
        window = self._windows.get(rank)
        if window is None or window.loop != loop:
            raise RuntimeError(
                f"rank {rank} has begun another loop since, here or in another process: this one is over"
            )
        return window

    # Where a rank stands

    def _steps(self, rank: int) -> Steps:
        terms = self._job.terms
        return Steps(self._plan, terms.batch_size, rank, terms.world_size, terms.drop_last)

    def _position(self, rank: int, state: Mapping[str, Any], *, resumes: bool = False) -> Position:
        position = Position(self._steps(rank))
        position.load(state, self._epoch, resumes=resumes)
        return position

    def _begun(self, rank: int, state: Mapping[str, Any]) -> Position:
        position = self._position(rank, state)
        position.begin()
        position.epoch = self._epoch(position.epoch.number)
        return position

    def _epoch(self, number: int) -> Any:
        """The rows of an epoch, planned once for all ranks, window by window as they are asked for."""
        epoch = self._epochs.get(number)
        if epoch is None:  # `or` would ask for its length, and so plan all of it
            epoch = self._epochs.setdefault(number, self._plan.epoch(number))
            for old in sorted(self._epochs)[:-_KEPT_EPOCHS]:
                self._epochs.pop(old, None)
        return epoch
