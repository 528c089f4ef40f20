"""One rank's batches, read from the workers that built them.

Adds: `RankReader`, which is to a coordinator what `Loader` is to an executor.
Leaves out: what the coordinator does (`ray_coordinator`, `ray_dealer`), and moving batches to a device (`device`).

A thread asks for the next step, maps its rows out of the object store as read-only views, and copies them once, into
the batch. Then the views go, and the coordinator hears that it may build on. So the trainer never waits for a copy,
and nobody ever sees an array that lies in the store. Memory: `ahead` batches, the one in use, and the one in the
making.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Self

from mmdp import spans
from mmdp.ahead import ahead
from mmdp.batching import batch, join, merge
from mmdp.failures import Failures
from mmdp.in_order import name_item
from mmdp.open_loop import OpenLoop
from mmdp.ray_call import CallStopped, answer, find, letting_go
from mmdp.ray_coordinator import NAME
from mmdp.ray_deal import Dealt, DealtRow, Finished
from mmdp.ray_fetch import BlockLost, fetch
from mmdp.ray_start import Session, program_id
from mmdp.ray_watch import raylet_pid, watch
from mmdp.ray_worker import unpack
from mmdp.records import Batch, Row
from mmdp.refusals import Reason
from mmdp.steps import check_ranks, refuse_late
from mmdp.traced import untraced

_CALL_SECONDS = 120.0  # for an answer that needs no row; planning a large epoch takes a while
_TRIES = 3  # to get a row whose node has gone


@dataclass(slots=True)
class Counts:
    """What a reader has done, since it was made.

    Attributes:
        batches: handed out.
        rows: in them.
        bytes: of their blocks, each read where it lay and copied once.
        lost: rows that had to be made again, because their node had gone.
    """

    batches: int = 0
    rows: int = 0
    bytes: int = 0
    lost: int = 0


@dataclass(frozen=True, slots=True)
class _Made:
    """A batch that lies ready.

    Attributes:
        batch: it.
        rows: for each, how many samples are left, and why others are not.
        num_bytes: of the blocks it was copied from.
    """

    batch: Batch
    rows: Sequence[tuple[int, Mapping[int, Reason]]]
    num_bytes: int


class RankReader:
    """Batches of packed rows for one rank. A `Coordinator` of that name must run, or start within `patience`.

    `for batch in reader` runs over what is left of the epoch, and the next loop over the next epoch, as with `Loader`.
    It works in any process on any node of the cluster.

    Args:
        name: of the coordinator.
        rank: of this process, 0 to world_size - 1.
        world_size: ranks.
        address: of the cluster, as in `ray_start.Session`.
        ahead: batches that lie ready, at least 1.
        patience: seconds to wait for the coordinator to start.
        timeout: seconds to wait for one step.

    Attributes:
        skipped: samples that failed while their row was built, counted by reason.
        counts: what was read.

    Raises:
        ValueError: a number out of range, or a coordinator for another world size.
        RuntimeError: no such coordinator.
    """

    def __init__(
        self,
        name: str = NAME,
        rank: int = 0,
        world_size: int = 1,
        *,
        address: str | None = None,
        ahead: int = 2,
        patience: float = 60.0,
        timeout: float = 600.0,
    ) -> None:
        check_ranks(1, rank, world_size)
        if ahead < 1:
            raise ValueError(f"ahead is {ahead}: at least 1 batch must lie ready")
        self.counts = Counts()
        self.dropped: dict[int, int] = {}
        self._who = f"the coordinator {name!r}"
        self._rank = rank
        self._ahead = ahead
        self._timeout = timeout
        self._started = False
        self._is_resumed = self._is_over = False  # as of `steps.Position`
        self._open = OpenLoop()
        self._session = Session(address)
        try:
            self._actor = find(name, patience)
            node = self._session.ray.get_runtime_context().get_node_id()
            self._terms, self._state = self._call("join", rank, world_size, node, program_id())
            self._failures = Failures(self._terms.max_failures)
            self.skipped = self._failures.skipped
        except BaseException:
            self._session.close()
            raise
        weakref.finalize(self, self._session.close)
        self._end_watch = watch(raylet_pid(), f"rank {rank}")
        weakref.finalize(self, self._end_watch)

    def __iter__(self) -> Iterator[Batch]:
        self._started = True
        is_over, self._is_over, self._is_resumed = self._is_over, False, False
        return self._open.begin(self._batches() if not is_over else _nothing())

    def __len__(self) -> int:
        """Steps of the next loop: all of an epoch, or what is left of it."""
        return 0 if self._is_over else int(self._call("remaining", self._state))

    def set_epoch(self, epoch: int) -> None:
        """The next loop runs over this epoch from its start, or goes on in it where it is in its middle.

        A loop that is open ends. Of an epoch that is over in the state just loaded, nothing is left to come.
        """
        self._open.end()
        self._state, self._is_over = self._call("at_epoch", self._state, epoch, resumes=self._is_resumed)

    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch that was handed out; under 200 bytes as JSON. `Loader` takes it as well."""
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next batch is the one after the state, which may be that of a `Loader`.

        Raises:
            ValueError: a state of another plan.
            RuntimeError: a loop has begun; its batches would not be those of the state.
        """
        refuse_late(started=self._started)
        self._state = self._call("checked", state)
        self._is_resumed, self._is_over = True, False

    def rewind(self, state: Mapping[str, Any]) -> None:
        """Back to a state of this very run: for who has taken batches ahead, and not handed them on."""
        self._open.end()
        self._state = self._call("checked", state)

    def read_by(self, end: Callable[[], None] | None) -> None:
        """A feed takes the batches from now on, in a thread: what ends its loop, and so this one; None once it is over.

        Whoever ends a loop of this loader, by `set_epoch`, `close` or a new loop, ends it by that.
        """
        self._open.read_by(end)

    def close(self) -> None:
        """Ends the loop, and leaves the coordinator."""
        self._open.end()
        self._end_watch()  # from here on it may end: it is closed
        try:
            with letting_go():
                self._call("leave", self._rank)
        finally:
            self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # A loop, in the consumer's thread

    def _batches(self) -> Generator[Batch, None, None]:
        number = int(self._call("begin", self._rank, self._state))
        stopping = threading.Event()
        with closing(ahead(self._pull(number, stopping), self._ahead)) as pulled:
            try:
                for made in pulled:
                    if isinstance(made, Finished):
                        self._state = made.state
                        self._failures.look()
                        if made.left_out:
                            self.dropped[made.epoch] = made.left_out
                        return
                    self._note(made)
                    yield made.batch
                    del made
            finally:
                stopping.set()  # before the thread is waited for

    def _note(self, made: _Made) -> None:
        """A batch is handed out."""
        assert made.batch.state is not None
        for num_samples, failed in made.rows:
            self._failures.note(num_samples, failed)
        self._state = made.batch.state
        self.counts.batches += 1
        self.counts.rows += len(made.rows)
        self.counts.bytes += made.num_bytes

    # Reading, in a thread of its own

    def _pull(self, number: int, stopping: threading.Event) -> Iterator[_Made | Finished]:
        num_copied = 0
        with contextlib.suppress(CallStopped):
            while True:
                with spans.span("gather") as work:
                    call = self._actor.take.remote(self._rank, number, num_copied)
                    dealt = answer(call, self._who, self._timeout, stopping.is_set)
                    del call
                    if not isinstance(dealt, Finished):
                        samples = sum(len(row.samples) for row in dealt.rows)
                        work.add(rows=len(dealt.rows), samples=samples, workers=dealt.num_workers)
                        work.add(ahead=dealt.ready, depth=dealt.depth, epoch=dealt.epoch)
                        work.add(by_rows=int(dealt.full == "rows"), by_bytes=int(dealt.full == "bytes"))
                if isinstance(dealt, Finished):
                    yield dealt
                    return
                made = self._copied(dealt, number, stopping.is_set)
                num_copied = 1
                del dealt  # and with it the last reference to its rows
                yield made
                del made

    def _copied(self, dealt: Dealt, number: int, is_stopped: Callable[[], bool]) -> _Made:
        with spans.span("transfer") as work:
            values = [
                self._views(row, (number, dealt.number, place), is_stopped) for place, row in enumerate(dealt.rows)
            ]
            num_bytes = sum(part.meta.num_bytes for row in dealt.rows for part in row.parts)
            work.add(num_bytes=num_bytes)
        rows = [_whole(row, parts) for row, parts in zip(dealt.rows, values, strict=True)]
        with spans.span("join"):
            made = batch(rows, pad_id=self._terms.pad_id, length=self._terms.length)
        made = replace(made, step_label_tokens=dealt.step_label_tokens, state=dict(dealt.state))
        return _Made(made, [(len(row.samples), row.skipped) for row in rows], num_bytes)

    def _views(self, row: DealtRow, where: tuple[int, int, int], is_stopped: Callable[[], bool]) -> list[Row]:
        """The parts of a row, given as loop, step and place in it, as views of the object store."""
        for part in row.parts:
            if part.meta.failure is not None:
                error = part.meta.failure.rebuild()
                error.add_note(f"row of samples {name_item(row.samples)}")
                raise error
        for _ in range(_TRIES):
            try:
                blocks = row.blocks or fetch(row.parts, self._timeout, is_stopped)
                return list(untraced(unpack(block, views=True) for block in blocks))
            except BlockLost:
                self.counts.lost += 1
                row = self._call("again", self._rank, *where)  # or the coordinator has gone, as this says
        raise RuntimeError(f"the row of samples {name_item(row.samples)} was lost {_TRIES} times over, with its node")

    def _call(self, method: str, *arguments: Any, **more: Any) -> Any:
        return answer(getattr(self._actor, method).remote(*arguments, **more), self._who, _CALL_SECONDS)


def _nothing() -> Generator[Batch, None, None]:
    yield from ()


def _whole(row: DealtRow, parts: Sequence[Row]) -> Row:
    """One row of its parts."""
    if len(parts) == 1 and not row.killed:
        return parts[0]
    rest = iter(parts)
    killed = Reason.KILLED_WORKER
    return merge([join([], [], [], {one: killed}) if one in row.killed else next(rest) for one in row.samples])
