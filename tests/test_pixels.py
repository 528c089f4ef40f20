"""From an image file to the tensors of a model: the pixels are those of the family's own image processor.

The reference is the class of transformers as it makes itself by default, on torchvision, with the sizes of `vision.py`.
Its variant on Pillow lies off from it by itself: by up to 3 levels of 255 on landscapes, and by up to 27 on portraits
of text or noise, since Pillow 13 resizes those in the other order (`vision_pictures.py`).
"""

import io
import json

import numpy as np
import pytest
import tiny_models as tiny
import torch
import transformers as hf
from PIL import Image, ImageDraw, ImageOps
from small import MARKS, tokenizer

import mmdp
from mmdp.families import MROPE
from mmdp.images import decode
from mmdp.tiny_model import tiny_vlm
from mmdp.vision import vision_family
from mmdp.vision_inputs import NORMAL
from mmdp.vision_pictures import resized

pytestmark = pytest.mark.usefixtures("one_thread")

MOST, MEAN = 3.01, 0.03
"""Levels of 255 that a pixel may lie off, and all pixels of a picture on average."""


def page(width, height):
    """Black text on white, and thin lines, one pixel wide."""
    picture = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(picture)
    for top in range(4, height - 10, 14):
        draw.text((5, top), "The quick brown fox jumps over the lazy dog. 0123456789 " * (width // 300 + 1), "black")
    for left in range(0, width, 41):
        draw.line((left, 0, width - left, height), "red")
    return picture


def noise(width, height):
    return Image.fromarray(np.random.default_rng(1).integers(0, 256, (height, width, 3), dtype=np.uint8))


def smooth(width, height):
    return noise(12, 9).resize((width, height), Image.Resampling.BICUBIC)


def clear(width, height):
    """A page that fades away to the right; transformers shows white behind it, and so do we."""
    picture = page(width, height).convert("RGBA")
    picture.putalpha(Image.linear_gradient("L").rotate(90).resize((width, height)))
    return picture


PICTURES = {
    "page.png": page(700, 500),
    "portrait.png": page(420, 1300),
    "noise.png": noise(300, 420),
    "smooth.png": smooth(1280, 960),
    "small.png": page(60, 44),
    "large.png": page(2600, 1500),
    "grey.png": page(333, 517).convert("L"),
    "clear.png": clear(200, 150),
    "turned.jpg": page(640, 480),
}
FAMILIES = list(tiny.SPECS)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """One sample a picture, and then two of several."""
    folder = tmp_path_factory.mktemp("pixels")
    for name, picture in PICTURES.items():
        exif = Image.Exif()
        if name == "turned.jpg":
            exif[0x0112] = 6  # a quarter to the right
        picture.save(folder / name, exif=exif)
    groups = [[name] for name in PICTURES] + SEVERAL
    rows = [{"images": group, "texts": [{"user": "what is it", "assistant": "fox"}]} for group in groups]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return mmdp.open_source(folder / "rows.jsonl")


SEVERAL = [["page.png", "portrait.png", "grey.png"], ["turned.jpg", "noise.png"]]


def encoder(family):
    marks = [mark for mark in vision_family(family).marks if mark not in MARKS]
    return mmdp.Encoder(tokenizer(marks=[*MARKS, *marks]), family)


def processor(family):
    """The image processor that `vision.py` says the family's defaults are of."""
    if family == "qwen3_vl":
        mean, deviation = NORMAL[family]
        size = {"shortest_edge": 256 * 256, "longest_edge": 4096 * 4096}
        return hf.Qwen2VLImageProcessor(patch_size=16, size=size, image_mean=mean, image_std=deviation)
    if family in MROPE:
        return hf.Qwen2VLImageProcessor()
    if family == "smolvlm":
        return hf.SmolVLMImageProcessor(size={"longest_edge": 2048}, max_image_size={"longest_edge": 512})
    if family == "gemma3":
        return hf.Gemma3ImageProcessor(size={"height": 896, "width": 896})
    return {"idefics3": hf.Idefics3ImageProcessor, "llava_onevision": hf.LlavaOnevisionImageProcessor}[family]()


def opened(source, name):
    """A picture as someone reads it who hands it to a processor, and turns it as its EXIF says."""
    return ImageOps.exif_transpose(Image.open(f"{source[0].images[0].root}/{name}"))


@pytest.mark.parametrize("family", FAMILIES)
def test_pixels_from_a_file_are_those_of_the_released_processor(family, source):
    """Text, lines, noise, smooth; portrait, landscape; enlarged, shrunk; grey, clear, turned; alone and several."""
    encode, reference = encoder(family), processor(family)
    config = tiny_vlm(encode).config
    build = mmdp.RowBuilder(source, encode, strict=True)
    deviation = max(NORMAL[family][1])
    for number, names in enumerate([[name] for name in PICTURES] + SEVERAL):
        batch = mmdp.batch([build([number])], pad_id=encode.pad_id)
        ours = mmdp.adapt(batch, config, "sdpa")["pixel_values"]
        pictures = [opened(source, name) for name in names]
        is_flat = family in MROPE or family == "gemma3"
        theirs = reference(pictures if is_flat else [pictures], return_tensors="pt")["pixel_values"]
        assert ours.shape == theirs.shape
        levels = (ours - theirs).abs_() * (255 * deviation)
        assert float(levels.max()) < MOST, names
        assert float(levels.mean()) < MEAN, names
        assert float(theirs.std()) > 0.1  # there is a picture


@pytest.mark.parametrize("family", FAMILIES)
def test_a_processor_on_pillow_gives_the_same_levels_where_it_goes_across_first(family):
    """Bit for bit, on a landscape: what is left to torchvision is its own rounding."""
    picture, rules = page(700, 500), vision_family(family)
    layout = rules.layout(*picture.size)
    file = io.BytesIO()
    picture.save(file, "PNG")
    ours = decode(file.getvalue(), fit=lambda upright: rules.fit(upright, layout))
    plain = {"do_rescale": False, "do_normalize": False}
    kind = getattr(hf, f"{type(processor(family)).__name__}Pil")
    sizes = {name: getattr(processor(family), name) for name in ("size", "max_image_size") if name in dir(kind)}
    patch = {"patch_size": rules.patch} if family in MROPE else {}
    theirs = np.asarray(kind(**sizes, **patch, **plain)([[picture]], return_tensors="np")["pixel_values"])
    if family in MROPE:
        cells = layout.height // rules.patch // 2, layout.width // rules.patch // 2
        cut = theirs.reshape(*cells, 2, 2, 3, 2, rules.patch, rules.patch)[:, :, :, :, :, 0]
        assert np.array_equal(ours, cut.transpose(4, 0, 2, 5, 1, 3, 6).reshape(ours.shape))
    elif family in ("smolvlm", "idefics3"):
        lines, columns = layout.height // rules.tile, layout.width // rules.tile
        cut = ours.reshape(3, lines, rules.tile, columns, rules.tile).transpose(1, 3, 0, 2, 4)
        assert np.array_equal(cut.reshape(-1, 3, rules.tile, rules.tile), theirs[0, :-1])
    elif family == "llava_onevision":
        assert np.array_equal(ours.reshape(3, -1, 384, 384).swapaxes(0, 1), theirs[0])
    else:
        assert np.array_equal(ours, theirs[0])


@pytest.mark.parametrize("filter", ["bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize("picture", [noise(300, 420), page(420, 1300), page(700, 500)])
def test_a_picture_is_resized_across_first(picture, filter):
    """As torchvision does it, whatever Pillow finds less work; a guard that the order matters here."""
    resample = Image.Resampling[filter.upper()]
    across = picture.resize((384, picture.height), resample).resize((384, 384), resample)
    assert across.tobytes() == resized(picture, 384, 384, filter).tobytes()
    down = np.asarray(picture.resize((picture.width, 384), resample).resize((384, 384), resample)).astype(int)
    assert np.abs(down - np.asarray(across)).max() > (3 if filter != "bilinear" else 0)
    assert resized(picture, *picture.size, filter) is picture


@pytest.mark.parametrize("size", [(3, 5000), (5000, 3), (2500, 1900), (1900, 2500), (7, 7)])
def test_a_padded_picture_is_that_of_the_whole_square(size):
    """LLaVA-OneVision's square is resized in bands, and never held: 5000 x 3 pixels cost no 5000 x 5000."""
    rules, picture = vision_family("llava_onevision"), noise(*size)
    side = max(size)
    square = Image.new("RGB", (side, side), (122, 116, 104))
    square.paste(picture, ((side - size[0]) // 2, (side - size[1]) // 2))
    found = rules.fit(picture, rules.layout(*size, num_images=2))
    assert resized(square, 384, 384, "bicubic").tobytes() == found.tobytes()
    grey = rules.fit(picture.convert("L"), rules.layout(*size, num_images=2))
    assert (grey.mode, grey.size) == ("RGB", (384, 384))


def test_a_square_of_billions_of_pixels_is_refused():
    """Its own processor would need 12 GiB for one; alone in its sample, the same picture is taken."""
    rules = vision_family("llava_onevision")
    with pytest.raises(mmdp.DataError, match="65536 pixels a side at most, this image is 65537 x 2"):
        rules.layout(65_537, 2, num_images=2)
    assert rules.layout(65_536, 2, num_images=2).vision == 1
    assert rules.layout(65_537, 2).vision > 1


def test_a_size_and_the_steps_of_a_family_exclude_each_other():
    file = io.BytesIO()
    noise(9, 9).save(file, "PNG")
    with pytest.raises(ValueError, match="fit alone decides"):
        decode(file.getvalue(), size=(3, 3), fit=lambda picture: picture)
    halved = decode(file.getvalue(), fit=lambda picture: picture.resize((4, 3)))
    assert (3, 3, 4) == halved.shape
    assert torch.uint8 == torch.from_numpy(halved).dtype
