"""Many fetches at once, in bounds: how many, how many bytes, how long, and how often each is tried.

Adds: `fetch_many` for images, for callers that wait; `afetch` for an event loop; `stream` for one large file;
`pauses`, how long to wait between tries.
Leaves out: where fetches run (`fetch_loop`), how a store is asked (`object_store`, `web_store`), and which names a row
may give (`image_names`).

Tries follow one policy. For object stores it is that of their client, which knows what each cloud means by its answers;
the loop in `_Client._repeat` takes over, with the same waits, only where the client gives up on what is worth another
try. For web servers that loop is all there is.
"""

from __future__ import annotations

import asyncio
import errno
import random
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

from mmdp.fetch_loop import Clock, Gate, submit, wait
from mmdp.image_names import MAX_FILE_BYTES, too_large
from mmdp.refusals import DataError, Reason, shorten
from mmdp.remote import (
    FIRST_WAIT,
    LONGEST_WAIT,
    WEB,
    Access,
    FetchError,
    MissingObjectError,
    Opened,
    Store,
    TransientError,
)

T = TypeVar("T")

# By event loop, and so by process: a forked process has a new one.
_clients: dict[tuple[asyncio.AbstractEventLoop, str, Access], _Client] = {}
_gates: dict[tuple[asyncio.AbstractEventLoop, int, int], Gate] = {}


def fetch_many(wanted: Sequence[tuple[str, str]], access: Access, limit: int | None = None) -> list[bytes | DataError]:
    """Images of a store, fetched side by side, in the order they were named.

    Args:
        wanted: the store (such as `s3://bucket`) and the key of each.
        access: how the stores are asked.
        limit: the first bytes of each will do; a store that ignores ranges gives all.

    Returns:
        The bytes of each, or why it can't be used: MISSING_IMAGE, EMPTY_IMAGE, IMAGE_TOO_LARGE.

    Raises:
        FetchError: a store or the network fails, or refuses; what was still being fetched is given up.
        RuntimeError: this process was forked from one that has fetched.
    """
    return wait(_all(wanted, access, limit))


async def afetch(place: str, key: str, access: Access, limit: int | None = None) -> bytes:
    """One image, for a caller on any event loop: as `fetch_many`, but a `DataError` is raised."""
    return await asyncio.wrap_future(submit(_one(place, key, access, limit)))


def stream(place: str, key: str, access: Access, piece_bytes: int) -> tuple[Opened, Iterator[bytes]]:
    """A file of any size: what its store says of it, and its bytes in pieces, each with the time of a whole fetch.

    Raises:
        MissingObjectError: there is no such file.
        TransientError: while the pieces come: the rest can't be had; open it again.
        FetchError: a store or the network fails, or refuses.
    """

    async def opened() -> Opened:
        return await _client(place, access).open(key)

    async def next_piece(pieces: AsyncIterator[bytes]) -> bytes | None:
        try:
            async with asyncio.timeout(access.fetch_seconds):
                return await anext(pieces, None)
        except TimeoutError:
            raise _too_slow(f"{place}/{key}", access) from None

    def pieces(answer: Opened) -> Iterator[bytes]:
        coming = answer.pieces(piece_bytes)
        while (piece := wait(next_piece(coming))) is not None:
            yield piece

    answer = wait(opened())
    return answer, pieces(answer)


def pauses(access: Access) -> Iterator[float]:
    """Seconds to wait before each further try: they grow, and no two processes wait the same."""
    pause = FIRST_WAIT
    for _ in range(access.fetch_retries):
        pause = min(LONGEST_WAIT, random.uniform(FIRST_WAIT, 3 * pause))  # noqa: S311 -- nothing secret
        yield pause


class _Client:
    """What a process fetches from one store with."""

    def __init__(self, place: str, access: Access, gate: Gate) -> None:
        self._place = place
        self._access = access
        self._gate = gate
        self._ignores_ranges = False
        self._store: Store
        if place.partition("://")[0] in WEB:
            from mmdp.web_store import WebStore

            self._store = WebStore(place, access)
        else:
            from mmdp.object_store import ObjectStore  # obstore takes a moment, and who reads local files needs none

            self._store = ObjectStore(place, access)

    async def image(self, key: str, limit: int | None) -> bytes:
        """An image, or its start; a `DataError` that names the key where it can't be used."""
        async with self._gate.fetches:
            try:
                return await self._fetch(key, limit)
            except MissingObjectError as error:
                raise DataError(
                    Reason.MISSING_IMAGE,
                    f"no object {shorten(self._uri(key), 200)} ({error}): upload it, or correct the name",
                ) from None

    async def open(self, key: str) -> Opened:
        """A file of any kind, whole; its body comes without a limit of time."""
        clock = Clock(self._access.fetch_seconds)
        async with self._gate.fetches:
            return await self._repeat(lambda: clock.run(self._store.open(key, None)), key, clock)

    async def _fetch(self, key: str, limit: int | None) -> bytes:
        clock = Clock(self._access.fetch_seconds)

        async def once() -> bytes:
            opened = await clock.run(self._store.open(key, None if self._ignores_ranges else limit))
            if opened.size > MAX_FILE_BYTES:
                raise too_large(key, opened.size)
            if not opened.size:
                shown = shorten(self._uri(key), 200)
                raise DataError(Reason.EMPTY_IMAGE, f"{shown} is an object of no bytes: upload it again")
            if limit is not None and opened.num_bytes > limit:
                self._note_ignored_ranges()
            async with self._gate.bytes(opened.num_bytes):  # a wait for room is no fault of the store
                data = await clock.run(opened.read())
            if len(data) != opened.num_bytes:
                raise TransientError(f"{len(data):,} of {opened.num_bytes:,} bytes came")
            return data

        return await self._repeat(once, key, clock)

    async def _repeat(self, once: Callable[[], Awaitable[T]], key: str, clock: Clock) -> T:
        """What `once` returns, tried again where a client gave up on what may pass."""
        try:
            for pause in pauses(self._access):
                try:
                    return await once()
                except TransientError:
                    await clock.run(asyncio.sleep(pause))
            return await once()
        except TransientError as error:
            tries = f"{self._access.fetch_retries + 1} tries"
            raise FetchError(errno.EIO, f"{error}, {tries}", self._uri(key)) from None
        except TimeoutError:
            raise _too_slow(self._uri(key), self._access) from None

    def _note_ignored_ranges(self) -> None:
        if not self._ignores_ranges:
            self._ignores_ranges = True
            warnings.warn(
                f"{self._place} ignores ranges: where the header of an image would do, whole images are fetched",
                RuntimeWarning,
                stacklevel=2,
            )

    def _uri(self, key: str) -> str:
        return f"{self._place}/{key}"


async def _one(place: str, key: str, access: Access, limit: int | None) -> bytes:
    return await _client(place, access).image(key, limit)


async def _all(wanted: Sequence[tuple[str, str]], access: Access, limit: int | None) -> list[bytes | DataError]:
    async def one(place: str, key: str) -> bytes | DataError:
        try:
            return await _one(place, key, access, limit)
        except DataError as error:
            return error

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(place, key)) for place, key in wanted]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _client(place: str, access: Access) -> _Client:
    """The client of this process for a store; asked for on the loop only."""
    bounds = asyncio.get_running_loop(), access.max_fetches, access.max_fetch_bytes
    if (*bounds[:1], place, access) not in _clients:
        gate = _gates.setdefault(bounds, Gate(*bounds[1:]))
        _clients[bounds[0], place, access] = _Client(place, access, gate)
    return _clients[bounds[0], place, access]


def _too_slow(uri: str, access: Access) -> FetchError:
    seconds = f"{access.fetch_seconds:g} s"
    return FetchError(errno.ETIMEDOUT, f"not whole within {seconds}, tries included: see Config.fetch_seconds", uri)
