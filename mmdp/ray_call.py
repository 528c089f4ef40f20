"""What is asked of Ray from a program without an event loop: it comes, or the wait ends within seconds.

Adds: `arrived`, which waits for objects; `answer`, for what a named actor says to a call; `find`, for the actor itself;
`gone_errors` and `lost_errors`, by which Ray says that nobody is there any more, and `told`, how it came to that;
`letting_go`, for calls that no longer matter.
Leaves out: the same on an event loop (`ray_actor.patiently`, `ray_fetch.fetched`).

**An object is asked for once, however long the wait.** A `ray.get` that times out gives up the transfer that is under
way, and the next one starts it anew: asked for every few seconds, a large object over a slow link never comes. A future
goes on with its one request until the object is there, whoever still waits.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from typing import Any

from mmdp.ray_start import NAMESPACE, load_ray
from mmdp.refusals import shorten

_POLL_SECONDS = 0.2  # between two looks at whether anybody still wants what is awaited
_DETAIL = "Worker exit detail: "  # Ray's words, behind which it says how a process ended


class CallStopped(Exception):  # noqa: N818 - says what happened
    """Nobody wants the answer any more."""


def gone_errors() -> tuple[type[Exception], ...]:
    """What Ray raises where whoever was asked has gone: its process, its node, or the Ray of this machine."""
    errors = load_ray().exceptions
    return (
        errors.RayActorError,
        errors.WorkerCrashedError,
        errors.NodeDiedError,
        errors.OutOfMemoryError,  # killed by Ray itself; a kill by the system is a RayActorError
        errors.LocalRayletDiedError,
    )


def lost_errors() -> tuple[type[Exception], ...]:
    """What Ray raises where an object is gone: by itself, or with whoever was to make it."""
    return (load_ray().exceptions.ObjectLostError, *gone_errors())


def told(death: Exception) -> str:
    """What Ray's many lines say about how an actor died, quoted in one, without the advice around it."""
    lines = [line for line in str(death).splitlines() if line.strip()] or [type(death).__name__]
    if getattr(death, "actor_init_failed", False):
        line = lines[-1]  # of a traceback
    else:
        general = getattr(death, "BASE_ERROR_MSG", None)  # that it died; then, indented, which actor it was; then how
        says = [line for line in lines if line != general and not line[0].isspace()] or lines
        line = next((line for line in lines if _DETAIL in line), says[0])
    return shorten(line.split(_DETAIL)[-1].split(" Some common causes")[0].strip(), 300)


@contextlib.contextmanager
def letting_go() -> Iterator[None]:
    """Inside, a partner is told that it is wanted no more: where it has gone by itself, or is silent, it is no matter.

    An error of the caller's own comes out of it, as ever.
    """
    try:
        yield
    except (RuntimeError, TimeoutError):  # of `answer`; and a fork's, which has nothing to let go of
        pass
    except load_ray().exceptions.RayError:  # where Ray itself has gone, it comes out of the call
        pass


def arrived(refs: Sequence[Any], seconds: float, late: str, check: Callable[[], None] | None = None) -> list[Any]:
    """What references stand for, once all are here.

    Args:
        refs: of objects, or of calls.
        seconds: to wait for all of them.
        late: the message when the time is over.
        check: called now and then meanwhile; what it raises ends the wait.

    Raises:
        TimeoutError: the time is over.
        Exception: what a call raised, or that an object is lost, as Ray says it.
    """
    end = time.monotonic() + seconds
    futures = [ref.future() for ref in refs]
    while True:
        left = max(0.0, end - time.monotonic())
        done, missing = wait(futures, left if check is None else min(left, _POLL_SECONDS), FIRST_EXCEPTION)
        if not missing or any(future.exception() is not None for future in done):
            return [future.result() for future in futures if future in done]
        if time.monotonic() >= end:
            raise TimeoutError(late)
        if check is not None:
            check()


def answer(ref: Any, who: str, seconds: float, is_stopped: Callable[[], bool] | None = None) -> Any:
    """What a call gave.

    Args:
        ref: of the call.
        who: was called, for messages.
        seconds: to wait.
        is_stopped: says, now and then, that nobody wants it any more.

    Raises:
        CallStopped: it said so.
        TimeoutError: the time is over.
        RuntimeError: whoever was called has gone.
        Exception: what the call raised.
    """
    errors = load_ray().exceptions

    def check() -> None:
        if is_stopped is not None and is_stopped():
            raise CallStopped

    late = f"{who} has not answered within {seconds:.0f} s"
    try:
        return arrived([ref], seconds, late, check if is_stopped is not None else None)[0]
    except errors.RayTaskError as error:
        raise error.cause from None
    except lost_errors() as error:
        how = type(error).__name__
        if isinstance(error, gone_errors()):
            how += f": {told(error)}"
        raise RuntimeError(
            f"{who} has died, and with it the rows it had ({how}): start it again, and go on from the last state"
        ) from error


def find(name: str, seconds: float) -> Any:
    """The handle of a named actor, which may be about to start; RuntimeError where there is none."""
    ray = load_ray()
    end = time.monotonic() + seconds
    while True:
        try:
            return ray.get_actor(name, NAMESPACE)
        except ValueError:
            if time.monotonic() >= end:
                raise RuntimeError(
                    f"no coordinator {name!r} on the cluster at {ray.get_runtime_context().gcs_address} within "
                    f"{seconds:.0f} s: start one with `Coordinator(..., name={name!r})` on one rank, and give the "
                    "others its address"
                ) from None
            time.sleep(_POLL_SECONDS)
