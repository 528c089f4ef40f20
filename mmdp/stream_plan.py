"""Rows over what arrives: a stream of samples to the steps of one rank, a window of rows at a time.

Adds: `StreamPlan`, whose `steps` plans one pass, and the state from which it goes on.
Leaves out: reading and encoding samples (`arrivals.py`), building rows, and the next pass (`stream_loader.py`).

The order of a pass is that of an epoch in `planner.py`, but that samples come in the order of the stream: the packer
fills rows from what waits, rows are sorted by cost inside windows, and blocks of a few rows are shuffled by (seed,
pass, block). It knows no world size: a step is the next W x B rows.

The state after a step is the row number, and where the pass stood when the window of that row was begun: which samples
waited, and how far the stream had been read. From there the window is planned again, and the rows before are left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mmdp import planner
from mmdp.arrivals import Arrivals, Arrived, Item, Taken, digest_of, name_of
from mmdp.assemble import Step
from mmdp.dealing import deal
from mmdp.fingerprints import differences, plan_fingerprint
from mmdp.planner import BLOCK, arrange
from mmdp.records import Budget
from mmdp.refusals import Reason, shorten
from mmdp.row_stream import BUFFER, RowStream
from mmdp.snapshot import Snapshot

if TYPE_CHECKING:
    from mmdp.encode import Encoder

VERSION = 2
"""Goes up when the same stream, budget and seed give other rows, or a state has another form."""

WINDOW = 64
"""Rows sorted by cost at a time, whose samples are held. Advised: 8 x world size x batch size, where memory allows."""


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of each step one rank takes, as `Steps` has it."""

    batch_size: int
    rank: int
    world_size: int
    drop_last: bool


@dataclass(frozen=True, slots=True)
class LeftOut:
    """The last rows of a pass, which make no whole step, where `drop_last` is asked for.

    Attributes:
        rows: how many.
        samples: how many, in them.
        skipped: what was refused while they were packed.
    """

    rows: int
    samples: int
    skipped: Mapping[int, Reason]


class _Sizes(NamedTuple):
    """(N,) int64 each, of the samples of some rows, one behind the other."""

    tokens: np.ndarray
    vision: np.ndarray


@dataclass(frozen=True, slots=True)
class _Window:
    """Rows in their final order, the number of the first, and where the pass stood before and behind them."""

    first: int
    rows: list[Taken]
    before: Snapshot
    after: Snapshot


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """The rows of every pass over a stream.

    Attributes:
        source: gives the samples of one pass each time it is gone over.
        encoder: makes tokens of them.
        budget: what a row holds.
        seed: another seed gives another order of rows.
        window: rows sorted by cost at a time.
        strict: raise the first bad sample's error instead of counting it.
        max_failures: raise when so many samples are bad, one after the other.

    Raises:
        ValueError: a window of no rows.
    """

    source: Iterable[Item]
    encoder: Encoder
    budget: Budget
    seed: int
    window: int
    strict: bool
    max_failures: int

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window is {self.window}: it must be at least 1")

    @property
    def fingerprint(self) -> str:
        """Hex digests of all that decides the rows, but for the samples themselves."""
        order = f"{VERSION} {planner.VERSION} {self.seed} {self.window} {BLOCK} {BUFFER}"
        name = f"stream {name_of(self.source)}"
        return plan_fingerprint(name, self.encoder.fingerprint, str(self.budget), order)

    def start(self, epoch: int) -> dict[str, Any]:
        """The state before the first row of a pass."""
        whose = {"version": VERSION, "plan": self.fingerprint, "epoch": epoch}
        return _in_front_of(whose, 0, 0, Snapshot())

    def steps(self, state: Mapping[str, Any], share: Share) -> Iterator[Step[tuple[Arrived, ...]] | LeftOut]:
        """The steps of the pass that are left from a state on, for one rank; last what is left out, if anything is.

        The items of a step are the samples of each row; a filler row has none.

        Raises:
            Exception: whatever `Arrivals` raises.
        """
        whose = {name: state[name] for name in ("version", "plan", "epoch")}
        cursor: int = state["cursor"]
        step = share.world_size * share.batch_size
        rows: deque[Taken] = deque()
        at = Snapshot(state["read"], state["waiting"], state["mark"])
        for window in self._windows(state["epoch"], state["row"], at):
            end = window.first + len(window.rows)
            before = max(0, state["cursor"] - window.first)
            self._check_rows(state, window, before)
            digests = _digests(window)
            rows.extend(window.rows[before:])
            window.rows.clear()  # whoever takes a row is the last to hold it
            while len(rows) >= step:
                cursor += step
                begun = (end, window.after) if cursor == end else (window.first, window.before)
                digest = window.after.digest if cursor == end else digests[cursor - window.first]
                front = _in_front_of(whose, cursor, *begun, digest)
                yield _step([rows.popleft() for _ in range(step)], front, share)
        if not rows:
            return
        if share.drop_last:
            refused = {number: reason for row in rows for number, reason in row.refused.items()}
            yield LeftOut(len(rows), sum(len(row.samples) for row in rows), refused)
        else:
            yield _step(list(rows), _in_front_of(whose, end, end, window.after, window.after.digest), share)

    def check(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state, once it is known to be one of this plan's.

        Raises:
            ValueError: no state of ours, or one of another budget, encoder, seed, window or source.
        """
        mine = self.start(0)
        if not _is_state(state, like=mine):
            raise ValueError(f"not a state of this loader: {shorten(state, 200)}")
        if state["plan"] != mine["plan"]:
            raise ValueError(
                f"the state is of another plan, which differs in {differences(state['plan'], mine['plan'])}: that must "
                "be as in the run that saved it, or begin without a state"
            )
        return dict(state)

    def _check_rows(self, state: Mapping[str, Any], window: _Window, before: int) -> None:
        """Refuses a stream that gives other samples than it did when the state was saved, as far as they came again."""
        if window.first != state["row"]:
            return
        digest = _digests(window, before)[-1] if before <= len(window.rows) else "fewer rows"
        if None not in (digest, state["digest"]) and digest != state["digest"]:
            raise ValueError(
                f"{name_of(self.source)} gives other samples than it did when the state was saved, or more or fewer of "
                "them, so that some would come twice or never: give the same stream, in the same order, or begin "
                "without a state"
            )

    def _windows(self, epoch: int, first: int, at: Snapshot) -> Generator[_Window, None, None]:
        arrivals = Arrivals(self.source, self.encoder, self.budget, at, self.strict, self.max_failures)
        packed = RowStream(arrivals, self.budget, buffer=BUFFER)
        packed.load_state_dict(
            {
                "budget": [self.budget.tokens, self.budget.images],
                "buffer": BUFFER,
                "num_read": 0,
                "num_rows": first,
                "waiting": " ".join(f"{number:x}:{tokens:x}:{images:x}" for number, tokens, images in at.sizes()),
            }
        )
        blocks = -(-self.window // BLOCK)  # of a whole window
        is_begun = False
        with closing(arrivals):
            while rows := [arrivals.take(numbers) for numbers in islice(packed, self.window)]:
                places = arrange(
                    *_sizes(rows), block=BLOCK, first_block=first // self.window * blocks, seed=self.seed, epoch=epoch
                )
                after = arrivals.snapshot()
                if not is_begun:
                    at, is_begun = arrivals.began_with(), True
                window = _Window(first, [rows[place] for place in places], at, after)
                rows.clear()
                yield window
                first, at = first + len(places), after


def _in_front_of(
    whose: Mapping[str, Any], cursor: int, row: int, at: Snapshot, digest: str | None = ""
) -> dict[str, Any]:
    """The state in front of row `cursor`; `at` is in front of row `row`, with which its window starts.

    Its digest is that of what waited then, and of the rows from there to the cursor.
    """
    return {**whose, "cursor": cursor, "row": row, **asdict(at), "digest": digest}


def _digests(window: _Window, count: int | None = None) -> list[str | None]:
    """Of what waited before the window, and of its rows before each; None where something can't be used any more."""
    found = [window.before.digest]
    for row in window.rows[:count]:
        found.append(None if found[-1] is None else digest_of(row.samples, found[-1]))
    return found


def _is_state(state: object, *, like: Mapping[str, Any]) -> bool:
    if not isinstance(state, Mapping) or state.keys() != like.keys() or state["version"] != VERSION:
        return False
    numbers = [state[name] for name in ("epoch", "cursor", "row", "read")]
    if not all(isinstance(number, int) and number >= 0 for number in numbers) or state["row"] > state["cursor"]:
        return False
    mark, waiting = state["mark"], state["waiting"]
    if not (state["digest"] is None or isinstance(state["digest"], str)):
        return False
    if not (mark is None or (isinstance(mark, Mapping) and isinstance(mark.get("number"), int))):
        return False
    try:
        Snapshot(waiting=waiting).sizes()
    except (AttributeError, ValueError):
        return False
    return True


def _step(rows: list[Taken], state: Mapping[str, Any], share: Share) -> Step[tuple[Arrived, ...]]:
    dealt = deal(*_sizes(rows), world_size=share.world_size, batch_size=share.batch_size)
    mine = [rows[place] for place in dealt[share.rank]]
    fillers: list[tuple[Arrived, ...]] = [()] * (share.batch_size - len(mine))
    return Step(
        items=[*(row.samples for row in mine), *fillers],
        label_tokens=sum(one.size.label_tokens for row in rows for one in row.samples),
        state=state,
        skipped={number: reason for row in mine for number, reason in row.refused.items()},
    )


def _sizes(rows: list[Taken]) -> tuple[list[np.ndarray], _Sizes]:
    """The samples of each row as places in the sizes, and these."""
    sizes = [one.size for row in rows for one in row.samples]
    ends = np.cumsum([len(row.samples) for row in rows])
    tokens = np.array([size.tokens for size in sizes], dtype=np.int64)
    vision = np.array([size.vision for size in sizes], dtype=np.int64)
    return np.split(np.arange(len(sizes)), ends[:-1]), _Sizes(tokens, vision)
