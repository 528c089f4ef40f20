"""Lazy sizes, measured in a thread of their own while rows are built.

Adds: `measured_ahead`, so that a loop over a plan with lazy sizes does not stop, with all its workers, at each window.
Leaves out: measuring itself (`measuring.py`), and what is done with sizes (`planner.py`).
"""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from mmdp.planner import shuffled

if TYPE_CHECKING:
    from mmdp.planner import Plan

_CHUNK = 32
"""Samples measured at a time: what a plan that needs a size may have to wait for, and what a loop that ends waits for.
Some 20 ms."""


@contextmanager
def measured_ahead(plan: Plan, epoch: int) -> Iterator[None]:
    """While the block runs, a thread measures what the epoch will ask for, in that order; complete sizes need none.

    What can't be measured ends the thread, and is raised where the plan asks for it.

    Args:
        plan: whose sizes may be lazy.
        epoch: its number.
    """
    if plan.sizes.complete:
        yield
        return
    leave = threading.Event()

    def run() -> None:
        order = shuffled(plan, epoch)
        with contextlib.suppress(Exception):  # the plan meets the same error when it needs the sample
            for start in range(0, len(order), _CHUNK):
                if leave.is_set():
                    return
                plan.sizes.require(np.sort(order[start : start + _CHUNK]))

    thread = threading.Thread(target=run, name="mmdp-measure", daemon=True)

    def stop() -> None:
        leave.set()
        thread.join()

    unregister = atexit.unregister  # a run that ends with the interpreter finds no module any more
    atexit.register(stop)  # at the interpreter's end a daemon thread stands still, and waiting for it would never end
    thread.start()
    try:
        yield
    finally:
        unregister(stop)
        stop()
