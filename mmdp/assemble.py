"""Rows of one rank built ahead by an executor, and batches of them: what all our loaders share.

Adds: `Assembler`, the loop from steps to batches, whatever a row is built from; `Step`, what it is given.
Leaves out: which rows a rank gets, and where a run stands (`loader.py`, `stream_loader.py`).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, Generic, TypeVar

from mmdp import executors, spans
from mmdp.batching import batch, join, merge
from mmdp.executors import Executor, Processes, WorkerDied
from mmdp.failures import Failures
from mmdp.open_loop import OpenLoop
from mmdp.records import Batch, Row
from mmdp.refusals import Reason
from mmdp.traced import traced, untraced

MAX_BYTES = 256 * 2**20
"""Bytes of pixels in flight."""

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Step(Generic[Item]):
    """What one rank does in one step.

    Attributes:
        items: what each of its B rows is built from.
        label_tokens: of the whole step, over all ranks, as measured.
        state: of the loader, after it.
        skipped: samples that were left out before a row was made of them, and are told with this batch.
    """

    items: Sequence[Item]
    label_tokens: int
    state: Mapping[str, Any]
    skipped: Mapping[int, Reason] = field(default_factory=dict)


class Assembler(Generic[Item]):
    """Steps to batches. One loop at a time: a new one ends the one before.

    Args:
        build: makes a row of an item. Pure, and picklable where processes run it.
        alone: an item taken apart: the index of each of its samples, and the item that holds this sample alone.
        num_bytes: of an item's pixels.
        batch_size: rows a batch, B.
        pad_id: fills the tail of a row.
        length: tokens a row, L.
        executor: "inline", "threads", "processes", "ray", or an executor of the caller, who closes it.
        num_workers: threads or processes; by default one for each processor.
        depth: rows in flight; by default two batches, and one row more for each worker.
        max_bytes: bytes of pixels in flight.
        strict: raise a sample's error instead of counting it.
        max_failures: raise when so many samples fail one after the other.

    Attributes:
        skipped: samples left out, counted by reason.
        failed: index to reason, for the first of those that failed while their row was built.
        open: the loop that is.

    Raises:
        ValueError: no such executor, or no worker.
    """

    def __init__(
        self,
        build: Callable[[Item], Row],
        alone: Callable[[Item], Mapping[int, Item]],
        num_bytes: Callable[[Item], float],
        *,
        batch_size: int,
        pad_id: int,
        length: int,
        executor: str | Executor,
        num_workers: int | None,
        depth: int | None,
        max_bytes: int,
        strict: bool,
        max_failures: int,
    ) -> None:
        self._failures = Failures(max_failures)
        self.skipped = self._failures.skipped
        self.failed = self._failures.named
        self._build = build
        self._alone = alone
        self._num_bytes = num_bytes
        self._batch_size = batch_size
        self._collate = partial(batch, pad_id=pad_id, length=length)
        self._is_own = isinstance(executor, str)
        if isinstance(executor, str):  # a batch copies its rows, so that views will do
            self._executor = executors.executor(executor, num_workers, views=True)
        else:
            self._executor = executor
        if self._is_own:  # so that processes stay from one loop to the next, and no longer than the loader
            self._executor.__enter__()
            weakref.finalize(self, self._executor.close)
        self._depth = depth if depth is not None else 2 * batch_size + self._executor.num_workers
        self._max_bytes = max_bytes
        self._strict = strict
        self.open = OpenLoop()

    @property
    def has_workers(self) -> bool:
        """Whether rows are built beside the consumer."""
        return self._executor.num_workers > 0

    def close(self) -> None:
        """Ends the loop and its workers; an executor of the caller stays."""
        self.open.end()
        if self._is_own:
            self._executor.close()

    def batches(self, steps: Iterable[Step[Item]], taken: Callable[[Step[Item]], None]) -> Generator[Batch, None, None]:
        """The batch of each step.

        Args:
            steps: pulled while the consumer waits.
            taken: told of a step just before its batch is handed out.
        """
        ahead: deque[Step[Item]] = deque()
        in_flight = 0
        weights: deque[float] = deque()  # of rows in flight, and of the next one where it has no room

        def weigh(item: Item) -> float:
            weights.append(self._num_bytes(item))
            return weights[-1]

        def items() -> Iterator[Item]:
            nonlocal in_flight
            for step in steps:
                ahead.append(step)
                for item in step.items:
                    in_flight += 1
                    yield item

        rows = self._executor.run(
            traced(self._build) if spans.is_on() else self._build,
            items(),
            depth=self._depth,
            weight=weigh,
            max_weight=self._max_bytes,
            on_error=self._rescue,
        )
        if spans.is_on():
            rows = untraced(rows)

        def gather() -> list[Row]:
            nonlocal in_flight
            with spans.span("gather", depth=self._depth, workers=self._executor.num_workers) as work:
                built = list(islice(rows, self._batch_size))
                for _ in range(min(len(built) - 1, len(weights))):
                    weights.popleft()
                in_flight -= len(built)
                if built:  # the last of them has been waited for with all that has room beside it
                    by_rows, by_bytes = in_flight + 1 >= self._depth, sum(weights) > self._max_bytes
                    work.add(by_rows=int(by_rows), by_bytes=int(by_bytes), epoch=int(ahead[0].state.get("epoch", 0)))
                    if weights:
                        weights.popleft()
                work.add(rows=len(built), samples=sum(len(row.samples) for row in built), ahead=in_flight)
            return built

        with closing(rows):
            while built := gather():
                step = ahead.popleft()
                made = self._batch(built, step)
                taken(step)
                built.clear()  # the batch holds copies
                del step
                yield made
                del made
        self._failures.look()

    def _batch(self, rows: Sequence[Row], step: Step[Item]) -> Batch:
        self.skipped.update(map(str, step.skipped.values()))
        for row in rows:
            self._failures.note(len(row.samples), row.skipped)
        with spans.span("join"):
            made = self._collate(rows)
        return replace(
            made,
            skipped={**step.skipped, **made.skipped},
            step_label_tokens=step.label_tokens,
            state=step.state,
        )

    def _rescue(self, item: Item, error: Exception) -> Row:
        """Builds a row that killed its worker sample by sample, so that one image does not cost its neighbours."""
        if not isinstance(error, WorkerDied) or self._strict:
            raise error
        start_method = self._executor.start_method if isinstance(self._executor, Processes) else "spawn"
        rows: list[Row] = []
        with Processes(1, start_method) as throw_away:
            for index, part in self._alone(item).items():
                rows += throw_away.run(self._build, [part], depth=1, on_error=partial(_killed, index))
        return merge(rows)


def _killed(index: int, _: object, error: Exception) -> Row:
    if not isinstance(error, WorkerDied):
        raise error
    return join([], [], [], {index: Reason.KILLED_WORKER})
