"""Samples that fail while rows are built: counted, and no more of them in a row than a sane data set has.

Adds: `Failures`, the count of one loader.
Leaves out: why a sample failed (`refusals.Reason`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from mmdp.refusals import Reason

MAX_FAILURES = 100
"""So many samples that fail one after the other mean that the data is gone, not that a sample is bad."""


class Failures:
    """What one loader has left out.

    Args:
        max_failures: raise when so many samples fail one after the other.

    Attributes:
        skipped: samples left out, counted by reason.
    """

    def __init__(self, max_failures: int) -> None:
        self.skipped: Counter[str] = Counter()
        self._max_failures = max_failures
        self._in_a_row = 0

    def note(self, num_samples: int, reasons: Collection[Reason]) -> None:
        """Counts those of one row.

        Args:
            num_samples: that are left in it.
            reasons: of those that are not.

        Raises:
            RuntimeError: too many have failed, one after the other.
        """
        self.skipped.update(map(str, reasons))
        self._in_a_row = 0 if num_samples else self._in_a_row + len(reasons)
        if self._in_a_row >= self._max_failures:
            raise RuntimeError(
                f"the last {self._in_a_row} samples failed, one after the other ({dict(self.skipped)}): the data can't "
                "be read any more. Mend it and resume; `max_failures` sets the limit"
            )
