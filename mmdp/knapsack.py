"""Which samples share a row: next-fit, the two decreasing rules, and the knapsack. Pure integers.

Adds: `pack`, from sizes to rows by one of the `STRATEGIES`; `refused`, the samples that no row can hold;
`lower_bound`, a number of rows that no packer can beat.
In: the tokens and images of each sample, and the `Budget` of a row. Out: sample indices, row after row.
Leaves out: streams (`row_stream`), shuffling and the order of rows (`planner`), and anything that looks into a sample.

Every strategy keeps both budgets:

- `greedy` is next-fit: samples in the order given; one that doesn't fit closes the row. One row is open at a time.
- `ffd` is first-fit-decreasing: longest sample first, each into the first row with room, so that short samples fill the
  gaps that long ones leave. It needs all sizes at hand. It sorts by tokens alone: where images bind, that is the wrong
  order, and rows run out of images with tokens to spare.
- `bfd` is best-fit-decreasing: the same, but a sample goes to the row with the smallest gap that holds it.
- `knapsack` turns the question around: not which row for this sample, but which samples for this row. A buffer of a few
  hundred sizes is enough, so it streams, roughly keeps the order given, and still wastes less. It wants that order
  shuffled: from sorted sizes, its buffer holds only one kind at a time.

No random number and no float takes part in a choice, so every machine packs alike. Ties: of samples of one size the
first goes first; of rows that are equally good, the one with fewer images left, then the one opened first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from mmdp.length_histogram import best_fit_decreasing
from mmdp.records import Budget
from mmdp.refusals import Reason
from mmdp.row_stream import BUFFER, RowStream

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

__all__ = ["STRATEGIES", "RowStream", "lower_bound", "pack", "refused"]


def pack(
    tokens: ArrayLike,
    images: ArrayLike | None,
    budget: Budget,
    strategy: str = "knapsack",
    *,
    buffer: int | None = BUFFER,
) -> list[np.ndarray]:
    """Packs samples into rows. Every index is in exactly one row, but for those that `refused` lists.

    Args:
        tokens: (N,) integers, tokens of each sample.
        images: (N,) integers, images of each sample; None where there are none.
        budget: what a row holds.
        strategy: one of `STRATEGIES`; the module's docstring tells them apart.
        buffer: how many sizes `knapsack` chooses from; None for all. All is tightest, but the long samples go first.

    Returns:
        The rows, each a (k,) int64 array of sample indices.

    Raises:
        ValueError: an unknown strategy, or sizes that are no sizes.

    >>> [len(pack(range(1, 25), None, Budget(tokens=100), strategy)) for strategy in ("greedy", "ffd")]
    [4, 3]
    """
    _check(budget)
    if strategy not in STRATEGIES:
        raise ValueError(f"unknown strategy {strategy!r}: choose one of {', '.join(STRATEGIES)}")
    all_tokens, all_images = _as_sizes(tokens, images)
    kept = np.flatnonzero(_fit_alone(all_tokens, all_images, budget))
    kept_tokens, kept_images = all_tokens[kept], all_images[kept]
    if budget.images is None or budget.images >= kept_images.sum():  # images can't bind
        budget, kept_images = Budget(budget.tokens, images=0), np.zeros_like(kept_images)
    if strategy == "knapsack":
        sizes = zip(range(len(kept)), kept_tokens.tolist(), kept_images.tolist(), strict=True)
        rows: Iterable[list[int] | np.ndarray] = RowStream(sizes, budget, buffer=buffer or max(1, len(kept)))
    elif strategy == "bfd" and not kept_images.any():
        order, starts = best_fit_decreasing(kept_tokens, budget.tokens)
        rows = (order[start:end] for start, end in pairwise(starts.tolist()))
    else:
        rows = _RULES[strategy](kept_tokens, kept_images, budget.tokens, budget.images or 0)
    return [kept[row] for row in rows]


def refused(tokens: ArrayLike, images: ArrayLike | None, budget: Budget) -> dict[int, Reason]:
    """The samples that no row can hold, each with its reason. `pack` leaves them out: count them and say so.

    Args:
        tokens: (N,) integers.
        images: (N,) integers, or None.
        budget: what a row holds.

    >>> {index: str(reason) for index, reason in refused([10, 11], [2, 0], Budget(tokens=10, images=1)).items()}
    {0: 'too_many_images', 1: 'too_long'}
    """
    _check(budget)
    tokens, images = _as_sizes(tokens, images)
    found = {}
    for index in np.flatnonzero(~_fit_alone(tokens, images, budget)).tolist():
        reason = budget.refusal(int(tokens[index]), int(images[index]))
        assert reason is not None
        found[index] = reason
    return found


def lower_bound(tokens: ArrayLike, images: ArrayLike | None, budget: Budget) -> int:
    """At least so many rows are needed: all tokens, or all images, without a gap. 0 where there is nothing to pack.

    What `refused` lists doesn't count. For lengths alone `length_histogram.martello_toth_bound` is stronger.

    Args:
        tokens: (N,) integers.
        images: (N,) integers, or None.
        budget: what a row holds.

    >>> lower_bound([30, 30, 30], [1, 9, 8], Budget(tokens=100, images=9))
    2
    """
    _check(budget)
    tokens, images = _as_sizes(tokens, images)
    kept = _fit_alone(tokens, images, budget)
    by_tokens = -(-int(tokens[kept].sum()) // budget.tokens)
    by_images = -(-int(images[kept].sum()) // budget.images) if budget.images else 0
    return max(by_tokens, by_images, int(kept.any()))


def _next_fit(tokens: np.ndarray, images: np.ndarray, max_tokens: int, max_images: int) -> list[list[int]]:
    rows: list[list[int]] = []
    gap = room = -1  # no row is open
    for index, (length, count) in enumerate(zip(tokens.tolist(), images.tolist(), strict=True)):
        if length > gap or count > room:
            rows.append([])
            gap, room = max_tokens, max_images
        rows[-1].append(index)
        gap, room = gap - length, room - count
    return rows


def _first_fit_decreasing(tokens: np.ndarray, images: np.ndarray, max_tokens: int, max_images: int) -> list[list[int]]:
    """Row by row search would be quadratic. Instead, a row too full for the present length sleeps until lengths have
    come down to its gap, and the rows awake stand in one heap for each number of images left.
    """
    rows: list[list[int]] = []
    gaps: list[int] = []
    awake: list[list[int]] = [[] for _ in range(max_images + 1)]  # heaps of row numbers
    asleep: dict[int, list[tuple[int, int]]] = defaultdict(list)  # gap -> (images left, row number)
    level = max_tokens  # rows with a gap of at least `level` are awake

    for index in _longest_first(tokens):
        length, count = int(tokens[index]), int(images[index])
        while level > length:
            level -= 1
            for room, number in asleep.pop(level, ()):
                heappush(awake[room], number)
        number, room = min(
            ((awake[room][0], room) for room in range(count, max_images + 1) if awake[room]),
            default=(len(rows), max_images),
        )
        if number == len(rows):
            rows.append([])
            gaps.append(max_tokens)
        else:
            heappop(awake[room])
        rows[number].append(index)
        gaps[number] -= length
        if gaps[number] >= level:
            heappush(awake[room - count], number)
        else:
            asleep[gaps[number]].append((room - count, number))
    return rows


def _best_fit_decreasing(tokens: np.ndarray, images: np.ndarray, max_tokens: int, max_images: int) -> list[list[int]]:
    """The gaps of the open rows are the bits of one integer for each number of images left: the lowest bit from a
    length up is the best fit for it.
    """
    rows: list[list[int]] = []
    gaps = [0] * (max_images + 1)
    having: dict[tuple[int, int], list[int]] = defaultdict(list)  # (gap, images left) -> heap of row numbers

    for index in _longest_first(tokens):
        length, count = int(tokens[index]), int(images[index])
        fitting = ((gaps[room] >> length, room) for room in range(count, max_images + 1))
        gap, room = min(
            (((bits & -bits).bit_length() - 1 + length, room) for bits, room in fitting if bits),
            default=(max_tokens, max_images),
        )
        if having[gap, room]:
            number = heappop(having[gap, room])
            if not having[gap, room]:
                gaps[room] ^= 1 << gap
        else:
            number = len(rows)
            rows.append([])
        rows[number].append(index)
        heappush(having[gap - length, room - count], number)
        gaps[room - count] |= 1 << (gap - length)
    return rows


_RULES: dict[str, Callable[[np.ndarray, np.ndarray, int, int], list[list[int]]]] = {
    "greedy": _next_fit,
    "ffd": _first_fit_decreasing,
    "bfd": _best_fit_decreasing,
}

STRATEGIES = (*_RULES, "knapsack")
"""What `pack` takes as its strategy."""


def _longest_first(tokens: np.ndarray) -> list[int]:
    """Indices by falling length; equal lengths in the order given."""
    order: list[int] = np.argsort(-tokens, kind="stable").tolist()
    return order


def _check(budget: Budget) -> None:
    if not isinstance(budget, Budget):
        raise ValueError(f"the budget is {budget!r}: give a Budget, such as mmdp.Budget(tokens=100)")


def _as_sizes(tokens: ArrayLike, images: ArrayLike | None) -> tuple[np.ndarray, np.ndarray]:
    """Checked (N,) int64 tokens and images; views or copies that nobody here writes to."""
    checked: list[np.ndarray] = []
    for name, values in (("tokens", tokens), ("images", images)):
        array = np.zeros(len(checked[0]), np.int64) if values is None else np.asarray(values)
        if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
            raise ValueError(f"{name} has shape {array.shape} and type {array.dtype}: give a list of integers")
        if len(array) and array.min() < 0:
            raise ValueError(f"{name}[{array.argmin()}] is {array.min()}: sizes are never negative")
        checked.append(array.astype(np.int64, copy=False))
    if len(checked[0]) != len(checked[1]):
        raise ValueError(f"{len(checked[0])} samples have tokens but {len(checked[1])} have images: give one for each")
    return checked[0], checked[1]


def _fit_alone(tokens: np.ndarray, images: np.ndarray, budget: Budget) -> np.ndarray:
    """(N,) bool: whether an empty row can hold the sample; `Budget.refusal` for arrays."""
    fit: np.ndarray = tokens <= budget.tokens
    return fit if budget.images is None else fit & (images <= budget.images)
