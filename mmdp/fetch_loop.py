"""The event loop that a process fetches on, in a thread of its own; and bounds for what runs there.

Adds: `submit` and `wait`, which hand work to the loop from any thread or event loop; `Gate`, room for so much at a
time; `Clock`, time that runs only while somebody else is waited for.
Leaves out: what is fetched (`fetch`).

Every caller, sync or async, hands its fetches to this one loop. So the bounds hold for the process whoever asks, Ctrl-C
reaches the caller at once, and a forked process, in which no thread of its parent lives on, starts a loop of its own.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

_END_SECONDS = 1.0
"""How long the end of a process waits for what it gives up."""

_loop: asyncio.AbstractEventLoop | None = None
_lock = threading.Lock()
_held: weakref.WeakSet[Any] = weakref.WeakSet()


def submit(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Starts work on the loop; `asyncio.wrap_future` makes it awaitable elsewhere."""
    return asyncio.run_coroutine_threadsafe(work, _running_loop())


def wait(work: Coroutine[Any, Any, T]) -> T:
    """What the work returns or raises, for a caller on no event loop; interrupted, it gives the work up."""
    future = submit(work)
    try:
        return future.result()
    except BaseException:  # such as Ctrl-C: nobody wants it any more
        future.cancel()
        raise


def held(future: Awaitable[T]) -> Awaitable[T]:
    """The same future, noted as one that a thread outside of Python will still touch, even when it is cancelled."""
    _held.add(future)
    return future


class Gate:
    """Room for so many fetches and so many bytes, first come, first served.

    Args:
        num_fetches: at a time.
        num_bytes: at a time; more than this at once gets in alone.
    """

    def __init__(self, num_fetches: int, num_bytes: int) -> None:
        self.fetches = asyncio.Semaphore(num_fetches)
        self._most = num_bytes
        self._used = 0
        self._turn = asyncio.Lock()  # so that many small ones don't keep a large one out for ever
        self._freed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def bytes(self, num_bytes: int) -> AsyncIterator[None]:
        """Room for so many bytes, for as long as the block runs."""
        async with self._turn:
            while self._used and self._used + num_bytes > self._most:
                self._freed.clear()
                await self._freed.wait()
            self._used += num_bytes
        try:
            yield
        finally:
            self._used -= num_bytes
            self._freed.set()


class Clock:
    """The time of one fetch, which runs only while the store is waited for.

    Args:
        seconds: in all; then whoever waits gets a `TimeoutError`.
    """

    def __init__(self, seconds: float) -> None:
        self._left = seconds

    async def run(self, waited_for: Awaitable[T]) -> T:
        """What this comes to, while there is time."""
        start = time.monotonic()
        try:
            async with asyncio.timeout(self._left):
                return await waited_for
        finally:
            self._left -= time.monotonic() - start


def _running_loop() -> asyncio.AbstractEventLoop:
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, daemon=True, name="mmdp-fetch").start()
            os.register_at_fork(after_in_child=_forget)
            atexit.register(_give_up, _loop)
        return _loop


def _forget() -> None:
    """After a fork: the thread of the loop is not there, and another one may have held the lock."""
    global _loop, _lock
    _loop, _lock = None, threading.Lock()


def _give_up(loop: asyncio.AbstractEventLoop) -> None:
    """At the end of the process that made the loop: a client's thread that calls into Python later would crash."""
    if loop is _loop:
        with contextlib.suppress(TimeoutError):
            submit(_cancel_all()).result(_END_SECONDS)


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    while _held:
        await asyncio.sleep(0.002)
