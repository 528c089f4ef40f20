"""What an image costs, per model family, from its upright width and height alone: no pixel is needed to plan.

Adds: `vision_family(spec)`, a value with the rules of one model family.
Leaves out: pixels, tokenizers, chat templates, video.

| family | tokens of one image | `vision` counts | height and width |
|---|---|---|---|
| `fixed:N` | N | 1 tile | a square |
| `qwen2_vl`, `qwen2_5_vl`, `qwen3_vl` | cells of 2 x 2 patches, two marks | patches | multiples of a cell |
| `smolvlm`, `idefics3` | tiles, two marks each, newlines, one mark | tiles, the global one too | multiples of a tile |
| `llava_onevision` | base tile, features off the padding, newlines | tiles, the base one too | the picture, unpadded |
| `gemma3` | 256, two marks | 1 tile | a square |

Every family is hashable and picklable, its `repr` holds each option, and it has:

- `layout(width, height, num_images=1)`: an `ImageLayout`, from the pixels of the upright image (EXIF orientation
  applied) and the number of images in its sample, which only LLaVA-OneVision asks for; a `DataError` for a side ratio
  that the family can't take.
- `text(layout)`: what its processor writes into the prompt for this image, `layout.tokens` tokens long.
- `placeholder`: what its chat template writes for one image; `text` takes its place.
- `image_token`: the token that is repeated. `marks`: every special token that `text` can hold; the tokenizer must have
  each as one token.
- `before`, `after`: plain text that its processor puts around `text`. It can melt into one token with the prompt
  beside it, so `layout.tokens` does NOT count it: only who tokenises the whole prompt can.
- `draft`: a JPEG may be decoded at a fraction of its size, for there is no released processor to be equal to.

Equal to the processors of transformers 5.24: tests/test_vision.py runs them. Where they compute in floats so do we, in
the same order of operations, since the last bit decides where a side lands on a border.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

from mmdp.records import ImageLayout
from mmdp.refusals import DataError, Reason, shorten


def vision_family(spec: str) -> VisionFamily:
    """The family that a name stands for, with its defaults or with options of its own.

    Args:
        spec: `NAME` or `NAME:OPTION=VALUE,...`, such as `qwen3_vl:max_pixels=1048576,min_pixels=65536`;
            `fixed:N` or `fixed:N:side=256,image_token=<image>`.

    Raises:
        ValueError: an unknown name, option or value; the message lists what exists.

    >>> vision_family("qwen3_vl").layout(640, 480)
    ImageLayout(tokens=302, vision=1200, height=480, width=640)
    """
    name, _, rest = spec.partition(":")
    if name not in _FAMILIES:
        known = ", ".join(_FAMILIES).replace("fixed", "fixed:N")
        raise ValueError(f"unknown vision family {shorten(name)}: the families are {known}")
    family = _FAMILIES[name]
    changes: dict[str, Any] = {}
    if name == "fixed":
        number, _, rest = rest.partition(":")
        changes["tokens"] = _whole_number("N of fixed:N", number)
    for option, _, value in (item.partition("=") for item in rest.split(",") if item):
        if option not in family.options or option in changes:
            known = ", ".join(family.options)
            raise ValueError(f"{name}: option {shorten(option)} is unknown or given twice: the options are {known}")
        is_text = isinstance(getattr(family, option), str)
        changes[option] = value if is_text else _whole_number(f"{name}: {option}", value)
    return replace(family, **changes)


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
    options: tuple[str, ...] = ("side", "tokens")

    def __post_init__(self) -> None:
        _at_least(self, tokens=1, side=1)
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
        _check_size(width, height, num_images)
        return ImageLayout(self.tokens + len(self.marks) - 1, 1, self.side, self.side)

    def text(self, layout: ImageLayout) -> str:
        """Image tokens between the marks."""
        return self.start + self.image_token * (layout.tokens - len(self.marks) + 1) + self.end


@dataclass(frozen=True, slots=True)
class QwenVL:
    """One grid of patches, near the image's own resolution; 2 x 2 patches, a cell, make a token."""

    name: str
    patch: int  # pixels
    min_pixels: int
    max_pixels: int
    options: ClassVar[tuple[str, ...]] = ("min_pixels", "max_pixels")
    image_token: ClassVar[str] = "<|image_pad|>"  # noqa: S105  (not a password)
    marks: ClassVar[tuple[str, ...]] = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
    placeholder: ClassVar[str] = "".join(marks)
    before: ClassVar[str] = ""
    after: ClassVar[str] = ""
    draft: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _at_least(self, min_pixels=1, max_pixels=self.min_pixels)

    def layout(self, width: int, height: int, num_images: int = 1) -> ImageLayout:
        """Rounds both sides to cells, then scales until the pixels lie within the limits."""
        _check_size(width, height, num_images)
        if max(width, height) > 200 * min(width, height):  # the limit of the released processors
            raise _aspect(self, width, height, "takes side ratios up to 200")
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
    options: ClassVar[tuple[str, ...]] = ("longest_edge", "tile", "image_seq_len", "split", "newline_pair")
    image_token: ClassVar[str] = "<image>"  # noqa: S105  (not a password)
    placeholder: ClassVar[str] = "<image>"
    before: ClassVar[str] = ""
    after: ClassVar[str] = ""
    draft: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _at_least(self, longest_edge=1, tile=1, image_seq_len=1, split=0, newline_pair=1)
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
        _check_size(width, height, num_images)
        rows, columns = self._grid(width, height) if self.split else (1, 1)
        tokens, tiles = self.image_seq_len + 3, 1
        if rows * columns > 1:
            tokens += rows * (columns * (self.image_seq_len + 2) + 1) + self.newline_pair - 1
            tiles += rows * columns
        return ImageLayout(tokens, tiles, rows * self.tile, columns * self.tile)

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of tiles. The image is scaled twice: to `longest_edge`, then up to whole tiles."""
        wide, tall = _scaled(width, height, self.longest_edge)
        if width >= height:
            tall += tall % 2
        else:
            wide += wide % 2
        wide, tall = max(1, wide), max(1, tall)
        if max(wide, tall) > _LARGEST_EDGE:
            wide, tall = (max(1, side) for side in _scaled(wide, tall, _LARGEST_EDGE))
        wide, tall = _scaled(wide, tall, math.ceil(max(wide, tall) / self.tile) * self.tile)
        if min(wide, tall) < 1:  # the released processors fail here too, for some values of `longest_edge` only
            raise _aspect(self, width, height, "would scale one side to 0 pixels")
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


@dataclass(frozen=True, slots=True)
class LlavaOnevision:
    """A sample's only image lies in the middle of a canvas of tiles; of several images each is one tile.

    Height and width are those of the undistorted picture; rounded up to whole tiles they are the canvas. The base tile
    is the whole image squeezed to a square. Features that see only padding are dropped, and what exceeds `anyres_max`
    tiles is scaled down: the model computes that from the ORIGINAL width and height, its `image_sizes`.
    """

    name: str
    grid: int  # tiles a side at most; `image_grid_pinpoints` holds every canvas up to grid x grid
    anyres_max: int  # tiles; `vision_aspect_ratio="anyres_max_9"`
    tile: int = 384  # pixels; with patch that of SigLIP so400m-patch14-384, the released vision tower
    patch: int = 14  # pixels
    options: ClassVar[tuple[str, ...]] = ("grid", "anyres_max", "tile", "patch")
    image_token: ClassVar[str] = "<image>"  # noqa: S105  (not a password)
    placeholder: ClassVar[str] = "<image>"
    marks: ClassVar[tuple[str, ...]] = ("<image>",)
    before: ClassVar[str] = ""
    after: ClassVar[str] = ""
    draft: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _at_least(self, grid=1, anyres_max=1, patch=1, tile=self.patch)

    @property
    def side(self) -> int:
        """Features a side of a tile."""
        return self.tile // self.patch

    def layout(self, width: int, height: int, num_images: int = 1) -> ImageLayout:
        """The canvas, and the features of it that see the picture."""
        _check_size(width, height, num_images)
        rows, columns = self._canvas(width, height) if num_images == 1 else (1, 1)
        tall, wide = rows * self.tile, columns * self.tile
        if wide / width < tall / height:
            tall = min(math.ceil(height * (wide / width)), tall)
        else:
            wide = min(math.ceil(width * (tall / height)), wide)
        if num_images > 1:
            return ImageLayout(self.side**2 + 1, 1, tall, wide, height, width)  # the tile and one newline
        lines, features = self._features(width, height, rows * self.side, columns * self.side)
        return ImageLayout(self.side**2 + lines * (features + 1), 1 + rows * columns, tall, wide, height, width)

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


VisionFamily: TypeAlias = Square | QwenVL | Idefics3 | LlavaOnevision

_LARGEST_EDGE = 4096  # pixels; Idefics3 and SmolVLM cap whatever `longest_edge` asks for


def _scaled(width: int, height: int, longest: int) -> tuple[int, int]:
    """Width and height once the longer side is `longest`; the other is cut to an integer, perhaps to 0."""
    ratio = width / height
    return (longest, int(longest / ratio)) if width >= height else (int(longest * ratio), longest)


def _check_size(width: int, height: int, num_images: int) -> None:
    if min(width, height, num_images) < 1:
        raise ValueError(f"an image of {width} x {height}, one of {num_images}: each must be at least 1")


def _aspect(family: VisionFamily, width: int, height: int, limit: str) -> DataError:
    ratio = max(width, height) / min(width, height)
    message = f"{family.name} {limit}, this image is {width} x {height}, ratio {ratio:.1f}: crop it or leave it out"
    return DataError(Reason.IMAGE_ASPECT, message)


def _at_least(family: VisionFamily, **bounds: int) -> None:
    for name, bound in bounds.items():
        if getattr(family, name) < bound:
            raise ValueError(f"{family.name}: {name} is {getattr(family, name)}: it must be at least {bound}")


def _whole_number(what: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{what} is {shorten(text)}: it must be a whole number") from None


_FAMILIES: dict[str, VisionFamily] = {
    "fixed": Square("fixed", 64, 256, "<|image|>", draft=True, options=("side", "image_token")),
    # Class defaults of Qwen2VLImageProcessor in transformers 5.24. The checkpoints' own preprocessor_config.json allows
    # 16384 tokens an image: `qwen2_5_vl:max_pixels=12845056`.
    "qwen2_vl": QwenVL("qwen2_vl", patch=14, min_pixels=56 * 56, max_pixels=28 * 28 * 1280),
    "qwen2_5_vl": QwenVL("qwen2_5_vl", patch=14, min_pixels=56 * 56, max_pixels=28 * 28 * 1280),
    # The same class; patch and limits are from the checkpoints' preprocessor_config.json, not its defaults.
    "qwen3_vl": QwenVL("qwen3_vl", patch=16, min_pixels=256 * 256, max_pixels=4096 * 4096),
    # SmolVLM and SmolVLM2 of 256M and 500M; those of 2B are `smolvlm:longest_edge=1536,tile=384,image_seq_len=81`.
    "smolvlm": Idefics3("smolvlm", longest_edge=2048, tile=512, image_seq_len=64),
    # Class defaults of Idefics3ImageProcessor and Idefics3Processor in transformers 5.24.
    "idefics3": Idefics3("idefics3", longest_edge=4 * 364, tile=364, image_seq_len=169),
    # Class defaults of LlavaOnevisionImageProcessor and LlavaOnevisionProcessor in transformers 5.24.
    "llava_onevision": LlavaOnevision("llava_onevision", grid=6, anyres_max=9),
    # 256 is the default of Gemma3Processor; 896 is the released checkpoints' size, where the class says 224.
    "gemma3": Square(
        "gemma3", 256, 896, "<image_soft_token>", "<start_of_image>", "<end_of_image>", before="\n\n", after="\n\n"
    ),
}
