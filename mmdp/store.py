"""Image bytes by reference: from inside the data's root and nowhere else.

Adds: `read` and `aread` for one image, `read_many` for those of a row, `reader` for a header that may need more bytes
than were guessed; `use_root`, which says how a remote root is fetched.
Leaves out: what the bytes mean (`images`); which names are allowed (`image_names`); the walk over a local folder
(`local_files`); fetching from stores (`fetch`).

A root is a local folder, a prefix of a bucket (`s3://bucket/train`, `gs://`, `az://`), or a folder of a web server
(`https://host/train`) if its host is allowed. It comes from the user who opened the data, never from a row; a row gives
a name below it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from mmdp.config import Config
from mmdp.fetch import afetch, fetch_many
from mmdp.image_names import MAX_FILE_BYTES, check_name, object_key
from mmdp.local_files import read_file
from mmdp.records import ImageRef
from mmdp.refusals import DataError, Reason, shorten
from mmdp.remote import Access, is_remote, split_uri

__all__ = ["MAX_FILE_BYTES", "aread", "is_far", "read", "read_many", "reader", "use_root"]

_access: dict[str, Access] = {}  # by remote root, in this process


def use_root(root: str, access: Access) -> None:
    """From now on, this process fetches images below a remote root so.

    `open_source` says it, and what it opens says it again in every process that it is sent to. A root of which nothing
    was said is fetched as `Config()` and the environment have it, with no web host allowed.
    """
    _access[root] = access


def is_far(ref: ImageRef) -> bool:
    """Whether the bytes of an image must be fetched, so that asking for many at once pays."""
    return ref.data is None and ref.failure is None and is_remote(ref.root)


def read(ref: ImageRef, limit: int | None = None) -> bytes:
    """The bytes of an image.

    Args:
        ref: the image; its own bytes where it carries them, else a file below `ref.root`.
        limit: read at most this many bytes from the start; all where None.

    Returns:
        The bytes; `b""` for an empty local file.

    Raises:
        DataError: the row is at fault: UNSAFE_PATH, MISSING_IMAGE, EMPTY_IMAGE (an object of no bytes),
            IMAGE_TOO_LARGE, WRONG_FORM (an empty name) or INVALID_TEXT (a name that no file can have).
        OSError: the machine, the network or the store is at fault, which is no reason to skip a row; a store was asked
            several times where that may help (`FetchError`).
        ValueError: a root that can't be read.
        RuntimeError: this process was forked from one that has fetched.
    """
    (data,) = _read([ref], limit)
    if isinstance(data, DataError):
        raise data
    return data[:limit]


async def aread(ref: ImageRef, limit: int | None = None) -> bytes:
    """`read` for an event loop, which goes on meanwhile. Ask for many: `Config.max_fetches` at a time are fetched."""
    if not is_far(ref):
        return await asyncio.to_thread(read, ref, limit)
    return (await afetch(*_place(ref), _access_to(ref.root), limit))[:limit]


def read_many(refs: Sequence[ImageRef], limit: int | None = None) -> list[bytes | DataError]:
    """`read` for several images, fetched side by side.

    Returns:
        In the order of `refs`: the bytes of each, or the `DataError` that `read` would raise for it.

    Raises:
        OSError, ValueError, RuntimeError: as `read`.
    """
    return [data if isinstance(data, DataError) else data[:limit] for data in _read(refs, limit)]


def reader(ref: ImageRef) -> Callable[[int | None], bytes]:
    """`read` for one image, for a caller that asks for a little, and then for more: nothing is fetched twice in vain.

    Raises:
        DataError, OSError, ValueError, RuntimeError: when it is called, as `read`.
    """
    kept, is_whole = b"", False

    def read_start(limit: int | None) -> bytes:
        nonlocal kept, is_whole
        if not is_whole and (limit is None or len(kept) < limit):
            (data,) = _read([ref], limit)
            if isinstance(data, DataError):
                raise data
            kept, is_whole = data, limit is None or len(data) != limit
        return kept[:limit]

    return read_start


def _read(refs: Sequence[ImageRef], limit: int | None) -> list[bytes | DataError]:
    """Of each image its first `limit` bytes, or all of it where that comes at no cost."""
    found: list[bytes | DataError] = []
    far: dict[Access, list[tuple[int, tuple[str, str]]]] = {}
    for number, ref in enumerate(refs):
        try:
            if is_far(ref):
                far.setdefault(_access_to(ref.root), []).append((number, _place(ref)))
                found.append(b"")
            else:
                found.append(_read_near(ref, limit))
        except DataError as error:
            found.append(error)
    for access, wanted in far.items():
        for (number, _), data in zip(wanted, fetch_many([place for _, place in wanted], access, limit), strict=True):
            found[number] = data
    return found


def _read_near(ref: ImageRef, limit: int | None) -> bytes:
    if ref.failure is not None:
        raise ref.failure
    if ref.data is not None:
        return ref.data
    if not ref.root:
        check_name(ref.name)
        raise DataError(
            Reason.MISSING_IMAGE,
            f"{shorten(ref.name)} names a file, but this source has no folder: put the image's bytes into the row",
        )
    return read_file(ref.root, ref.name, limit)


def _place(ref: ImageRef) -> tuple[str, str]:
    """The store of an image, and its key there."""
    place, prefix = split_uri(ref.root)
    return place, object_key(prefix, ref.name)


def _access_to(root: str) -> Access:
    return _access.get(root) or Access.of(Config(), root)
