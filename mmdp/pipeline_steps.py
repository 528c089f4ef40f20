"""Which rows a rank has in which step of the model: epochs with an end, and rows dealt as the planner deals them.

Adds: `ModelSteps`.
Leaves out: what becomes of the rows (`pipeline_run`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from mmdp.pipeline_model import RowCost

_FILLER = RowCost(0, 0.0, 0.0)


class ModelSteps:
    """The steps of all ranks. A last, incomplete step of an epoch is completed with rows that cost nothing.

    Args:
        rows: in the order of the plan, over and over.
        epoch_rows: rows of an epoch; 0 for one without end.
        ranks: that there are.
        step_rows: rows of a step, for one rank.
    """

    def __init__(self, rows: Sequence[RowCost], epoch_rows: int, ranks: int, step_rows: int) -> None:
        self._rows = rows
        self._epoch_rows = epoch_rows
        self._ranks = ranks
        self._step_rows = step_rows
        self._dealt: dict[int, list[list[RowCost]]] = {}

    @cached_property
    def num_steps(self) -> int | None:
        """Of an epoch; None for one without end.

        >>> ModelSteps([RowCost(1, 0.1, 1.0)], 111, ranks=4, step_rows=4).num_steps
        7
        """
        return -(-self._epoch_rows // (self._ranks * self._step_rows)) if self._epoch_rows else None

    def begins(self, step: int) -> bool:
        """Whether an epoch begins with it."""
        return step % self.num_steps == 0 if self.num_steps else step == 0

    def of(self, step: int, rank: int) -> list[RowCost]:
        """The rows of a rank's step."""
        if step not in self._dealt:
            self._dealt[step] = self._deal(step)
        return self._dealt[step][rank]

    def _deal(self, step: int) -> list[list[RowCost]]:
        """The dearest first, each to the lightest rank that has room; images are the cost."""
        wanted = self._ranks * self._step_rows
        first = step * wanted
        size = wanted
        if self.num_steps:
            epoch, inside = divmod(step, self.num_steps)
            size = min(wanted, self._epoch_rows - inside * wanted)
            first = epoch * self._epoch_rows + inside * wanted
        rows = [self._rows[(first + at) % len(self._rows)] for at in range(size)]
        order = sorted(range(size), key=lambda at: -rows[at].images)
        dealt: list[list[int]] = [[] for _ in range(self._ranks)]
        loads = [0] * self._ranks
        for at in order:
            with_room = (rank for rank in range(self._ranks) if len(dealt[rank]) < self._step_rows)
            rank = min(with_room, key=lambda one: (loads[one], len(dealt[one]), one))
            dealt[rank].append(at)
            loads[rank] += rows[at].images
        return [[rows[at] for at in sorted(mine)] + [_FILLER] * (self._step_rows - len(mine)) for mine in dealt]
