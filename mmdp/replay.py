"""A loader that costs nothing, to see how fast training could be.

Adds: `perfect`, which builds a few batches once and gives them over and over.
Leaves out: what the difference says (`diagnosis.py`).

    for batch in mmdp.feed(perfect(loader), device):
        train(batch)

What a run gains with it is all that a better loader could ever bring. For measuring only: it trains on the same few
batches, and its state is that of a run that has not begun.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sized
from dataclasses import replace
from itertools import cycle, islice
from typing import Any, Generic, TypeVar

from mmdp.records import Batch

T = TypeVar("T")


def perfect(loader: Iterable[T], steps: int | None = None, num_batches: int = 4) -> Perfect[T]:
    """The first batches of a loader, built now, and given in turn for so many steps.

    Args:
        loader: where the batches come from. It stands at its beginning again, where it can be rewound.
        steps: of each loop; by default as many as the loader has.
        num_batches: batches that are built and kept, fewer where the loader has fewer. They differ in size, so take
            some.

    Raises:
        ValueError: a number below 1, a loader without a length and no `steps`, or one without batches.

    >>> list(perfect([7, 8, 9], steps=5, num_batches=2))
    [7, 8, 7, 8, 7]
    """
    return Perfect(loader, steps, num_batches)


class Perfect(Generic[T]):
    """Replays a few batches; made by `perfect`. Everything else that it is asked for, the loader answers.

    A batch comes again as it is: a loop that writes into its batches on the CPU sees what it wrote.

    Attributes:
        loader: where the batches came from.
        batches: those that are replayed.
    """

    def __init__(self, loader: Iterable[T], steps: int | None = None, num_batches: int = 4) -> None:
        if steps is None:
            if not isinstance(loader, Sized):
                raise ValueError(f"a {type(loader).__name__} has no length: say how many `steps` a loop has")
            steps = len(loader)
        for name, value in (("steps", steps), ("num_batches", num_batches)):
            if value < 1:
                raise ValueError(f"{name} is {value}: it must be at least 1")
        self.loader = loader
        self._steps = steps
        start = loader.state_dict() if hasattr(loader, "state_dict") else None
        loop = iter(loader)
        self.batches = [_without_progress(batch, start) for batch in islice(loop, num_batches)]
        if isinstance(loop, Generator):
            loop.close()
        if start is not None and hasattr(loader, "rewind"):
            loader.rewind(start)
        if not self.batches:
            raise ValueError("the loader has no batch to replay")

    def __iter__(self) -> Iterator[T]:
        return islice(cycle(self.batches), self._steps)

    def __len__(self) -> int:
        """Steps of each loop."""
        return self._steps

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not made yet, as in a copy
            raise AttributeError(name)
        return getattr(self.loader, name)


def _without_progress(batch: T, state: Any) -> T:
    """Whoever saves the state of a replayed batch saves one from which nothing is lost."""
    return replace(batch, state=state) if isinstance(batch, Batch) else batch
