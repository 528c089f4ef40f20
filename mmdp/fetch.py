"""Many fetches at once, in bounds: how many, how many bytes, how long, and how often each is tried.

Adds: `fetch_many` for images, for callers that wait; `afetch` for an event loop; `stream` for one large file.
Leaves out: where fetches run (`fetch_loop`), how a store is asked (`object_store`, `web_store`), how long it is waited
between tries (`remote.pauses`), and which names a row may give (`image_names`).

Every try is one of `_Client._repeat`, whatever the store: the clients ask once, and say what is worth another try. A
store that is gone for a while is waited for, until the tries or the time of the file are used up; a warning says so.
"""

from __future__ import annotations

import asyncio
import math
import time
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import TypeVar

from mmdp.fetch_loop import Clock, Gate, submit, wait
from mmdp.image_names import MAX_FILE_BYTES, too_large
from mmdp.refusals import DataError, Reason, shorten
from mmdp.remote import (
    WEB,
    Access,
    FetchError,
    MissingObjectError,
    Opened,
    Rest,
    RestError,
    Store,
    TransientError,
    given_up,
    pauses,
)

T = TypeVar("T")

_CHUNK_BYTES = 2**20
"""Of a large file: what comes at a time, and so the most that a cut loses."""

_WARN_SECONDS = 3.0
"""A store that fails for longer is spoken of; a busy one that asks for a little patience is not."""

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

    A body that is cut goes on where it ended, if the file is still the same.

    Raises:
        MissingObjectError: there is no such file.
        TransientError: while the pieces come: the rest can't be had; open it again.
        FetchError: a store or the network fails, or refuses.
    """

    async def opened() -> Opened:
        return await _client(place, access).open(key)

    async def begin(answer: Opened) -> AsyncIterator[bytes]:
        return _client(place, access).pieces(key, answer, piece_bytes)

    async def next_piece(pieces: AsyncIterator[bytes]) -> bytes | None:
        return await anext(pieces, None)

    def pieces(answer: Opened) -> Iterator[bytes]:
        coming = wait(begin(answer))
        while (piece := wait(next_piece(coming))) is not None:
            yield piece

    answer = wait(opened())
    return answer, pieces(answer)


class _Client:
    """What a process fetches from one store with."""

    def __init__(self, place: str, access: Access, gate: Gate) -> None:
        self._place = place
        self._access = access
        self._gate = gate
        self._ignores_ranges = False
        self._is_gone = False
        self._gone_since = 0.0
        self._gave = -math.inf  # when it last gave a file
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
        return await self._open(key, None)

    async def pieces(self, key: str, opened: Opened, num_bytes: int) -> AsyncGenerator[bytes, None]:
        """The body of a file in pieces of at least so many bytes, the last one aside; cut, it goes on where it ended.

        Raises:
            TransientError: it was cut, and its rest can't be had.
            FetchError: the store fails, or the body doesn't go on.
        """
        held: list[bytes] = []
        done = known = 0
        failures: list[TransientError] = []
        waits = pauses(self._access)
        while True:
            try:
                async with aclosing(self._chunks(key, opened, min(num_bytes, _CHUNK_BYTES))) as chunks:
                    async for chunk in chunks:
                        done += len(chunk)
                        held.append(chunk)
                        if sum(map(len, held)) >= num_bytes:
                            yield b"".join(held)
                            held = []
                if held:
                    yield b"".join(held)
                return
            except TransientError as error:
                if not opened.resumes:
                    raise
                if done > known:  # it goes on, so the tries begin anew
                    failures, waits, known = [], pauses(self._access), done
                failures.append(error)
            if (pause := next(waits, None)) is None:
                raise given_up(self._uri(key), failures, self._access, is_late=False)
            await asyncio.sleep(pause)
            try:
                opened = await self._open(key, Rest(done, opened.stamp))
            except (RestError, MissingObjectError) as error:
                raise TransientError(f"the body was cut short, and its rest can't be had: {error}") from None

    async def _chunks(self, key: str, opened: Opened, num_bytes: int) -> AsyncGenerator[bytes, None]:
        """A body as it comes; each chunk has the time of a whole fetch."""
        async with aclosing(opened.pieces(num_bytes)) as coming:
            while True:
                try:
                    async with asyncio.timeout(self._access.fetch_seconds):
                        chunk = await anext(coming, None)
                except TimeoutError:
                    raise given_up(self._uri(key), [], self._access, is_late=True) from None
                if chunk is None:
                    return
                yield chunk

    async def _open(self, key: str, rest: Rest | None) -> Opened:
        clock = Clock(self._access.fetch_seconds)
        async with self._gate.fetches:
            return await self._repeat(lambda: clock.run(self._store.open(key, None, rest)), key, clock)

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
        """What `once` returns, tried again where it fails by what may pass, until tries or time are used up."""
        failures: list[TransientError] = []
        since = 0.0
        try:
            for pause in (*pauses(self._access), None):
                try:
                    done = await once()
                except TransientError as error:
                    failures.append(error)
                else:
                    self._note_back()
                    self._gave = time.monotonic()
                    return done
                since = since or time.monotonic()
                if pause is not None:
                    self._note_gone(failures[-1], time.monotonic() - since + pause)
                    await clock.run(asyncio.sleep(pause))
        except TimeoutError:
            raise self._given_up(key, failures, since, is_late=True) from None
        raise self._given_up(key, failures, since, is_late=False)

    def _given_up(self, key: str, failures: Sequence[TransientError], since: float, *, is_late: bool) -> FetchError:
        return given_up(
            self._uri(key), failures, self._access, is_late=is_late, others_came=bool(since) and self._gave > since
        )

    def _note_gone(self, error: TransientError, seconds: float) -> None:
        if seconds > _WARN_SECONDS and not self._is_gone:
            self._is_gone = True
            self._gone_since = time.monotonic() - seconds
            warnings.warn(
                f"{self._place} fails ({error}); it is tried again for up to {self._access.fetch_seconds:g} s a file: "
                "see Config.fetch_retries",
                RuntimeWarning,
                stacklevel=2,
            )

    def _note_back(self) -> None:
        if self._is_gone:
            self._is_gone = False
            seconds = time.monotonic() - self._gone_since
            warnings.warn(f"{self._place} answers again, {seconds:.0f} s after it failed", RuntimeWarning, stacklevel=2)

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
