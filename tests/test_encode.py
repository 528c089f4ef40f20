"""Laws of `encode.py`: what is promised from headers is what is delivered in pixels."""

import pickle

import numpy as np
import pytest
from PIL import Image
from small import MARKS, QWEN_MARKS, tokenizer, write_data

import mmdp
from mmdp.encode import Encoder
from mmdp.records import IGNORE
from mmdp.refusals import DataError, Reason


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return mmdp.open_source(write_data(tmp_path_factory.mktemp("data")))


def test_pixels_have_the_size_that_the_header_promised(data):
    """Law 4: the size measured is the size delivered, image for image; (3, H, W) uint8."""
    encoder = Encoder(tokenizer(marks=[*MARKS, *QWEN_MARKS]), "qwen3_vl:min_pixels=1024,max_pixels=65536")
    met = 0
    for index in range(len(data)):
        sample = data[index]
        encoded = encoder.encode(sample)
        images = encoder.pixels(sample, encoded)
        assert [(3, at.height, at.width) for at in encoded.layouts] == [image.shape for image in images]
        assert all(image.dtype == np.uint8 for image in images)
        marks = sum(at.tokens for at in encoded.layouts)
        pads = int((encoded.ids == encoder.image_id).sum())
        assert marks == pads + 2 * len(images)
        met += len(images)
    assert 12 == met


def test_an_image_costs_what_the_family_says(data):
    """Tokens of a sample with images are those of its text, and N for each image."""
    short, long = (Encoder(tokenizer(), f"fixed:{number}") for number in (4, 9))
    for index in range(len(data)):
        sample = data[index]
        assert 5 * len(sample.images) == len(long.encode(sample).ids) - len(short.encode(sample).ids)


def test_image_tokens_are_never_learnt(data):
    """Labels are -100 on images, and the first label of a sample is -100."""
    encoder = Encoder(tokenizer(), "fixed:4")
    for index in range(len(data)):
        encoded = encoder.encode(data[index])
        assert encoder.image_id not in encoded.labels
        assert IGNORE == encoded.labels[0]
        assert 0 < encoded.size.label_tokens < encoded.size.tokens


def test_fixed_takes_the_image_token_there_is_or_adds_one(data):
    """A tokenizer without an image token gets `<|image|>`; the one that was given stays as it is."""
    with_one, without = tokenizer(), tokenizer(marks=["<|im_start|>", "<|im_end|>"])
    size = len(without)
    assert "<image>" == Encoder(with_one, "fixed:4").family.image_token
    encoder = Encoder(without, "fixed:4")
    assert "<|image|>" == encoder.family.image_token
    assert (size, size + 1) == (len(without), len(encoder.tokenizer))
    assert 4 == int((encoder.encode(data[0]).ids == size).sum())


def test_a_family_whose_marks_the_tokenizer_lacks_is_refused():
    """The error names a missing mark, and the way out."""
    with pytest.raises(ValueError, match=r"<\|vision_start\|>.*fixed:64"):
        Encoder(tokenizer(), "qwen3_vl")


def test_a_bad_image_is_named_by_file_row_and_field(tmp_path):
    """IMG-01, 02: the message holds the line, the id, the field and the file; nothing else of the run is touched."""
    path = write_data(tmp_path)
    (tmp_path / "0-0.png").write_bytes(b"")
    (tmp_path / "2-1.png").unlink()
    source, encoder = mmdp.open_source(path), Encoder(tokenizer(), "fixed:4")
    for index, field, reason in (
        (0, "images[0] = '0-0.png'", Reason.EMPTY_IMAGE),
        (2, "images[1]", Reason.MISSING_IMAGE),
    ):
        with pytest.raises(DataError) as caught:
            encoder.encode(source[index])
        assert reason == caught.value.reason
        assert f"rows.jsonl:{index + 1} (id 's{index}'), field {field}" in str(caught.value)


def test_too_many_pixels_are_refused_from_the_header(tmp_path):
    """IMG-12: the cap is checked before anything is decoded."""
    path = write_data(tmp_path, (1,), repeat=1)
    encoder = Encoder(tokenizer(), "fixed:4", max_pixels=100)
    with pytest.raises(DataError, match="max_pixels") as caught:
        encoder.encode(mmdp.open_source(path)[0])
    assert Reason.IMAGE_TOO_LARGE == caught.value.reason


def test_sideways_photographs_cost_what_their_upright_size_costs(tmp_path):
    """IMG-04: orientation is read from the header, so the layout is that of the upright picture."""
    path = write_data(tmp_path, (1,), repeat=1)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (320, 64)).save(tmp_path / "0-0.png", exif=exif)
    encoder = Encoder(tokenizer(marks=[*MARKS, *QWEN_MARKS]), "qwen3_vl:min_pixels=1024")
    source = mmdp.open_source(path)
    layout = encoder.encode(source[0]).layouts[0]
    assert (320, 64) == (layout.height, layout.width)
    assert (3, 320, 64) == encoder.pixels(source[0], encoder.encode(source[0]))[0].shape


def test_a_pickled_encoder_encodes_alike(data):
    """Workers get the same ids, and the fingerprint says so; another setting has another fingerprint."""
    encoder = Encoder(tokenizer(marks=["<|im_start|>", "<|im_end|>"]), "fixed:4")
    other = pickle.loads(pickle.dumps(encoder))
    assert encoder.fingerprint == other.fingerprint
    assert np.array_equal(encoder.encode(data[2]).ids, other.encode(data[2]).ids)
    assert encoder.fingerprint != Encoder(tokenizer(), "fixed:5").fingerprint


@pytest.mark.parametrize(
    ("pad", "end", "wanted"), [("<pad>", "<|im_end|>", "<pad>"), (None, "<|im_end|>", "<|im_end|>"), (None, None, None)]
)
def test_padding_has_the_id_that_the_tokenizer_gives_it(pad, end, wanted):
    """Its own mark first, else the end mark, else 0: an embedding of padding may be trained apart."""
    own = tokenizer(marks=[*MARKS, "<pad>"])
    own.pad_token, own.eos_token = pad, end
    assert (own.convert_tokens_to_ids(wanted) if wanted else 0) == Encoder(own, "fixed:16").pad_id
