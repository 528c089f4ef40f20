"""Which names a row may give its images. Refused by rule, before anything is opened or fetched.

Adds: `check_name`, a name to its folders and file; `object_key`, the same for object stores; the errors that
all stores share. Leaves out: links and other surprises of a disk (`local_files`).

A row is data, so its names are not trusted. They are relative to the data's root, a folder or a prefix of a bucket:

| a name that | is refused, because |
|---|---|
| has a scheme (`http:`, `file:`, `data:`, `C:`) | rows never make the machine fetch; write `./a:b.png` for a colon |
| is absolute, or has a backslash or a NUL | it could not be relative to the data folder on every machine |
| climbs out with `..` at any point | dots that stay inside are fine |
| ends in `/`, `.` or `..` | it is a folder |

`~` and `$VAR` are ordinary characters.
"""

from __future__ import annotations

import re

from mmdp.refusals import DataError, Reason, shorten

MAX_FILE_BYTES = 512 * 2**20
"""Bytes; a larger file is refused unread. Fifty million pixels of four 16-bit channels, uncompressed, are 400 MB."""

_MAX_NAME = 4096
"""Characters; PATH_MAX of Linux."""

_MAX_KEY_BYTES = 1024
"""Bytes of UTF-8; the longest key of S3, Google and Azure alike."""

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")  # RFC 3986, section 3.1; also a Windows drive


def check_name(name: str) -> list[str]:
    """The folders and the file of a name that keeps the rules, from the root down.

    Raises:
        DataError: UNSAFE_PATH, WRONG_FORM (an empty name) or MISSING_IMAGE (a name that no file can have).
    """
    if not name:
        raise DataError(Reason.WRONG_FORM, "the name of the image is empty: name a file, or leave the image out")
    if len(name) > _MAX_NAME:
        raise too_long(name)
    if "\0" in name:
        raise unsafe(name, "has a NUL character", "name a file of the data folder")
    if match := _SCHEME.match(name):
        raise unsafe(
            name,
            f"starts with the scheme {shorten(match.group(), 20)}, and nothing is fetched for a row",
            "copy the image into the data folder and name it by a relative path (a file with a colon: ./a:b.png)",
        )
    if "\\" in name:
        raise unsafe(name, "has a backslash", "write relative paths with /")
    if name.startswith("/"):
        raise unsafe(name, "is absolute", "name the file relative to the data folder")
    if name.endswith("/") or name.rsplit("/", 1)[-1] in (".", ".."):
        raise unsafe(name, "is a folder", "name a file")
    names = [part for part in name.split("/") if part not in ("", ".")]
    depth = 0
    for part in names:
        depth += -1 if part == ".." else 1
        if depth < 0:
            raise unsafe(name, "climbs out of the data folder", "move the image into it and name it from there")
    return names


def object_key(prefix: str, name: str) -> str:
    """The key of the object that a name below a prefix means; a bucket has no links, so `..` just goes.

    Raises:
        DataError: as `check_name`, and INVALID_TEXT for a name that is no UTF-8.

    >>> object_key("train/v1", "./sub/../b.png")
    'train/v1/b.png'
    """
    parts = prefix.split("/") if prefix else []
    for part in check_name(name):
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    key = "/".join(parts)
    try:
        num_bytes = len(key.encode())
    except UnicodeEncodeError:
        raise lone_surrogate(name) from None
    if num_bytes > _MAX_KEY_BYTES:
        raise too_long(name)
    return key


def unsafe(name: str, found: str, remedy: str) -> DataError:
    """The refusal of a name that breaks a rule."""
    return DataError(Reason.UNSAFE_PATH, f"{shorten(name)} {found}: {remedy}")


def too_long(name: str) -> DataError:
    """The refusal of a name that is longer than any file's."""
    found = f"{shorten(name)} is a name of {len(name):,} characters, and no file can have it"
    remedy = "correct the name; an image in base64 is to begin with data:image/jpeg;base64, or with its own type"
    return DataError(Reason.MISSING_IMAGE, f"{found}: {remedy}")


def lone_surrogate(name: str) -> DataError:
    """The refusal of a name that is no text."""
    return DataError(
        Reason.INVALID_TEXT, f"{shorten(name)} has a lone surrogate, so no file can have this name: correct it"
    )


def too_large(name: str, size: int) -> DataError:
    """The refusal of a file of `size` bytes."""
    return DataError(
        Reason.IMAGE_TOO_LARGE,
        f"{shorten(name)} has {size:,} bytes, at most {MAX_FILE_BYTES:,} are read: store a smaller file",
    )
