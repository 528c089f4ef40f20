"""A call to a named actor, from a program without an event loop: it is answered, or it ends within seconds.

Adds: `answer`, which waits for one; `find`, which waits for the actor itself.
Leaves out: calls on an event loop (`ray_actor.patiently`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

from mmdp.ray_start import NAMESPACE, load_ray

_POLL_SECONDS = 0.2  # after which a wait looks whether anybody still wants its answer


class CallStopped(Exception):  # noqa: N818 - says what happened
    """Nobody wants the answer any more."""


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
    ray = load_ray()
    end = time.monotonic() + seconds
    # One request for all of the wait: a `ray.get` that times out gives up a transfer under way, and the next starts it
    # anew, so a large answer over a slow link would never come.
    future = ref.future()
    while not wait([future], _POLL_SECONDS if is_stopped is not None else max(0.0, end - time.monotonic())).done:
        if is_stopped is not None and is_stopped():
            raise CallStopped
        if time.monotonic() >= end:
            raise TimeoutError(f"{who} has not answered within {seconds:.0f} s")
    try:
        return future.result()
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as error:
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
