"""Vision families that see an image as one picture, resized: to a square, or near its own resolution.

Adds: `Square` (nanoVLM's way, Gemma 3) and `QwenVL`, values with the rules of `vision.py`.
Leaves out: families that cut an image into tiles (`vision_tiled.py`), and which options a released model has
(`vision.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from PIL import Image

from mmdp.records import ImageLayout
from mmdp.vision_checks import check_filter, check_options, check_size, refused_aspect
from mmdp.vision_pictures import resized


@dataclass(frozen=True, slots=True)
class Square:
    """The same number of tokens for every image, each resized to one square.

    `fixed:N` (nanoVLM's way) has no marks, and its image token is whatever the tokenizer has:
    `dataclasses.replace(family, image_token="<image>")`. Gemma 3 is meant with pan-and-scan off, as it is released.
    """

    name: str
    tokens: int  # without marks
    side: int  # pixels
    image_token: str
    start: str = ""
    end: str = ""
    before: str = ""
    after: str = ""
    draft: bool = False
    filter: str = "bicubic"
    options: tuple[str, ...] = ("side", "tokens", "filter")

    def __post_init__(self) -> None:
        check_options(self, tokens=1, side=1)
        check_filter(self, self.filter)
        if not self.image_token:
            raise ValueError(f"{self.name}: image_token is empty: name the token that stands for an image")

    @property
    def placeholder(self) -> str:
        """The start mark, or the image token where there is none."""
        return self.start or self.image_token

    @property
    def marks(self) -> tuple[str, ...]:
        """Start, image and end, those that exist."""
        return tuple(filter(None, (self.start, self.image_token, self.end)))

    def layout(self, width: int, height: int, num_images: int = 1) -> ImageLayout:
        """The same for every image."""
        check_size(width, height, num_images)
        return ImageLayout(self.tokens + len(self.marks) - 1, 1, self.side, self.side)

    def text(self, layout: ImageLayout) -> str:
        """Image tokens between the marks."""
        return self.start + self.image_token * (layout.tokens - len(self.marks) + 1) + self.end

    def fit(self, picture: Image.Image, layout: ImageLayout) -> Image.Image:
        """The picture squeezed to the square."""
        return resized(picture, layout.width, layout.height, self.filter)


@dataclass(frozen=True, slots=True)
class QwenVL:
    """One grid of patches, near the image's own resolution; 2 x 2 patches, a cell, make a token."""

    name: str
    patch: int  # pixels
    min_pixels: int
    max_pixels: int
    filter: str = "bicubic"
    options: ClassVar[tuple[str, ...]] = ("min_pixels", "max_pixels", "filter")
    image_token: ClassVar[str] = "<|image_pad|>"  # noqa: S105  (not a password)
    marks: ClassVar[tuple[str, ...]] = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
    placeholder: ClassVar[str] = "".join(marks)
    before: ClassVar[str] = ""
    after: ClassVar[str] = ""
    draft: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_options(self, min_pixels=1, max_pixels=self.min_pixels)
        check_filter(self, self.filter)

    def layout(self, width: int, height: int, num_images: int = 1) -> ImageLayout:
        """Rounds both sides to cells, then scales until the pixels lie within the limits."""
        check_size(width, height, num_images)
        if max(width, height) > 200 * min(width, height):  # the limit of the released processors
            raise refused_aspect(self.name, width, height, "takes side ratios up to 200")
        cell = 2 * self.patch
        rows, columns = round(height / cell), round(width / cell)  # half to even
        if rows * columns * cell**2 > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows = max(1, math.floor(height / shrink / cell))
            columns = max(1, math.floor(width / shrink / cell))
        elif rows * columns * cell**2 < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows, columns = math.ceil(height * grow / cell), math.ceil(width * grow / cell)
        return ImageLayout(rows * columns + 2, 4 * rows * columns, rows * cell, columns * cell)

    def text(self, layout: ImageLayout) -> str:
        """Image tokens between the marks."""
        start, image, end = self.marks
        return start + image * (layout.tokens - 2) + end

    def fit(self, picture: Image.Image, layout: ImageLayout) -> Image.Image:
        """The picture resized, once."""
        return resized(picture, layout.width, layout.height, self.filter)
