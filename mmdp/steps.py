"""Which rows a rank builds, step after step.

Adds: `Steps`, the rows of one rank from any row of the plan on; `Place`, one of them; `Position`, where a run stands,
and the state it resumes from.
Leaves out: building rows (`loader.py`), planning them (`planner.py`).

A step is the next world_size x batch_size rows of the plan. The state after it is (epoch, row number), whatever was
read ahead: it holds for any number of workers, ranks and rows a batch. A digest of the rows before it goes with it:
where data have come or gone since, so that a sample would come twice or never, the state is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mmdp.fingerprints import differences
from mmdp.planner import Epoch, Plan
from mmdp.records import Budget
from mmdp.refusals import counted, shorten

_STATE_VERSION = 2


class Place(NamedTuple):
    """One row that a rank is to build.

    Attributes:
        samples: indices; empty for a filler row.
        epoch: its number.
        after: the row of the plan where the next step starts.
        step_label_tokens: label tokens of the whole step, over all ranks, as measured.
        digest: of all rows before `after`, as `Epoch.digest` gives it.
    """

    samples: tuple[int, ...]
    epoch: int
    after: int
    step_label_tokens: int
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Steps:
    """The rows of one rank. All ranks take the same number of steps, and together each row once.

    Attributes:
        plan: the rows of every epoch.
        batch_size: rows a rank and step, B.
        rank: 0 to world_size - 1.
        world_size: ranks, W.
        drop_last: leave the last, incomplete step out, instead of completing it with filler rows.

    Raises:
        ValueError: a number out of range.
    """

    plan: Plan
    batch_size: int
    rank: int = 0
    world_size: int = 1
    drop_last: bool = False

    def __post_init__(self) -> None:
        check_plan(self.plan)
        check_ranks(self.batch_size, self.rank, self.world_size)

    def done(self, epoch: Epoch, cursor: int) -> bool:
        """Whether no step is left from row `cursor` on; plans no further than it must."""
        step = self.world_size * self.batch_size if self.drop_last else 1
        return len(epoch.take(cursor, step)) < step

    def count(self, epoch: Epoch, cursor: int = 0) -> int:
        """How many steps there are from row `cursor` on; plans the whole epoch."""
        rows, step = max(0, len(epoch) - cursor), self.world_size * self.batch_size
        return rows // step if self.drop_last else -(-rows // step)

    def remaining(self, epoch: Epoch, cursor: int) -> int:
        """Steps of the next loop: what is left of the epoch, or the next one whole."""
        return self.count(epoch, cursor) or self.count(self.plan.epoch(epoch.number + 1))

    def places(self, epoch: Epoch, cursor: int = 0) -> Iterator[list[Place]]:
        """For each step from row `cursor` on, the B rows of this rank, filler rows among them; plans as it goes."""
        while (step := epoch.dealt(cursor, self.world_size, self.batch_size)).rows:
            if self.drop_last and len(step.rows) < self.world_size * self.batch_size:
                return
            cursor += len(step.rows)
            mine, filler = (
                step.ranks[self.rank],
                Place((), epoch.number, cursor, step.label_tokens, epoch.digest(cursor)),
            )
            places = [filler._replace(samples=tuple(map(int, step.rows[place]))) for place in mine]
            yield places + [filler] * (self.batch_size - len(places))

    def left_out(self, epoch: Epoch, cursor: int) -> int:
        """How many samples `drop_last` leaves out, where no step is left from row `cursor` on."""
        return sum(map(len, epoch.take(cursor, self.world_size * self.batch_size)))

    def state(self, epoch: int, cursor: int, digest: str) -> dict[str, Any]:
        """The state after a step, with the digest of the rows before the cursor: under 200 bytes as JSON."""
        return {
            "version": _STATE_VERSION,
            "plan": self.plan.fingerprint,
            "epoch": epoch,
            "cursor": cursor,
            "rows": digest,
        }

    def check(self, state: Mapping[str, Any]) -> tuple[int, int, str]:
        """(epoch, cursor, digest of the rows before it) of a state.

        Raises:
            ValueError: no state of ours, or one of another plan.
        """
        version = state.get("version") if isinstance(state, Mapping) else None
        if isinstance(version, int) and version not in (0, _STATE_VERSION):
            raise ValueError(
                f"the state is of version {version}, and this mmdp reads version {_STATE_VERSION}: resume with the "
                "mmdp that saved it, or begin without a state"
            )
        is_ours = version == _STATE_VERSION and "plan" in state
        epoch, cursor = (state.get("epoch"), state.get("cursor")) if is_ours else (None, None)
        if not (isinstance(epoch, int) and isinstance(cursor, int) and min(epoch, cursor) >= 0):
            raise ValueError(
                f"not a state of version {_STATE_VERSION} of this loader: {shorten(state, 200)}. Give what "
                "`state_dict` or `batch.state` gave, or begin without a state"
            )
        if state["plan"] != self.plan.fingerprint:
            raise ValueError(
                f"the state is of another plan, which differs in {differences(state['plan'], self.plan.fingerprint)}: "
                "that must be as in the run that saved it, or begin without a state"
            )
        return epoch, cursor, str(state.get("rows"))


class Position:
    """Where a run stands: an epoch, and the row of its plan that the next step starts with.

    Args:
        steps: of this rank.

    Attributes:
        epoch: the epoch.
        cursor: the row.
        dropped: epoch to the number of samples that `drop_last` left out at its end.
        is_over: the next loop is that over an epoch which a loaded state says is over.
    """

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.epoch = steps.plan.epoch(0)
        self.cursor = 0
        self.dropped: dict[int, int] = {}
        self._is_resumed = False  # from a state, and no loop has begun
        self.is_over = False

    def __len__(self) -> int:
        """Steps of the next loop: all of an epoch, or what is left of it."""
        return 0 if self.is_over else self.steps.remaining(self.epoch, self.cursor)

    def begin(self) -> None:
        """A loop begins: in the next epoch, where no step of this one is left.

        Raises:
            ValueError: the epoch has no step at all.
        """
        is_over, self.is_over, self._is_resumed = self.is_over, False, False
        if is_over:
            return
        if self.cursor and self.steps.done(self.epoch, self.cursor):
            self.finish()
            self.epoch, self.cursor = self.steps.plan.epoch(self.epoch.number + 1), 0
        if self.steps.done(self.epoch, self.cursor):
            raise ValueError(
                f"epoch {self.epoch.number} has {counted(len(self.epoch), 'row')}, less than a step of "
                f"{counted(self.steps.world_size, 'rank')} x {self.steps.batch_size} rows, and drop_last leaves that "
                "out: give smaller batches, or let filler rows complete the step"
            )

    def leave(self) -> None:
        """To the end of the epoch, past the steps that are left."""
        step = self.steps.world_size * self.steps.batch_size
        self.cursor = min(len(self.epoch), self.cursor + step * self.steps.count(self.epoch, self.cursor))
        self.finish()

    def finish(self) -> None:
        """No step of the epoch is left: notes what is dropped."""
        if left_out := self.steps.left_out(self.epoch, self.cursor):
            self.dropped[self.epoch.number] = left_out

    def set_epoch(self, epoch: int) -> None:
        """To the start of this epoch, unless it is in its middle.

        Where a resumed run begins with the epoch that its state has ended, as `for epoch in range(state["epoch"], n)`
        does, that epoch has no step left: else it would come twice.
        """
        is_done = bool(self.cursor) and self.steps.done(self.epoch, self.cursor)
        self.is_over = is_done and self._is_resumed and epoch == self.epoch.number
        if self.is_over:
            return
        if epoch != self.epoch.number or is_done:
            self.epoch, self.cursor = self.steps.plan.epoch(epoch), 0

    def state(self) -> dict[str, Any]:
        """From which a new run goes on here."""
        return self.steps.state(self.epoch.number, self.cursor, self.epoch.digest(self.cursor))

    def load(
        self, state: Mapping[str, Any], epoch_of: Callable[[int], Epoch] | None = None, *, resumes: bool = False
    ) -> None:
        """To where a state was taken.

        Args:
            state: of this plan.
            epoch_of: gives the rows of an epoch, where somebody else has planned them already.
            resumes: a new run goes on from it.

        Raises:
            ValueError: what `Steps.check` raises, or the rows before it are other ones now.
        """
        number, cursor, digest = self.steps.check(state)
        epoch = (epoch_of or self.steps.plan.epoch)(number)
        try:
            is_same = epoch.digest(cursor) == digest
        except IndexError:
            raise ValueError(
                f"the state stands before row {cursor} of epoch {number}, which has {len(epoch)} rows now: samples "
                "have come or gone since it was saved. Put the data back, or begin an epoch: "
                f"`set_epoch({number + 1})` instead of the state"
            ) from None
        if not is_same:
            raise ValueError(
                f"the first {cursor} rows of epoch {number} are not those that were handed out before the state was "
                "saved: samples could be used then that can't be used now, or the other way round (an image that came "
                "or went, another size), and some would come twice or never. Put the data back, or begin an epoch: "
                f"`set_epoch({number + 1})` instead of the state"
            )
        self.epoch, self.cursor = epoch, cursor
        self._is_resumed, self.is_over = resumes, False


def check_ranks(batch_size: int, rank: int, world_size: int) -> None:
    """Raises a ValueError where a number is out of range, or is none."""
    for name, value in (("batch_size", batch_size), ("rank", rank), ("world_size", world_size)):
        if not hasattr(value, "__index__"):
            raise ValueError(f"{name} is {value!r}: it must be a whole number")
    for name, value in (("batch_size", batch_size), ("world_size", world_size)):
        if value < 1:
            raise ValueError(f"{name} is {value}: it must be at least 1")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of {world_size}: ranks go from 0 to world size - 1")


def check_plan(plan: object) -> None:
    """Raises a ValueError where this is no plan."""
    if not hasattr(plan, "epoch"):
        raise ValueError(f"{shorten(plan)} is no plan: give what mmdp.plan(sizes, budget) returns")


def row_length(budget: Budget, length: int | None) -> int:
    """Tokens a row of a batch: as asked for, else those of the budget.

    Raises:
        ValueError: a row of the budget would be longer.
    """
    if length is None:
        return budget.tokens
    if length < budget.tokens:
        raise ValueError(f"rows of {length} tokens can't hold the {budget.tokens} of the plan's budget")
    return length


def refuse_late(*, started: bool) -> None:
    """Raises a RuntimeError where a state comes after the first loop has started."""
    if started:
        raise RuntimeError("load the state before the first loop: this one has begun with other rows")
