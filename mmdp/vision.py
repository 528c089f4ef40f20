"""What an image costs, per model family, from its upright width and height alone: no pixel is needed to plan.

Adds: `vision_family(spec)`, a value with the rules of one model family; `spec_of`, the spec of a processor at hand.
Leaves out: the rules themselves (`vision_resized.py`, `vision_tiled.py`), pixels, tokenizers, chat templates, video.

| family | tokens of one image | `vision` counts | height and width |
|---|---|---|---|
| `fixed:N` | N | 1 tile | a square |
| `qwen2_vl`, `qwen2_5_vl`, `qwen3_vl` | cells of 2 x 2 patches, two marks | patches | multiples of a cell |
| `smolvlm`, `idefics3` | tiles, two marks each, newlines, one mark | tiles, the global one too | multiples of a tile |
| `llava_onevision` | base tile, features off the padding, newlines | tiles, the base one too | all tiles in a column |
| `gemma3` | 256, two marks | 1 tile | a square |

Every family is hashable and picklable, its `repr` holds each option, and it has:

- `layout(width, height, num_images=1)`: an `ImageLayout`, from the pixels of the upright image (EXIF orientation
  applied) and the number of images in its sample, which only LLaVA-OneVision asks for; a `DataError` for a side ratio
  that the family can't take.
- `fit(picture, layout)`: the pixels that its processor makes of an upright picture of Pillow, to `layout.height` and
  `layout.width`, by the same steps and with the same `filter`.
- `text(layout)`: what its processor writes into the prompt for this image, `layout.tokens` tokens long.
- `placeholder`: what its chat template writes for one image; `text` takes its place.
- `image_token`: the token that is repeated. `marks`: every special token that `text` can hold; the tokenizer must have
  each as one token.
- `before`, `after`: plain text that its processor puts around `text`. It can melt into one token with the prompt
  beside it, so `layout.tokens` does NOT count it: only who tokenises the whole prompt can.
- `draft`: a JPEG may be decoded at a fraction of its size, for there is no released processor to be equal to; and the
  layout is the same for images of all sizes, so that a changed image is not looked for.

Equal to the processors of transformers 5.24: tests/test_vision.py runs them. Where they compute in floats so do we, in
the same order of operations, since the last bit decides where a side lands on a border.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

from mmdp.refusals import shorten
from mmdp.vision_of_processor import filter_of, spec_of
from mmdp.vision_resized import QwenVL, Square
from mmdp.vision_tiled import Idefics3, LlavaOnevision

__all__ = ["VisionFamily", "filter_of", "spec_of", "vision_family"]

VisionFamily: TypeAlias = Square | QwenVL | Idefics3 | LlavaOnevision


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
    name, _, rest = str(spec).partition(":")
    if name not in _FAMILIES:
        known = ", ".join("fixed:N" if one == "fixed" else one for one in _FAMILIES)
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


def _whole_number(what: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{what} is {shorten(text)}: it must be a whole number") from None


_FAMILIES: dict[str, VisionFamily] = {
    "fixed": Square("fixed", 64, 256, "<|image|>", draft=True, options=("side", "image_token", "filter")),
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
        "gemma3",
        256,
        896,
        "<image_soft_token>",
        "<start_of_image>",
        "<end_of_image>",
        before="\n\n",
        after="\n\n",
        filter="bilinear",
    ),
}
