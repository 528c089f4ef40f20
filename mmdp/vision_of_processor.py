"""The vision family and its options, read off a processor of transformers.

Adds: `spec_of`, such as `qwen2_5_vl:min_pixels=3136,max_pixels=12845056,filter=bicubic`; `filter_of`. A processor that
makes pixels in a way that no family here does is refused.
Leaves out: mean and deviation of the pixels, which `adapt` and `loss` take from `image_processor`; loading a processor.
Nothing is imported from transformers: its classes are known by their names.
"""

from __future__ import annotations

import math
from typing import Any

from mmdp.refusals import shorten
from mmdp.vision_checks import FILTERS

_PLAIN = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_center_crop": False,
    "do_pan_and_scan": False,
}
"""The switches of image processors, and how they must stand; None counts as False."""

_RESAMPLING = {1: "lanczos", 2: "bilinear", 3: "bicubic"}
"""Pillow's numbers of its filters, as `preprocessor_config.json` has them in `resample`."""


def spec_of(processor: Any) -> str:
    """The `vision` of an `Encoder` whose layouts and pixels are those of this processor.

    Args:
        processor: of transformers, loaded. Its image processor alone will do for Qwen-VL: elsewhere the processor
            around it says how many tokens an image costs.

    Returns:
        `NAME:OPTION=VALUE,...` with each option that `vision_family` takes. Qwen2-VL and Qwen2.5-VL share a class of
        image processors, and are the same here: it alone gives `qwen2_5_vl`.

    Raises:
        ValueError: a class that is not known, a setting that no family here has, or an image processor without the
            processor that knows its tokens.
    """
    image_processor = getattr(processor, "image_processor", None) or processor
    names = {one.__name__.removesuffix("Pil").removesuffix("Fast") for one in type(image_processor).__mro__}
    reader = next((_READERS[name] for name in _READERS if name in names), None)
    if reader is None:
        raise ValueError(
            f"no vision family is known for {type(image_processor).__name__}: the image processors are "
            f"{', '.join(_READERS)}; give the family and its options yourself"
        )
    for switch, wanted in _PLAIN.items():
        if bool(getattr(image_processor, switch, wanted)) != wanted:
            raise _refused(image_processor, switch, wanted)
    if not math.isclose(image_processor.rescale_factor, 1 / 255):
        raise _refused(image_processor, "rescale_factor", "1 / 255")
    return f"{reader(processor, image_processor)},filter={filter_of(image_processor)}"


def filter_of(image_processor: Any) -> str:
    """The filter that an image processor of transformers resizes with: one of `vision_checks.FILTERS`.

    Raises:
        ValueError: it is none of them.
    """
    resample = image_processor.resample
    # An InterpolationMode of torchvision has a word for its value, Pillow's enum and the file have a number.
    name = str(getattr(resample, "value", resample)).lower()
    name = _RESAMPLING.get(int(name), name) if name.isdigit() else name
    if name not in FILTERS:
        raise _refused(image_processor, "resample", " or ".join(FILTERS))
    return name


def _qwen(processor: Any, image_processor: Any) -> str:
    if image_processor.merge_size != 2:
        raise _refused(image_processor, "merge_size", 2)
    name = {14: "qwen2_5_vl", 16: "qwen3_vl"}.get(image_processor.patch_size)
    if name is None:
        raise _refused(image_processor, "patch_size", "14 or 16")
    if type(processor).__name__ == "Qwen2VLProcessor" and name == "qwen2_5_vl":
        name = "qwen2_vl"
    size = image_processor.size
    return f"{name}:min_pixels={size['shortest_edge']},max_pixels={size['longest_edge']}"


def _idefics3(name: str, processor: Any, image_processor: Any) -> str:
    tokens = _of_whole(processor, "image_seq_len")
    newlines = len(processor.tokenizer("\n\n", add_special_tokens=False)["input_ids"])
    edge, tile = image_processor.size["longest_edge"], image_processor.max_image_size["longest_edge"]
    split = int(image_processor.do_image_splitting)
    return f"{name}:longest_edge={edge},tile={tile},image_seq_len={tokens},split={split},newline_pair={newlines}"


def _smolvlm(processor: Any, image_processor: Any) -> str:
    return _idefics3("smolvlm", processor, image_processor)


def _idefics(processor: Any, image_processor: Any) -> str:
    return _idefics3("idefics3", processor, image_processor)


def _llava(processor: Any, image_processor: Any) -> str:
    tile, tokens = _side(image_processor), _of_whole(processor, "num_image_tokens")
    if processor.vision_feature_select_strategy != "full":
        raise _refused(processor, "vision_feature_select_strategy", "full")
    side = math.isqrt(tokens)
    patch = tile // side
    if side**2 != tokens or tile // patch != side:
        raise _refused(processor, "num_image_tokens", f"the square of the patches along {tile} pixels")
    pinpoints = {tuple(point) for point in image_processor.image_grid_pinpoints}
    grid = max(max(point) for point in pinpoints) // tile
    sides = [tile * number for number in range(1, grid + 1)]
    if pinpoints != {(height, width) for height in sides for width in sides}:
        raise _refused(image_processor, "image_grid_pinpoints", "all canvases up to a grid of tiles")
    kind, _, most = processor.vision_aspect_ratio.rpartition("_")
    if kind != "anyres_max" or not most.isdigit():
        raise _refused(processor, "vision_aspect_ratio", "anyres_max_N")
    return f"llava_onevision:grid={grid},anyres_max={most},tile={tile},patch={patch}"


def _gemma3(processor: Any, image_processor: Any) -> str:
    return f"gemma3:side={_side(image_processor)},tokens={_of_whole(processor, 'image_seq_length')}"


def _side(image_processor: Any) -> int:
    size = image_processor.size
    if not size.get("height") or size["height"] != size.get("width"):
        raise _refused(image_processor, "size", "a height and as large a width")
    return int(size["height"])


def _of_whole(processor: Any, name: str) -> int:
    value = getattr(processor, name, None)
    if value is None:
        raise ValueError(
            f"{type(processor).__name__} has no `{name}`, the tokens of an image: give the whole processor, such as "
            "AutoProcessor.from_pretrained loads it"
        )
    return int(value)


def _refused(owner: Any, name: str, wanted: object) -> ValueError:
    found = shorten(getattr(owner, name))
    return ValueError(f"{type(owner).__name__} has {name} {found}: only {wanted} is supported")


_READERS = {
    "Qwen2VLImageProcessor": _qwen,
    "SmolVLMImageProcessor": _smolvlm,
    "Idefics3ImageProcessor": _idefics,
    "LlavaOnevisionImageProcessor": _llava,
    "Gemma3ImageProcessor": _gemma3,
}
