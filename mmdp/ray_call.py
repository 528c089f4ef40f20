"""What is asked of Ray from a program without an event loop: it comes, or the wait ends within seconds.

Adds: `arrived`, which waits for objects; `answer`, for what a named actor says to a call; `find`, for the actor itself.
Leaves out: the same on an event loop (`ray_actor.patiently`, `ray_fetch.fetched`).

**An object is asked for once, however long the wait.** A `ray.get` that times out gives up the transfer that is under
way, and the next one starts it anew: asked for every few seconds, a large object over a slow link never comes. A future
goes on with its one request until the object is there, whoever still waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from typing import Any

from mmdp.ray_start import NAMESPACE, load_ray

_POLL_SECONDS = 0.2  # between two looks at whether anybody still wants what is awaited


class CallStopped(Exception):  # noqa: N818 - says what happened
    """Nobody wants the answer any more."""


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
    except (errors.RayActorError, errors.ObjectLostError) as error:
        raise RuntimeError(
            f"{who} has died, and with it the rows it had ({type(error).__name__}): start it again, and go on from "
            "the last state"
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
