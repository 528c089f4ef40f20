"""Bytes of an image in; its upright pixels out.

Adds: `decode`, bytes to (3, H, W) uint8; `Decoder`, the one seam for another JPEG library. A refusal is a `DataError`
without a place: the caller adds it with `.at(...)`.
Leaves out: sizes without pixels (`image_sizes.py`), which formats there are (`image_formats.py`), where bytes come from
(`sources.py`), which size an image should have, and by which steps a model family gets there (`vision.py`).
"""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
from PIL import Image
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile

from mmdp.config import Config
from mmdp.image_formats import naming_faults, pillow_header, plugin_of
from mmdp.image_headers import Header, parse_header
from mmdp.image_sizes import check_pixels
from mmdp.refusals import DataError, Reason

MAX_PIXELS = Config().max_pixels
"""Pixels; the default cap of `decode`."""

DRAFT_MARGIN = 1.5
"""A draft keeps both sides at least this many times as long as asked for. Against the full decode, on real files, 1.5
leaves photographs above 45 dB and fine line drawings above 38; 1 leaves under 40 and 30; 2 leaves all above 45, but
then 1024 x 768 to 256 x 256 gains nothing (`benchmarks/decode.py`)."""

Decoder = Callable[[bytes, int], np.ndarray]
"""The seam for another JPEG library. In: a file of one or three channels, and how far to shrink each side (1, 2, 4, 8).
Out: (ceil(H / shrink), ceil(W / shrink), 3) uint8 RGB as stored, not yet upright. Bytes it can't decode: ValueError."""

_TURNS = {  # by EXIF orientation
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode(
    data: bytes,
    *,
    size: tuple[int, int] | None = None,
    filter: str = "bicubic",
    fit: Callable[[Image.Image], Image.Image] | None = None,
    max_pixels: int = MAX_PIXELS,
    draft: bool = False,
    lenient: bool = False,
    decoder: Decoder | None = None,
) -> np.ndarray:
    """The first picture of a file in RGB: on white where it is transparent, turned upright, then resized.

    Resizing is Pillow's, with antialiasing. Grey of more than 8 bits is scaled, so that white stays white. Nothing
    process-wide is read or set: threads decode side by side, and Pillow lets go of the GIL while it works.

    Args:
        data: the whole file.
        size: the (height, width) wanted; None for the size it has.
        filter: "bilinear", "bicubic" or "lanczos": how it comes to that size.
        fit: makes of the upright picture, in mode "L" or "RGB", the one wanted, instead of `size` and `filter`: the
            steps of a model family (`vision.py`).
        max_pixels: pixels; the header may promise no more.
        draft: let a JPEG shrink while it is decoded: faster, and nearly the same. It acts where both sides are at least
            2 * `DRAFT_MARGIN` times as long as asked for; the other formats ignore it.
        lenient: keep what a cut JPEG, PNG, GIF or BMP still shows, one colour behind the cut, instead of refusing it.
        decoder: another JPEG library, such as `simplejpeg`. Pillow keeps CMYK, lenient decoding and the other formats.

    Returns:
        (3, H, W) uint8, C-contiguous and writable.

    Raises:
        DataError: no bytes, not an image, damaged, or too large.
        ValueError: a wanted side under 1, or both a size and `fit`.
    """
    if size is not None and min(size) < 1:
        raise ValueError(f"size is {size}: both sides must be at least 1")
    if size is not None and fit is not None:
        raise ValueError("both size and fit are given: fit alone decides what becomes of the picture")
    plugin = plugin_of(data)
    header = parse_header(data)
    if header is not None:
        check_pixels(header.width, header.height, max_pixels)
    is_jpeg = plugin is JpegImageFile
    with naming_faults():
        im = plugin(io.BytesIO(_end_jpeg(data) if lenient and is_jpeg else data))
        if header is None:
            header = pillow_header(im)
            check_pixels(header.width, header.height, max_pixels)
        shrink = _shrink(header, size) if draft and is_jpeg and size is not None else 1
        if decoder is not None and is_jpeg and not lenient and im.mode != "CMYK":
            flat: Image.Image = Image.fromarray(decoder(data, shrink))
        else:
            if shrink > 1:
                im.draft(None, (header.width // shrink, header.height // shrink))
            _load(im, lenient)
            flat = _flatten(im, data)
    upright = _upright(flat, header, shrink, size, Image.Resampling[filter.upper()])
    return _by_channel(upright if fit is None else fit(upright))


def simplejpeg(data: bytes, shrink: int) -> np.ndarray:
    """A `Decoder` by the package simplejpeg: faster, and it refuses damage that Pillow passes over in silence."""
    try:
        import simplejpeg as library
    except ImportError as error:
        raise ImportError("decoding with simplejpeg needs the extra `jpeg`: uv add 'mmdp[jpeg]'") from error
    height, width = library.decode_jpeg_header(data)[:2]
    pixels: np.ndarray = library.decode_jpeg(
        data, "RGB", min_height=-(-height // shrink), min_width=-(-width // shrink), strict=True
    )
    return pixels


def _end_jpeg(data: bytes) -> bytes:
    """A cut JPEG with the marker that ends it; libjpeg then fills up what is missing. A cut segment goes."""
    at = max(data.rfind(marker) for marker in (b"\xff\xc4", b"\xff\xda", b"\xff\xdb", b"\xff\xdd"))
    length = int.from_bytes(data[at + 2 : at + 4], "big")
    return (data if at + 4 <= at + 2 + length <= len(data) else data[:at]) + b"\xff\xd9"


def _load(im: ImageFile, lenient: bool) -> None:
    try:
        im.load()
    except OSError:
        if not lenient or not isinstance(im, PngImageFile | GifImageFile | BmpImageFile):
            raise
        im.tile = []  # nothing is left to load: the rows decoded so far are the image
        im.load()


def _shrink(header: Header, size: tuple[int, int]) -> int:
    """How far libjpeg may shrink both sides and leave the wanted (height, width) its margin."""
    width, height = header.upright
    most = min(height / size[0], width / size[1]) / DRAFT_MARGIN
    return next((shrink for shrink in (8, 4, 2) if shrink <= most), 1)


def _flatten(im: ImageFile, data: bytes) -> Image.Image:
    """A loaded image of any mode in mode "L" or "RGB", on white where it is transparent."""
    if im.mode.startswith(("I", "F")):
        return _scale(im)
    if not im.has_transparency_data:
        wanted = "L" if im.mode in ("1", "L") else "RGB"
        return im if im.mode == wanted else im.convert(wanted)
    if isinstance(im, PngImageFile) and "transparency" in im.info:
        # Pillow keeps the transparent colour of a PNG as deep as the file has it, and the pixels 8 bits deep.
        colour, depth = im.info["transparency"], data[24]
        if im.mode == "RGB":
            im.info["transparency"] = tuple(value >> (depth - 8) & 255 for value in colour)
        elif im.mode == "L":
            im.info["transparency"] = (colour & 2**depth - 1) * 255 // (2**depth - 1)
    clear = im.convert("RGBA")
    flat = Image.new("RGB", im.size, "white")
    flat.paste(clear, (0, 0), clear)
    return flat


def _scale(im: ImageFile) -> Image.Image:
    """Grey of more than 8 bits in mode "L".

    White is 65535; where integers go beyond, 2**31 - 1. Floats have no stated white: we take the least of 1, 255, 65535
    and the brightest pixel that none exceeds.
    """
    values = np.asarray(im)
    if im.mode.startswith("I;16"):
        grey = ((np.arange(65536) + 128) // 257).astype(np.uint8)[values]
    else:
        values = np.nan_to_num(values.astype(np.float32), posinf=0, neginf=0)
        peak = float(values.max())
        whites = (1.0, 255.0, 65535.0, peak) if im.mode == "F" else (65535.0, 2.0**31)
        white = next(white for white in whites if peak <= white)
        grey = np.rint((values * (255 / white)).clip(0, 255)).astype(np.uint8)
    if "transparency" in im.info:
        grey[values == im.info["transparency"]] = 255
    return Image.fromarray(grey)


def _upright(
    flat: Image.Image, header: Header, shrink: int, size: tuple[int, int] | None, filter: Image.Resampling
) -> Image.Image:
    """Turns an image in mode "L" or "RGB" upright, and resizes it to (height, width)."""
    if flat.size != (-(-header.width // shrink), -(-header.height // shrink)):
        found = f"the header promises {header.width} x {header.height}, the pixels (shrunk by {shrink}) are {flat.size}"
        raise DataError(Reason.DAMAGED_IMAGE, f"{found}: fetch the file again")
    if size is not None and shrink > 1:
        # Where a side is no multiple of `shrink`, its last pixel is a part of one. The box says so; without it all
        # pixels lie off by up to a half, which costs line drawings 10 to 20 dB.
        box = (0, 0, header.width / shrink, header.height / shrink)
        flat = flat.resize(size if header.orientation >= 5 else size[::-1], filter, box)
    if header.orientation in _TURNS:
        flat = flat.transpose(_TURNS[header.orientation])
    return flat if size is None else flat.resize(size[::-1], filter)


def _by_channel(flat: Image.Image) -> np.ndarray:
    """(3, H, W) uint8 of an image in mode "L" or "RGB", in memory of its own."""
    planes = flat.split() * (3 // len(flat.getbands()))  # one grey plane stands for all three
    pixels = bytearray().join(plane.tobytes() for plane in planes)
    return np.frombuffer(pixels, np.uint8).reshape(3, flat.height, flat.width)
