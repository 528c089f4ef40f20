"""The pixels of a batch as each model family takes them, made on the device they are on.

Adds: `vision_inputs`, the keyword arguments for the images, equal to those of the released processors within rounding;
`image_cells`, the grid behind the positions of Qwen-VL.
Leaves out: decoding (`images.py`), layouts (`vision.py`), tokens and masks (`adapters.py`).

| family | `pixel_values` | beside it |
|---|---|---|
| Qwen-VL | (patches, 3 * frames * P * P), cells of 2 x 2 patches together | `image_grid_thw` (N, 3) |
| SmolVLM, Idefics3 | (B, most tiles of a row, 3, S, S), short rows filled with zeros | `pixel_attention_mask` |
| LLaVA-OneVision | (N, most tiles, 3, S, S), the base tile first | `image_sizes` (N, 2), `batch_num_images` |
| Gemma 3 | (N, 3, S, S) | |

Pixels stay uint8 until they have their last shape; then all of them are normalised at once, in float32. All sizes are
made while decoding, by Pillow, but for the whole image of SmolVLM and Idefics3: that is the picture, which is here,
squeezed once more.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from mmdp.families import MROPE
from mmdp.records import ImageBuffer
from mmdp.refusals import shorten
from mmdp.resampling import resize, weights
from mmdp.vision_tiled import GREY, LlavaOnevision

_CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
_HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
NORMAL: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "qwen2_vl": _CLIP,
    "qwen2_5_vl": _CLIP,
    # From the preprocessor_config.json of its checkpoints; the class they name defaults to those of CLIP.
    "qwen3_vl": _HALF,
    "smolvlm": _HALF,
    "idefics3": _HALF,
    "llava_onevision": _CLIP,
    "gemma3": _HALF,
}
"""Mean and deviation of each channel in 0..1: class defaults of the image processors in transformers 5.24."""


def vision_inputs(
    images: ImageBuffer,
    config: Any,
    *,
    num_rows: int,
    dtype: torch.dtype,
    normal: Any = None,
    filter: str | None = None,
) -> dict[str, torch.Tensor]:
    """The keyword arguments for the images of a batch; none where it has no image.

    Args:
        images: of the sizes that the family's layouts promise; `num_image_tokens` refuses others.
        config: of the whole model.
        num_rows: B as the model sees it: 1 for a flattened batch.
        dtype: of the pixels handed to the model.
        normal: mean and deviation of each channel, instead of the family's.
        filter: what images that are resized here are resized with, instead of the family's: `vision_checks.FILTERS`.

    Raises:
        ValueError: images for LLaVA-OneVision that do not know their original size.
    """
    family = config.model_type
    if not len(images):
        return {}
    normal = normal or NORMAL[family]
    if family in MROPE:
        return _qwen(images, config.vision_config, normal, dtype)
    if family in ("smolvlm", "idefics3"):
        rows = images.rows.numpy() if num_rows > 1 else np.zeros(len(images), dtype=np.int64)
        return _tiles(images, config.vision_config.image_size, rows, num_rows, normal, dtype, filter or "lanczos")
    if family == "llava_onevision":
        return _llava(images, config.vision_config.image_size, normal, dtype, filter or "bicubic")
    side = config.vision_config.image_size
    return {"pixel_values": _normalised(images.pixels.view(-1, 3, side, side), normal, dtype)}


def num_image_tokens(images: ImageBuffer, config: Any) -> np.ndarray:
    """(N,) how many placeholders stand for each image.

    Raises:
        ValueError: an image whose size no layout of this family has.
    """
    family, sizes = config.model_type, np.stack([images.heights.numpy(), images.widths.numpy()], axis=1)
    tokens: np.ndarray
    if family in MROPE:
        tokens = np.prod(image_cells(images, config), axis=1)
        return tokens
    side = config.vision_config.image_size
    if family in ("smolvlm", "idefics3"):
        _check(sizes, sizes % side == 0, config, f"multiples of its tile, {side} pixels")
        tiles = np.prod(sizes // side, axis=1)
        features = (side // config.vision_config.patch_size) ** 2 // config.scale_factor**2
        tokens = np.where(tiles > 1, tiles + 1, 1) * features
        return tokens
    if family == "llava_onevision":
        rules = llava_rules(config)
        originals, counts = _originals(images), images_of_segment(images)
        layouts = [rules.layout(int(w), int(h), int(n)) for (h, w), n in zip(originals, counts, strict=True)]
        expected = np.array([(layout.height, layout.width) for layout in layouts])
        _check(sizes, sizes == expected, config, f"{expected.tolist()} for these originals")
        return np.array([layout.tokens for layout in layouts])
    _check(sizes, sizes == side, config, f"squares of {side} pixels")
    return np.full(len(images), config.mm_tokens_per_image)


def image_cells(images: ImageBuffer, config: Any) -> np.ndarray:
    """(N, 2) lines and columns of cells of each image, for a Qwen-VL; one token a cell.

    Raises:
        ValueError: a side that is no multiple of a cell.
    """
    vision = config.vision_config
    cell = vision.patch_size * vision.spatial_merge_size
    sizes = np.stack([images.heights.numpy(), images.widths.numpy()], axis=1)
    _check(sizes, sizes % cell == 0, config, f"multiples of its cell, {cell} pixels")
    cells: np.ndarray = sizes // cell
    return cells


def images_of_segment(images: ImageBuffer) -> np.ndarray:
    """(N,) how many images the sample of each image has, from the segments, which tell a repeated sample apart."""
    if images.segments is None:
        raise ValueError("these images do not know their segments: make the batch with mmdp.batch")
    keys = images.rows.numpy() * (int(images.segments.max()) + 1) + images.segments.numpy()
    _, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
    number: np.ndarray = counts[inverse]
    return number


def llava_rules(config: Any) -> LlavaOnevision:
    """The layout rules that a config of LLaVA-OneVision stands for.

    Raises:
        ValueError: canvases other than all up to some grid.
    """
    tile = config.vision_config.image_size
    pinpoints = {tuple(point) for point in config.image_grid_pinpoints}
    grid = max(max(point) for point in pinpoints) // tile
    sides = [tile * number for number in range(1, grid + 1)]
    if pinpoints != {(height, width) for height in sides for width in sides}:
        raise ValueError(
            f"image_grid_pinpoints {shorten(config.image_grid_pinpoints)}: only all canvases up to a grid of tiles are "
            "supported, as the released checkpoints have them"
        )
    most = int(config.vision_aspect_ratio.removeprefix("anyres_max_"))
    return LlavaOnevision("llava_onevision", grid, most, tile, config.vision_config.patch_size)


def _qwen(images: ImageBuffer, vision: Any, normal: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All patches of an image, cell by cell, each cell's own patches together; a still image is every frame."""
    patch, merge, frames = vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size
    patches = []
    for image in images:
        lines, columns = (side // (patch * merge) for side in image.shape[1:])
        cut = image.view(3, lines, merge, patch, columns, merge, patch).permute(1, 4, 2, 5, 0, 3, 6)
        patches.append(cut.reshape(-1, 3, patch, patch))
    flat = _normalised(torch.cat(patches), normal, dtype)
    grids = torch.stack([torch.ones_like(images.heights), images.heights // patch, images.widths // patch], dim=1)
    return {
        "pixel_values": flat[:, :, None].expand(-1, -1, frames, -1, -1).reshape(len(flat), -1),
        "image_grid_thw": grids.to(images.pixels.device),
    }


def _tiles(
    images: ImageBuffer, side: int, rows: np.ndarray, num_rows: int, normal: Any, dtype: torch.dtype, filter: str
) -> dict[str, torch.Tensor]:
    """Each image as its tiles and, where they are several, the whole of it squeezed to one more."""
    stacks = []
    for image in images:
        tiles = _cut(image, side)
        whole = resize(image, side, side, filter=filter)[None]
        stacks.append(torch.cat([tiles, whole]) if len(tiles) > 1 else tiles)
    row_of = np.repeat(rows, [len(stack) for stack in stacks])
    counts = np.bincount(row_of, minlength=num_rows)
    place = np.arange(len(row_of)) - (np.cumsum(counts) - counts)[row_of]  # rows come in order
    device = images.pixels.device
    where = torch.from_numpy(row_of).to(device), torch.from_numpy(place).to(device)
    # The models drop a tile of zeros as filling. No picture is one: a mean is taken off, and none of 255 levels is it.
    pixels = torch.zeros(num_rows, int(counts.max()), 3, side, side, dtype=dtype, device=device)
    pixels[where] = _normalised(torch.cat(stacks), normal, dtype)
    real = torch.zeros(num_rows, int(counts.max()), side, side, dtype=torch.bool, device=device)
    real[where] = True
    return {"pixel_values": pixels, "pixel_attention_mask": real}


def _llava(images: ImageBuffer, side: int, normal: Any, dtype: torch.dtype, filter: str) -> dict[str, torch.Tensor]:
    """The tiles of each image: of an only image the base tile and its canvas; of several images each is one."""
    counts, originals = images_of_segment(images), _originals(images)
    grey = tuple(int(value * 255) for value in normal[0])
    stacks = []
    for image, count, (height, width) in zip(images, counts, originals, strict=True):
        if count > 1 and grey != GREY:
            image = _repainted(image, int(height), int(width), grey, filter)
        stacks.append(image.view(3, -1, side, side).transpose(0, 1))
    lengths = [len(stack) for stack in stacks]
    tiles = torch.split(_normalised(torch.cat(stacks), normal, dtype), lengths)
    starts = np.r_[True, (np.diff(images.rows.numpy()) != 0) | (np.diff(_segments(images)) != 0)]
    return {
        "pixel_values": torch.stack([pad(one, (0,) * 7 + (max(lengths) - len(one),)) for one in tiles]),
        # These two stay on the host: the model reads them number by number.
        "image_sizes": torch.from_numpy(originals),
        "batch_num_images": torch.from_numpy(counts[starts]),
    }


def _repainted(image: torch.Tensor, height: int, width: int, grey: tuple[int, ...], filter: str) -> torch.Tensor:
    """An image that was padded with `GREY` to a square, before it was resized, as if it had been padded with this grey.

    Resizing is linear, so each pixel moves by the share of the padding in it; within rounding, and the clamp at 0, 255.
    """
    longest, side = max(height, width), image.shape[1]
    short = min(height, width)
    padding = np.ones(longest, dtype=np.float32)
    padding[(longest - short) // 2 :][:short] = 0
    share = torch.from_numpy(weights(longest, side, filter) @ padding).to(image.device)
    change = torch.tensor(grey, device=image.device) - torch.tensor(GREY, device=image.device)
    moved = change[:, None, None] * (share[:, None] if width > height else share[None, :])
    return (image + moved).round().clamp(0, 255).to(torch.uint8)


def _cut(image: torch.Tensor, side: int) -> torch.Tensor:
    """(tiles, 3, S, S), line by line, of an image of whole tiles."""
    lines, columns = image.shape[1] // side, image.shape[2] // side
    return image.view(3, lines, side, columns, side).permute(1, 3, 0, 2, 4).reshape(-1, 3, side, side)


def _normalised(pixels: torch.Tensor, normal: Any, dtype: torch.dtype) -> torch.Tensor:
    """(..., 3, H, W) uint8 as numbers around 0; the arithmetic of the released processors, step for step."""
    mean, deviation = (torch.tensor(part, device=pixels.device).view(3, 1, 1) * 255.0 for part in normal)
    return pixels.to(torch.float32).sub_(mean).div_(deviation).to(dtype)


def _originals(images: ImageBuffer) -> np.ndarray:
    if images.originals is None or not bool(images.originals.all()):
        raise ValueError(
            "LLaVA-OneVision needs each image's size before it was resized: make the samples with "
            "mmdp.Encoder(tokenizer, 'llava_onevision') and the batch with mmdp.batch"
        )
    return images.originals.numpy()


def _segments(images: ImageBuffer) -> np.ndarray:
    assert images.segments is not None  # images_of_segment has refused
    return images.segments.numpy()


def _check(sizes: np.ndarray, fits: np.ndarray, config: Any, wanted: str) -> None:
    if not fits.all():
        height, width = sizes[~fits.all(axis=-1)][0]
        raise ValueError(
            f"an image of {width} x {height} pixels for {config.model_type}, which takes {wanted}: encode with the "
            f"vision family and the options of this model, such as mmdp.Encoder(tokenizer, {config.model_type!r})"
        )
