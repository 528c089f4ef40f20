"""The one loop that is open over a loader, and who reads it in a thread of its own.

Adds: `OpenLoop`.
Leaves out: what a loop does (`assemble`, `ray_reader`), and the thread that reads ahead of a trainer (`device`).

A generator can be closed from anywhere but while it runs, and a feed's thread runs it nearly always. So a feed says how
its own loop is ended: that ends the thread, and leaves the loader where the trainer is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator

from mmdp.records import Batch


class OpenLoop:
    """Which loop is open. A new one ends the one before."""

    def __init__(self) -> None:
        # Weak, so that a loop ends with its workers when the `for` that runs it does.
        self._loop: weakref.ref[Generator[Batch, None, None]] | None = None
        self._end_reader: weakref.WeakMethod[Callable[[], None]] | None = None

    def __reduce__(self) -> tuple[type[OpenLoop], tuple[()]]:
        return OpenLoop, ()  # a loop runs here and nowhere else: over a copy of the loader none is open

    def begin(self, loop: Generator[Batch, None, None]) -> Generator[Batch, None, None]:
        """Makes this the open loop, and gives it back; rows that another one has read ahead are let go."""
        self.end()
        self._loop = weakref.ref(loop)
        return loop

    def read_by(self, end: Callable[[], None] | None) -> None:
        """A thread takes the batches from now on.

        Args:
            end: a method that ends its loop, and the thread; None where there is no such thread any more.
        """
        self._end_reader = weakref.WeakMethod(end) if end is not None else None

    def end(self) -> None:
        """Ends the open loop, if there is one.

        Raises:
            RuntimeError: another thread of the program takes a batch at this moment.
        """
        end = self._end_reader() if self._end_reader is not None else None
        self._end_reader = None
        loop = self._loop() if self._loop is not None else None
        try:
            if end is not None:
                end()
            if loop is not None:
                loop.close()
        except ValueError as error:
            if "already executing" not in str(error):
                raise
            raise RuntimeError(
                "another thread takes a batch of this loader at this moment: end its loop there first, by `break`"
            ) from None
