"""A progress bar for every job that takes more than a moment.

Adds: `track`. Leaves out: tables and live columns of a run (`metrics.py`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

_EVERY = 15
"""Seconds between two lines where there is no terminal for a bar."""


def track(items: Sequence[T], what: str, *, unit: str = "", unit_size: int = 1) -> Iterator[T]:
    """The items, with a bar on standard error while they are worked on; without a terminal, a line now and then.

    Args:
        items: each a step of the job.
        what: said before the bar.
        unit: what the bar counts, such as `steps`.
        unit_size: how many of what the bar counts are in one item.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield from _with_lines(items, what, f" {unit}" if unit else "", unit_size)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=len(items) * unit_size)
        for item in items:
            yield item
            bar.advance(task, unit_size)


def _with_lines(items: Sequence[T], what: str, unit: str, unit_size: int) -> Iterator[T]:
    began = said = time.monotonic()
    for number, item in enumerate(items):
        if time.monotonic() - said > _EVERY:
            said = time.monotonic()
            print(f"{what}: {number * unit_size:,} of {len(items) * unit_size:,}{unit}", file=sys.stderr, flush=True)
        yield item
    if said > began:
        print(f"{what}: all {len(items) * unit_size:,}{unit}", file=sys.stderr, flush=True)
