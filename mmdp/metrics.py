"""What a stage counts, and the one line it prints.

Adds: `Tally`, which adds up batches: samples, rows, tokens, images, padding, skipped samples, seconds.
Leaves out: figures (`plots`), writing the report (`cli.py`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from mmdp.records import Batch
from mmdp.refusals import Reason, counted

_MOST_NAMED = 1000


def padding_share(padded_tokens: int, tokens: int) -> float:
    """Padding tokens over all tokens of a batch; 0 where there are none.

    >>> padding_share(300, 700)
    0.3
    """
    total = padded_tokens + tokens
    return padded_tokens / total if total else 0.0


@dataclass(slots=True)
class Tally:
    """A running sum over batches.

    Attributes:
        samples: samples delivered.
        rows: rows delivered, filler rows aside.
        tokens: real tokens, image placeholders included.
        images: images delivered.
        padded_tokens: padding tokens, those of filler rows aside.
        filler_rows: all-padding rows that complete a step; None where a stage has none to speak of.
        skipped: samples left out, by reason.
        failed: index to reason, for the first thousand that failed while their row was built.
        seconds: time that passed while batches were made; None before any was.
    """

    samples: int = 0
    rows: int = 0
    tokens: int = 0
    images: int = 0
    padded_tokens: int = 0
    filler_rows: int | None = None
    skipped: Counter[str] = field(default_factory=Counter)
    failed: dict[int, Reason] = field(default_factory=dict)
    seconds: float | None = None

    def add(self, batch: Batch) -> None:
        """Counts one batch."""
        self.samples += sum(len(row) for row in batch.samples)
        self.rows += len(batch.samples) - batch.filler_rows
        if batch.state is not None or batch.filler_rows:
            self.filler_rows = (self.filler_rows or 0) + batch.filler_rows
        self.tokens += batch.num_tokens
        self.images += len(batch.images)
        self.padded_tokens += batch.padded_tokens
        self.skipped.update(map(str, batch.skipped.values()))
        self.failed.update(islice(batch.skipped.items(), max(0, _MOST_NAMED - len(self.failed))))

    def over(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches, each counted, with the time that passes until the last."""
        start = time.perf_counter()
        for batch in batches:
            self.add(batch)
            self.seconds = time.perf_counter() - start
            yield batch

    @property
    def padding_share(self) -> float:
        """Padding tokens over all tokens."""
        return padding_share(self.padded_tokens, self.tokens)

    def as_dict(self) -> dict[str, Any]:
        """The keys that the report of every stage has."""
        return {
            "samples": self.samples,
            "rows": self.rows,
            "tokens": self.tokens,
            "images": self.images,
            "padded_tokens": self.padded_tokens,
            "filler_rows": self.filler_rows,
            "padding_share": self.padding_share,
            "skipped": dict(sorted(self.skipped.items())),
            "seconds": self.seconds,
            "samples_per_second": self.samples / self.seconds if self.seconds else None,
        }


def report_line(stage: str, figures: Mapping[str, Any], say: str = "") -> str:
    """One line of the same form in every stage; what a stage does not have (None) is left out.

    Args:
        stage: its number and name.
        figures: the keys of `Tally.as_dict`.
        say: the number that this stage moves, for the end of the line.
    """
    parts = [
        counted(figures[f"{name}s"], name)
        for name in ("sample", "row", "token", "image")
        if figures[f"{name}s"] is not None
    ]
    if figures["padding_share"] is not None:
        parts.append(f"padding {figures['padding_share']:.1%}")
    skipped = figures["skipped"]
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in skipped.items())
    parts.append(f"skipped {sum(skipped.values()):,}" + (f" ({reasons})" if reasons else ""))
    if figures["samples_per_second"] is not None:
        parts.append(f"{figures['samples_per_second']:,.0f} samples/s")
    if say:
        parts.append(say)
    return f"[{stage}] " + " | ".join(parts)
