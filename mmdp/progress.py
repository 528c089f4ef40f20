"""A progress bar for every job that takes more than a moment.

Adds: `track`. Leaves out: tables and live columns of a run (`metrics.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def track(items: Sequence[T], what: str, *, unit_size: int = 1) -> Iterator[T]:
    """The items, with a bar on standard error while they are worked on; silent without a terminal.

    Args:
        items: each a step of the job.
        what: said before the bar.
        unit_size: how many of what the bar counts are in one item.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=len(items) * unit_size)
        for item in items:
            yield item
            bar.advance(task, unit_size)
