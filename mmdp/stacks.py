"""Where a thread spends its time, by looking at its stack many times a second.

Adds: `sampled`, which watches the calling thread, and `Stacks`, the seconds of each stack it saw.
Leaves out: the flame graph of them (`plots.flame`).

Why looking, and not `cProfile`: that slows every call down, so that small functions look dear, and it keeps who called
whom, not whole stacks. A look costs some 20 microseconds, whatever the thread does.

A look needs Python's lock. Where the thread holds it for long, in C code that does not let go, the look comes late and
counts for all the time since the last one: seconds are right, but lie with what the thread did when it let go.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeAlias

Stacks: TypeAlias = "Counter[tuple[str, ...]]"
"""Microseconds of each stack: `module.function`, outermost first."""

INTERVAL = 0.005
"""Seconds between two looks."""


@contextmanager
def sampled(interval: float = INTERVAL) -> Iterator[Stacks]:
    """Watches the calling thread as long as the block runs.

    Args:
        interval: seconds between two looks.

    Yields:
        The stacks, from the function that holds the block on; complete once the block has ended.

    Raises:
        ValueError: an interval of no length.
    """
    if interval <= 0:
        raise ValueError(f"an interval of {interval} s: give a time between two looks, such as {INTERVAL}")
    stacks: Stacks = Counter()
    over = threading.Event()
    caller = sys._getframe(2)  # this function's frame and that of `contextmanager` lie between
    thread = threading.Thread(
        target=_watch, args=(threading.get_ident(), caller, interval, over, stacks), daemon=True, name="mmdp-stacks"
    )
    thread.start()
    try:
        yield stacks
    finally:
        over.set()
        thread.join()


def _watch(ident: int, caller: FrameType, interval: float, over: threading.Event, stacks: Stacks) -> None:
    before = time.monotonic()
    while not over.wait(interval):
        now = time.monotonic()
        frame = sys._current_frames().get(ident)
        stacks[_names(frame, caller)] += round((now - before) * 1e6)
        before = now


def _names(frame: FrameType | None, caller: FrameType) -> tuple[str, ...]:
    names = []
    while frame is not None:
        names.append(f"{frame.f_globals.get('__name__', '?')}.{frame.f_code.co_qualname}")
        if frame is caller:
            break
        frame = frame.f_back
    return tuple(reversed(names))
