"""Vision families that cut an image into tiles, and see the whole of it as one tile more.

Adds: `Idefics3` (SmolVLM too) and `LlavaOnevision`, values with the rules of `vision.py`.
Leaves out: families that see one picture (`vision_resized.py`), and which options a released model has (`vision.py`).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import ClassVar

from PIL import Image

from mmdp.records import ImageLayout
from mmdp.vision_checks import check_filter, check_options, check_size, refused_aspect
from mmdp.vision_pictures import resized

GREY = (122, 116, 104)
"""What LLaVA-OneVision pads one of several images with: the mean of CLIP's pixels, cut to whole levels."""

_LARGEST_EDGE = 4096  # pixels; Idefics3 and SmolVLM cap whatever `longest_edge` asks for
_BAND = 2**22  # pixels that a padded image is resized at a time
_LARGEST_SQUARE = 65_536  # pixels a side; the released processor of LLaVA-OneVision would need 12 GiB for it


@dataclass(frozen=True, slots=True)
class Idefics3:
    """The longer side to a fixed length, cut into square tiles, and the whole image as one more tile.

    Two newlines stand before that global tile. `newline_pair` is the number of tokens they cost: 1 where the tokenizer
    fuses them, as those of SmolLM2 and Llama 3 do, else 2; it changes `layout`, never `text`.
    """

    name: str
    longest_edge: int  # pixels
    tile: int  # pixels; `max_image_size` of the image processor
    image_seq_len: int  # tokens a tile
    split: int = 1  # 0 is `do_image_splitting=False`: one tile for the whole image
    newline_pair: int = 1
    filter: str = "lanczos"
    options: ClassVar[tuple[str, ...]] = ("longest_edge", "tile", "image_seq_len", "split", "newline_pair", "filter")
    image_token: ClassVar[str] = "<image>"  # noqa: S105  (not a password)
    placeholder: ClassVar[str] = "<image>"
    before: ClassVar[str] = ""
    after: ClassVar[str] = ""
    draft: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_options(self, longest_edge=1, tile=1, image_seq_len=1, split=0, newline_pair=1)
        check_filter(self, self.filter)
        if self.split > 1 or self.newline_pair > 2:
            found = f"{self.split} and {self.newline_pair}"
            raise ValueError(f"{self.name}: split is 0 or 1 and newline_pair 1 or 2, not {found}")

    @property
    def marks(self) -> tuple[str, ...]:
        """A mark for every place that a tile can have, and three more."""
        longest = min(self.longest_edge + self.longest_edge % 2, _LARGEST_EDGE)
        side = range(1, math.ceil(longest / self.tile) + 1 if self.split else 1)
        places = (f"<row_{row}_col_{column}>" for row in side for column in side)
        return ("<fake_token_around_image>", "<global-img>", self.image_token, *places)

    def layout(self, width: int, height: int, num_images: int = 1) -> ImageLayout:
        """Rows of tiles, each with a newline, and the global tile; a single tile is global alone."""
        check_size(width, height, num_images)
        rows, columns = self._grid(width, height) if self.split else (1, 1)
        tokens, tiles = self.image_seq_len + 3, 1
        if rows * columns > 1:
            tokens += rows * (columns * (self.image_seq_len + 2) + 1) + self.newline_pair - 1
            tiles += rows * columns
        return ImageLayout(tokens, tiles, rows * self.tile, columns * self.tile)

    def _first(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of the image once it is scaled to `longest_edge`."""
        wide, tall = _scaled(width, height, self.longest_edge)
        if width >= height:
            tall += tall % 2
        else:
            wide += wide % 2
        wide, tall = max(1, wide), max(1, tall)
        if max(wide, tall) > _LARGEST_EDGE:
            wide, tall = (max(1, side) for side in _scaled(wide, tall, _LARGEST_EDGE))
        return wide, tall

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of tiles. The image is scaled twice: to `longest_edge`, then up to whole tiles."""
        wide, tall = self._first(width, height)
        wide, tall = _scaled(wide, tall, math.ceil(max(wide, tall) / self.tile) * self.tile)
        if min(wide, tall) < 1:  # the released processors fail here too, for some values of `longest_edge` only
            raise refused_aspect(self.name, width, height, "would scale one side to 0 pixels")
        return math.ceil(tall / self.tile), math.ceil(wide / self.tile)

    def text(self, layout: ImageLayout) -> str:
        """Each tile behind its place, row by row, then the global tile."""
        fake, whole = self.marks[:2]
        image = self.image_token * self.image_seq_len
        lines = ""
        if layout.vision > 1:
            rows, columns = range(layout.height // self.tile), range(layout.width // self.tile)
            tile = f"{fake}<row_{{}}_col_{{}}>{image}"
            lines = "\n".join("".join(tile.format(row + 1, column + 1) for column in columns) for row in rows) + "\n\n"
        return f"{lines}{fake}{whole}{image}{fake}"

    def fit(self, picture: Image.Image, layout: ImageLayout) -> Image.Image:
        """The picture resized twice, as the released processors do it; its tiles are cut, and seen whole, later."""
        once = resized(picture, *self._first(*picture.size), self.filter)
        return resized(once, layout.width, layout.height, self.filter)


@dataclass(frozen=True, slots=True)
class LlavaOnevision:
    """A sample's only image lies in the middle of a canvas of tiles; of several images each is one tile.

    Height and width are those of all its tiles, one below the other: the base tile, the whole image squeezed to a
    square, and then those of the canvas, line by line. Base tile and canvas are both made of the original, so neither
    can be had from the other. Features that see only padding are dropped, and what exceeds `anyres_max` tiles is scaled
    down: the model computes that from the ORIGINAL width and height, its `image_sizes`.
    """

    name: str
    grid: int  # tiles a side at most; `image_grid_pinpoints` holds every canvas up to grid x grid
    anyres_max: int  # tiles; `vision_aspect_ratio="anyres_max_9"`
    tile: int = 384  # pixels; with patch that of SigLIP so400m-patch14-384, the released vision tower
    patch: int = 14  # pixels
    filter: str = "bicubic"
    options: ClassVar[tuple[str, ...]] = ("grid", "anyres_max", "tile", "patch", "filter")
    image_token: ClassVar[str] = "<image>"  # noqa: S105  (not a password)
    placeholder: ClassVar[str] = "<image>"
    marks: ClassVar[tuple[str, ...]] = ("<image>",)
    before: ClassVar[str] = ""
    after: ClassVar[str] = ""
    draft: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_options(self, grid=1, anyres_max=1, patch=1, tile=self.patch)
        check_filter(self, self.filter)

    @property
    def side(self) -> int:
        """Features a side of a tile."""
        return self.tile // self.patch

    def layout(self, width: int, height: int, num_images: int = 1) -> ImageLayout:
        """The tiles, and the features of the canvas that see the picture."""
        check_size(width, height, num_images)
        if num_images > 1:
            if max(width, height) > _LARGEST_SQUARE:
                limit = f"pads one of several images to a square, of {_LARGEST_SQUARE} pixels a side at most"
                raise refused_aspect(self.name, width, height, limit)
            return ImageLayout(self.side**2 + 1, 1, self.tile, self.tile, height, width)  # the tile and one newline
        rows, columns = self._canvas(width, height)
        lines, features = self._features(width, height, rows * self.side, columns * self.side)
        tokens, tiles = self.side**2 + lines * (features + 1), 1 + rows * columns
        return ImageLayout(tokens, tiles, tiles * self.tile, self.tile, height, width)

    def _canvas(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of the canvas that keeps most of the image, and of those the one that wastes least."""

        def worth(shape: tuple[int, int]) -> tuple[int, int]:
            tall, wide = shape[0] * self.tile, shape[1] * self.tile
            scale = min(wide / width, tall / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            return kept, kept - tall * wide

        sides = range(1, self.grid + 1)
        return max(((rows, columns) for rows in sides for columns in sides), key=worth)

    def _features(self, width: int, height: int, lines: int, columns: int) -> tuple[int, int]:
        """Lines and columns of features without the padding, scaled down where they are too many."""
        if width / height > columns / lines:
            lines -= (lines - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (lines / height), 7))) // 2 * 2
        ratio = math.sqrt(lines * columns / (self.anyres_max * self.side**2))
        if ratio > 1.1:  # the model leaves up to a tenth too many alone
            return int(lines // ratio), int(columns // ratio)
        return lines, columns

    def text(self, layout: ImageLayout) -> str:
        """Image tokens alone; the model makes the newlines itself."""
        return self.image_token * layout.tokens

    def fit(self, picture: Image.Image, layout: ImageLayout) -> Image.Image:
        """All tiles, one below the other; the canvas is black where the picture leaves it free."""
        if layout.vision == 1:
            return self._padded(picture)
        rows, columns = self._canvas(*picture.size)
        inner = resized(picture, *self._inner(*picture.size, rows, columns), self.filter)
        canvas = Image.new(picture.mode, (columns * self.tile, rows * self.tile))
        canvas.paste(inner, ((canvas.width - inner.width) // 2, (canvas.height - inner.height) // 2))
        tiles = Image.new(picture.mode, (layout.width, layout.height))
        tiles.paste(resized(picture, self.tile, self.tile, self.filter))
        for number, (row, column) in enumerate(itertools.product(range(rows), range(columns)), start=1):
            left, top = column * self.tile, row * self.tile
            tiles.paste(canvas.crop((left, top, left + self.tile, top + self.tile)), (0, number * self.tile))
        return tiles

    def _inner(self, width: int, height: int, rows: int, columns: int) -> tuple[int, int]:
        """Width and height of the undistorted picture on its canvas."""
        tall, wide = rows * self.tile, columns * self.tile
        if wide / width < tall / height:
            return wide, min(math.ceil(height * (wide / width)), tall)
        return min(math.ceil(width * (tall / height)), wide), tall

    def _padded(self, picture: Image.Image) -> Image.Image:
        """The picture in the middle of a grey square, resized to a tile; the square is never held as a whole."""
        side, (width, height) = max(picture.size), picture.size
        wide = Image.new("RGB", (self.tile, side), GREY)  # resized across, not yet down
        left, top = (side - width) // 2, (side - height) // 2
        lines = max(1, _BAND // side)
        for start in range(0, height, lines):
            part = picture.crop((0, start, width, min(height, start + lines)))
            band = Image.new("RGB", (side, part.height), GREY)
            band.paste(part, (left, 0))
            wide.paste(resized(band, self.tile, part.height, self.filter), (0, top + start))
        return resized(wide, self.tile, self.tile, self.filter)


def _scaled(width: int, height: int, longest: int) -> tuple[int, int]:
    """Width and height once the longer side is `longest`; the other is cut to an integer, perhaps to 0."""
    ratio = width / height
    return (longest, int(longest / ratio)) if width >= height else (int(longest * ratio), longest)
