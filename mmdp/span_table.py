"""Spans as arrays: what a recording gives, what travels between processes, what figures and the diagnosis read.

Adds: `Spans`, N of them; `Lane`, the thread where one ran; `merge`.
Leaves out: recording them (`spans`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import numpy as np

_Key = TypeVar("_Key", bound=Hashable)

NO_NUMBER = int(np.iinfo(np.int64).min)
"""Stands in `Spans.numbers` where a span has no such number."""


class Lane(NamedTuple):
    """A thread of a process of a host.

    Attributes:
        host: its name, as `spans.Clock` has it.
        pid: of the process.
        ident: of the thread.
        thread: its name.
        processors: that the process may use.
    """

    host: str
    pid: int
    ident: int
    thread: str
    processors: int


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """N spans.

    Attributes:
        names: that occur.
        lanes: that occur.
        name: (N,) int64, index into `names`.
        lane: (N,) int64, index into `lanes`.
        start: (N,) int64, nanoseconds since 1970.
        end: (N,) int64, likewise.
        numbers: (N,) int64 each; `NO_NUMBER` where a span has none of this name.
        dropped: older spans that were not kept.
    """

    names: tuple[str, ...]
    lanes: tuple[Lane, ...]
    name: np.ndarray
    lane: np.ndarray
    start: np.ndarray
    end: np.ndarray
    numbers: Mapping[str, np.ndarray] = field(default_factory=dict)
    dropped: int = 0

    def __len__(self) -> int:
        return len(self.start)

    def __getitem__(self, chosen: np.ndarray) -> Spans:
        """The spans that a mask (N,) bool, or indices, choose."""
        return replace(
            self,
            name=self.name[chosen],
            lane=self.lane[chosen],
            start=self.start[chosen],
            end=self.end[chosen],
            numbers={key: values[chosen] for key, values in self.numbers.items()},
        )

    def named(self, *names: str) -> Spans:
        """The spans of these names, earliest first."""
        wanted = [at for at, name in enumerate(self.names) if name in names]
        chosen: np.ndarray = np.flatnonzero(np.isin(self.name, wanted))
        return self[chosen[np.argsort(self.start[chosen], kind="stable")]]

    def number(self, key: str) -> np.ndarray:
        """The numbers of this name that spans have; fewer than N where some have none."""
        values = self.numbers.get(key, _array(()))
        known: np.ndarray = values[values != NO_NUMBER]
        return known

    @property
    def seconds(self) -> np.ndarray:
        """(N,) float64, how long each took."""
        taken: np.ndarray = (self.end - self.start) / 1e9
        return taken


def merge(parts: Sequence[Spans]) -> Spans:
    """The spans of several recorders as one, in the order given.

    >>> len(merge([]))
    0
    """
    names = _places(name for part in parts for name in part.names)
    lanes = _places(lane for part in parts for lane in part.lanes)
    keys = dict.fromkeys(key for part in parts for key in part.numbers)
    return Spans(
        names=tuple(names),
        lanes=tuple(lanes),
        name=_joined(_array(names[name] for name in part.names)[part.name] for part in parts),
        lane=_joined(_array(lanes[lane] for lane in part.lanes)[part.lane] for part in parts),
        start=_joined(part.start for part in parts),
        end=_joined(part.end for part in parts),
        numbers={key: _joined(part.numbers.get(key, np.full(len(part), NO_NUMBER)) for part in parts) for key in keys},
        dropped=sum(part.dropped for part in parts),
    )


def _places(keys: Iterable[_Key]) -> dict[_Key, int]:
    return {key: at for at, key in enumerate(dict.fromkeys(keys))}


def _array(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, dtype=np.int64)


def _joined(arrays: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([_array(()), *arrays])
