"""Image bytes from inside a local data folder and nowhere else.

Adds: `read_file`. In: the folder, and a name that keeps the rules of `image_names`. Out: the file's bytes.
POSIX only (Linux, macOS): the walk below stands on directory descriptors.

The name is walked folder by folder from an open descriptor of the root, never following a link. Where a link (or `..`)
stands in the way, it is resolved first and compared with the resolved root, and the *resolved* path is walked the same
way; so a link that appears between check and open is refused, not followed. Only regular files are opened: a pipe or a
device is told by its type, never touched.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from mmdp.image_names import MAX_FILE_BYTES, check_name, lone_surrogate, too_large, too_long, unsafe
from mmdp.refusals import DataError, Reason, shorten

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


class _LinkInTheWayError(Exception):
    """The walk met a symbolic link."""


def read_file(folder: str, name: str, limit: int | None = None) -> bytes:
    """The bytes of a file below a folder; the first `limit` of them where given.

    Raises:
        DataError: the row is at fault: UNSAFE_PATH, MISSING_IMAGE, IMAGE_TOO_LARGE, WRONG_FORM (an empty name) or
            INVALID_TEXT (a name that no file can have).
        OSError: the machine is at fault (no permission, an I/O error, a data folder that is gone).
    """
    names = check_name(name)
    try:
        try:
            file = _walk(folder, names)
        except _LinkInTheWayError:
            root = Path(folder).resolve()
            file = _walk(str(root), _resolve(root, name))
    except (FileNotFoundError, NotADirectoryError):
        if not Path(folder).is_dir():
            shown = str(Path(folder).absolute())
            raise FileNotFoundError(errno.ENOENT, "no such data folder (is the disk mounted?)", shown) from None
        raise DataError(
            Reason.MISSING_IMAGE,
            f"no file {shorten(name)} in the data folder, {shorten(folder, 200)}: add it, correct the name, or say "
            "where images are (`--image-folder`, Config.image_folder)",
        ) from None
    except UnicodeEncodeError:
        raise lone_surrogate(name) from None
    except _LinkInTheWayError:
        raise unsafe(name, "turned into a link while it was opened", "leave the data folder alone") from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise too_long(name) from None
        remedy = ": make it readable for this user" if isinstance(error, PermissionError) else ""
        raise OSError(error.errno, f"{error.strerror}{remedy}", str(Path(folder, name))) from None
    with open(file, "rb") as stream:  # noqa: PTH123 -- a descriptor, not a path
        size = os.fstat(file).st_size
        if size > MAX_FILE_BYTES:
            raise too_large(name, size)
        return stream.read(size if limit is None else min(limit, size))


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
        raise unsafe("/".join(names), f"is a {kind}", "only regular files are opened; name one")


def _resolve(root: Path, name: str) -> Sequence[str]:
    """The names from the resolved root to where the links of `name` lead, if that is inside."""
    try:
        path = (root / name).resolve(strict=True)
    except RuntimeError:  # Python below 3.13 calls a loop so
        raise unsafe(name, "is a link that leads in a circle", "put the file itself there") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise unsafe(name, "is a link that leads in a circle", "put the file itself there") from None
        raise
    if path == root:
        raise unsafe(name, "is a link to the data folder itself", "name a file")
    if not path.is_relative_to(root):
        raise unsafe(
            name,
            "is a link that leads out of the data folder",
            "name the folder that it leads to as image folder (--image-folder), or copy the file",
        )
    return path.relative_to(root).parts
