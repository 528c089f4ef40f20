"""A progress bar for every job that takes more than a moment.

Adds: `track`. Leaves out: tables and live columns of a run (`metrics.py`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

_EVERY = 15
"""Seconds between two lines where there is no terminal for a bar."""


def track(items: Sequence[T], what: str, *, unit: str = "", size: Callable[[T], int] | None = None) -> Iterator[T]:
    """The items, with a bar on standard error while they are worked on; without a terminal, a line now and then.

    Args:
        items: each a step of the job.
        what: said before the bar.
        unit: what the bar counts, such as `steps`.
        size: how many of what the bar counts are in an item; by default it is one.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    sizes = [1 if size is None else size(item) for item in items]
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield from _with_lines(items, what, f" {unit}" if unit else "", sizes)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=sum(sizes))
        for item, done in zip(items, sizes, strict=True):
            yield item
            bar.advance(task, done)


def _with_lines(items: Sequence[T], what: str, unit: str, sizes: Sequence[int]) -> Iterator[T]:
    began = said = time.monotonic()
    done = 0
    for item, size in zip(items, sizes, strict=True):
        if time.monotonic() - said > _EVERY:
            said = time.monotonic()
            print(f"{what}: {done:,} of {sum(sizes):,}{unit}", file=sys.stderr, flush=True)
        yield item
        done += size
    if said > began:
        print(f"{what}: all {done:,}{unit}", file=sys.stderr, flush=True)
