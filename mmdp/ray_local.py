"""A Ray of our own on this machine: started quietly, for this program only, and ended without a trace.

Adds: `LocalRay`; `sweep`, after those that were killed; `on_loopback` and `sigterm_stays`, for who joins one too.
Leaves out: whether one is wanted, and who still needs it (`ray_start`).

It has no dashboard, reports nothing to anybody, prints nothing, and leaves no file behind: what a program that was
killed could not remove, the next one does. All of its ports are on the loopback, so that no other machine reaches it:
whoever reaches a port of Ray can run code here.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from mmdp.machine import num_processors

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows: what a killed program leaves stays there
    fcntl = None

_PREFIX, _LOCK = "mmdp-ray-", "in use"

_STARTS = 3
"""Tries: on a busy machine a node does not always come up within Ray's own 15 to 30 s."""

_LONGEST_FOLDER = 40
"""Characters: behind it come 65 of Ray's own, and the path of a socket has at most 107."""

_KEPT_TASKS = 10_000
"""Finished calls that Ray remembers, at 3.5 kB each; by default 100,000, for a dashboard that there is none of."""


_SIGACTION_BYTES = 1024
"""Room for what the system keeps of a signal's handler: 152 bytes on Linux, 16 on macOS."""


class LocalRay:
    """A Ray on this machine that ends with this program, or with `end`.

    Args:
        ray: the package, as `ray_start.load_ray` gives it.
        namespace: of this program's named actors.
        num_cpus: CPUs that it says it has, if this machine has fewer.
        store_bytes: of its object store; None for Ray's own choice.

    Attributes:
        folder: all of its files.

    Raises:
        ValueError: numbers that Ray does not take.
        RuntimeError: it can't be started.
    """

    def __init__(self, ray: Any, namespace: str, num_cpus: float | None, store_bytes: int | None) -> None:
        self.folder = ""
        self._lock: IO[str] | None = None
        self._ray = ray
        self._over = threading.Event()
        options = {
            "address": "local",
            "num_cpus": max(num_processors(), math.ceil(num_cpus or 0)),
            "object_store_memory": store_bytes,
            "namespace": namespace,
            "include_dashboard": False,
            "logging_level": "ERROR",
            "log_to_driver": False,
            "_system_config": {"task_events_max_num_task_in_gcs": _KEPT_TASKS},
        }
        if threading.current_thread() is threading.main_thread():
            self._start(options)
        else:
            self._start_apart(options)

    def end(self) -> None:
        """Ends its processes, and removes its files."""
        self._discard()
        self._over.set()

    def _discard(self) -> None:
        with sigterm_stays():
            self._ray.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()

    def _start(self, options: dict[str, Any]) -> None:
        failure: Exception | None = None
        logging.getLogger("ray").setLevel(logging.ERROR)  # as `init` does too, behind its first lines
        for _ in range(_STARTS):
            parent = tempfile.gettempdir()
            parent = parent if len(parent) <= _LONGEST_FOLDER else "/tmp"  # noqa: S108 - a path of a socket must be short
            sweep(Path(parent))
            self.folder = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
            self._lock = _lock(Path(self.folder))
            try:
                with on_loopback(), sigterm_stays():
                    self._ray.init(**options, _temp_dir=self.folder)
                return
            except ValueError:
                self._discard()
                raise
            except Exception as error:  # of its own class: "the current node timed out during startup"
                failure = error
                _kill_below(self.folder)  # Ray leaves what had come up, and that would make the next try slower still
                self._discard()
            except BaseException:  # such as Ctrl-C
                _kill_below(self.folder)
                self._discard()
                raise
        raise RuntimeError(
            f"Ray can't be started on this machine, in {_STARTS} tries. The last: {failure}. Is the machine very busy, "
            "or is /dev/shm smaller than the object store?"
        ) from failure

    def _start_apart(self, options: dict[str, Any]) -> None:
        """In a thread that lasts: on Linux, Ray's processes are killed when the thread that started them ends."""
        began = threading.Event()
        failures: list[BaseException] = []

        def keep() -> None:
            try:
                self._start(options)
            except BaseException as error:
                failures.append(error)
                return
            finally:
                began.set()
            self._over.wait()

        threading.Thread(target=keep, name="mmdp-ray-keep", daemon=True).start()
        began.wait()
        for failure in failures:
            raise failure


def _lock(folder: Path) -> IO[str] | None:
    """A lock in the folder of a Ray, which goes with this program however that ends."""
    if fcntl is None:
        return None
    made = folder / f"new {_LOCK}"
    file = made.open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    made.rename(folder / _LOCK)  # now, so that nobody finds it free
    return file


def sweep(parent: Path) -> None:
    """Removes the folders of programs that were killed before they could: those whose lock is free."""
    if fcntl is None:
        return
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), (folder / _LOCK).open() as file:  # in use, not ours, or gone meanwhile
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def on_loopback() -> Iterator[None]:
    """Inside, Ray takes 127.0.0.1 for the address of this machine, and what it starts listens there alone.

    It does so by itself on macOS and Windows. Here no argument brings it there: an address on the loopback is replaced
    by that of a network card, even when one is joined.
    """
    constants: Any = import_module("ray._private.ray_constants")
    before = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def sigterm_stays() -> Iterator[None]:
    """Inside, Ray begins or ends; SIGTERM stays with Python.

    The C++ of Ray takes the signal for itself when a program connects: it prints a stack, has the program aborted 3 s
    later by an alarm that nobody stops, and only then calls Python. Ending actors takes longer than that, and writing a
    checkpoint does. When Ray ends, it leaves the signal without any handler. What Ray sets in Python stays: SystemExit
    in the main thread; a handler of the user's own goes before that one.
    """
    if fcntl is None:  # Windows has no such signal
        yield
        return
    before, found = signal.getsignal(signal.SIGTERM), ctypes.create_string_buffer(_SIGACTION_BYTES)
    system = ctypes.CDLL(None)
    system.sigaction(int(signal.SIGTERM), None, found)
    try:
        yield
    finally:
        handler = before if callable(before) else signal.getsignal(signal.SIGTERM)
        if callable(handler) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
        else:  # no other thread may ask Python
            system.sigaction(int(signal.SIGTERM), found, None)


def _kill_below(folder: str) -> None:
    """Kills the processes that were started with a folder of ours in their command line; on Linux only."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended, or is not ours
            if int(process.name) != os.getpid() and f"{folder}/".encode() in (process / "cmdline").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)
