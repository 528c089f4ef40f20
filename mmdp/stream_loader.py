"""Packed batches from a stream that may have no end: samples are planned as they arrive.

Adds: `StreamLoader`, the `Loader` for sources without length and random access.
Leaves out: sources whose samples can be measured beforehand, for which `Loader` knows more: its epochs are shuffled,
have a length, and all that is left out is known from the start.

Memory, whatever the length of the stream, each sample as its tokens (8 bytes each), its text and its image references
(the compressed bytes where rows carry them):

- 256 samples that wait, and the samples of one window of rows and of one step of all ranks;
- of this rank, three steps and `depth` rows;
- pixels only of what is in flight: `depth` rows and `max_bytes` bytes; beside them some four batches and a row for each
  worker, as in `Loader`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from mmdp.ahead import ahead
from mmdp.arrivals import Arrived, Item, name_of
from mmdp.assemble import MAX_BYTES, Assembler, Step
from mmdp.batching import build_row
from mmdp.failures import MAX_FAILURES
from mmdp.records import Batch, Budget, Encoded, Row
from mmdp.refusals import counted, shorten
from mmdp.steps import check_ranks, refuse_late, row_length
from mmdp.stream_plan import WINDOW, LeftOut, Share, StreamPlan

if TYPE_CHECKING:
    from mmdp.encode import Encoder
    from mmdp.executors import Executor


class StreamLoader:
    """Batches of packed rows for one rank, of samples that are read as they come.

    `for batch in loader` runs over what is left of the pass, and the next loop over the next pass; a stream without end
    has one pass. A loop that is left early may be taken up again: nothing is lost, and nothing comes twice.

    Batches are those of `Loader`. A sample's index is its place in the stream, from 0, bad rows counted. What can't be
    used or fits no row is told in `skipped` of the batch whose rows were packed from what came next; where that is more
    than half of what came, a warning says so, once a pass. Filler rows come only when a stream ends.

    Each rank reads the whole stream, encodes every sample (in a thread of its own), and builds its own rows alone: so
    ranks see each sample once and take equal steps, without a word between them. The stream must be the same on all.

    Args:
        source: gives its samples anew each time it is gone over, and a `DataError` in place of a bad row; such as
            `open_source(..., streaming=True)`. An iterator, which can be gone over once, will not do.
        encoder: makes tokens and pixels of them.
        budget: what a row holds.
        seed: of the order of rows. Samples keep the order of the stream, but for what packing moves.
        batch_size: rows a batch, B.
        rank: of this process, 0 to world_size - 1.
        world_size: ranks.
        executor: "inline", "threads", "processes", "ray", or an executor of your own, which you close.
        num_workers: threads or processes; by default one for each processor.
        depth: rows in flight; by default two batches, and one row more for each worker.
        max_bytes: bytes of pixels in flight.
        window: rows sorted by cost at a time, so that ranks have like work; their samples are held.
        drop_last: leave the last, incomplete step of a pass out instead of completing it with filler rows.
        length: tokens a row, L; by default the budget's.
        strict: raise a bad sample's error instead of counting it. One that fits no row is counted all the same.
        max_failures: raise when so many samples are bad, one after the other.

    Attributes:
        skipped: samples left out, counted by reason, since this loader was made; of all ranks together, each once.
        dropped: pass to the number of samples, over all ranks, that `drop_last` left out at its end.

    Raises:
        ValueError: a number out of range, or no stream. From a loop: no sample of a pass fits a row.
    """

    def __init__(
        self,
        source: Iterable[Item],
        encoder: Encoder,
        budget: Budget,
        *,
        seed: int = 0,
        batch_size: int = 8,
        rank: int = 0,
        world_size: int = 1,
        executor: str | Executor = "threads",
        num_workers: int | None = None,
        depth: int | None = None,
        max_bytes: int = MAX_BYTES,
        window: int = WINDOW,
        drop_last: bool = False,
        length: int | None = None,
        strict: bool = False,
        max_failures: int = MAX_FAILURES,
    ) -> None:
        check_ranks(batch_size, rank, world_size)
        _check_source(source)
        self._share = Share(batch_size, rank, world_size, drop_last)
        self._plan = StreamPlan(source, encoder, budget, seed, window, strict, max_failures)
        self._assembler: Assembler[tuple[Arrived, ...]] = Assembler(
            StreamRowBuilder(encoder, name_of(source), strict),
            _alone,
            _pixel_bytes,
            batch_size=batch_size,
            pad_id=encoder.pad_id,
            length=row_length(budget, length),
            executor=executor,
            num_workers=num_workers,
            depth=depth,
            max_bytes=max_bytes,
            strict=strict,
            max_failures=max_failures,
        )
        self.skipped = self._assembler.skipped
        self.dropped: dict[int, int] = {}
        self._state: Mapping[str, Any] = self._plan.start(0)
        self._is_over = False  # the pass of the state
        self._started = False

    def __iter__(self) -> Iterator[Batch]:
        self._started = True
        return self._assembler.open.begin(self._batches())

    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch that was handed out, whatever was read ahead; at most 4 kB as JSON."""
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next batch is the one after the state. Any number of workers, ranks and rows a batch will do.

        The stream is read again from the oldest sample that was still needed, some hundreds back. A `StreamSource`
        goes on near there; any other source is read from its start, without encoding what is not needed.

        Raises:
            ValueError: a state of another source, encoder, budget, seed or window.
            RuntimeError: a loop has begun; its batches would not be those of the state.
        """
        refuse_late(started=self._started)
        self._go_to(state)

    def rewind(self, state: Mapping[str, Any]) -> None:
        """Back to a state of this very run: for who has taken batches ahead, and not handed them on.

        A loop that is open ends. Samples counted as skipped stay counted.

        Raises:
            ValueError: a state of another source, encoder, budget, seed or window.
        """
        self._assembler.open.end()
        self._go_to(state)

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

    def _go_to(self, state: Mapping[str, Any]) -> None:
        self._state, self._is_over = self._plan.check(state), False

    def _batches(self) -> Generator[Batch, None, None]:
        if self._is_over:
            self._go_to(self._plan.start(self._state["epoch"] + 1))
        begun = self._state
        left_out = yield from self._pass()
        if self._state is begun and begun["cursor"]:  # a state behind the last step
            self._go_to(self._plan.start(begun["epoch"] + 1))
            begun = self._state
            left_out = yield from self._pass()
        if self._state is begun:
            assert left_out is not None  # else `Arrivals` has said that nothing can be used
            raise ValueError(
                f"pass {begun['epoch']} has {counted(left_out.rows, 'row')}, less than a step of "
                f"{counted(self._share.world_size, 'rank')} x {self._share.batch_size} rows, and drop_last leaves that "
                "out: give smaller batches, or let filler rows complete the step"
            )
        self._is_over = True

    def _pass(self) -> Generator[Batch, None, LeftOut | None]:
        """What is left of the pass."""
        left_out: list[LeftOut] = []
        steps = self._steps(left_out)
        # Beside the loop, since a window of samples is encoded at a time: nobody waits for it, and no worker stands.
        with closing(ahead(steps, depth=1) if self._assembler.has_workers else steps) as planned:
            yield from self._assembler.batches(planned, self._take)
        for left in left_out:
            self.dropped[self._state["epoch"]] = left.samples
            if self._share.rank == 0:  # no batch tells of them, and no two ranks count them
                self.skipped.update(map(str, left.skipped.values()))
        return left_out[0] if left_out else None

    def _steps(self, left_out: list[LeftOut]) -> Generator[Step[tuple[Arrived, ...]], None, None]:
        for step in self._plan.steps(self._state, self._share):
            if isinstance(step, LeftOut):
                left_out.append(step)
            else:
                yield step

    def _take(self, step: Step[tuple[Arrived, ...]]) -> None:
        self._state = step.state


@dataclass(frozen=True, slots=True)
class StreamRowBuilder:
    """Samples of a stream to a row, pixels included. Pure and picklable, and it needs no source.

    Attributes:
        encoder: makes pixels of them.
        name: what a person calls the stream.
        strict: raise a sample's error instead of counting it.
    """

    encoder: Encoder
    name: str
    strict: bool = False

    def __call__(self, samples: tuple[Arrived, ...]) -> Row:
        """The row of these samples.

        Raises:
            DataError: in strict mode, for the first sample that fails.
            OSError: a file that exists could not be read, three times over.
        """
        arrived = {one.number: one for one in samples}

        def one(number: int) -> tuple[Encoded, list[np.ndarray]]:
            encoded = arrived[number].encoded
            return encoded, self.encoder.pixels(arrived[number].sample, encoded)

        return build_row(arrived, one, name=self.name, strict=self.strict)


def _alone(samples: tuple[Arrived, ...]) -> dict[int, tuple[Arrived, ...]]:
    return {one.number: (one,) for one in samples}


def _pixel_bytes(samples: tuple[Arrived, ...]) -> int:
    return sum(3 * at.height * at.width for one in samples for at in one.encoded.layouts)


def _check_source(source: object) -> None:
    if isinstance(source, Iterator):
        raise ValueError(
            f"{shorten(source)} can be gone over once, and a stream is read again for the next pass and after a "
            "restart: give something that starts anew each time, such as an object whose __iter__ opens the stream"
        )
    if not isinstance(source, Iterable):
        name = shorten(getattr(source, "name", source))
        if hasattr(source, "__getitem__"):
            raise ValueError(
                f"{name} is read by row, and is no stream: take mmdp.Loader, which starts as soon after "
                "mmdp.measure(..., lazy=True). Parquet and the Hub can be opened with streaming=True instead"
            )
        raise ValueError(f"{name} is no stream: give an object that yields samples each time it is gone over")
