"""Packed batches for one rank, built ahead of the training loop, resumed exactly.

Adds: `Loader`, on any executor; and `PackedDataset`, the same rows for torch's DataLoader.
Leaves out: which rows a rank gets (`steps.py`), and moving batches to a device (`device.py`).

Memory: at most `depth` rows and `max_bytes` bytes of pixels are in flight; beside them there are some four batches (the
one in use, the next one, the rows it is made of) and a row for each worker. Nothing else grows with the data but sizes.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset, Sampler

from mmdp import executors
from mmdp.batching import RowBuilder, batch, join, merge
from mmdp.executors import Executor, Processes, WorkerDied
from mmdp.records import Batch, Reason, Row
from mmdp.sizes import Sizes
from mmdp.steps import Place, Position, Steps

if TYPE_CHECKING:
    from mmdp.encode import Encoder
    from mmdp.planner import Epoch, Plan
    from mmdp.sources import Source

MAX_BYTES = 256 * 2**20
"""Bytes of pixels in flight."""

MAX_FAILURES = 100
"""So many samples that fail one after the other mean that the data is gone, not that a sample is bad."""


class Loader:
    """Batches of packed rows for one rank.

    `for batch in loader` runs over what is left of the epoch, and the next loop over the next epoch. A loop that is
    left early may be taken up again: nothing is lost, and nothing comes twice.

    Args:
        source: the samples.
        encoder: makes tokens and pixels of them.
        plan: the rows, from the sizes that `measure` gave for this source and encoder.
        batch_size: rows a batch, B.
        rank: of this process, 0 to world_size - 1.
        world_size: ranks; all take the same number of steps, and together they see each sample once an epoch.
        executor: "inline", "threads", "processes", or an executor of your own, which you close.
        num_workers: threads or processes; by default one for each processor.
        depth: rows in flight; by default two batches, and one row more for each worker.
        max_bytes: bytes of pixels in flight, as the plan knows them.
        drop_last: leave the last, incomplete step out instead of completing it with filler rows.
        length: tokens a row, L; by default the budget's.
        strict: raise a sample's error instead of counting it.
        max_failures: raise when so many samples fail one after the other.

    Attributes:
        skipped: samples that failed while their row was built, counted by reason, since this loader was made.

    Raises:
        ValueError: a number out of range, or a plan of other data.
    """

    def __init__(
        self,
        source: Source,
        encoder: Encoder,
        plan: Plan,
        *,
        batch_size: int = 8,
        rank: int = 0,
        world_size: int = 1,
        executor: str | Executor = "threads",
        num_workers: int | None = None,
        depth: int | None = None,
        max_bytes: int = MAX_BYTES,
        drop_last: bool = False,
        length: int | None = None,
        strict: bool = False,
        max_failures: int = MAX_FAILURES,
    ) -> None:
        self.steps = Steps(plan, batch_size, rank, world_size, drop_last)
        self.skipped: Counter[str] = Counter()
        self._build = RowBuilder(source, encoder, plan.sizes, strict=strict)
        self._is_own = isinstance(executor, str)
        self._executor = executors.executor(executor, num_workers) if isinstance(executor, str) else executor
        if self._is_own:  # so that processes stay from one loop to the next, and no longer than the loader
            self._executor.__enter__()
            weakref.finalize(self, self._executor.close)
        self._depth = depth if depth is not None else 2 * batch_size + self._executor.num_workers
        self._max_bytes = max_bytes
        self._max_failures = max_failures
        self._collate = partial(batch, pad_id=encoder.pad_id, length=_row_length(plan, length))
        self._bytes_of = partial(_pixel_bytes, plan.sizes)
        self._at = Position(self.steps)
        self._failures = 0
        self._started = False
        # Weak, so that a loop ends with its workers when the `for` that runs it does.
        self._loop: weakref.ref[Generator[Batch, None, None]] | None = None

    def __iter__(self) -> Iterator[Batch]:
        self._end_loop()  # rows that were read ahead are built again by the new one
        self._started = True
        loop = self._batches()
        self._loop = weakref.ref(loop)
        return loop

    def __len__(self) -> int:
        """Steps of the next loop: all of an epoch, or what is left of it. Epochs may differ by a few rows."""
        return len(self._at)

    @property
    def dropped(self) -> dict[int, int]:
        """Epoch to the number of samples, over all ranks, that `drop_last` left out at its end."""
        return dict(self._at.dropped)

    def set_epoch(self, epoch: int) -> None:
        """The next loop runs over this epoch from its start, or goes on in it where it is in its middle.

        A loop that is open ends.
        """
        self._end_loop()
        self._at.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch that was handed out; under 200 bytes as JSON."""
        return self._at.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next batch is the one after the state. Any number of workers, ranks and rows a batch will do.

        Raises:
            ValueError: a state of another plan.
            RuntimeError: a loop has begun; its batches would not be those of the state.
        """
        _refuse_late(started=self._started)
        self._at.load(state)

    def close(self) -> None:
        """Ends the loop and its workers; an executor of your own stays."""
        self._end_loop()
        if self._is_own:
            self._executor.close()

    def _end_loop(self) -> None:
        loop = self._loop() if self._loop is not None else None
        if loop is not None:
            loop.close()

    def _batches(self) -> Generator[Batch, None, None]:
        self._at.begin()
        ahead: deque[Place] = deque()

        def samples() -> Iterator[tuple[int, ...]]:
            for places in self.steps.places(self._at.epoch, self._at.cursor):
                for place in places:
                    ahead.append(place)
                    yield place.samples

        rows = self._executor.run(
            self._build,
            samples(),
            depth=self._depth,
            weight=self._bytes_of,
            max_weight=self._max_bytes,
            on_error=self._rescue,
        )
        try:
            while step := list(islice(rows, self.steps.batch_size)):
                places = [ahead.popleft() for _ in step]
                made = self._batch(step, places[0])
                self._at.cursor = places[0].after
                step.clear()  # the batch holds copies
                yield made
                del made
        finally:
            rows.close()
        self._at.finish()

    def _batch(self, rows: Sequence[Row], place: Place) -> Batch:
        for row in rows:
            self._count(row)
        state = self.steps.state(place.epoch, place.after)
        return replace(self._collate(rows), step_label_tokens=place.step_label_tokens, state=state)

    def _rescue(self, samples: tuple[int, ...], error: Exception) -> Row:
        """Builds a row that killed its worker sample by sample, so that one image does not cost its neighbours."""
        if not isinstance(error, WorkerDied) or self._build.strict:
            raise error
        start_method = self._executor.start_method if isinstance(self._executor, Processes) else "spawn"
        with Processes(1, start_method) as throw_away:
            alone = [(sample,) for sample in samples]
            return merge(list(throw_away.run(self._build, alone, depth=1, on_error=_killed)))

    def _count(self, row: Row) -> None:
        self.skipped.update(map(str, row.skipped.values()))
        self._failures = 0 if row.samples else self._failures + len(row.skipped)
        if self._failures >= self._max_failures:
            raise RuntimeError(
                f"the last {self._failures} samples failed, one after the other ({dict(self.skipped)}): the data can't "
                "be read any more. Mend it and resume; `max_failures` sets the limit"
            )


class PackedDataset(Dataset[Row]):
    """The rows of a plan as a map-style data set for torch's DataLoader.

    `dataset[k]` is row k of the epoch. Three ways to go over it, all with `collate_fn=dataset.collate`:

    - `DataLoader(dataset, batch_sampler=dataset.sampler(8, rank, world_size), ...)`: balanced ranks, equal steps,
      every sample once. `batch.state` is what to save; `sampler.load_state_dict` goes on after it. The sampler starts
      the next epoch by itself, and persistent workers follow it.
    - `DataLoader(dataset, batch_size=8, shuffle=False)`: one rank; the plan has shuffled already. `set_epoch` before
      each epoch; persistent workers hear of it.
    - A `DistributedSampler(shuffle=False)` of torch works too, but repeats rows to make ranks equal.

    Batches of workers lie in shared memory and hold file handles, some ten each; and one lost worker ends the loop.
    `Loader` needs neither, and lives on.

    Args:
        source: the samples.
        encoder: makes tokens and pixels of them.
        plan: the rows, from the sizes that `measure` gave for this source and encoder.
        length: tokens a row in a batch, L; by default the budget's.
        strict: raise a sample's error instead of counting it.
    """

    def __init__(
        self, source: Source, encoder: Encoder, plan: Plan, *, length: int | None = None, strict: bool = False
    ) -> None:
        self.plan = plan
        self._build = RowBuilder(source, encoder, plan.sizes, strict=strict)
        self._collate = partial(batch, pad_id=encoder.pad_id, length=_row_length(plan, length))
        self._epoch = plan.epoch(0)
        self._number = torch.zeros(1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self._rows())

    def __getitem__(self, row: int | Place) -> Row:
        if isinstance(row, Place):
            made = self._build(row.samples)
            return replace(made, after=(row.epoch, row.after), step_label_tokens=row.step_label_tokens)
        return self._build(tuple(map(int, self._rows()[row])))

    def set_epoch(self, epoch: int) -> None:
        """The rows of another epoch, in workers that live on too."""
        self._epoch = self.plan.epoch(epoch)
        self._number[0] = epoch

    def _rows(self) -> Epoch:
        number = int(self._number)  # another process may have set it
        if number != self._epoch.number:
            self._epoch = self.plan.epoch(number)
        return self._epoch

    def sampler(
        self, batch_size: int = 8, rank: int = 0, world_size: int = 1, *, drop_last: bool = False
    ) -> StepSampler:
        """The batch sampler of one rank."""
        return StepSampler(Steps(self.plan, batch_size, rank, world_size, drop_last))

    def collate(self, rows: Sequence[Row]) -> Batch:
        """B rows as one batch, with the state after it where the rows belong to a step."""
        made = self._collate(rows)
        first = rows[0]
        if first.after is None:
            return made
        state = Steps(self.plan, 1).state(*first.after)
        return replace(made, step_label_tokens=first.step_label_tokens, state=state)


class StepSampler(Sampler[list[Place]]):
    """The rows of one rank, step after step, as a batch sampler.

    Each loop is one epoch, or what is left of it after a loaded state; the next loop is the next epoch, also where a
    loop was left early: how much a DataLoader has read ahead, only the batches know. So save `batch.state`.

    Attributes:
        steps: of this rank.
    """

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self._at = Position(steps)
        self._started = False
        self._is_open = False

    def __iter__(self) -> Iterator[list[Place]]:
        if self._is_open:
            self._at.leave()
        self._at.begin()
        self._started = self._is_open = True
        epoch = self._at.epoch
        yield from self.steps.places(epoch, self._at.cursor)
        if self._at.epoch is epoch:
            self._at.leave()
            self._is_open = False

    def __len__(self) -> int:
        """Steps of the next loop; those of this one until the last of them is taken."""
        return len(self._at)

    @property
    def dropped(self) -> dict[int, int]:
        """Epoch to the number of samples, over all ranks, that `drop_last` left out at its end."""
        return dict(self._at.dropped)

    def set_epoch(self, epoch: int) -> None:
        """The next loop runs over this epoch; one that a loaded state is in the middle of goes on there."""
        self._is_open = False
        self._at.set_epoch(epoch)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next batch is the one after the state, which was some batch's `state`.

        Raises:
            ValueError: a state of another plan.
            RuntimeError: a loop has begun.
        """
        _refuse_late(started=self._started)
        self._at.load(state)


def _refuse_late(*, started: bool) -> None:
    if started:
        raise RuntimeError("load the state before the first loop: this one has begun with other rows")


def _row_length(plan: Plan, length: int | None) -> int:
    if length is None:
        return plan.budget.tokens
    if length < plan.budget.tokens:
        raise ValueError(f"rows of {length} tokens can't hold the {plan.budget.tokens} of the plan's budget")
    return length


def _pixel_bytes(sizes: Sizes, samples: Sequence[int]) -> int:
    return sum(3 * at.height * at.width for sample in samples for at in sizes.encoded(sample).layouts)


def _killed(samples: tuple[int, ...], error: Exception) -> Row:
    if not isinstance(error, WorkerDied):
        raise error
    return join([], [], [], dict.fromkeys(samples, Reason.KILLED_WORKER))
