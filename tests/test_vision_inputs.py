"""Laws of vision_inputs.py: pixels are those of the released image processors, which are built from code here."""

import io
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import tiny_models as tiny
import torch
import transformers as hf
from PIL import Image

import mmdp
from mmdp.adapters import adapt
from mmdp.families import MROPE
from mmdp.images import decode
from mmdp.records import Encoded
from mmdp.resampling import resize
from mmdp.vision import vision_family
from mmdp.vision_checks import FILTERS
from mmdp.vision_inputs import NORMAL, num_image_tokens, vision_inputs
from mmdp.vision_pictures import resized
from mmdp.vision_tiled import GREY

pytestmark = pytest.mark.usefixtures("one_thread")

VISION = list(tiny.SPECS)
ROWS = [[0, 1, 2], [3, 4]]  # samples of 1, 0, 2, 1, 0 images


MOST, MEAN = 3.01, 0.05
"""Levels of 255 that a pixel may lie off, and all of them on average. The reference is the image processor as
transformers makes it by default, on torchvision; the same with Pillow made to go across first lies as far from it."""


def processor(family, side, **more):
    """The released image processor for a model with this side of a tile."""
    if family in MROPE:
        size = {"shortest_edge": 28 * 28, "longest_edge": 10**6}
        mean, deviation = NORMAL[family]
        own = {"patch_size": 16, "image_mean": mean, "image_std": deviation} if family == "qwen3_vl" else {}
        return hf.Qwen2VLImageProcessor(size=size, **own, **more)
    if family in ("smolvlm", "idefics3"):
        kind = hf.SmolVLMImageProcessor if family == "smolvlm" else hf.Idefics3ImageProcessor
        return kind(size={"longest_edge": 4 * side}, max_image_size={"longest_edge": side}, **more)
    if family == "llava_onevision":
        points = [[a * side, b * side] for a in range(1, 4) for b in range(1, 4)]
        own = {"size": {"height": side, "width": side}, "image_grid_pinpoints": points}
        return hf.LlavaOnevisionImageProcessor(**own, **more)
    return hf.Gemma3ImageProcessor(size={"height": side, "width": side}, **more)


SIDE = 56
LARGER = {
    "smolvlm": f"smolvlm:longest_edge={4 * SIDE},tile={SIDE},image_seq_len=49",
    "idefics3": f"idefics3:longest_edge={4 * SIDE},tile={SIDE},image_seq_len=49",
    "llava_onevision": f"llava_onevision:grid=3,anyres_max=9,tile={SIDE},patch=8",
    "qwen2_vl": "qwen2_vl:min_pixels=784,max_pixels=50176",
    "qwen2_5_vl": "qwen2_5_vl:min_pixels=784,max_pixels=50176",
    "qwen3_vl": "qwen3_vl:min_pixels=1024,max_pixels=50176",
    "gemma3": f"gemma3:side={SIDE},tokens=49",
}


def noise(sizes):
    """Pictures of these widths and heights with noise, smooth shapes, sharp edges, black and white in them."""
    draw = np.random.default_rng(1)
    for width, height in sizes:
        image = draw.integers(0, 256, (height, width, 3), dtype=np.uint8)
        image[: height // 2] = np.linspace(0, 255, width).astype(np.uint8)[:, None]
        image[:, : width // 3] = 0 if height % 3 else 255
        yield Image.fromarray(image)


def png(picture):
    file = io.BytesIO()
    picture.save(file, "PNG", compress_level=1)
    return file.getvalue()


def pictures(spec, sizes_of_samples):
    """Samples with images of these sizes, in two rows: the buffer as a worker makes it, and the pictures of each."""
    rules = vision_family(spec)
    rows, originals = [], []
    for sizes in sizes_of_samples:
        layouts = tuple(rules.layout(*size, num_images=len(sizes)) for size in sizes)
        originals.append(list(noise(sizes)))
        files = zip(map(png, originals[-1]), layouts, strict=True)
        images = [decode(file, fit=partial(rules.fit, layout=layout)) for file, layout in files]
        assert [(layout.height, layout.width) for layout in layouts] == [image.shape[1:] for image in images]
        ids = np.ones(3, dtype=np.int32)
        rows.append((Encoded(ids, ids, layouts), images))
    first, second = rows[:2], rows[2:]
    made = [mmdp.join(*zip(*part, strict=True), range(len(part))) for part in (first, second)]
    return mmdp.batch(made, pad_id=0).images, originals


def config_of(family):
    """A model that takes what `LARGER` makes."""
    config = tiny.make_config(family)
    if family not in MROPE:
        config.vision_config.image_size = SIDE
        config.image_grid_pinpoints = [[a * SIDE, b * SIDE] for a in range(1, 4) for b in range(1, 4)]
    return config


def nested(family, groups):
    """Pictures as the processor of a family takes those of two rows."""
    if family == "llava_onevision":
        return groups
    if family in ("smolvlm", "idefics3"):
        return [groups[0] + groups[1], groups[2] + groups[3]]
    return [picture for group in groups for picture in group]


SAMPLES = [[(64, 40)], [(30, 90), (200, 199)], [(300, 100)], [(10, 10), (57, 55), (90, 20)]]


@pytest.mark.parametrize("filter", [None, "bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize("family", VISION)
def test_the_images_of_rows_are_those_of_the_released_processor(family, filter):
    """Two rows, samples of one and of several images, from a file's bytes on; with every filter."""
    spec, own = LARGER[family], {}
    if filter is not None:
        spec, own = f"{spec},filter={filter}", {"resample": Image.Resampling[filter.upper()]}
    images, groups = pictures(spec, SAMPLES)
    made = vision_inputs(images, config_of(family), num_rows=2, dtype=torch.float32, filter=filter)
    theirs = processor(family, SIDE, **own)(nested(family, groups), return_tensors="pt")
    assert set(theirs) - {"num_crops"} == set(made)
    assert made["pixel_values"].shape == theirs["pixel_values"].shape
    levels = (made["pixel_values"] - theirs["pixel_values"]).abs() * 255 * max(NORMAL[family][1])
    assert float(levels.max()) < MOST
    assert float(levels.mean()) < MEAN
    if family in MROPE:
        assert torch.equal(theirs["image_grid_thw"], made["image_grid_thw"])
    if family in ("smolvlm", "idefics3"):
        assert torch.equal(theirs["pixel_attention_mask"].bool(), made["pixel_attention_mask"])
        assert bool((made["pixel_values"][0, -1] == 0).all()) or bool((made["pixel_values"][1, -1] == 0).all())
    if family == "llava_onevision":
        assert [1, 2, 1, 3] == made["batch_num_images"].tolist() == theirs["batch_num_images"].tolist()
        originals = [[height, width] for group in SAMPLES for width, height in group]
        assert originals == made["image_sizes"].tolist()


@pytest.mark.parametrize("filter", FILTERS)
@pytest.mark.parametrize("size", [(16, 16), (200, 31), (37, 90), (24, 100)])
def test_resizing_on_a_device_is_that_of_pillow_within_a_level(filter, size):
    """Up and down, every filter; nearly all pixels are exactly the same."""
    picture = next(noise([(90, 64)]))
    theirs = resized(picture, size[1], size[0], filter)
    image = torch.from_numpy(np.asarray(picture).transpose(2, 0, 1).copy())
    ours = resize(image, *size, filter=filter).permute(1, 2, 0).numpy()
    apart = np.abs(ours.astype(int) - np.asarray(theirs).astype(int))
    assert apart.max() <= 1
    assert (apart > 0).mean() < 0.02
    assert ours.std() > 20


@pytest.mark.parametrize("family", VISION)
def test_placeholders_counted_from_sizes_are_those_of_the_rules(family):
    """`num_image_tokens` reads a batch, `vision.py` a data set: both must say the same for any model."""
    rules, config = vision_family(LARGER[family]), tiny.make_config(family)
    if family not in MROPE:
        config.vision_config.image_size = SIDE
        config.vision_config.patch_size = 8 if family == "llava_onevision" else 4
        config.image_grid_pinpoints = [[a * SIDE, b * SIDE] for a in range(1, 4) for b in range(1, 4)]
        config.vision_aspect_ratio, config.mm_tokens_per_image = "anyres_max_9", 49
    layouts = [rules.layout(*size, num_images=len(sizes)) for sizes in SAMPLES for size in sizes]
    texts = [rules.text(layout).count(rules.image_token) for layout in layouts]
    assert texts == num_image_tokens(pictures(LARGER[family], SAMPLES)[0], config).tolist()


def test_mean_and_deviation_can_come_from_a_processor():
    batch = tiny.packed("gemma3", ROWS)
    own = hf.Gemma3ImageProcessor(image_mean=[0.0] * 3, image_std=[1.0] * 3)
    pixels = adapt(batch, tiny.make_model("gemma3"), image_processor=own)["pixel_values"]
    assert torch.equal(batch.images.pixels.view(-1, 3, 28, 28) / 255, pixels.float())
    assert not torch.equal(pixels, adapt(batch, tiny.make_model("gemma3"))["pixel_values"])


def test_padding_has_the_grey_of_the_processors_mean():
    """LLaVA-OneVision pads one of several images with the mean of its own pixels, before it is resized."""
    assert tuple(int(value * 255) for value in NORMAL["llava_onevision"][0]) == GREY
    mean, deviation = [0.5, 0.45, 0.4], [0.5, 0.4, 0.3]
    images, groups = pictures(LARGER["llava_onevision"], SAMPLES)
    rules = {"num_rows": 2, "dtype": torch.float32, "normal": (mean, deviation)}
    made = vision_inputs(images, config_of("llava_onevision"), **rules)["pixel_values"]
    theirs = processor("llava_onevision", SIDE, image_mean=mean, image_std=deviation)(groups, return_tensors="pt")
    levels = (made - theirs["pixel_values"]).abs() * 255 * torch.tensor(deviation)[:, None, None]
    assert float(levels.max()) < MOST
    assert float(levels.mean()) < MEAN
    grey = (255 * (made[1:3, 0] * torch.tensor(deviation)[:, None, None] + torch.tensor(mean)[:, None, None])).round()
    assert [127, 114, 102] == grey[0, :, 0, 0].tolist()  # the first of two is a portrait: its corner is padding


def test_pixels_come_in_the_models_dtype():
    for dtype in (torch.float32, torch.bfloat16):
        net = tiny.make_model("smolvlm", dtype=dtype)
        assert dtype == adapt(tiny.packed("smolvlm", ROWS), net)["pixel_values"].dtype


def test_original_sizes_come_through_the_token_cache(tmp_path, monkeypatch):
    """LLaVA-OneVision counts features from the size before the resize: a batch has it, measured or not."""
    monkeypatch.setenv("MMDP_CACHE", str(tmp_path))
    source = mmdp.open_source(tiny.folder_of((1, 0, 2, 1, 0, 1)) / "rows.jsonl")
    encoder = tiny.encoder("llava_onevision")
    sizes = mmdp.measure(source, encoder)
    measured = mmdp.batch([mmdp.RowBuilder(source, encoder, sizes)([0, 1, 2])], pad_id=0)
    assert [[40, 64], [90, 30], [80, 80]] == measured.images.originals.tolist()
    assert [1, 3, 3] == measured.images.segments.tolist()
    again = mmdp.batch([mmdp.RowBuilder(source, encoder)([0, 1, 2])], pad_id=0)
    assert torch.equal(again.images.originals, measured.images.originals)


def test_llava_needs_the_original_sizes():
    batch = tiny.packed("llava_onevision", ROWS)
    lost = replace(batch, images=replace(batch.images, originals=torch.zeros_like(batch.images.originals)))
    with pytest.raises(ValueError, match="needs each image's size before it was resized"):
        adapt(lost, tiny.make_config("llava_onevision"), "sdpa")
    config = tiny.make_config("llava_onevision")
    config.image_grid_pinpoints = [[16, 16], [16, 32]]
    with pytest.raises(ValueError, match="only all canvases up to a grid of tiles"):
        adapt(batch, config, "sdpa")
