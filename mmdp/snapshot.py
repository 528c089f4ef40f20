"""Where a pass over a stream stands between two rows, as JSON can hold it.

Adds: `Snapshot`. Leaves out: taking one, and going on from it (`arrivals`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Where a pass stands between two rows. JSON holds its fields.

    Attributes:
        read: number of the first sample that no packer has seen.
        waiting: samples that wait, oldest first: number less the number before, tokens and images, in hexadecimal.
        mark: of the source, at or before the first sample that is still needed; None reads from its start.
        digest: of the ids of the samples that wait; None where one of them can't be used any more.
    """

    read: int = 0
    waiting: str = ""
    mark: Mapping[str, Any] | None = None
    digest: str | None = ""

    def sizes(self) -> list[tuple[int, int, int]]:
        """(number, tokens, images) of each sample that waits.

        >>> Snapshot(waiting="9:40:1 2:1f:0").sizes()
        [(9, 64, 1), (11, 31, 0)]
        """
        number, sizes = 0, []
        for entry in self.waiting.split():
            step, tokens, images = (int(part, 16) for part in entry.split(":"))
            number += step
            sizes.append((number, tokens, images))
        return sizes
