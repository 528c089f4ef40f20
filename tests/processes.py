"""Processes that others started: which there are, and which of them still run. None of it minds one that just ended."""

import contextlib
import time

import psutil


def children(pid: int | None = None) -> set[psutil.Process]:
    """Of a process, by default this one, with theirs."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return set(psutil.Process(pid).children(recursive=True))
    return set()


def runs(process: psutil.Process | int) -> bool:
    """Whether it has not ended; one that waits to be reaped has."""
    with contextlib.suppress(psutil.NoSuchProcess):
        one = psutil.Process(process) if isinstance(process, int) else process
        return one.is_running() and one.status() != psutil.STATUS_ZOMBIE
    return False


def still_running(processes, seconds: float = 10.0) -> list[psutil.Process | int]:
    """Those that have not ended in time."""
    end = time.monotonic() + seconds
    left = list(processes)
    while left and time.monotonic() < end:
        left = [one for one in left if runs(one)]
        time.sleep(0.05)
    return left
