"""Functions for workers to run, well and badly. A module of their own, so that a worker imports little."""

import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from mmdp.refusals import DataError, Reason

BAD = 3
"""The item at which a function here goes wrong."""


def double(item):
    return 2 * item


def start_and_end(item):
    """When work on the item began and ended, by a clock that all processes share. Item 0 takes long."""
    start = time.monotonic()
    time.sleep(0.3 if item == 0 else 0.002)
    return item, start, time.monotonic()


def short(item):
    time.sleep(0.01)
    return item


def process_id(item):
    time.sleep(0.05)
    return os.getpid()


def array(num_bytes):
    import numpy as np  # takes as long as all the rest of a worker's start

    return np.arange(num_bytes // 8, dtype=np.int64)


def raises(item):
    if item == BAD:
        raise OSError(f"image of sample {item} is cut short")
    return item


class NeedsTwoError(Exception):
    def __init__(self, key, code):
        super().__init__(f"{key}: {code}")
        self.key, self.code = key, code


class SaysElseError(Exception):
    def __init__(self, key, code=0):
        super().__init__(f"{key}: {code}")


class HoldsLockError(Exception):
    def __init__(self, message):
        super().__init__(message)
        self.lock = threading.Lock()


class SilentError(Exception):
    def __str__(self):
        raise ZeroDivisionError


def raises_awkwardly(item):
    if item == 0:
        raise NeedsTwoError("key0", 403)
    if item == 1:
        raise SaysElseError("key1", 404)
    if item == 2:
        raise HoldsLockError("key2: 405")
    raise SilentError


def exits(item):
    if item == BAD:
        sys.exit("enough")
    return item


def dies(item):
    """By exit code 7 at one item, by signal 9 at the one after it."""
    if item == BAD:
        os._exit(7)
    if item == BAD + 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def row_dies(row):
    """Dies at a row that holds the bad item."""
    if BAD in row:
        os._exit(1)
    return row


@dataclass(frozen=True)
class DiesOnce:
    """Kills the first process that meets the bad item, and no other."""

    folder: Path

    def __call__(self, item):
        mark = self.folder / "died"
        if item == BAD and not mark.exists():
            mark.touch()
            os._exit(1)
        return item


@dataclass(frozen=True)
class Stuck:
    """Never comes back from the bad item, unless a file says so."""

    folder: Path

    def __call__(self, item):
        while item == BAD and not (self.folder / "let go").exists():
            time.sleep(0.01)
        return item


class Arrives:
    """Leaves a mark wherever it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __getstate__(self):
        return self.folder

    def __setstate__(self, folder):
        self.folder = folder
        (folder / f"{os.getpid()}-{time.monotonic_ns()}").touch()

    def __call__(self, item):
        time.sleep(0.01)
        return os.getpid()


def lock_at_bad(item):
    """A result that can't be pickled, at one item."""
    return threading.Lock() if item == BAD else item


class OnlyThere:
    """Pickles well, and can't be rebuilt in any process but the worker's own."""

    def __init__(self, home):
        self.home = home

    def __reduce__(self):
        return _rebuild_only_there, (self.home,)


def _rebuild_only_there(home):
    if os.getpid() != home:
        raise ModuleNotFoundError("no module of that name here")
    return OnlyThere(home)


def only_there(item):
    return OnlyThere(os.getpid()) if item == BAD else item


def forever(item):
    """Quick for the first items, then never done."""
    time.sleep(0.01 if item < BAD + 3 else 1000)
    return item


def meets(kind, item):
    """An error of data at the bad item."""
    if item == BAD:
        raise (
            DataError(Reason.MISSING_IMAGE, f"of sample {item}") if kind is DataError else kind(5, f"of sample {item}")
        )
    return item
