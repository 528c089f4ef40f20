"""Ray itself: imported late, started quietly or joined, and ended by whoever started it.

Adds: `Session`, a hold on Ray for as long as something runs on it; what a cluster has (`total_cpus`, `free_cpus`,
`store_bytes`, `used_store_bytes`).
Leaves out: what runs on it (`ray_pool`). With its neighbours `ray_*.py` it is the only importer of ray.

Whose Ray it is:

| there is | then |
|---|---|
| a Ray that this program has started or joined by itself | it is used, and left alone |
| an address, given or in `RAY_ADDRESS` | it is joined; the last `close` leaves it |
| neither | one is started on this machine, for this program only; the last `close`, or the program's end, ends it |

Nobody else's Ray is ever ended. A Ray that is started here has no dashboard, reports nothing to anybody, prints
nothing, and leaves no file behind. It listens on this machine's network address: on a machine that others can reach,
set `RAY_AUTH_MODE=token` before, and every process that joins needs the token.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

NAMESPACE = "mmdp"
"""Where named actors are found by all programs on one cluster."""

_EVERYWHERE = {
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # else, below `uv run`, workers build an environment of their own
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # what will be the default; unset, each start prints a warning
}
_WHERE_WE_START = {
    "RAY_AUTH_MODE": "disabled",  # unset, Ray 2.60 writes a token into the user's home, and says so
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is reported to anybody
    "RAY_enable_worker_prestart": "0",  # idle workers would be started ahead, and slow down the first that is wanted
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",  # Ray's 15: beside other work, an actor gets a thirtieth of what any process gets
}
_STARTS = 3
"""Tries: on a busy machine a node does not always come up within Ray's own 15 to 30 s."""

_REACH_SECONDS = 10.0  # for a cluster to take a connection

_LONGEST_FOLDER = 40
"""Characters: behind it come 65 of Ray's own, and the path of a socket has at most 107."""


@dataclass(slots=True)
class _Hold:
    """What this program holds.

    Attributes:
        lock: around all of it; the same thread may come twice, since the garbage collector closes sessions too.
        sessions: how many hold on to Ray.
        is_foreign: Ray was there before the first of them.
        folder: of the Ray that was started here.
        pid: of the process that did.
    """

    lock: threading.RLock
    sessions: int = 0
    is_foreign: bool = False
    folder: str | None = None
    pid: int = 0


_hold = _Hold(threading.RLock())


class Session:
    """A hold on Ray: joins or starts it, as the table above says. `close` it.

    Args:
        address: of a cluster, as `ray.init` takes it; None looks at `RAY_ADDRESS`.
        num_cpus: CPUs that a Ray started here says it has, if this machine has fewer.
        store_bytes: of its object store; by default Ray's own choice, 30 % of the memory.

    Raises:
        ImportError: ray is not installed.
        ValueError: this program is on another cluster already.
        RuntimeError: no Ray at the address, or none can be started.
    """

    def __init__(
        self, address: str | None = None, *, num_cpus: float | None = None, store_bytes: int | None = None
    ) -> None:
        address = address or os.environ.get("RAY_ADDRESS")
        self._is_open = False
        with _hold.lock:
            ray = load_ray(starts=address is None)
            if not ray.is_initialized():
                _hold.sessions, _hold.is_foreign = 0, False
                if address is not None:
                    _join(ray, address)
                else:
                    _start(ray, num_cpus, store_bytes)
            elif not _hold.sessions:
                _hold.is_foreign = True
            here = str(ray.get_runtime_context().gcs_address)
            if address is not None and not _is_at(address, here):
                raise ValueError(
                    f"this program is on the Ray cluster at {here}, not on the one at {address}: leave that one first"
                )
            _hold.sessions += 1
            self._is_open = True
        self.ray = ray
        self.address = here

    def close(self) -> None:
        """Lets go. The last one ends, or leaves, what the first one started, or joined."""
        with _hold.lock:
            if not self._is_open:
                return
            self._is_open = False
            _hold.sessions -= 1
            if not _hold.sessions and not _hold.is_foreign:
                _end()


def load_ray(*, starts: bool = False) -> Any:
    """The package, imported with our settings.

    Args:
        starts: a Ray will be started here.

    Raises:
        ImportError: it is not installed.
    """
    if "ray" not in sys.modules or starts:
        for name, value in (_EVERYWHERE | _WHERE_WE_START if starts else _EVERYWHERE).items():
            os.environ.setdefault(name, value)
    try:
        return import_module("ray")
    except ImportError as error:
        raise ImportError("what runs on Ray needs the package ray, 2.55 or later: uv add ray") from error


def _is_at(address: str, here: str) -> bool:
    """Whether an address, as a user gives it, is that of a cluster, as Ray knows it."""
    if ":" not in address or "://" in address:  # such as "auto"
        return True
    host, port = address.rsplit(":", 1)
    there, known = here.rsplit(":", 1)
    if port != known:
        return False
    try:
        found = socket.gethostbyname(host)
    except OSError:
        found = host
    return found == there or found.startswith("127.")


def _join(ray: Any, address: str) -> None:
    try:
        if ":" in address and "://" not in address:  # Ray itself tries for some minutes
            host, port = address.rsplit(":", 1)
            socket.create_connection((host, int(port)), _REACH_SECONDS).close()
        ray.init(address=address, namespace=NAMESPACE, logging_level="ERROR", log_to_driver=False)
    except Exception as error:
        raise RuntimeError(
            f"no Ray can be joined at {address}: {error}. Start one (`ray start --head`), or unset RAY_ADDRESS"
        ) from error


def _start(ray: Any, num_cpus: float | None, store_bytes: int | None) -> None:
    cpus = max(_processors(), math.ceil(num_cpus or 0))
    failure: Exception | None = None
    for _ in range(_STARTS):
        parent = tempfile.gettempdir()
        _hold.folder = tempfile.mkdtemp(prefix="mmdp-ray-", dir=parent if len(parent) <= _LONGEST_FOLDER else "/tmp")  # noqa: S108 - a path of a socket must be short
        try:
            ray.init(
                address="local",
                num_cpus=cpus,
                object_store_memory=store_bytes,
                namespace=NAMESPACE,
                include_dashboard=False,
                logging_level="ERROR",
                log_to_driver=False,
                _temp_dir=_hold.folder,
            )
        except ValueError:
            _end()
            raise
        except Exception as error:  # of its own class: "the current node timed out during startup"
            failure = error
            _kill_below(_hold.folder)  # Ray leaves what had come up, and that would make the next try slower still
            _end()
        else:
            _hold.pid = os.getpid()
            atexit.register(_end_with_program)  # it runs before Ray's own, which would leave the folder
            return
    raise RuntimeError(
        f"Ray can't be started on this machine, in {_STARTS} tries. The last: {failure}. Is the machine very busy, or "
        "is /dev/shm smaller than the object store?"
    ) from failure


def _end() -> None:
    folder, _hold.folder = _hold.folder, None
    load_ray().shutdown()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _kill_below(folder: str) -> None:
    """Kills the processes that were started with a folder of ours in their command line; on Linux only."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended, or is not ours
            if int(process.name) != os.getpid() and f"{folder}/".encode() in (process / "cmdline").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)


def _end_with_program() -> None:
    atexit.unregister(_end_with_program)
    if _hold.folder is not None and _hold.pid == os.getpid():  # a fork ends nothing
        _end()


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def expected_cpus(address: str | None) -> float:
    """CPUs of the cluster that a `Session` would be on; none is started to find out."""
    ray = sys.modules.get("ray")
    if address is None and "RAY_ADDRESS" not in os.environ and not (ray is not None and ray.is_initialized()):
        return _processors()
    session = Session(address)
    try:
        return total_cpus()
    finally:
        session.close()


def program_id() -> str:
    """Of this program on its cluster; its actors have the same."""
    return str(load_ray().get_runtime_context().get_job_id())


def total_cpus() -> float:
    """CPUs of the cluster, free or not."""
    return float(load_ray().cluster_resources().get("CPU", 0))


def free_cpus() -> float:
    """CPUs that nobody has taken."""
    return float(load_ray().available_resources().get("CPU", 0))


def is_alive(node: str) -> bool:
    """Whether the cluster still has a node. It takes Ray some 15 s to be sure that it has not."""
    return any(known["NodeID"] == node and known["Alive"] for known in load_ray().nodes())


def store_bytes() -> int:
    """Bytes of the smallest object store among the nodes."""
    stores = [node["Resources"].get("object_store_memory", 0) for node in load_ray().nodes() if node["Alive"]]
    return int(min(stores))


def used_store_bytes() -> int:
    """Bytes that lie in the object stores of all nodes, as they last reported: a second old, or so."""
    ray = load_ray()
    total = ray.cluster_resources().get("object_store_memory", 0)
    return int(total - ray.available_resources().get("object_store_memory", 0))
