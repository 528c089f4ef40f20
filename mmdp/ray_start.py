"""Ray itself: imported late, started quietly or joined, and ended by whoever started it.

Adds: `Session`, a hold on Ray for as long as something runs on it; what a cluster has (`total_cpus`, `free_cpus`,
`store_bytes`, `used_store_bytes`).
Leaves out: how one is started here (`ray_local`), and what runs on it (`ray_pool`). With its neighbours `ray_*.py` it
is the only importer of ray.

Whose Ray it is:

| there is | then |
|---|---|
| a Ray that this program has started or joined by itself | it is used, and left alone |
| an address, given or in `RAY_ADDRESS` | it is joined; the last `close` leaves it |
| neither | one is started on this machine, for this program only; the last `close`, or the program's end, ends it |

Nobody else's Ray is ever ended. One that is started here listens on the loopback alone. Other users of the same machine
reach it there: where they are not to be trusted, set `RAY_AUTH_MODE=token` before, and every process that joins needs
the token. A plain `ray start --head` may ask for one too: it is joined as it is, from its own machine and by its own
user; elsewhere set `RAY_AUTH_MODE=token`, and see `ray_auth`.

No thread of Ray lives on in a forked process, and a call would wait there for ever. So a process that was forked after
its parent had used Ray is refused, whatever it asks of Ray.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import sys
import threading
from collections import deque
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from mmdp.machine import num_processors
from mmdp.ray_address import REACH_SECONDS, is_at, is_on_loopback_alone
from mmdp.ray_auth import AUTH_MODE, AskedForToken, TokenMode
from mmdp.ray_local import LocalRay, on_loopback, sigterm_stays

NAMESPACE = "mmdp"
"""Where named actors are found by all programs on one cluster."""

_UV = "RAY_ENABLE_UV_RUN_RUNTIME_ENV"
_EVERYWHERE = {
    _UV: "0",  # else, below `uv run`, workers build an environment of their own
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # what will be the default; unset, each start prints a warning
}
_WHERE_WE_START = {
    AUTH_MODE: "disabled",  # unset, Ray 2.60 writes a token into the user's home, and says so
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is reported to anybody
    "RAY_enable_worker_prestart": "0",  # idle workers would be started ahead, and slow down the first that is wanted
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",  # Ray's 15: beside other work, an actor gets a thirtieth of what any process gets
}
_GC_THREAD = "PythonGCThread"  # of Ray, in each process that is on it
_EXIT_SECONDS = 60.0  # that the program's end waits for a thread which starts or ends Ray


@dataclass(slots=True)
class _Hold:
    """What this program holds.

    Attributes:
        lock: around all of it.
        sessions: who holds on to Ray, each by an object of its own.
        let_go: those that have let go, for whoever has the lock.
        is_foreign: Ray was there before the first of them.
        local: the Ray that was started here.
        pid: of the process that did.
        user: the process that has used Ray, this one or one that it was forked from.
        settings: of the environment, that are ours and not the user's.
        mode: whether our token is shown to the one that was joined.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    sessions: set[object] = field(default_factory=set)
    let_go: deque[object] = field(default_factory=deque)
    is_foreign: bool = False
    local: LocalRay | None = None
    pid: int = 0
    user: int | None = None
    settings: dict[str, str] = field(default_factory=dict)
    mode: TokenMode = field(default_factory=TokenMode)


_hold = _Hold()


class Session:
    """A hold on Ray: joins or starts it, as the table above says. `close` it.

    Args:
        address: of a cluster, as `ray.init` takes it; None looks at `RAY_ADDRESS`.
        num_cpus: CPUs that a Ray started here says it has, if this machine has fewer.
        store_bytes: of its object store; by default Ray's own choice, 30 % of the memory.

    Raises:
        ImportError: ray is not installed.
        ValueError: this program is on another cluster already.
        RuntimeError: no Ray at the address, one that asks for a token, or none can be started; or this process was
            forked from one that has used Ray.
    """

    def __init__(
        self, address: str | None = None, *, num_cpus: float | None = None, store_bytes: int | None = None
    ) -> None:
        address = address or os.environ.get("RAY_ADDRESS")
        self._token = object()
        self._pid = os.getpid()
        load_ray()  # a fork is refused before it waits for a lock that nobody gives back there
        _hold.user = self._pid
        try:
            with _hold.lock:
                ray = load_ray(starts=address is None)
                if not ray.is_initialized():
                    _forget()
                    if address is not None:
                        _join(ray, address)
                    else:
                        _start(ray, num_cpus, store_bytes)
                elif not _hold.sessions:
                    _hold.is_foreign = True
                    with sigterm_stays():
                        pass
                here = str(ray.get_runtime_context().gcs_address)
                if address is not None and not is_at(address, here):
                    raise ValueError(
                        f"this program is on the Ray cluster at {here}, not on the one at {address}: leave that one "
                        "first"
                    )
                _hold.sessions.add(self._token)
        finally:
            _settle()
        self.ray = ray
        self.address = here

    def close(self) -> None:
        """Lets go. The last one ends, or leaves, what the first one started, or joined.

        It never waits for another thread: the garbage collector closes sessions too, in any thread, and Ray's own ones
        are waited for while Ray ends. Whoever starts or ends Ray just now sees to it.
        """
        if os.getpid() == self._pid:  # a fork ends nothing
            _hold.let_go.append(self._token)
            _settle()


def load_ray(*, starts: bool = False) -> Any:
    """The package, imported with our settings.

    Args:
        starts: a Ray will be started here.

    Raises:
        ImportError: it is not installed.
        RuntimeError: this process was forked from one that has used Ray.
    """
    for name, value in (_EVERYWHERE | _WHERE_WE_START if starts else _EVERYWHERE).items():
        if name not in os.environ:
            os.environ[name] = _hold.settings[name] = value
    try:
        ray = import_module("ray")
    except ImportError as error:
        raise ImportError("what runs on Ray needs the package ray, 2.55 or later: uv add ray") from error
    if os.environ[_UV] == "0":  # Ray has read it when it was imported, which may have been before
        constants: Any = import_module("ray._private.ray_constants")
        constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = False
    _refuse_fork(ray)
    return ray


def _refuse_fork(ray: Any) -> None:
    """Refuses where the process that this one was forked from has used Ray, by our hand or by its user's own.

    A Ray that is over is no better: gRPC stays behind in the process, and the next Ray of a fork never comes up.
    """
    if ray.is_initialized() and _hold.user is None:
        _hold.user = 0 if _has_no_threads() else os.getpid()
    if _hold.user not in (None, os.getpid()):
        raise RuntimeError(
            f"process {os.getpid()} was forked after {f'process {_hold.user}' if _hold.user else 'its parent'} had "
            'used Ray, and no thread of Ray survives that: a call would wait for ever. Start processes by "spawn": '
            'multiprocessing.get_context("spawn"), or multiprocessing_context="spawn" of a DataLoader'
        )


def _has_no_threads() -> bool:
    """Whether the threads that Ray keeps in each program, as Python knows them, have all gone, as in a fork.

    Ray itself does not say in which process it was initialised. Where its threads are not found under these names, of
    a version to come, nobody is refused.
    """
    worker: Any = import_module("ray._private.worker").global_worker
    listens = getattr(worker, "listener_thread", None)  # it ends too when the cluster has gone; the other one stays
    return (
        listens is not None
        and not listens.is_alive()
        and all(thread.name != _GC_THREAD for thread in threading.enumerate())
    )


def _join(ray: Any, address: str) -> None:
    try:
        with contextlib.ExitStack() as settings:
            if ":" in address and "://" not in address:  # Ray itself tries for some minutes
                host, port = address.rsplit(":", 1)
                socket.create_connection((host, int(port)), REACH_SECONDS).close()
                mode = os.environ.get(AUTH_MODE)
                _hold.mode.follow(address, None if mode == _hold.settings.get(AUTH_MODE) else mode)
                if is_on_loopback_alone(ray, host, int(port)):
                    settings.enter_context(on_loopback())
            logging.getLogger("ray").setLevel(logging.ERROR)  # as `init` does too, behind its first lines
            with sigterm_stays():
                ray.init(address=address, namespace=NAMESPACE, logging_level="ERROR", log_to_driver=False)
    except AskedForToken:
        raise
    except Exception as error:
        _hold.mode.leave()
        raise RuntimeError(
            f"no Ray can be joined at {address}: {error}. Start one (`ray start --head`), or unset RAY_ADDRESS"
        ) from error


def _start(ray: Any, num_cpus: float | None, store_bytes: int | None) -> None:
    _hold.pid = os.getpid()
    atexit.register(_end_with_program)  # it runs before Ray's own, which would leave the folder
    try:
        _hold.local = LocalRay(ray, NAMESPACE, num_cpus, store_bytes)
    except BaseException:
        atexit.unregister(_end_with_program)
        raise


def _forget() -> None:
    """Whatever this program was on is over: nobody holds on to it any more."""
    _hold.sessions.clear()
    _hold.is_foreign = False
    _hold.mode.leave()
    if _hold.local is not None:  # somebody else has shut it down
        _end()


def _settle() -> None:
    """Ends Ray once all have let go; where another thread has the lock, that one does, behind what it does now."""
    while _hold.let_go and _hold.lock.acquire(blocking=False):
        try:
            was_held = bool(_hold.sessions)
            while _hold.let_go:
                _hold.sessions.discard(_hold.let_go.popleft())
            if was_held and not _hold.sessions and not _hold.is_foreign:
                _end()
        finally:
            _hold.lock.release()


def _end() -> None:
    local, _hold.local = _hold.local, None
    if local is None:
        with sigterm_stays():
            load_ray().shutdown()
        _hold.mode.leave()
        return
    atexit.unregister(_end_with_program)
    local.end()


def _end_with_program() -> None:
    """What is started here ends, and a thread that is at it just now may finish: daemons are cut off soon."""
    if _hold.pid == os.getpid() and _hold.lock.acquire(timeout=_EXIT_SECONDS):  # a fork ends nothing
        try:
            if _hold.local is not None:
                _end()
        finally:
            _hold.lock.release()


def expected_cpus(address: str | None) -> float:
    """CPUs of the cluster that a `Session` would be on; none is started to find out."""
    ray = sys.modules.get("ray")
    if address is None and "RAY_ADDRESS" not in os.environ and not (ray is not None and ray.is_initialized()):
        return num_processors()
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
