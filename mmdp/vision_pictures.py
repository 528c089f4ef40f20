"""A picture of Pillow resized as the image processors of transformers do it by default, with torchvision.

Adds: `resized`. Leaves out: which size a picture gets (`vision.py`), and pixels on a device (`resampling.py`).

Both resize along one direction, round and cut to 0..255, then along the other. torchvision always goes across first.
Pillow 13 goes down first where that is less work, and on portraits of text or noise its pixels are then up to 27 levels
from those of torchvision. So the order is said here, and the pixels do not hang on the version of Pillow.
"""

from __future__ import annotations

from PIL import Image


def resized(picture: Image.Image, width: int, height: int, filter: str) -> Image.Image:
    """The picture in another size, antialiased; the picture itself where it has that size.

    Args:
        picture: of any mode that can be resized.
        width: pixels.
        height: pixels.
        filter: one of `vision_checks.FILTERS`.
    """
    for size in ((width, picture.height), (width, height)):
        if size != picture.size:
            picture = picture.resize(size, Image.Resampling[filter.upper()])
    return picture
