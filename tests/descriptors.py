"""Which descriptors of this process point below a folder: other threads open and close their own at any time."""

import contextlib
import os
from collections import Counter
from pathlib import Path


def open_below(folder: Path) -> Counter[Path]:
    """How many descriptors are open on each file and folder below `folder`, itself among them."""
    names = {_identity(path.stat()): path for path in (folder, *folder.rglob("*")) if path.exists()}
    found: Counter[Path] = Counter()
    for number in os.listdir("/dev/fd"):  # noqa: PTH208 -- numbers, not paths
        with contextlib.suppress(OSError):  # closed meanwhile: the listing's own, or another thread's
            name = names.get(_identity(os.fstat(int(number))))
            if name is not None:
                found[name] += 1
    return found


def _identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino
