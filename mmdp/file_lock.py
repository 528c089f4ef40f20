"""A lock between processes, on a file.

Adds: `locked`.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

_SAY_AFTER = 5.0
"""Seconds of waiting, after which it is said."""

_POLL = 0.2
"""Seconds between two looks; a lock of the system could be waited for, but not with Ctrl-C on every system."""


@contextlib.contextmanager
def locked(path: Path, doing: str) -> Iterator[None]:
    """Holds an advisory lock; it goes with the process, however that ends. No lock where the system has no `fcntl`.

    Args:
        path: of the lock; made if absent, and left.
        doing: what the other process is said to do to the folder, such as "measuring into".
    """
    try:
        import fcntl
    except ImportError:  # Windows: two processes must not do the same at once there
        yield
        return
    with path.open("w") as file:
        since, said = time.monotonic(), False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not said and time.monotonic() - since > _SAY_AFTER:
                    said = True
                    warnings.warn(f"another process is {doing} {path.parent}; waiting for it", stacklevel=4)
                time.sleep(_POLL)
        file.write(str(os.getpid()))
        file.flush()
        yield
