"""Blocks out of the object store, from whatever node they lie on; or the news that they are lost.

Adds: `fetched` for an event loop, `fetch` for a thread; `BlockLost`.
Leaves out: making a block again (`ray_crew`, `ray_dealer`).

Where the only copy of an object is lost with its node, Ray looks for a way to make it again. For the result of an actor
that is gone there is none, and now and then Ray never says so. So a wait looks, every few seconds, whether the node of
the block is still there. The block itself is asked for once (`ray_call` says why).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from mmdp.ray_call import CallStopped, arrived, lost_errors
from mmdp.ray_job import Built
from mmdp.ray_start import is_alive
from mmdp.ray_worker import Block

_LOOK_SECONDS = 5.0  # between two looks at whether the node is there


class BlockLost(RuntimeError):  # noqa: N818 - says what happened
    """The block is gone, with its node or its owner."""


async def fetched(built: Built) -> Block:
    """The block of what an actor has built, as views of this node's store.

    Raises:
        BlockLost: it is gone.
    """
    future = asyncio.wrap_future(built.block.future())
    while not (await asyncio.wait({future}, timeout=_LOOK_SECONDS))[0]:
        if not await asyncio.to_thread(is_alive, built.node):
            future.add_done_callback(_look)
            raise BlockLost("its node is gone")
    try:
        block: Block = future.result()
    except lost_errors() as error:
        raise BlockLost(type(error).__name__) from None
    return block


def fetch(parts: Sequence[Built], seconds: float, is_stopped: Callable[[], bool] = lambda: False) -> list[Block]:
    """The blocks of several, as views of this node's store.

    Args:
        parts: what actors have built.
        seconds: to wait, while their nodes are there.
        is_stopped: says, now and then, that nobody wants them any more.

    Raises:
        BlockLost: one is gone.
        CallStopped: nobody wants them any more.
        TimeoutError: the time is over.
    """
    looked = time.monotonic()

    def check() -> None:
        nonlocal looked
        if is_stopped():
            raise CallStopped
        if time.monotonic() - looked >= _LOOK_SECONDS:
            looked = time.monotonic()
            if not all(is_alive(part.node) for part in parts):
                raise BlockLost("its node is gone")

    try:
        return arrived([part.block for part in parts], seconds, f"a row has not come within {seconds:.0f} s", check)
    except lost_errors() as error:
        raise BlockLost(type(error).__name__) from None


def _look(future: asyncio.Future[Any]) -> None:
    """Marks an error as seen: nobody waits for it any more."""
    if not future.cancelled():
        future.exception()
