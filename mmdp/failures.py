"""Samples that fail while rows are built: counted, and no more of them in a row than a sane data set has.

Adds: `Failures`, the count of one loader, and the first of those it counts.
Leaves out: why a sample failed (`refusals.Reason`; its message, `Loader.messages`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from mmdp.refusals import Reason
from mmdp.turnout import Alarm

MAX_FAILURES = 100
"""So many samples that fail one after the other mean that the data is gone, not that a sample is bad."""


MAX_NAMED = 1000
"""So many of them are kept by index; all are counted."""


class Failures:
    """What one loader has left out.

    Args:
        max_failures: raise when so many samples fail one after the other.

    Attributes:
        skipped: samples left out, counted by reason.
        named: index to reason, for the first `MAX_NAMED` of them.
    """

    def __init__(self, max_failures: int) -> None:
        self.skipped: Counter[str] = Counter()
        self.named: dict[int, Reason] = {}
        self._max_failures = max_failures
        self._in_a_row = 0
        self._lost: Counter[str] = Counter()  # of rows alone: whoever shares `skipped` counts other samples there too
        self._alarm = Alarm("of which rows were built")

    def note(self, num_samples: int, failed: Mapping[int, Reason]) -> None:
        """Counts those of one row.

        Args:
            num_samples: that are left in it.
            failed: index to reason, of those that are not.

        Raises:
            RuntimeError: too many have failed, one after the other.
        """
        self.skipped.update(map(str, failed.values()))
        self._lost.update(map(str, failed.values()))
        self._alarm.note(num_samples + len(failed))
        if self._alarm.is_due():
            self.look()
        for index in failed if len(self.named) < MAX_NAMED else ():
            self.named[index] = failed[index]
        self._in_a_row = 0 if num_samples else self._in_a_row + len(failed)
        if self._in_a_row >= self._max_failures:
            raise RuntimeError(
                f"the last {self._in_a_row} samples failed, one after the other ({dict(self.skipped)}): the data can't "
                "be read any more. Mend it and resume; `max_failures` sets the limit"
            )

    def look(self) -> None:
        """Warns, once, where most samples are left out: at the end of an epoch too, of which few samples may be all."""
        self._alarm.look(self._lost, "`Loader.messages` says why; most often images are not where they were")
