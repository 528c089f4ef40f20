"""The machine that this runs on.

Adds: `num_processors`; `tell_load`, for stages that time something.
"""

from __future__ import annotations

import os

_BUSY = 1.5  # programs that want a processor, for each that there is


def num_processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def tell_load() -> None:
    """Prints a line where other programs keep the processors busy: what is timed then says little."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > _BUSY * num_processors():
        print(
            f"this machine is busy: {load:.0f} programs want its {num_processors()} processors. Times, and shares of "
            "waiting, then differ from run to run, and not only for what is shown here"
        )
