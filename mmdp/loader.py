"""Packed batches for one rank, built ahead of the training loop, resumed exactly.

Adds: `Loader`, on any executor.
Leaves out: which rows a rank gets (`steps.py`), torch's DataLoader (`packed_dataset.py`), and moving batches to a
device (`device.py`).

Memory: at most `depth` rows and `max_bytes` bytes of pixels are in flight; beside them there are some four batches (the
one in use, the next one, the rows it is made of) and a row for each worker. Nothing else grows with the data but sizes.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from mmdp import executors
from mmdp.batching import RowBuilder, batch, join, merge
from mmdp.executors import Executor, Processes, WorkerDied
from mmdp.measured_ahead import measured_ahead
from mmdp.records import Batch, Reason, Row
from mmdp.sizes import Sizes
from mmdp.steps import Place, Position, Steps, refuse_late, row_length

if TYPE_CHECKING:
    from mmdp.encode import Encoder
    from mmdp.planner import Plan
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
        self._collate = partial(batch, pad_id=encoder.pad_id, length=row_length(plan.budget, length))
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
        refuse_late(started=self._started)
        self._at.load(state)

    def rewind(self, state: Mapping[str, Any]) -> None:
        """Back to a state of this very run: for who has taken batches ahead, and not handed them on.

        A loop that is open ends. Samples counted as skipped stay counted.

        Raises:
            ValueError: a state of another plan.
        """
        self._end_loop()
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
        with measured_ahead(self.steps.plan, self._at.epoch.number), closing(rows):
            while step := list(islice(rows, self.steps.batch_size)):
                places = [ahead.popleft() for _ in step]
                made = self._batch(step, places[0])
                self._at.cursor = places[0].after
                step.clear()  # the batch holds copies
                yield made
                del made
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


def _pixel_bytes(sizes: Sizes, samples: Sequence[int]) -> int:
    return sum(3 * at.height * at.width for sample in samples for at in sizes.encoded(sample).layouts)


def _killed(samples: tuple[int, ...], error: Exception) -> Row:
    if not isinstance(error, WorkerDied):
        raise error
    return join([], [], [], dict.fromkeys(samples, Reason.KILLED_WORKER))
