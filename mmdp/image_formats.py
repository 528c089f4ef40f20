"""The image formats that are taken, each with the Pillow plugin that reads it.

Adds: `plugin_of`, by a file's first bytes; `pillow_header`, what a plugin says of an image that is not loaded yet;
`naming_faults`, in which all that Pillow raises for bad bytes becomes a `DataError`.
Leaves out: headers read without Pillow (`image_headers.py`), sizes (`image_sizes.py`), pixels (`images.py`).
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from PIL import Image
from PIL.AvifImagePlugin import AvifImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.Jpeg2KImagePlugin import Jpeg2KImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.PpmImagePlugin import PpmImageFile
from PIL.QoiImagePlugin import QoiImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from mmdp.image_headers import ORIENTATION, Header
from mmdp.refusals import DataError, Reason, shorten

# The formats we take, by their first bytes; each plugin decodes in this process. We go by plugin rather than by
# Image.open, which also knows plugins that start other programs (EPS), and warns by a cap that is process-wide.
_PLUGINS: tuple[tuple[re.Pattern[bytes], type[ImageFile]], ...] = tuple(
    (re.compile(magic, re.DOTALL), plugin)
    for magic, plugin in (
        (rb"\xff\xd8\xff", JpegImageFile),
        (rb"\x89PNG\r\n\x1a\n", PngImageFile),
        (rb"RIFF....WEBP", WebPImageFile),
        (rb"GIF8[79]a", GifImageFile),
        (rb"BM.{12}[\x0c\x28\x34\x38\x40\x6c\x7c]\0\0\0", BmpImageFile),
        (rb"(?:II|MM)(?:[*+]\0|\0[*+])", TiffImageFile),
        (rb"....ftyp(?:avif|avis|mif1|msf1)", AvifImageFile),
        (rb"\xff\x4f\xff\x51|\0\0\0\x0cjP  \r\n\x87\n", Jpeg2KImageFile),
        (rb"P[1-6f]\s", PpmImageFile),
        (rb"qoif", QoiImageFile),
    )
)

# What Pillow 12 and 13 raise for damaged bytes: found by cutting files and flipping bits in all formats, and by reading
# the source. A MemoryError is not among them, as it tells of the machine; a Warning is, as some turn them into errors.
_FAULTS = (
    OSError,
    SyntaxError,
    ValueError,
    RuntimeError,
    TypeError,
    LookupError,
    ArithmeticError,
    EOFError,
    struct.error,
    zlib.error,
    Warning,
)

_TURNED = frozenset(range(2, 9))  # the EXIF orientations that ask for a turn or a mirror


def plugin_of(data: bytes) -> type[ImageFile]:
    """What reads these bytes. The name of a file tells nothing.

    Args:
        data: the start of the file, or all of it.

    Raises:
        DataError: no bytes, or none of the formats.
    """
    if not data:
        raise DataError(Reason.EMPTY_IMAGE, "the image has no bytes: fetch the file again")
    for magic, plugin in _PLUGINS:
        if magic.match(data):
            return plugin
    formats = ", ".join(str(plugin.format) for _, plugin in _PLUGINS)
    raise DataError(
        Reason.NOT_AN_IMAGE, f"starts with {shorten(data[:16])}, which is none of {formats}: fetch the file again"
    )


@contextmanager
def naming_faults() -> Iterator[None]:
    """What Pillow raises for bad bytes becomes a DataError with the reason it is counted under.

    Raises:
        DataError: damaged, or larger than Pillow's own cap.
    """
    try:
        yield
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        # Some plugins hold Pillow's own cap (179 million pixels) against a file as they open it.
        raise DataError(
            Reason.IMAGE_TOO_LARGE, f"Pillow's own cap: {shorten(str(error), 200)}. Make it smaller"
        ) from error
    except _FAULTS as error:
        found = f"{type(error).__name__}: {shorten(str(error), 200)}"
        raise DataError(Reason.DAMAGED_IMAGE, f"truncated or damaged ({found}): fetch the file again") from error


def pillow_header(im: ImageFile) -> Header:
    """The header as Pillow reads it; the image is not loaded."""
    try:
        # Not im.getexif: that of a PNG decodes the image, to look for EXIF behind the pixels.
        orientation = Image.Image.getexif(im).get(ORIENTATION, 1)
    except _FAULTS:
        orientation = 1
    header = Header(*im.size, int(orientation) if orientation in _TURNED else 1)
    if not isinstance(im, TiffImageFile):
        return header
    # Pillow turns a TIFF while it loads it, so that for us it is stored upright.
    return Header(*header._replace(width=im.tag_v2[256], height=im.tag_v2[257]).upright, orientation=1)
