"""A loop that goes on in another process than it began in.

Adds: `refuse_fork`.
Leaves out: what a library does in a fork (`object_store`, `ray_start`).

A forked process has the loop's variables, and none of the threads that work for it: who waits there for the next result
waits for ever. A loop that is begun in the fork starts threads of its own, and works.
"""

from __future__ import annotations

import os


def refuse_fork(began: int) -> None:
    """Call it before each wait.

    Args:
        began: the process that the loop began in.

    Raises:
        RuntimeError: this one is another.
    """
    if os.getpid() != began:
        raise RuntimeError(
            f"this loop began in process {began}, and process {os.getpid()} was forked after that: none of its threads "
            "are here, and the next result would never come. Begin a loop here: `iter(loader)`"
        )
