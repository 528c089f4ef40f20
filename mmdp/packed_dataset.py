"""The rows of a plan for torch's DataLoader, resumed exactly.

Adds: `PackedDataset`, a map-style data set of rows; `StepSampler`, its batch sampler for one rank.
Leaves out: a loop of our own, which lives through the death of a worker (`loader.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset, Sampler

from mmdp.batching import RowBuilder, batch
from mmdp.records import Batch, Row
from mmdp.steps import Place, Position, Steps, check_plan, refuse_late, row_length

if TYPE_CHECKING:
    from mmdp.encode import Encoder
    from mmdp.planner import Epoch, Plan
    from mmdp.sources import Source


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
        check_plan(plan)
        self.plan = plan
        self._build = RowBuilder(source, encoder, plan.sizes, strict=strict)
        self._collate = partial(batch, pad_id=encoder.pad_id, length=row_length(plan.budget, length))
        self._epoch = plan.epoch(0)
        self._number = torch.zeros(1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self._rows())

    def __getitem__(self, row: int | Place) -> Row:
        if isinstance(row, Place):
            made = self._build(row.samples)
            return replace(made, after=(row.epoch, row.after, row.digest), step_label_tokens=row.step_label_tokens)
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
    def batch_size(self) -> int:
        """Refused: whoever asks would deal these batches to the ranks once more, as `accelerator.prepare` does.

        Raises:
            RuntimeError: always; torch's own DataLoader never asks.
        """
        raise RuntimeError(
            "these batches are those of one rank already, and would be dealt out once more: with accelerate prepare "
            "the model and the optimizer only, and go over the DataLoader as it is (docs/training.md)"
        )

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
        refuse_late(started=self._started)
        self._at.load(state, resumes=True)
