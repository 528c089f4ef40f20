"""Bytes of an image in; its upright size, from the header alone, out. Planning touches no pixel.

Adds: `upright_size`, `image_size` and `read_size`, which decode nothing; `check_pixels`, the cap on what is decoded. A
refusal is a `DataError` without a place: the caller adds it with `.at(...)`.
Leaves out: decoding (`images.py`), where bytes come from (`sources.py`), how many tokens an image costs (`vision.py`).

The size measured is the size decoded, since both come from one header (`image_headers`). Upright means what Pillow's
`exif_transpose` makes of a file, but for two cases: what a PNG says behind its pixels is not heard, because no prefix
of the file shows it; and EXIF that can't be read leaves the image as it is stored, where Pillow raises.
"""

from __future__ import annotations

import io
from collections.abc import Callable

from mmdp.image_formats import naming_faults, pillow_header, plugin_of
from mmdp.image_headers import parse_header
from mmdp.refusals import DataError, Reason

HEAD_BYTES = (4096, 65536)
"""The prefixes that `read_size` asks for before it asks for all. Of 707 real files 4 KiB decide 59%, those without much
metadata; 64 KiB decide 99%, being room for a colour profile and a thumbnail in front of the pixels."""


def upright_size(head: bytes) -> tuple[int, int] | None:
    """(width, height) after EXIF orientation, from the first bytes of a JPEG, PNG, WebP or GIF.

    Args:
        head: the start of the file, or all of it.

    Returns:
        The size, or None where these bytes can't decide it: too few, another format, or a doubtful header.
    """
    try:
        header = parse_header(head)
    except DataError:
        return None
    return None if header is None else header.upright


def image_size(data: bytes) -> tuple[int, int]:
    """(width, height) after EXIF orientation, in every format that `decode` takes. No pixel is decoded.

    Args:
        data: the whole file.

    Raises:
        DataError: no bytes, not an image, or a damaged header.
    """
    plugin = plugin_of(data)
    header = parse_header(data)
    if header is None:
        with naming_faults():
            header = pillow_header(plugin(io.BytesIO(data)))
    return header.upright


def read_size(read: Callable[[int | None], bytes]) -> tuple[int, int]:
    """(width, height) after EXIF orientation, from as few bytes as decide it.

    Args:
        read: gives the first so many bytes of the file, fewer where it ends; all of it for None.

    Raises:
        DataError: as `image_size`.
    """
    for num_bytes in HEAD_BYTES:
        head = read(num_bytes)
        plugin_of(head)  # refuses a saved error page by its first bytes
        if (size := upright_size(head)) is not None:
            return size
        if len(head) < num_bytes:
            return image_size(head)
    return image_size(read(None))


def check_pixels(width: int, height: int, max_pixels: int) -> None:
    """Refuses an image with more pixels than the cap; called on the header, before anything is decoded.

    Raises:
        DataError: `image_too_large`, naming both sides, the cap and its knob.
    """
    if width * height > max_pixels:
        raise DataError(
            Reason.IMAGE_TOO_LARGE,
            f"{width} x {height} is {width * height} pixels, more than max_pixels = {max_pixels}: "
            "make the image smaller, or give Encoder a larger max_pixels",
        )
