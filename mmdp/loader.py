"""Packed batches for one rank, built ahead of the training loop, resumed exactly.

Adds: `Loader`, on any executor.
Leaves out: which rows a rank gets (`steps.py`), the loop from rows to batches (`assemble.py`), samples without end
(`stream_loader.py`), torch's DataLoader (`packed_dataset.py`), and moving batches to a device (`device.py`).

Memory: at most `depth` rows and `max_bytes` bytes of pixels are in flight; beside them there are some four batches (the
one in use, the next one, the rows it is made of) and a row for each worker. Nothing else grows with the data but sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from mmdp.assemble import MAX_BYTES, Assembler, Step
from mmdp.batching import RowBuilder
from mmdp.failures import MAX_FAILURES
from mmdp.measured_ahead import measured_ahead
from mmdp.records import Batch
from mmdp.sizes import Sizes
from mmdp.steps import Position, Steps, refuse_late, row_length

if TYPE_CHECKING:
    from mmdp.encode import Encoder
    from mmdp.executors import Executor
    from mmdp.planner import Plan
    from mmdp.sources import Source


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
        executor: "inline", "threads", "processes", "ray", or an executor of your own, which you close.
        num_workers: threads or processes; by default one for each processor. Each fetches for one row at a time and
            waits for it, so over a far store more of them than processors help; `Config.max_fetches` bounds all fetches
            of a process.
        depth: rows in flight; by default two batches, and one row more for each worker.
        max_bytes: bytes of pixels in flight, as the plan knows them.
        drop_last: leave the last, incomplete step out instead of completing it with filler rows.
        length: tokens a row, L; by default the budget's.
        strict: raise a sample's error instead of counting it.
        max_failures: raise when so many samples fail one after the other.

    Attributes:
        skipped: samples that failed while their row was built, counted by reason, since this loader was made.
        failed: index to reason, for the first thousand of them.

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
        self.steps = Steps(plan, batch_size, rank, world_size, drop_last)  # refuses what is no plan
        self._build = RowBuilder(source, encoder, plan.sizes, strict=strict)
        self._assembler: Assembler[tuple[int, ...]] = Assembler(
            self._build,
            _alone,
            partial(_pixel_bytes, plan.sizes),
            batch_size=batch_size,
            pad_id=encoder.pad_id,
            length=row_length(plan.budget, length),
            executor=executor,
            num_workers=num_workers,
            depth=depth,
            max_bytes=max_bytes,
            strict=strict,
            max_failures=max_failures,
        )
        self.skipped = self._assembler.skipped
        self.failed = self._assembler.failed
        self._at = Position(self.steps)
        self._started = False

    def __iter__(self) -> Iterator[Batch]:
        self._started = True
        return self._assembler.open.begin(self._batches())

    def __len__(self) -> int:
        """Steps of the next loop: all of an epoch, or what is left of it. Epochs may differ by a few rows."""
        return len(self._at)

    def messages(self) -> dict[int, str]:
        """Index to message, for the samples in `failed`: file, line, id, field, what was found.

        Each is built once more for it, which takes a moment; only one that killed its worker is not.
        """
        return self._build.messages(self.failed)

    @property
    def dropped(self) -> dict[int, int]:
        """Epoch to the number of samples, over all ranks, that `drop_last` left out at its end."""
        return dict(self._at.dropped)

    def set_epoch(self, epoch: int) -> None:
        """The next loop runs over this epoch from its start, or goes on in it where it is in its middle.

        A loop that is open ends. Of an epoch that is over in the state just loaded, nothing is left to come.
        """
        self._assembler.open.end()
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
        self._at.load(state, resumes=True)

    def rewind(self, state: Mapping[str, Any]) -> None:
        """Back to a state of this very run: for who has taken batches ahead, and not handed them on.

        A loop that is open ends. Samples counted as skipped stay counted.

        Raises:
            ValueError: a state of another plan.
        """
        self._assembler.open.end()
        self._at.load(state)

    def read_by(self, end: Callable[[], None] | None) -> None:
        """A feed takes the batches from now on, in a thread: what ends its loop, and so this one; None once it is over.

        Whoever ends a loop of this loader, by `set_epoch`, `close` or a new loop, ends it by that.
        """
        self._assembler.open.read_by(end)

    def close(self) -> None:
        """Ends the loop and its workers; an executor of your own stays. A later loop starts workers anew."""
        self._assembler.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _batches(self) -> Generator[Batch, None, None]:
        self._at.begin()
        with measured_ahead(self.steps.plan, self._at.epoch.number):
            yield from self._assembler.batches(self._steps(), self._take)
        self._at.finish()

    def _steps(self) -> Iterator[Step[tuple[int, ...]]]:
        for places in self.steps.places(self._at.epoch, self._at.cursor):
            first = places[0]
            state = self.steps.state(first.epoch, first.after, first.digest)
            yield Step([place.samples for place in places], first.step_label_tokens, state)

    def _take(self, step: Step[tuple[int, ...]]) -> None:
        self._at.cursor = step.state["cursor"]


def _alone(samples: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    return {sample: (sample,) for sample in samples}


def _pixel_bytes(sizes: Sizes, samples: Sequence[int]) -> int:
    return sum(3 * at.height * at.width for sample in samples for at in sizes.encoded(sample).layouts)
