"""Image bytes by reference, from inside the data folder and nowhere else.

Adds: `read`. In: an `ImageRef`. Out: its bytes, or the first few of them.
Leaves out: what the bytes mean (`images`), and object stores: a root such as `s3://bucket/train` comes with part 4,
behind this same function. POSIX only (Linux, macOS): the walk below stands on directory descriptors.

A row is data, so its names are not trusted. What is refused is refused by rule, before anything is opened:

| a name that | is refused, because |
|---|---|
| has a scheme (`http:`, `file:`, `data:`, `C:`) | rows never make the machine fetch; write `./a:b.png` for a colon |
| is absolute, or has a backslash or a NUL | it could not be relative to the data folder on every machine |
| climbs out with `..` at any point | dots that stay inside are fine |
| ends in `/`, `.` or `..` | it is a folder |

`~` and `$VAR` are ordinary characters. Then the name is walked folder by folder from an open descriptor of the root,
never following a link. Where a link (or `..`) stands in the way, it is resolved first and compared with the resolved
root, and the *resolved* path is walked the same way; so a link that appears between check and open is refused, not
followed. Only regular files are opened: a pipe or a device is told by its type, never touched.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from mmdp.records import DataError, ImageRef, Reason, shorten

MAX_FILE_BYTES = 512 * 2**20
"""Bytes; a larger file is refused unread. Fifty million pixels of four 16-bit channels, uncompressed, are 400 MB."""

_MAX_NAME = 4096
"""Characters; PATH_MAX of Linux."""

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")  # RFC 3986, section 3.1; also a Windows drive
_REMOTE_ROOT = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


class _LinkInTheWayError(Exception):
    """The walk met a symbolic link."""


def read(ref: ImageRef, limit: int | None = None) -> bytes:
    """The bytes of an image.

    Args:
        ref: the image; its own bytes where it carries them, else a file below `ref.root`.
        limit: read at most this many bytes from the start; all where None.

    Returns:
        The bytes; `b""` for an empty file.

    Raises:
        DataError: the row is at fault: UNSAFE_PATH, MISSING_IMAGE, IMAGE_TOO_LARGE, WRONG_FORM (an empty name) or
            INVALID_TEXT (a name that no file can have).
        OSError: the machine is at fault (no permission, an I/O error, a data folder that is gone), which is no reason
            to skip a row.
        ValueError: a root that no part of mmdp reads yet.
    """
    if ref.data is not None:
        return ref.data if limit is None else ref.data[:limit]
    names = _check_name(ref.name)
    if not ref.root:
        raise DataError(
            Reason.MISSING_IMAGE,
            f"{shorten(ref.name)} names a file, but this source has no folder: put the image's bytes into the row",
        )
    if _REMOTE_ROOT.match(ref.root):
        raise ValueError(
            f"images below {shorten(ref.root)} can't be read yet: object stores come in a later part; "
            "copy the data set to a local folder"
        )
    try:
        try:
            file = _walk(ref.root, names)
        except _LinkInTheWayError:
            root = Path(ref.root).resolve()
            file = _walk(str(root), _resolve(root, ref.name))
    except (FileNotFoundError, NotADirectoryError):
        if not Path(ref.root).is_dir():
            folder = str(Path(ref.root).absolute())
            raise FileNotFoundError(errno.ENOENT, "no such data folder (is the disk mounted?)", folder) from None
        raise DataError(
            Reason.MISSING_IMAGE, f"no file {shorten(ref.name)} in the data folder: add it, or correct the name"
        ) from None
    except UnicodeEncodeError:
        raise DataError(
            Reason.INVALID_TEXT, f"{shorten(ref.name)} has a lone surrogate, so no file can have this name: correct it"
        ) from None
    except _LinkInTheWayError:
        raise _unsafe(ref.name, "turned into a link while it was opened", "leave the data folder alone") from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise _too_long(ref.name) from None
        remedy = ": make it readable for this user" if isinstance(error, PermissionError) else ""
        raise OSError(error.errno, f"{error.strerror}{remedy}", str(Path(ref.root, ref.name))) from None
    with open(file, "rb") as stream:  # noqa: PTH123 -- a descriptor, not a path
        size = os.fstat(file).st_size
        if size > MAX_FILE_BYTES:
            raise DataError(
                Reason.IMAGE_TOO_LARGE,
                f"{shorten(ref.name)} has {size:,} bytes, at most {MAX_FILE_BYTES:,} are read: store a smaller file",
            )
        return stream.read(size if limit is None else min(limit, size))


def _unsafe(name: str, found: str, remedy: str) -> DataError:
    return DataError(Reason.UNSAFE_PATH, f"{shorten(name)} {found}: {remedy}")


def _too_long(name: str) -> DataError:
    found = f"{shorten(name)} is a name of {len(name):,} characters, and no file can have it"
    return DataError(Reason.MISSING_IMAGE, f"{found}: correct the name")


def _check_name(name: str) -> list[str]:
    """The folders and the file of a name that keeps the rules, from the root down."""
    if not name:
        raise DataError(Reason.WRONG_FORM, "the name of the image is empty: name a file, or leave the image out")
    if len(name) > _MAX_NAME:
        raise _too_long(name)
    if "\0" in name:
        raise _unsafe(name, "has a NUL character", "name a file of the data folder")
    if match := _SCHEME.match(name):
        raise _unsafe(
            name,
            f"starts with the scheme {shorten(match.group(), 20)}, and nothing is fetched for a row",
            "copy the image into the data folder and name it by a relative path (a file with a colon: ./a:b.png)",
        )
    if "\\" in name:
        raise _unsafe(name, "has a backslash", "write relative paths with /")
    if name.startswith("/"):
        raise _unsafe(name, "is absolute", "name the file relative to the data folder")
    if name.endswith("/") or name.rsplit("/", 1)[-1] in (".", ".."):
        raise _unsafe(name, "is a folder", "name a file")
    names = [part for part in name.split("/") if part not in ("", ".")]
    depth = 0
    for part in names:
        depth += -1 if part == ".." else 1
        if depth < 0:
            raise _unsafe(name, "climbs out of the data folder", "move the image into it and name it from there")
    return names


def _walk(root: str, names: Sequence[str]) -> int:
    """A descriptor of the regular file at the end of the names, having followed no link below the root."""
    folder = os.open(root, _FOLDER & ~os.O_NOFOLLOW)
    try:
        for name in names[:-1]:
            if name == "..":  # the kernel would resolve it; the resolved path is what counts
                raise _LinkInTheWayError
            try:
                below = os.open(name, _FOLDER, dir_fd=folder)
            except OSError as error:
                # A link is ENOTDIR on Linux and ELOOP elsewhere; a file in a folder's place is ENOTDIR everywhere.
                if error.errno in (errno.ELOOP, errno.ENOTDIR) and _is_link(name, folder):
                    raise _LinkInTheWayError from None
                raise
            os.close(folder)
            folder = below
        mode = os.stat(names[-1], dir_fd=folder, follow_symlinks=False).st_mode
        if stat.S_ISLNK(mode):
            raise _LinkInTheWayError
        _check_regular(mode, names)
        try:
            file = os.open(names[-1], _FILE, dir_fd=folder)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise _LinkInTheWayError from None
            raise
    finally:
        os.close(folder)
    try:
        _check_regular(os.fstat(file).st_mode, names)  # it may have been exchanged since
    except DataError:
        os.close(file)
        raise
    return file


def _is_link(name: str, folder: int) -> bool:
    return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)


def _check_regular(mode: int, names: Sequence[str]) -> None:
    if not stat.S_ISREG(mode):
        kind = "folder" if stat.S_ISDIR(mode) else "pipe, socket or device"
        raise _unsafe("/".join(names), f"is a {kind}", "only regular files are opened; name one")


def _resolve(root: Path, name: str) -> Sequence[str]:
    """The names from the resolved root to where the links of `name` lead, if that is inside."""
    try:
        path = (root / name).resolve(strict=True)
    except RuntimeError:  # Python below 3.13 calls a loop so
        raise _unsafe(name, "is a link that leads in a circle", "put the file itself there") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _unsafe(name, "is a link that leads in a circle", "put the file itself there") from None
        raise
    if path == root:
        raise _unsafe(name, "is a link to the data folder itself", "name a file")
    if not path.is_relative_to(root):
        raise _unsafe(name, "is a link that leads out of the data folder", "copy the file into the folder")
    return path.relative_to(root).parts
