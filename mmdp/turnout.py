"""How the samples of a stream turn out: how many are left out, why, and when that is too many to go on or to be silent.

Adds: `Turnout`, of a stream; `Alarm`, the warning, of loaders too (`failures`).
Leaves out: judging a sample (`arrivals`), and what was measured beforehand (`measuring` warns of the same there).
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter

from mmdp.records import Budget
from mmdp.refusals import DataError, counted
from mmdp.sizes import ALARM_SHARE

BARREN = 10_000
"""So many samples, one after the other, of which none fits a row: a stream that may have no end is given up."""

ALARM_AFTER = 256
"""So many samples tell how many are left out; it is looked at again whenever they have doubled, and at the end."""

_log = logging.getLogger(__name__)


class Alarm:
    """A warning, given once, that most samples are left out: looked for after some, and whenever they have doubled.

    Args:
        which: samples are meant, behind "of the 300 samples ".
    """

    def __init__(self, which: str) -> None:
        self._which = which
        self._num_judged = 0
        self._next_look = ALARM_AFTER
        self._is_given = False

    def note(self, num_samples: int) -> None:
        """So many more are used, or left out."""
        self._num_judged += num_samples

    def is_due(self) -> bool:
        """Whether it is time to look again."""
        if self._num_judged < self._next_look:
            return False
        self._next_look *= 2
        return True

    def look(self, counts: Counter[str], say: str) -> None:
        """Warns, where more than `ALARM_SHARE` are left out.

        Args:
            counts: those left out, by reason.
            say: behind it.
        """
        if self._is_given or counts.total() <= ALARM_SHARE * self._num_judged:
            return
        self._is_given = True
        warnings.warn(
            f"{counts.total()} of the {counted(self._num_judged, 'sample')} {self._which} are left out: "
            f"{dict(counts)}. {say}",
            stacklevel=2,
        )


class Turnout:
    """What has become of the samples of one pass.

    Args:
        name: of the stream.
        budget: what a row holds.
        max_failures: raise when so many samples are bad, one after the other.

    Attributes:
        counts: samples left out, by reason.
    """

    def __init__(self, name: str, budget: Budget, max_failures: int) -> None:
        self.counts: Counter[str] = Counter()
        self._name = name
        self._budget = budget
        self._max_failures = max_failures
        self._alarm = Alarm(f"that {name} has given")
        self._num_bad = 0  # since the last that could be encoded
        self._num_barren = 0  # since the last that fits a row
        self._first = ""

    def accept(self) -> None:
        """A sample fits a row."""
        self._num_bad = self._num_barren = 0
        self._note()

    def refuse(self, error: DataError, *, is_bad: bool) -> None:
        """A sample is left out; of each kind the first is logged.

        Args:
            error: why.
            is_bad: it could not be encoded; else it fits no row.

        Raises:
            RuntimeError: too many bad ones, one after the other.
            ValueError: too many that fit no row.
        """
        self.counts[str(error.reason)] += 1
        self._first = self._first or str(error)
        self._num_bad = self._num_bad + 1 if is_bad else 0
        self._num_barren += 1
        if self.counts[str(error.reason)] == 1:
            _log.warning("left out, and later ones of this kind will be counted only: %s", error)
        if self._num_bad >= self._max_failures:
            raise RuntimeError(
                f"the last {counted(self._num_bad, 'sample')} that came are bad ({dict(self.counts)}): the data can't "
                "be read any more. Mend it and resume; `max_failures` sets the limit"
            )
        if self._num_barren >= BARREN:
            raise ValueError(
                f"none of the last {self._num_barren} samples that came fits a row of {self._budget} "
                f"({dict(self.counts)}): give a larger budget, or leave them out of the stream"
            )
        self._note()

    def look(self) -> None:
        """Warns, once a pass, where more samples were left out than a sound set has bad ones."""
        self._alarm.look(self.counts, f"First: {self._first}")

    def _note(self) -> None:
        self._alarm.note(1)
        if self._alarm.is_due():
            self.look()
