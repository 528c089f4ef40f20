"""Sizes, a budget and a seed to the rows of every epoch, in an order that suits any number of ranks.

Adds: `plan`, whose result gives each epoch as a sequence of rows, each the sample indices packed into it.
Leaves out: what fills a row (`row_stream.py`), which rank gets it (`dealing.py`), and building it (`row_builder.py`).

The order of an epoch, all of it a function of sizes, budget, seed and epoch number:

1. Samples are shuffled, and the packer streams over them: a row is filled from the next few hundred sizes.
2. Rows are sorted by cost inside windows, so that rows of like cost are neighbours and meet in one step. Attention
   grows with the square of a sample's length, the vision tower with its patches or tiles, and a step waits for its
   dearest rank.
3. Blocks of a few rows are shuffled inside their window, so that cheap and dear steps mix. The packer leaves some
   hundreds of short samples for the end of its input, so the last window is a large one, and a small epoch has but one.

No part of it knows a world size or a batch size: a step is the next W x B rows, so a row number is all that a resumed
run needs, with other ranks and other batches too. Integer arithmetic and a hash of our own: every machine plans alike.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, overload

import numpy as np

from mmdp.dealing import Measured, deal, row_costs
from mmdp.fingerprints import plan_fingerprint
from mmdp.records import Budget
from mmdp.refusals import Reason, counted, shorten
from mmdp.row_hashes import row_digests, shuffle_keys
from mmdp.row_stream import BUFFER, RowStream

if TYPE_CHECKING:
    from mmdp.sizes import Sizes

VERSION = 2
"""Goes up when the same sizes, budget and seed give other rows; a resumed run then refuses an older state."""

WINDOW = 512
"""Rows sorted by cost at a time: 8 for each of 64 rows a step. Advised: at least 8 x world size x batch size."""

_FIRST_WINDOW = 64
"""Rows in the first window of an epoch; each later one has twice as many, up to `WINDOW`. So a cold start is short."""

_TAIL_BUFFERS = 3
"""A window behind which at most so many buffers of samples are left takes them in: short ones then mix with others."""

BLOCK = 8
"""Rows that stay neighbours when a window is shuffled."""

_KEPT_STEPS = 32
"""Dealt steps that an epoch keeps. Ranks that are further apart than that cost another dealing, and nothing else."""

_CHUNK = 256
"""Samples whose sizes are asked for at a time: what a cold start waits for, together with one buffer."""


def plan(
    sizes: Sizes, budget: Budget, seed: int = 0, *, window: int = WINDOW, block: int = BLOCK, buffer: int = BUFFER
) -> Plan:
    """Plans every epoch; the work for an epoch is done when its rows are asked for.

    Args:
        sizes: from `measure`.
        budget: what a row holds. A sample that fits no row is left out, and counted in `Plan.skipped`.
        seed: another seed gives another order, in each epoch.
        window: rows sorted by cost at a time.
        block: rows that stay neighbours.
        buffer: sizes the packer chooses from.

    Raises:
        ValueError: a number below 1, or no sample that fits a row.
    """
    if not isinstance(budget, Budget):
        raise ValueError(f"the budget is {shorten(budget)}: give a Budget, such as mmdp.Budget(tokens=1024, images=9)")
    if not hasattr(sizes, "require"):
        raise ValueError(f"{shorten(sizes)} are no sizes: give what mmdp.measure(source, encoder) returns")
    for name, value in (("window", window), ("block", block), ("buffer", buffer)):
        if value < 1:
            raise ValueError(f"{name} is {value}: it must be at least 1")
    return Plan(sizes, budget, seed, window, block, buffer)


@dataclass(frozen=True, slots=True)
class Plan:
    """The rows of every epoch. `plan.epoch(3)[7]` are the sample indices of row 7 of epoch 3."""

    sizes: Sizes
    budget: Budget
    seed: int
    window: int
    block: int
    buffer: int

    def __repr__(self) -> str:
        return f"<Plan of {counted(len(self.sizes), 'sample')} into rows of {self.budget}, seed {self.seed}>"

    @property
    def fingerprint(self) -> str:
        """Hex digests of all that decides the rows; ranks that differ in it would not see the same epoch."""
        data, _, encoder = self.sizes.fingerprint.partition("-")
        order = f"{VERSION} {self.seed} {self.window} {self.block} {self.buffer}"
        return plan_fingerprint(f"{data} {len(self.sizes)}", encoder, str(self.budget), order)

    @property
    def skipped(self) -> dict[int, Reason]:
        """Index to reason, for every sample that no epoch holds: what can't be used, and what fits no row."""
        return {**self.sizes.skipped, **self.sizes.refused(self.budget)}

    def epoch(self, number: int) -> Epoch:
        """The rows of an epoch, planned as they are asked for.

        Raises:
            ValueError: a negative number.
        """
        if number < 0:
            raise ValueError(f"epoch {number}: the first one is 0")
        return Epoch(self, number)


class DealtStep(NamedTuple):
    """One step, for all ranks.

    Attributes:
        rows: sample indices of each, at most world_size x batch_size.
        label_tokens: of all rows, as measured.
        ranks: for each rank the places in `rows` that it gets.
    """

    rows: list[np.ndarray]
    label_tokens: int
    ranks: list[list[int]]


class Epoch(Sequence[np.ndarray]):
    """The rows of one epoch: each an int32 array of the sample indices packed into it.

    A row is planned when it, or one after it, is first asked for; `len` plans them all. Threads may share an epoch.
    """

    def __init__(self, plan: Plan, number: int) -> None:
        self._plan = plan
        self.number = number
        self._lock = threading.Lock()
        self._windows: list[tuple[np.ndarray, np.ndarray]] = []  # flat indices and offsets of each planned window
        self._ends = [0]  # the row where each planned window starts, and where the last one ends
        self._digests: list[np.ndarray] = []  # (rows of each window,) uint64, of all rows up to each of its rows
        self._source: Iterator[list[list[int]]] | None = _windows(plan, number)
        self._dealing = threading.Lock()
        self._dealt: dict[tuple[int, int, int], DealtStep] = {}

    def __reduce__(self) -> tuple[type[Epoch], tuple[Plan, int]]:
        return Epoch, (self._plan, self.number)

    def __len__(self) -> int:
        while self._grow():
            pass
        return self._ends[-1]

    @overload
    def __getitem__(self, row: int) -> np.ndarray: ...

    @overload
    def __getitem__(self, row: slice) -> list[np.ndarray]: ...

    def __getitem__(self, row: int | slice) -> np.ndarray | list[np.ndarray]:
        if isinstance(row, slice):
            return [self[number] for number in range(*row.indices(len(self)))]
        if row < 0:
            row += len(self)
        while row >= self._ends[-1] and self._grow():
            pass
        if not 0 <= row < self._ends[-1]:
            raise IndexError(f"no row {row} in epoch {self.number}")
        window = bisect_right(self._ends, row) - 1
        place = row - self._ends[window]
        flat, offsets = self._windows[window]
        return flat[offsets[place] : offsets[place + 1]]

    @property
    def num_bytes(self) -> int:
        """Memory of the rows that are planned."""
        flats = sum(flat.nbytes + offsets.nbytes for flat, offsets in list(self._windows))
        return flats + sum(digests.nbytes for digests in list(self._digests))

    def digest(self, row: int) -> str:
        """Hex digest of all rows before this one: two plans that agree in it have handed out the same samples so far.

        Raises:
            IndexError: the epoch has no such row, and does not end in front of it.
        """
        if row == 0:
            return f"{0:016x}"
        self[row - 1]
        window = bisect_right(self._ends, row - 1) - 1
        return f"{int(self._digests[window][row - 1 - self._ends[window]]):016x}"

    def take(self, start: int, count: int) -> list[np.ndarray]:
        """The rows from `start` on, `count` of them or what is left; plans no further than it must."""
        rows = []
        for number in range(start, start + count):
            try:
                rows.append(self[number])
            except IndexError:
                break
        return rows

    def dealt(self, start: int, world_size: int, batch_size: int) -> DealtStep:
        """The step that begins with row `start`. It is dealt once for all ranks that share this epoch."""
        key = (start, world_size, batch_size)
        with self._dealing:
            if key not in self._dealt:
                rows, sizes = self.take(start, world_size * batch_size), self._plan.sizes
                labels = sum(int(sizes.label_tokens[row].sum()) for row in rows)
                ranks = deal(rows, sizes, world_size=world_size, batch_size=batch_size)
                self._dealt[key] = DealtStep(rows, labels, ranks)
                for old in list(self._dealt)[:-_KEPT_STEPS]:
                    del self._dealt[old]
            return self._dealt[key]

    def _grow(self) -> bool:
        """Plans one more window; False where there is none."""
        with self._lock:
            if self._source is None:
                return False
            try:
                rows = next(self._source, None)
            except BaseException:  # a disk that fails while sizes are measured, Ctrl-C: the next try goes on here
                self._source = islice(_windows(self._plan, self.number), len(self._windows), None)
                raise
            if rows is None:
                self._source = None
                return False
            offsets = np.zeros(len(rows) + 1, dtype=np.int32)
            offsets[1:] = np.cumsum([len(row) for row in rows])
            flat = np.fromiter((index for row in rows for index in row), dtype=np.int32, count=int(offsets[-1]))
            flat.flags.writeable = False
            before = self._digests[-1][-1] if self._digests else np.uint64(0)
            self._digests.append(row_digests(flat, offsets, self._ends[-1], before))
            self._windows.append((flat, offsets))
            self._ends.append(self._ends[-1] + len(rows))  # last, since readers take no lock
            return True


def _windows(plan: Plan, epoch: int) -> Iterator[list[list[int]]]:
    """The rows of an epoch, window by window, each in its final order."""
    samples = _Samples(plan, epoch)
    rows = RowStream(samples, plan.budget, buffer=plan.buffer)
    num_blocks, size = 0, min(_FIRST_WINDOW, plan.window)
    while window := list(islice(rows, size)):
        if samples.num_left <= _TAIL_BUFFERS * plan.buffer:
            window += rows
        size = min(2 * size, plan.window)
        places = arrange(window, plan.sizes, block=plan.block, first_block=num_blocks, seed=plan.seed, epoch=epoch)
        num_blocks += -(-len(window) // plan.block)
        yield [window[place] for place in places]


def arrange(
    rows: Sequence[Sequence[int] | np.ndarray],
    sizes: Measured,
    *,
    block: int,
    first_block: int,
    seed: int,
    epoch: int,
) -> list[int]:
    """The rows of a window in their final order, as places in `rows`: sorted by cost, then blocks shuffled.

    Args:
        rows: sample indices of each.
        sizes: of their samples.
        block: rows that stay neighbours.
        first_block: number of the window's first block in its epoch.
        seed: of the shuffle.
        epoch: likewise.
    """
    order = np.argsort(row_costs(rows, sizes), kind="stable")
    blocks = [order[start : start + block] for start in range(0, len(order), block)]
    numbers = np.arange(first_block, first_block + len(blocks), dtype=np.uint64)
    mixed = np.argsort(shuffle_keys(numbers, seed, epoch, salt=1), kind="stable")
    return [int(place) for number in mixed for place in blocks[number]]


def shuffled(plan: Plan, epoch: int) -> np.ndarray:
    """(N,) int64, all samples in the order in which the packer of this epoch meets them."""
    keys = shuffle_keys(np.arange(len(plan.sizes), dtype=np.uint64), plan.seed, epoch, salt=0)
    return np.argsort(keys, kind="stable")


class _Samples:
    """(index, tokens, images) of every sample that fits a row, shuffled; to be gone over once.

    Attributes:
        num_left: samples behind the last one that was given, of which some may fit no row.
    """

    def __init__(self, plan: Plan, epoch: int) -> None:
        self._plan = plan
        self._order = shuffled(plan, epoch)
        self.num_left = len(self._order)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        sizes, budget, found = self._plan.sizes, self._plan.budget, False
        for start in range(0, len(self._order), _CHUNK):
            chunk = self._order[start : start + _CHUNK]
            sizes.require(chunk)
            columns = chunk.tolist(), sizes.tokens[chunk].tolist(), sizes.images[chunk].tolist()
            for place, (index, tokens, images) in enumerate(zip(*columns, strict=True), start + 1):
                if index not in sizes.skipped and budget.refusal(tokens, images) is None:
                    found = True
                    self.num_left = len(self._order) - place
                    yield index, tokens, images
        if not found:
            raise ValueError(f"none of the {len(sizes)} samples fits a row of {budget}: {sizes.counts(budget)}")
