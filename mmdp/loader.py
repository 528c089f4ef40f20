"""Packed batches for one rank, in the order of the plan, with a state that fits in a line.

Adds: `Loader`, which builds the rows of its rank ahead of the training loop, on any executor, and `PackedDataset`, the
same rows for torch's DataLoader. Both resume exactly: the state after a batch is (epoch, row number), whatever was read
ahead, and it is valid for any number of workers, ranks and rows a batch.
Leaves out: which samples share a row (`planner.py`), moving batches to a device (`device.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset, Sampler

from mmdp.batching import RowBuilder, batch, join
from mmdp.executors import Executor, executor
from mmdp.planner import Epoch, Plan, deal
from mmdp.records import Batch, Row

if TYPE_CHECKING:
    from mmdp.encode import Encoder
    from mmdp.sources import Source

_STATE_VERSION = 1


class Place(NamedTuple):
    """One row that a rank is to build.

    Attributes:
        epoch: its number.
        samples: indices; empty for a filler row.
        after: (epoch, row number) where the next step starts.
    """

    epoch: int
    samples: tuple[int, ...]
    after: tuple[int, int]


@dataclass(slots=True)
class Steps:
    """The rows of one rank, step after step, from a cursor on.

    A step is the next world_size x batch_size rows of the plan; the last one is completed with filler rows, or left out.
    All ranks take the same number of steps.
    """

    plan: Plan
    batch_size: int
    rank: int = 0
    world_size: int = 1
    drop_last: bool = False

    def __post_init__(self) -> None:
        for name, value in (("batch_size", self.batch_size), ("world_size", self.world_size)):
            if value < 1:
                raise ValueError(f"{name} is {value}: it must be at least 1")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} of world size {self.world_size}: ranks go from 0 to world size - 1")

    def count(self, epoch: Epoch, cursor: int) -> int:
        """How many steps are left from row `cursor` on."""
        step = self.world_size * self.batch_size
        left = max(0, len(epoch) - cursor)
        return left // step if self.drop_last else -(-left // step)

    def places(self, epoch: Epoch, cursor: int) -> Iterator[list[Place]]:
        """For each step, the rows of this rank, filler rows among them."""
        step = self.world_size * self.batch_size
        while rows := epoch.take(cursor, step):
            if self.drop_last and len(rows) < step:
                return
            cursor += len(rows)
            mine = deal(rows, self.plan.sizes, world_size=self.world_size, batch_size=self.batch_size)[self.rank]
            after = (epoch.number, cursor)
            places = [Place(epoch.number, tuple(map(int, rows[place])), after) for place in mine]
            places += [Place(epoch.number, (), after)] * (self.batch_size - len(places))
            yield places


class Loader:
    """Batches of packed rows for one rank.

    `for batch in loader` runs over the rest of the epoch, and the next one over the next epoch. Rows are built ahead, at
    most `depth` of them and about `max_bytes` bytes of pixels.

    Args:
        source: the samples.
        encoder: makes tokens and pixels of them.
        plan: the rows; from the sizes that `measure` gave for this source and encoder.
        batch_size: rows a batch, B.
        rank: of this process, 0 to world_size - 1.
        world_size: ranks; each takes the same number of steps, and together they see each sample once an epoch.
        executor: "inline", "threads", "processes", or an executor of your own.
        num_workers: threads or processes; by default the cores.
        depth: rows in flight; by default two batches and a row a worker.
        max_bytes: bytes of pixels in flight.
        drop_last: leave the last, incomplete step out instead of completing it with filler rows.
        length: tokens a row, L; by default the plan's budget.
        strict: raise a sample's error instead of counting it.
        max_failures: stop when so many samples in a row fail.

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
        max_bytes: int = 256 * 2**20,
        drop_last: bool = False,
        length: int | None = None,
        strict: bool = False,
        max_failures: int = 100,
    ) -> None:
        if fingerprint(source, encoder) != plan.sizes.fingerprint:
            raise ValueError("the plan is of another source or encoder: measure this one, and plan from its sizes")
        self.plan = plan
        self.steps = Steps(plan, batch_size, rank, world_size, drop_last)
        self.length = plan.budget.tokens if length is None else length
        self.max_bytes = max_bytes
        self.max_failures = max_failures
        self.skipped: Counter[str] = Counter()
        self._build = RowBuilder(source, encoder, plan.sizes, strict=strict)
        self._pad_id = encoder.pad_id
        self._executor = make_executor(executor, num_workers) if isinstance(executor, str) else executor
        self._depth = depth if depth is not None else 2 * batch_size + self._executor.num_workers
        self._epoch = plan.epoch(0)
        self._cursor = 0
        self._started = False
        self._failures = 0
