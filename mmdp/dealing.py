"""The rows of one step to ranks, so that all have like work.

Adds: `deal`, and `row_costs`, what a row costs among others. Leaves out: the order in which rows come (`planner.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Protocol

import numpy as np


class Measured(Protocol):
    """What costs are made of, by sample index."""

    @property
    def tokens(self) -> np.ndarray:
        """(N,) integers."""

    @property
    def vision(self) -> np.ndarray:
        """(N,) integers, patches or tiles."""


def deal(rows: Sequence[np.ndarray], sizes: Measured, *, world_size: int, batch_size: int) -> list[list[int]]:
    """Gives the rows of one step to ranks: the dearest first, each to the lightest rank that has room.

    This is the longest-processing-time rule (Graham, 1969) with a limit on the number of rows.

    Args:
        rows: at most world_size x batch_size.
        sizes: of their samples.
        world_size: ranks.
        batch_size: rows a rank.

    Returns:
        For each rank the places in `rows` it gets, in rising order; ranks of a last, incomplete step may get fewer.
    """
    assert len(rows) <= world_size * batch_size
    costs = row_costs(rows, sizes)
    dealt: list[list[int]] = [[] for _ in range(world_size)]
    open_ranks = [(0, 0, rank) for rank in range(world_size)]  # load, rows, rank: a heap, the lightest first
    for place in map(int, np.argsort(-costs, kind="stable")):
        load, num_rows, rank = heappop(open_ranks)
        dealt[rank].append(place)
        if num_rows + 1 < batch_size:
            heappush(open_ranks, (load + int(costs[place]), num_rows + 1, rank))
    return [sorted(places) for places in dealt]


def row_costs(rows: Sequence[Sequence[int] | np.ndarray], sizes: Measured) -> np.ndarray:
    """(R,) integers, the cost of each row among these: squares of lengths, and vision patches or tiles, in equal parts.

    Each part counts as a share of its sum over the rows, brought to one denominator. The costs are int64 where these
    hold them, else integers of Python: some thousand rows of 100,000 tokens come so far.
    """
    ends = np.cumsum([len(row) for row in rows])
    if not len(ends) or not ends[-1]:
        return np.zeros(len(rows), dtype=np.int64)
    flat = np.concatenate([np.asarray(row, dtype=np.int64) for row in rows])
    squares = _sums(sizes.tokens[flat].astype(np.int64) ** 2, ends)
    vision = _sums(sizes.vision[flat].astype(np.int64), ends)
    all_squares, all_vision = max(1, int(squares.sum())), max(1, int(vision.sum()))
    if int(squares.max()) * all_vision + int(vision.max()) * all_squares > np.iinfo(np.int64).max:
        squares, vision = squares.astype(object), vision.astype(object)
    costs: np.ndarray = squares * all_vision + vision * all_squares
    return costs


def _sums(values: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The sum of each stretch of values that ends at `ends`; stretches may be empty."""
    total = np.concatenate([[0], np.cumsum(values)])
    sums: np.ndarray = np.diff(total[ends], prepend=0)
    return sums
