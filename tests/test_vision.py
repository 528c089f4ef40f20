"""Laws of vision.py, vision_resized.py, vision_tiled.py: they predict what released processors make.

Those of transformers are built from code, with a tokenizer trained here. On some 200 sizes their own counters and text
are asked, which need no pixels; on 23 of them they really run.
"""

import itertools
import pickle
import random
import re
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers import decoders as token_decoders
from transformers import PreTrainedTokenizerFast
from transformers.image_processing_utils import select_best_resolution
from transformers.image_utils import SizeDict
from transformers.models.idefics3.image_processing_idefics3 import get_resize_output_image_size
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize
from transformers.models.smolvlm import processing_smolvlm

from mmdp.records import ImageLayout
from mmdp.refusals import DataError, Reason
from mmdp.vision import vision_family

pytestmark = pytest.mark.usefixtures("one_thread")

CASES = [
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen2_5_vl:max_pixels=12845056",
    "qwen3_vl",
    "qwen3_vl:max_pixels=1048576,min_pixels=65536",
    "qwen3_vl:max_pixels=65536,min_pixels=1024",
    "smolvlm",
    "smolvlm:longest_edge=1536,tile=384,image_seq_len=81",
    "smolvlm:split=0",
    "idefics3",
    "llava_onevision",
    "llava_onevision:grid=3,anyres_max=4",
    "gemma3",
]
FAMILIES = ["fixed:64", *CASES]
# Where the edge is no multiple of the tile, the released counter forgets the second scaling: only a run tells.
UNEVEN = ["smolvlm:longest_edge=1000,tile=364,image_seq_len=5", "idefics3:longest_edge=5001,tile=1500,image_seq_len=5"]

EXTREMES = [
    (1, 1),
    (1, 300),
    (300, 1),
    (6000, 2),
    (2, 6000),
    (1, 6000),
    (6000, 1),
    (200, 1),
    (201, 1),
    (1, 200),
    (3, 3),
]
RUN = [
    *EXTREMES,
    *[(3, 3), (640, 480), (480, 640), (512, 512), (1000, 333), (37, 53), (385, 384), (1153, 700), (28, 2800)],
    *[(730, 1093), (2500, 1800), (1600, 20)],
]
QUICK = {"do_rescale": False, "do_normalize": False}  # the values of the pixels are not compared, so they stay uint8


def random_sizes(count: int) -> list[tuple[int, int]]:
    """Sides spread evenly over orders of magnitude, up to 50 megapixels."""
    draw = random.Random(0)
    sizes = [(int(10 ** draw.uniform(0, 4.6)), int(10 ** draw.uniform(0, 4.6))) for _ in range(4 * count)]
    return [size for size in sizes if size[0] * size[1] <= 50_000_000][:count]


SIZES = [
    *RUN,
    *[(7071, 7071), (50_000_000, 1), (1, 50_000_000), (10_000, 5_000), (65_535, 762), (32, 6400), (6401, 32)],
    *[(1920, 1080), (1080, 1920), (256, 256), (224, 224), (896, 896), (4096, 4096), (2048, 512), (1456, 364)],
    # half of a cell and its neighbours, for 28 and for 32 pixels
    *[(cell * k // 2 + step, 500) for cell in (28, 32) for k in (1, 3, 5, 35) for step in (-1, 0, 1)],
    *random_sizes(140),
]


def make_tokenizer(family, *, fuses_newlines: bool, extra: dict[str, str] | None = None) -> PreTrainedTokenizerFast:
    """A byte-level BPE with the family's marks; it has a token for two newlines, or has not."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = token_decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[*family.marks, "<|video_pad|>", "<video>", "<end_of_utterance>"],
        show_progress=False,
    )
    backend.train_from_iterator(["Look: what is this?", *(["a\n\n"] if fuses_newlines else [])] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, extra_special_tokens=extra or {})


class Watch:
    """Mixed into an image processor: the sizes between its steps, which its results do not show."""

    def split_images(self, images, *args, **kwargs):
        self.resized = tuple(images.shape[-2:])
        return super().split_images(images, *args, **kwargs)

    def _resize_for_patching(self, *args, **kwargs):
        picture = super()._resize_for_patching(*args, **kwargs)
        self.resized = tuple(picture.shape[-2:])
        return picture

    def _pad_for_patching(self, *args, **kwargs):
        canvas = super()._pad_for_patching(*args, **kwargs)
        self.canvas = tuple(canvas.shape[-2:])
        return canvas


def watched(name: str, **kwargs):
    """An image processor of transformers that also remembers the sizes between its steps."""
    return type(name, (Watch, getattr(transformers, name)), {})(**QUICK, **kwargs)


def make_processor(spec: str, *, fuses_newlines: bool = True):
    """The released processor for a spec, from code alone. What vision.py calls class defaults stays unsaid here."""
    family = vision_family(spec)
    name = spec.partition(":")[0]
    options = dict(item.split("=") for item in spec.partition(":")[2].split(",") if item)
    options = {key: int(value) for key, value in options.items()}
    if name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
        size = {"shortest_edge": 65536, "longest_edge": 16777216} if name == "qwen3_vl" else {}
        image_processor = transformers.Qwen2VLImageProcessor(
            patch_size=16 if name == "qwen3_vl" else 14, size=size or None, **QUICK, **options
        )
        tokenizer = make_tokenizer(family, fuses_newlines=fuses_newlines)
        kind = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[name]
        video = transformers.Qwen3VLVideoProcessor() if name == "qwen3_vl" else transformers.Qwen2VLVideoProcessor()
        return getattr(transformers, f"{kind}Processor")(image_processor, tokenizer, video)
    if name in ("smolvlm", "idefics3"):
        if name == "smolvlm":
            options = {"longest_edge": 2048, "tile": 512, "image_seq_len": 64} | options
        sizes = {
            theirs: {"longest_edge": options[ours]}
            for ours, theirs in (("longest_edge", "size"), ("tile", "max_image_size"))
            if ours in options
        }
        kind = "SmolVLM" if name == "smolvlm" else "Idefics3"
        image_processor = watched(f"{kind}ImageProcessor", do_image_splitting=options.get("split", 1) == 1, **sizes)
        tokenizer = make_tokenizer(family, fuses_newlines=fuses_newlines)
        length = {"image_seq_len": options["image_seq_len"]} if "image_seq_len" in options else {}
        if name == "idefics3":
            return transformers.Idefics3Processor(image_processor, tokenizer, **length)
        with patch.object(processing_smolvlm, "num2words", str):  # only videos need that package
            return transformers.SmolVLMProcessor(
                image_processor, tokenizer, transformers.SmolVLMVideoProcessor(), **length
            )
    if name == "llava_onevision":
        own = {}
        if "grid" in options:
            sides = [384 * k for k in range(1, options["grid"] + 1)]
            own["image_grid_pinpoints"] = [list(pair) for pair in itertools.product(sides, sides)]
        image_processor = watched("LlavaOnevisionImageProcessor", **own)
        tokenizer = make_tokenizer(family, fuses_newlines=fuses_newlines)
        aspect = {"vision_aspect_ratio": f"anyres_max_{options['anyres_max']}"} if "anyres_max" in options else {}
        return transformers.LlavaOnevisionProcessor(
            image_processor,
            tokenizer,
            transformers.LlavaOnevisionVideoProcessor(),
            num_image_tokens=(384 // 14) ** 2,
            vision_feature_select_strategy="full",
            **aspect,
        )
    assert name == "gemma3"
    image_processor = transformers.Gemma3ImageProcessor(size={"height": 896, "width": 896}, **QUICK)
    names = dict(zip(("boi_token", "image_token", "eoi_token"), family.marks, strict=True))
    tokenizer = make_tokenizer(family, fuses_newlines=fuses_newlines, extra=names)
    return transformers.Gemma3Processor(image_processor, tokenizer)


def layout_or_refusal(family, width: int, height: int, num_images: int = 1) -> ImageLayout | None:
    try:
        return family.layout(width, height, num_images)
    except DataError as error:
        if error.reason is not Reason.IMAGE_ASPECT:
            raise
        return None


def counted(processor, spec: str, width: int, height: int) -> tuple[str, int, tuple[int, int]]:
    """What the released code itself says without pixels: text, patches or tiles, size."""
    image_processor, name = processor.image_processor, spec.partition(":")[0]
    if name.startswith("qwen"):
        patches = image_processor.get_number_of_image_patches(height, width)
        size = smart_resize(
            height,
            width,
            factor=image_processor.patch_size * image_processor.merge_size,
            min_pixels=image_processor.size["shortest_edge"],
            max_pixels=image_processor.size["longest_edge"],
        )
        grid = torch.tensor([[1, size[0] // image_processor.patch_size, size[1] // image_processor.patch_size]])
        text = processor.replace_image_token({"image_grid_thw": grid}, 0)
        return f"<|vision_start|>{text}<|vision_end|>", patches, size
    if name in ("smolvlm", "idefics3"):
        tiles, rows, columns = image_processor.get_number_of_image_patches(height, width)
        tile = image_processor.max_image_size["longest_edge"]
        text = processor.replace_image_token({"rows": [[rows]], "cols": [[columns]]}, 0)
        return text, max(tiles, 1), (max(rows, 1) * tile, max(columns, 1) * tile)
    if name == "llava_onevision":
        tensors = {
            "batch_num_images": [1],
            "image_sizes": [[height, width]],
            "pixel_values": [torch.empty(1, 3, 384, 384)],
        }
        canvas = select_best_resolution((height, width), image_processor.image_grid_pinpoints)
        return processor.replace_image_token(tensors, 0), 1 + canvas[0] * canvas[1] // 384**2, canvas
    text = processor.replace_image_token({"num_crops": [0]}, 0)
    return text, *processor._get_num_multimodal_tokens([[height, width]])["num_image_patches"], (896, 896)


@pytest.mark.parametrize("spec", CASES)
def test_text_vision_and_size_are_those_of_the_released_code_on_every_size(spec):
    """Also: it refuses exactly the shapes that the released code refuses."""
    family, processor = vision_family(spec), make_processor(spec)
    refused = 0
    for width, height in SIZES:
        layout = layout_or_refusal(family, width, height)
        try:
            text, vision, size = counted(processor, spec, width, height)
        except ValueError:
            assert layout is None
            refused += 1
            continue
        assert layout is not None
        assert text == family.before + family.text(layout) + family.after
        assert vision == layout.vision
        if family.name == "llava_onevision":  # all tiles in a column, those of the canvas and the base tile
            assert (layout.height, layout.width) == (size[0] * size[1] // 384 + 384, 384)
        else:
            assert size == (layout.height, layout.width)
    assert len(SIZES) - refused >= 100
    assert (refused > 20) == family.name.startswith("qwen")


@pytest.mark.parametrize("spec", [*CASES, *UNEVEN])
def test_a_run_of_the_released_processor_gives_the_predicted_text_tokens_and_pixels(spec):
    """Text and count of the whole prompt, shapes of the pixels, and the sizes between the processor's steps."""
    family, processor = vision_family(spec), make_processor(spec)
    tokenizer, watch = processor.tokenizer, processor.image_processor
    sizes = RUN if spec in CASES else [(1, 300), (6000, 2), (500, 360)]
    ran = 0
    for width, height in sizes:
        layout = layout_or_refusal(family, width, height)
        prompt, image = f"Look:{family.placeholder}what?", Image.new("RGB", (width, height), (90, 9, 200))
        try:
            made = processor(text=[prompt], images=[[image]], return_tensors="pt")
        except (ValueError, RuntimeError):
            assert layout is None
            continue
        assert layout is not None
        ran += 1
        expected = prompt.replace(family.placeholder, family.before + family.text(layout) + family.after)
        assert expected == tokenizer.decode(made["input_ids"][0], skip_special_tokens=False)
        assert tokenizer(expected)["input_ids"] == made["input_ids"][0].tolist()
        assert layout.tokens == len(tokenizer(family.text(layout))["input_ids"])
        pixels = made["pixel_values"]
        if family.name.startswith("qwen"):
            grid = made["image_grid_thw"]
            assert grid.tolist() == [[1, layout.height // family.patch, layout.width // family.patch]]
            assert layout.vision == int(grid.prod()) == len(pixels)
        elif family.name == "gemma3":
            assert pixels.shape == (layout.vision, 3, layout.height, layout.width)
        elif family.name == "llava_onevision":
            assert pixels.shape == (1, layout.vision, 3, 384, 384)
            rows, columns = (side // 384 for side in watch.canvas)
            assert (layout.height, layout.width) == ((rows * columns + 1) * 384, 384)
            assert watch.resized[::-1] == family._inner(width, height, rows, columns)
        else:
            assert pixels.shape == (1, layout.vision, 3, family.tile, family.tile)
            if family.split:
                assert watch.resized == (layout.height, layout.width)
    assert ran >= len(sizes) - 8
    assert ran == len(sizes) or family.name.startswith("qwen")


@pytest.mark.parametrize("spec", CASES)
@pytest.mark.parametrize("fuses_newlines", [True, False])
def test_two_images_in_a_sample_and_a_tokenizer_that_fuses_newlines_or_not(spec, fuses_newlines):
    """The number of images matters for LLaVA-OneVision only, the newlines for SmolVLM and Idefics3 only."""
    family, processor = vision_family(spec), make_processor(spec, fuses_newlines=fuses_newlines)
    newline_pair = len(processor.tokenizer("\n\n")["input_ids"])
    assert newline_pair == (1 if fuses_newlines else 2)
    if family.name in ("smolvlm", "idefics3"):
        family = replace(family, newline_pair=newline_pair)
    sizes = [(300, 200), (90, 400)]
    layouts = [family.layout(*size, num_images=2) for size in sizes]
    prompt = f"One:{family.placeholder}two:{family.placeholder}?"
    made = processor(text=[prompt], images=[[Image.new("RGB", size) for size in sizes]], return_tensors="pt")
    texts = [family.before + family.text(layout) + family.after for layout in layouts]
    assert f"One:{texts[0]}two:{texts[1]}?" == processor.tokenizer.decode(made["input_ids"][0])
    for size, layout in zip(sizes, layouts, strict=True):
        assert layout.tokens == len(processor.tokenizer(family.text(layout))["input_ids"])
        assert (layout == family.layout(*size)) == (family.name != "llava_onevision")


@pytest.mark.parametrize("spec", ["idefics3", "llava_onevision", "gemma3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_token_counts_are_those_of_the_released_counter(spec):
    """The counter that serving engines use leaves out the marks around an image, except for Idefics3."""
    family = vision_family(spec)
    processor = make_processor(spec)
    sizes = [size for size in SIZES if layout_or_refusal(family, *size)]
    assert len(sizes) >= 100
    theirs = processor._get_num_multimodal_tokens([[height, width] for width, height in sizes])["num_image_tokens"]
    marks = {"idefics3": 0, "llava_onevision": 0}.get(spec, 2)
    assert theirs == [family.layout(*size).tokens - marks for size in sizes]


def test_the_released_counter_is_wrong_where_only_a_run_is_trusted():
    """A guard for UNEVEN: 720 pixels are two tiles of 364, but are scaled with the width to 786, which are three."""
    spec = UNEVEN[0]
    assert counted(make_processor(spec), spec, 500, 360)[2] == (2 * 364, 3 * 364)
    layout = vision_family(spec).layout(500, 360)
    assert (layout.height, layout.width) == (3 * 364, 3 * 364)


def test_the_sizes_reach_every_branch():
    """A guard: rounding up and down to the pixel limits, one tile and many, features scaled down and not."""
    qwen, smolvlm, llava = (vision_family(name) for name in ("qwen2_vl", "smolvlm", "llava_onevision"))
    sizes = [size for size in SIZES if max(size) <= 200 * min(size)]
    pixels = {size: qwen.layout(*size).height * qwen.layout(*size).width for size in sizes}
    assert sum(width * height > 1.5 * pixels[width, height] for width, height in sizes) > 10
    assert sum(width * height < pixels[width, height] / 1.5 for width, height in sizes) > 5
    assert {5, 9, 13, 17} <= {smolvlm.layout(*size).vision for size in SIZES}
    assert {2, 3, 5, 7, 37} <= {llava.layout(*size).vision for size in SIZES}
    exact = replace(llava, anyres_max=36)
    assert 10 < sum(exact.layout(*size) != llava.layout(*size) for size in SIZES) < len(SIZES) - 10


def test_examples_computed_elsewhere():
    """Tokens without marks of three common sizes, from an independent implementation of the formulas."""
    expected = {
        (256, 256): (64, 81, 64, 1127),
        (640, 480): (64, 391, 300, 862),
        (1920, 1080): (64, 1222, 2040, 862),
        (1080, 1920): (64, 1222, 2040, 863),
    }
    families = [vision_family(spec) for spec in ("fixed:64", "qwen2_5_vl", "qwen3_vl", "smolvlm")]
    marks = (0, 2, 2, 0)
    for size, counts in expected.items():
        assert counts == tuple(family.layout(*size).tokens - mark for family, mark in zip(families, marks, strict=True))


class Outline:
    """An image without pixels, all that the released scaling steps need."""

    def __init__(self, height: int, width: int):
        self.shape = (3, height, width)

    def size(self):
        return self.shape


class OutlineProcessor(transformers.Idefics3ImageProcessor):
    def resize(self, image, size, resample=None, **kwargs):
        if size.longest_edge:
            return Outline(*get_resize_output_image_size(image, size.longest_edge))
        return Outline(size.height, size.width)


def test_idefics3_scales_as_the_released_steps_do_for_any_edge_and_tile():
    """Odd edges and exact ratios land on the border of a tile; one pixel of width can scale to none."""
    draw, processor, refused = random.Random(1), OutlineProcessor(), 0
    for turn in range(6000):
        edge = draw.choice([draw.randint(1, 5000), 2048, 1083, 1568])
        tile = max(1, draw.choice([edge // draw.randint(1, 6), draw.randint(edge // 6, edge)]))
        short, ratio = draw.randint(1, 200), draw.choice([1, 2, 3, 4, 6, draw.uniform(1, 300)])
        sides = [1, draw.randint(1, 9999)] if turn % 3 == 0 else [short, int(short * ratio)]
        width, height = draw.sample(sides, 2)
        scaled = processor.resize(Outline(height, width), SizeDict(longest_edge=edge))
        expected = processor.resize_for_vision_encoder(scaled, tile).shape[1:]
        family = vision_family(f"idefics3:longest_edge={edge},tile={tile}")
        layout = layout_or_refusal(family, width, height)
        if min(expected) == 0:
            assert layout is None
            refused += 1
            continue
        assert layout is not None
        assert expected == (layout.height, layout.width)
        assert f"<row_{layout.height // tile}_col_{layout.width // tile}>" in family.marks
    assert 20 < refused < 600


def test_a_side_that_scales_to_nothing_is_refused_where_the_released_processor_fails():
    """1568 * (1 / 1568) is below one in floats, so the second scaling makes the width 0."""
    family, processor = vision_family("idefics3:longest_edge=1568,tile=392"), make_processor("idefics3")
    processor.image_processor.size = {"longest_edge": 1568}
    processor.image_processor.max_image_size = {"longest_edge": 392}
    with pytest.raises((ValueError, RuntimeError)):
        processor.image_processor(Image.new("RGB", (1, 2000)))
    with pytest.raises(DataError, match=r"1 x 2000, ratio 2000\.0"):
        family.layout(1, 2000)
    assert family.layout(2, 2000).vision == 5


def test_the_aspect_error_carries_numbers_limit_and_remedy():
    with pytest.raises(DataError, match=r"qwen3_vl takes side ratios up to 200, this image is 6000 x 2, .*: crop"):
        vision_family("qwen3_vl").layout(6000, 2)
    assert vision_family("qwen3_vl").layout(200, 1).tokens >= 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("clip", "unknown vision family 'clip': the families are fixed:N, qwen2_vl, qwen2_5_vl, qwen3_vl, smolvlm"),
        ("", "unknown vision family ''"),
        ("fixed", "N of fixed:N is '': it must be a whole number"),
        ("fixed:", "N of fixed:N is ''"),
        ("fixed:many", "N of fixed:N is 'many'"),
        ("fixed:0", "tokens is 0: it must be at least 1"),
        ("fixed:64:side=0", "side is 0"),
        ("fixed:64:image_token=", "image_token is empty"),
        ("fixed:64:tokens=3", "'tokens' is unknown or given twice: the options are side, image_token, filter"),
        ("qwen3_vl:max_pixel=3", "'max_pixel' is unknown or given twice: the options are min_pixels, max_pixels"),
        ("qwen3_vl:max_pixels=1e6", "max_pixels is '1e6': it must be a whole number"),
        ("qwen3_vl:max_pixels", "max_pixels is '': it must be a whole number"),
        ("qwen3_vl:max_pixels=9", "max_pixels is 9: it must be at least 65536"),
        ("qwen3_vl:min_pixels=0", "min_pixels is 0: it must be at least 1"),
        ("qwen3_vl:min_pixels=70000,min_pixels=80000", "'min_pixels' is unknown or given twice"),
        ("qwen3_vl:patch=14", "'patch' is unknown"),
        ("smolvlm:split=2", "split is 0 or 1"),
        ("smolvlm:newline_pair=3", "newline_pair 1 or 2"),
        ("llava_onevision:grid=0", "grid is 0"),
        ("gemma3:side=-1", "side is -1"),
        ("fixed:64:filter=box", "fixed: filter is 'box': the filters are bilinear, bicubic, lanczos"),
        ("qwen3_vl:filter=", "qwen3_vl: filter is ''"),
        ("smolvlm:filter=LANCZOS", "smolvlm: filter is 'LANCZOS'"),
        ("llava_onevision:filter=nearest", "llava_onevision: filter is 'nearest'"),
    ],
)
def test_a_wrong_spec_is_refused_with_what_exists(spec, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        vision_family(spec)


@pytest.mark.parametrize("spec", FAMILIES)
def test_a_family_is_a_value(spec):
    """Equal, hashable, the same after a pickle; its repr tells options apart; no size below 1."""
    family = vision_family(spec)
    assert pickle.loads(pickle.dumps(family)) == family == vision_family(spec)
    assert len({family, vision_family(spec)}) == 1
    assert len({repr(vision_family(other)) for other in FAMILIES}) == len(FAMILIES)
    assert spec.partition(":")[0] == family.name
    assert family.draft == (spec == "fixed:64")
    assert family.image_token in family.marks
    for wrong in [(0, 5), (5, 0), (5, 5, 0)]:
        with pytest.raises(ValueError, match="at least 1"):
            family.layout(*wrong)


def test_fixed_takes_its_side_and_its_image_token():
    family = vision_family("fixed:3:side=64,image_token=<image>")
    assert family == replace(vision_family("fixed:3"), side=64, image_token="<image>")
    assert ImageLayout(tokens=3, vision=1, height=64, width=64) == family.layout(9000, 1)
    assert family.text(family.layout(9000, 1)) == "<image><image><image>"
    assert (family.placeholder, family.marks) == ("<image>", ("<image>",))
    assert vision_family("fixed:3").image_token == "<|image|>"


sides = st.one_of(st.integers(1, 64), st.integers(1, 12_000))


@pytest.mark.parametrize("spec", FAMILIES)
@given(width=sides, height=sides, num_images=st.integers(1, 3))
def test_text_is_made_of_marks_and_newlines_and_as_long_as_said(spec, width, height, num_images):
    family = vision_family(spec)
    layout = layout_or_refusal(family, width, height, num_images)
    if layout is None:
        return
    text = family.text(layout)
    outline, marks = re.subn("|".join(map(re.escape, family.marks)), "*", text)
    assert layout.tokens == marks + len(re.findall("\n+", outline))  # a run of newlines is one token
    assert set(outline) <= {"*", "\n"}
    assert "\n\n\n" not in outline
    assert min(layout.vision, layout.height, layout.width) >= 1


@given(width=sides, height=sides, more_width=st.integers(0, 500), more_height=st.integers(0, 500))
def test_qwen_stays_within_its_limits_and_grows_with_the_image(width, height, more_width, more_height):
    family = vision_family("qwen3_vl")
    small, large = (
        layout_or_refusal(family, *size) for size in [(width, height), (width + more_width, height + more_height)]
    )
    for layout in filter(None, (small, large)):
        assert layout.height % 32 == layout.width % 32 == 0
        assert layout.vision * 16 * 16 == layout.height * layout.width
        assert layout.tokens == layout.vision // 4 + 2
        assert family.min_pixels <= layout.height * layout.width
        assert layout.height * layout.width <= family.max_pixels or min(layout.height, layout.width) == 32
    free = [
        layout is not None and abs(layout.height - size[1]) <= 16 >= abs(layout.width - size[0])
        for layout, size in [(small, (width, height)), (large, (width + more_width, height + more_height))]
    ]
    if all(free):  # neither limit scales it
        assert small.tokens <= large.tokens


@given(width=sides, height=sides)
def test_idefics3_depends_on_the_shape_alone_and_a_square_costs_most(width, height):
    family = vision_family("smolvlm")
    layout = family.layout(width, height)
    assert layout == family.layout(2 * width, 2 * height)
    assert layout.tokens <= family.layout(1, 1).tokens == 1127
    assert max(layout.height, layout.width) == 2048
    assert layout.vision == layout.height * layout.width // 512**2 + 1


@given(width=sides, height=sides)
def test_llava_onevision_is_bounded_and_its_tiles_stand_in_a_column(width, height):
    family = vision_family("llava_onevision")
    layout = family.layout(width, height)
    assert (layout.height, layout.width) == (layout.vision * 384, 384)
    most_lines = 27 * 6
    assert 27**2 < layout.tokens <= 27**2 + 1.1**2 * 9 * 27**2 + most_lines
    several = family.layout(width, height, num_images=2)
    assert (several.tokens, several.vision, several.height, several.width) == (27**2 + 1, 1, 384, 384)
