"""The laws of `images.py`, `image_sizes.py` and `image_formats.py`, which are laws of all three together.

The size from the header is the size decoded; every file is a picture or a DataError.
"""

import io
import json
import math
import random
import struct
import subprocess
import sys
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile, ImageOps, features

from mmdp import images
from mmdp.image_headers import parse_header
from mmdp.image_sizes import HEAD_BYTES, check_pixels, image_size, read_size, upright_size
from mmdp.images import decode
from mmdp.refusals import DataError, Reason

HAS_AVIF = features.check("avif")


def encode(im: Image.Image, format: str, **options) -> bytes:
    buffer = io.BytesIO()
    im.save(buffer, format, **options)
    return buffer.getvalue()


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth shapes with grain, unlike itself in any mirror."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 9, 3), dtype=np.uint8)).resize((width, height), Image.BICUBIC)
    grain = rng.normal(0, 4, (height, width, 1))
    return Image.fromarray((np.asarray(coarse) + grain).clip(0, 255).astype(np.uint8))


def exif(orientation: int) -> bytes:
    tags = Image.Exif()
    tags[0x010F] = "maker"  # a value that lies outside its entry
    tags[0x0112] = orientation
    return tags.tobytes()


def xmp(orientation: int) -> bytes:
    return f'<x:xmpmeta><rdf:Description tiff:Orientation="{orientation}"/></x:xmpmeta>'.encode()


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(
    width: int, height: int, depth: int, colour_type: int, rows: bytes, *before: bytes, after: bytes = b""
) -> bytes:
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, 0))
    body = png_chunk(b"IDAT", zlib.compress(rows))
    return b"".join([b"\x89PNG\r\n\x1a\n", header, *before, body, after, png_chunk(b"IEND", b"")])


def plain(data: bytes) -> Image.Image:
    """What Pillow alone makes of a file, on white where it is transparent."""
    im = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    if im.has_transparency_data:
        im = Image.alpha_composite(Image.new("RGBA", im.size, "white"), im.convert("RGBA"))
    return im.convert("RGB")


def picture(pixels: np.ndarray) -> np.ndarray:
    """(H, W, 3), as Pillow has it."""
    return pixels.transpose(1, 2, 0)


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    error = float(np.mean((a.astype(np.float64) - b) ** 2))
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)


def reason_of(data: bytes, **options) -> Reason:
    with pytest.raises(DataError) as caught:
        decode(data, **options)
    return caught.value.reason


class CountingReader:
    """A file that remembers which prefixes were asked for."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.asked: list[int | None] = []

    def __call__(self, num_bytes: int | None) -> bytes:
        self.asked.append(num_bytes)
        return self.data[:num_bytes]


# One small file of every kind that Pillow can write, with EXIF where the format has it.
SMALL = photo(37, 23)
FILES: dict[str, bytes] = {
    "jpeg": encode(SMALL, "JPEG", exif=exif(6)),
    "jpeg 444": encode(SMALL, "JPEG", subsampling=0),
    "jpeg progressive": encode(SMALL, "JPEG", progressive=True),
    "jpeg grey": encode(SMALL.convert("L"), "JPEG"),
    "jpeg cmyk": encode(SMALL.convert("CMYK"), "JPEG"),
    "jpeg mpo": encode(SMALL, "MPO", save_all=True, append_images=[SMALL]),
    "png": encode(SMALL, "PNG", exif=exif(8)),
    "png palette": encode(SMALL.quantize(7), "PNG", transparency=3),
    "png rgba": encode(SMALL.convert("RGBA"), "PNG"),
    "png 16 bit": encode(Image.fromarray(np.arange(851, dtype=np.uint16).reshape(23, 37) * 77), "PNG"),
    "png 1 bit": encode(SMALL.convert("1"), "PNG"),
    "png animated": encode(SMALL, "PNG", save_all=True, append_images=[SMALL.rotate(180)]),
    "gif": encode(SMALL, "GIF", comment=b"a comment"),
    "gif animated": encode(SMALL.quantize(8), "GIF", save_all=True, append_images=[SMALL.quantize(9)], disposal=2),
    "webp": encode(SMALL, "WEBP"),
    "webp lossless": encode(SMALL.convert("RGBA"), "WEBP", lossless=True),
    "webp exif": encode(SMALL, "WEBP", exif=exif(5)),
    "webp animated": encode(SMALL, "WEBP", save_all=True, append_images=[SMALL.rotate(180)], exif=exif(3)),
    "tiff": encode(SMALL, "TIFF", exif=exif(6)),
    "tiff float": encode(SMALL.convert("F"), "TIFF"),
    "tiff cmyk": encode(SMALL.convert("CMYK"), "TIFF"),
    "bmp": encode(SMALL, "BMP"),
    "bmp palette": encode(SMALL.quantize(16), "BMP"),
    "jpeg 2000": encode(SMALL, "JPEG2000"),
    "ppm": encode(SMALL, "PPM"),
    "pgm 16 bit": encode(SMALL.convert("I"), "PPM"),
    "qoi": encode(SMALL, "QOI"),
} | ({"avif": encode(SMALL, "AVIF", exif=exif(6))} if HAS_AVIF else {})
PARSED = [name for name in FILES if name.split()[0] in ("jpeg", "png", "gif", "webp") and name != "jpeg 2000"]


# The handed cases


@pytest.fixture(scope="module")
def handed(case_script, tmp_path_factory) -> dict[str, tuple[bytes, dict]]:
    folder = tmp_path_factory.mktemp("handed")
    case_script("make_images").main(str(folder))
    expected = json.loads((folder / "expected.json").read_text())
    return {name: ((folder / name).read_bytes(), entry) for name, entry in expected.items()}


def test_handed_images_come_out_as_expected(handed):
    """Verdict, upright size and given points hold for every handed file (IMG-01 to IMG-12)."""
    wrong = []
    for name, (data, entry) in handed.items():
        if entry["verdict"] == "reject":
            with pytest.raises(DataError):
                decode(data)
            continue
        width, height = entry["size"]
        pixels = decode(data)
        if (3, height, width) != pixels.shape or (width, height) != image_size(data):
            wrong.append((name, pixels.shape))
        for x, y, *colour, tolerance in entry["points"]:
            if np.abs(pixels[:, y, x].astype(int) - colour).max() > tolerance:
                wrong.append((name, x, y, pixels[:, y, x].tolist()))
    assert [] == wrong
    assert {f"IMG-{number:02}" for number in range(13)} == {entry["case"] for _, entry in handed.values()}


def test_each_refusal_has_its_own_reason(handed):
    """Empty, foreign, damaged and too large are counted apart (IMG-01, IMG-02, IMG-12)."""
    expected = {
        "truncated.jpg": Reason.DAMAGED_IMAGE,
        "cut_last_bytes.jpg": Reason.DAMAGED_IMAGE,
        "empty.jpg": Reason.EMPTY_IMAGE,
        "error_page.jpg": Reason.NOT_AN_IMAGE,
        "header_bomb.png": Reason.IMAGE_TOO_LARGE,
        "real_bomb.png": Reason.IMAGE_TOO_LARGE,
    }
    assert expected == {name: reason_of(data) for name, (data, entry) in handed.items() if entry["verdict"] == "reject"}


def test_lenient_decoding_is_per_call(handed):
    """A cut JPEG decodes in full size where asked for, and only there (IMG-01)."""
    for name in ("truncated.jpg", "cut_last_bytes.jpg"):
        data, _ = handed[name]
        assert (3, 64, 96) == decode(data, lenient=True).shape
        assert Reason.DAMAGED_IMAGE == reason_of(data)


def test_a_bomb_costs_no_memory(handed, tmp_path):
    """A refused bomb is never unpacked: the peak of the process hardly grows (IMG-12)."""
    if not Path("/proc/self/status").exists():
        pytest.skip("reads the peak memory of the child from /proc, which this system lacks")
    paths = []
    for name in ("header_bomb.png", "real_bomb.png"):
        paths.append(str(tmp_path / name))
        (tmp_path / name).write_bytes(handed[name][0])
    script = """
import re, sys
from pathlib import Path
from mmdp.images import decode
from mmdp.refusals import DataError
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
before = peak()
for path in sys.argv[1:]:
    try:
        decode(Path(path).read_bytes())
    except DataError as error:
        print(error.reason)
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", script, *paths], capture_output=True, text=True, check=True)
    *reasons, grown_kb = done.stdout.split()
    assert ["image_too_large"] * 2 == reasons
    assert int(grown_kb) < 20_000  # decoded, the smaller one takes 432 MB


# Sizes from headers


@pytest.mark.parametrize("name", FILES)
def test_header_decode_and_pillow_agree(name):
    """The size from the header is the size of the decoded picture and of Pillow's upright one, in every format."""
    data = FILES[name]
    assert plain(data).size == image_size(data) == decode(data).shape[:0:-1]


@pytest.mark.parametrize("name", PARSED)
def test_a_prefix_decides_rightly_or_not_at_all(name):
    """Any prefix gives the size of the whole file or None; and the four formats need no Pillow."""
    data = FILES[name]
    answers = {upright_size(data[:length]) for length in range(len(data) + 1)}
    assert {image_size(data), None} == answers


@pytest.mark.parametrize(
    "format",
    ["JPEG", "PNG", "WEBP", "TIFF", pytest.param("AVIF", marks=[] if HAS_AVIF else pytest.mark.skip("no AVIF"))],
)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_turned_upright(format, orientation):
    """All eight EXIF orientations: size and pixels are those of exif_transpose; resizing comes after the turn."""
    data = encode(SMALL, format, exif=exif(orientation))
    expected = plain(data)
    assert (SMALL.size[::-1] if orientation >= 5 else SMALL.size) == expected.size == image_size(data)
    assert np.array_equal(np.asarray(expected), picture(decode(data)))
    small = expected.resize((11, 8), Image.BICUBIC)
    assert np.array_equal(np.asarray(small), picture(decode(data, size=(8, 11))))


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", [None, 1, 8])
def test_xmp_turns_only_where_exif_is_silent(format, orientation):
    """Orientation 6 in XMP counts as Pillow counts it: only where EXIF states none."""
    tags = {} if orientation is None else {"exif": exif(orientation)}
    if format == "PNG":
        data = encode(SMALL, "PNG", **tags)
        data = data[:33] + png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp(6)) + data[33:]
    else:
        data = encode(SMALL, format, xmp=xmp(6), **tags)
    assert parse_header(data) is not None
    assert (SMALL.size if orientation == 1 else SMALL.size[::-1]) == plain(data).size == image_size(data)
    assert np.array_equal(np.asarray(plain(data)), picture(decode(data)))


def test_xmp_turns_a_tiff():
    """A TIFF with an orientation in XMP alone is turned too, in size and pixels."""
    data = encode(SMALL, "TIFF", tiffinfo={700: xmp(6)})
    assert SMALL.size[::-1] == plain(data).size == image_size(data)
    assert np.array_equal(np.asarray(plain(data)), picture(decode(data)))


def test_odd_exif_goes_to_pillow():
    """EXIF our parser won't judge (a long instead of a short, a compressed profile) still counts as in Pillow."""
    as_long = exif(6).replace(
        b"\x01\x12\x00\x03\x00\x00\x00\x01\x00\x06\x00\x00", b"\x01\x12\x00\x04\x00\x00\x00\x01\x00\x00\x00\x06"
    )
    profile = b"Raw profile type exif\0\0" + zlib.compress(b"\nexif\n%8d\n" % len(exif(6)) + exif(6).hex().encode())
    tagged = encode(SMALL, "PNG")
    tagged = tagged[:33] + png_chunk(b"zTXt", profile) + tagged[33:]
    for data in (encode(SMALL, "JPEG", exif=as_long), tagged):
        assert parse_header(data) is None
        assert SMALL.size[::-1] == plain(data).size == image_size(data) == decode(data).shape[:0:-1]


def test_what_a_png_says_behind_its_pixels_is_not_heard():
    """EXIF behind the pixels of a PNG turns neither the size nor the picture: a prefix could not know."""
    rows = b"".join(b"\0" + bytes(range(12)) for _ in range(2))
    data = png(4, 2, 8, 2, rows, after=png_chunk(b"eXIf", exif(6)[6:]))
    assert (2, 4) == plain(data).size
    assert (4, 2) == upright_size(data[:100]) == image_size(data) == decode(data).shape[:0:-1]


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_unreadable_exif_costs_no_picture(format):
    """EXIF that makes Pillow raise leaves the picture as it is stored, in size and pixels."""
    data = encode(
        SMALL, format, exif=b"Exif\0\0this is no TIFF header", **({"dpi": (72, 72)} if format == "JPEG" else {})
    )
    with pytest.raises(SyntaxError):
        plain(data)
    assert SMALL.size == image_size(data) == decode(data).shape[:0:-1]


def test_no_size_decodes_a_pixel(monkeypatch):
    """Sizes come without loading an image, also where Pillow's own getexif would load it."""

    def load(self):
        raise AssertionError("an image was loaded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    late = png(4, 2, 8, 0, bytes(10), png_chunk(b"tEXt", b"Raw profile type exif\0nonsense"))
    with pytest.raises(AssertionError, match="loaded"):
        Image.open(io.BytesIO(FILES["png 1 bit"])).getexif()
    assert (4, 2) == image_size(late)
    for data in FILES.values():
        image_size(data)


def test_read_size_asks_for_no_more_than_it_needs():
    """The first 4 KiB decide; a profile in front of the pixels costs 64 KiB; other formats cost the file."""
    profile = random.Random(0).randbytes(30_000)
    large = photo(400, 300)
    cases = {
        "plain": (encode(large, "JPEG"), [4096]),
        "png": (encode(large, "PNG"), [4096]),
        "webp": (encode(large, "WEBP", quality=99), [4096]),
        "profile": (encode(large, "JPEG", icc_profile=profile), [4096, 65536]),
        "exif behind the pixels": (encode(large, "WEBP", lossless=True, exif=exif(6)), [4096, 65536, None]),
        "bmp": (encode(large, "BMP"), [4096, 65536, None]),
        "short": (FILES["qoi"], [4096]),
    }
    for name, (data, asked) in cases.items():
        reader = CountingReader(data)
        assert image_size(data) == read_size(reader), name
        assert asked == reader.asked, name
    page = CountingReader(b"<html>" + bytes(100_000))
    with pytest.raises(DataError, match="not_an_image"):
        read_size(page)
    assert [4096] == page.asked


@given(st.binary(max_size=300), st.sampled_from([b"", *(data[:40] for data in FILES.values())]))
@settings(max_examples=300, deadline=None)
def test_upright_size_takes_any_bytes(tail, start):
    """No bytes make the parser raise; what it returns has no side of 0."""
    size = upright_size(start + tail)
    assert size is None or min(size) > 0


def test_endless_headers_are_refused_at_once():
    """Headers without an end cost a bounded number of steps, and Pillow's slow walk is never started."""
    empty_chunks = b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 4, 8, 2, 0, 0, 0))
    extended = b"WEBPVP8X\x0a\0\0\0\x08\0\0\0\7\0\0\7\0\0"
    hostile = {
        "segments of length 0": b"\xff\xd8" + b"\xff\xe0\0\0" * 500_000,
        "markers alone": b"\xff\xd8" + b"\xff\xd0" * 500_000,
        "fill bytes": b"\xff\xd8" + b"\xff" * 2_000_000,
        "stray bytes": b"\xff\xd8\xff" + bytes(2_000_000),
        "empty chunks": empty_chunks + png_chunk(b"abcd", b"") * 100_000,
        "riff chunks": b"RIFF\xff\xff\xff\x7f" + extended + b"abcd\0\0\0\0" * 100_000,
        "gif blocks": b"GIF89a\3\0\2\0\0\0\0!\xfe" + b"\1a" * 500_000,
    }
    for name, data in hostile.items():
        assert upright_size(data) is None, name
        with pytest.raises(DataError, match="no pixels behind"):
            image_size(data)
        assert Reason.DAMAGED_IMAGE == reason_of(data), name


def test_real_files_have_the_size_pillow_says(shared):
    """Every file of the real set: the header's size is Pillow's upright size, and 64 KiB decide nearly all."""
    folder = shared / "data" / "real-vqa"
    paths = [*sorted((folder / "images").iterdir()), *sorted((folder / "edge").iterdir())]
    decided = num_files = 0
    for path in paths:
        if path.suffix == ".jsonl":
            continue
        num_files += 1
        data = path.read_bytes()
        with Image.open(path) as im:
            turned = im.getexif().get(0x0112, 1) >= 5
            expected = im.size[::-1] if turned else im.size
        assert expected == image_size(data), path.name
        for num_bytes in HEAD_BYTES:
            head = upright_size(data[:num_bytes])
            assert head in (None, expected), path.name
        decided += head is not None
    assert num_files > 700
    assert decided > 0.98 * num_files


# Pixels


def test_pixels_can_be_written_and_are_contiguous():
    """uint8 (3, H, W), C-contiguous, writable, whatever the sides, also where a transposed view would be contiguous."""
    for mode in ("RGB", "L", "RGBA", "1", "P"):
        for width, height in ((1, 1), (1, 3), (3, 1), (3, 3), (5, 4)):
            pixels = decode(encode(Image.new(mode, (width, height)), "PNG"))
            assert (3, height, width) == pixels.shape
            assert np.uint8 == pixels.dtype
            assert pixels.flags.c_contiguous
            pixels[:] = 7


@pytest.mark.parametrize("name", ["jpeg", "jpeg grey", "jpeg cmyk", "png", "webp", "bmp", "gif", "tiff cmyk"])
@pytest.mark.parametrize("size", [None, (23, 37), (16, 16), (100, 50), (1, 1)])
def test_a_full_decode_is_plain_pillow(name, size):
    """Without draft the pixels are those of Pillow alone, bit for bit: open, turn, RGB, bicubic."""
    expected = plain(FILES[name])
    if size is not None:
        expected = expected.resize(size[::-1], Image.BICUBIC)
    assert np.array_equal(np.asarray(expected), picture(decode(FILES[name], size=size)))


def test_transparent_parts_are_white():
    """Alpha in any form lets white through, never black or a hidden colour, also in a resized picture."""
    red = Image.new("RGBA", (8, 8), (200, 0, 0, 0))
    for data in (encode(red, "PNG"), encode(red, "WEBP", lossless=True), encode(red.convert("LA"), "PNG")):
        assert {255} == set(decode(data).flat)
        assert {255} == set(decode(data, size=(3, 3)).flat)
    half = Image.new("RGBA", (2, 2), (0, 100, 200, 128))
    assert [127, 177, 227] == decode(encode(half, "PNG"))[:, 0, 0].tolist()
    row = struct.pack(">BH", 0, 0b00011011 << 8)  # grey 0, 1, 2, 3 of 3
    for trns, expected in ((1, [0, 255, 170, 255]), (3, [0, 85, 170, 255])):
        chunk = png_chunk(b"tRNS", struct.pack(">H", trns))
        assert expected == decode(png(4, 1, 2, 0, row, chunk))[0, 0].tolist()
    deep = png(2, 1, 16, 0, b"\0" + struct.pack(">HH", 1000, 2000), png_chunk(b"tRNS", struct.pack(">H", 2000)))
    assert [4, 255] == decode(deep)[0, 0].tolist()
    rgb = struct.pack(">6H", 256, 512, 768, 0x8000, 0x9000, 0xA000)
    chunk = png_chunk(b"tRNS", struct.pack(">3H", 0x8000, 0x9000, 0xA000))
    assert [[1, 255], [2, 255], [3, 255]] == decode(png(2, 1, 16, 2, b"\0" + rgb, chunk))[:, 0].tolist()


@pytest.mark.parametrize("format", ["PNG", "TIFF", "PPM"])
def test_deep_grey_is_scaled(format):
    """65535 -> 255 and 32768 -> 128, for 16 and for 32 bits."""
    values = np.array([[0, 257, 32768, 65535]])
    for dtype in (np.uint16, np.int32):
        if format == "PNG" and dtype is np.int32:
            continue  # it would be stored in 16 bits
        data = encode(Image.fromarray(values.astype(dtype)), format)
        assert [[[0, 1, 128, 255]]] * 3 == decode(data).tolist(), dtype


@pytest.mark.parametrize("white", [1, 255, 65535, 1e6])
def test_floats_are_scaled_to_the_least_usual_white(white):
    """Float images are scaled by 1, 255, 65535 or their peak, whichever is the least that no pixel exceeds."""
    values = np.array([[0, white / 2, white, -white, math.nan]], np.float32)
    first, middle, last, below, unknown = decode(encode(Image.fromarray(values), "TIFF"))[0, 0].tolist()
    assert [0, 255, 0, 0] == [first, last, below, unknown]
    assert abs(middle - 127.5) <= 0.5


def test_four_channel_jpegs_keep_their_colours():
    """CMYK as Adobe stores it (inverted), and YCCK, come out in the colours they show."""
    inks = (30, 200, 120, 40)
    expected = [round(255 - ink - (255 - ink) * inks[3] / 255) for ink in inks[:3]]
    cmyk = encode(Image.new("CMYK", (16, 16), inks), "JPEG", quality=95)
    # YCCK is the three inks as luma and chroma, beside black; Pillow inverts on writing.
    luma = Image.new("RGB", (1, 1), inks[:3]).convert("YCbCr").getpixel((0, 0))
    stored = Image.new("CMYK", (16, 16), (*(255 - value for value in luma), inks[3]))
    ycck = bytearray(encode(stored, "JPEG", quality=95))
    ycck[ycck.index(b"Adobe") + 11] = 2  # the colour transform
    for data in (cmyk, bytes(ycck)):
        assert np.abs(decode(data)[:, 8, 8].astype(int) - expected).max() <= 4


def test_real_edge_files_decode_right(shared):
    """The difficult real files (EXIF, palette, grey, CMYK, wrong suffix): size as listed, pixels as Pillow alone."""
    folder = shared / "data" / "real-vqa" / "edge"
    entries = [json.loads(line) for line in (folder / "edge.jsonl").read_text().splitlines()]
    for entry in entries:
        data = (folder / entry["file"]).read_bytes()
        size = (entry["width"], entry["height"])
        expected = size[::-1] if entry["exif_orientation"] >= 5 else size
        pixels = decode(data)
        assert expected == image_size(data) == pixels.shape[:0:-1]
        assert np.array_equal(np.asarray(plain(data)), picture(pixels)), entry["file"]
    assert {1, 3, 6, 8} <= {entry["exif_orientation"] for entry in entries}
    assert {"RGB", "P", "L", "CMYK"} == {entry["mode"] for entry in entries}


# Drafts


def test_drafts_of_real_photographs_keep_45_db(shared):
    """On photographs a draft is within 45 dB of the full decode, at any orientation; and it did shrink."""
    folder = shared / "data" / "real-vqa" / "edge"
    names = [*(f"exif-Landscape_{turn}.jpg" for turn in (1, 3, 6, 8)), "college-physics-Picture 3-16f3.jpg"]
    for name in names:
        data = (folder / name).read_bytes()
        full = Image.fromarray(picture(decode(data)))
        for side in (224, 256, 384):
            expected = np.asarray(full.resize((side, side), Image.BICUBIC))
            draft = picture(decode(data, size=(side, side), draft=True))
            assert 45 <= psnr(expected, draft) < math.inf, (name, side)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_drafts_respect_orientation_and_both_sides(orientation):
    """A draft asks for the stored sides: upright result near the full decode, whichever side is the short one."""
    data = encode(photo(700, 460), "JPEG", quality=92, exif=exif(orientation))
    for size in ((150, 220), (220, 150), (100, 32), (32, 100)):
        full, draft = decode(data, size=size), decode(data, size=size, draft=True)
        assert 45 <= psnr(full, draft)


@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(1, 600), st.integers(1, 600))
def test_a_draft_keeps_its_margin(width, height, target_height, target_width):
    """Shrinking is by 1, 2, 4 or 8, and leaves both sides the margin wherever it shrinks at all."""
    header = images.Header(width, height, 6)
    shrink = images._shrink(header, (target_height, target_width))
    assert shrink in (1, 2, 4, 8)
    if shrink > 1:
        assert height / shrink >= images.DRAFT_MARGIN * target_width
        assert width / shrink >= images.DRAFT_MARGIN * target_height


@pytest.mark.parametrize("size", [(701, 463), (703, 461), (705, 465), (7, 5), (31, 17)])
def test_drafts_of_odd_sizes_are_not_off_by_half_a_pixel(size):
    """Sides that are no multiple of the shrinking keep every line in its place (half a pixel off is 25 dB here)."""
    lines = Image.new("RGB", size, "white")
    for x in range(0, size[0], 40):
        lines.paste((0, 0, 0), (x, 0, x + 20, size[1]))
    data = encode(lines, "JPEG", quality=95)
    target = (max(1, size[1] // 4), max(1, size[0] // 4))
    assert images._shrink(images.Header(*size, 1), target) == 2
    assert 40 <= psnr(decode(data, size=target), decode(data, size=target, draft=True))


@pytest.mark.parametrize("name", [name for name in FILES if not name.startswith("jpeg") or name == "jpeg 2000"])
def test_draft_changes_nothing_but_jpegs(name):
    """In the other formats a draft is the full decode."""
    assert np.array_equal(decode(FILES[name], size=(4, 4)), decode(FILES[name], size=(4, 4), draft=True))


# Damage, caps, other people's state


def test_a_cut_file_is_refused_or_partly_shown():
    """Strict refuses a file cut in its pixels; lenient keeps the size and what stands before the cut."""
    large = photo(120, 90)
    bmp = encode(large, "BMP")
    for data in (encode(large, "JPEG"), encode(large, "PNG"), encode(large, "GIF", interlace=0), bmp):
        cut = data[: int(len(data) * 0.7)]
        assert Reason.DAMAGED_IMAGE == reason_of(cut)
        whole, part = decode(data), decode(cut, lenient=True)
        assert whole.shape == part.shape
        rows = slice(50, None) if data is bmp else slice(None, 40)  # a BMP starts at the bottom
        assert psnr(whole[:, rows], part[:, rows]) > 40
        assert not np.array_equal(whole, part)
        assert np.array_equal(whole, decode(data, lenient=True))
    assert Reason.DAMAGED_IMAGE == reason_of(encode(large, "WEBP")[:-40], lenient=True)


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"progressive": True, "subsampling": 0}])
def test_a_jpeg_may_be_cut_anywhere(options):
    """Lenient shows a JPEG cut at any byte of its pixels, also between the scans of a progressive one."""
    data = encode(SMALL, "JPEG", **options)
    for length in range(data.index(b"\xff\xda") + 14, len(data)):
        assert (3, 23, 37) == decode(data[:length], lenient=True).shape


def damage(data: bytes, rng: random.Random) -> bytes:
    """Cut, flipped, zeroed, shortened, stretched, or with a wild number in the header."""
    changed = bytearray(data)
    at = rng.randrange(len(changed))
    match rng.randrange(6):
        case 0:
            del changed[at:]
        case 1:
            changed[at] ^= 1 << rng.randrange(8)
        case 2:
            changed[at : at + 20] = bytes(len(changed[at : at + 20]))
        case 3:
            del changed[at : at + rng.randrange(1, 30)]
        case 4:
            changed[at:at] = rng.randbytes(rng.randrange(1, 20))
        case _:
            at %= 100
            changed[at : at + 4] = rng.choice([b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff", b"\0\0\0\1"])
    return bytes(changed)


@pytest.mark.filterwarnings("ignore")
def test_damaged_files_are_a_picture_or_a_data_error():
    """Whatever happens to the bytes: no other exception, and where there is a picture its size was foretold."""
    rng = random.Random(7)
    outcomes = dict.fromkeys(["picture", *Reason], 0)
    for _ in range(40):
        for data in FILES.values():
            damaged = damage(data, rng)
            options = rng.choice([{}, {"lenient": True}, {"size": (5, 6), "draft": True}])
            try:
                pixels = decode(damaged, max_pixels=100_000, **options)
            except DataError as error:
                outcomes[error.reason] += 1
                continue
            outcomes["picture"] += 1
            assert pixels.shape[:0:-1] == (image_size(damaged) if "size" not in options else (6, 5))
    assert min(outcomes["picture"], outcomes[Reason.DAMAGED_IMAGE]) > 200
    assert outcomes[Reason.IMAGE_TOO_LARGE] > 0


def test_formats_that_run_programs_are_not_images():
    """PostScript, PDF and SVG are refused unread: their readers start other programs."""
    for data in (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", b"%PDF-1.7", b"<svg/>", b"\x00" * 64):
        assert Reason.NOT_AN_IMAGE == reason_of(data)
        with pytest.raises(DataError, match="none of JPEG, PNG"):
            image_size(data)


def test_the_pixel_cap_names_its_numbers():
    """One pixel too many is refused, with both sides, the cap and the knob in the message; the cap itself passes."""
    check_pixels(30, 20, 600)
    with pytest.raises(
        DataError, match=r"30 x 21 is 630 pixels.*max_pixels = 600.*Encoder a larger max_pixels"
    ) as caught:
        check_pixels(30, 21, 600)
    assert Reason.IMAGE_TOO_LARGE == caught.value.reason
    for data in FILES.values():
        assert Reason.IMAGE_TOO_LARGE == reason_of(data, max_pixels=37 * 23 - 1)
        decode(data, max_pixels=37 * 23)


def test_our_cap_stands_alone():
    """Between Pillow's own cap and ours an image is decoded, without a warning, and no process-wide state moves."""
    side = 9500  # 90.25 million pixels; Pillow warns from 89.5
    assert side**2 > Image.MAX_IMAGE_PIXELS
    data = png(side, side, 1, 0, bytes((side + 7) // 8 + 1) * side)
    before = (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, list(warnings.filters))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (side, side) == image_size(data)
        assert (3, 4, 4) == decode(data, size=(4, 4), max_pixels=side**2).shape
        assert Reason.IMAGE_TOO_LARGE == reason_of(data)
    decode(FILES["jpeg"][:-2], lenient=True)
    assert before == (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, list(warnings.filters))


def test_threads_do_not_disturb_each_other():
    """Strict and lenient calls side by side each get their own answer."""
    cut = encode(photo(200, 160), "JPEG")[:-200]
    expected = decode(cut, lenient=True)

    def attempt(lenient: bool) -> bool:
        if lenient:
            return np.array_equal(expected, decode(cut, lenient=True))
        return reason_of(cut) == Reason.DAMAGED_IMAGE

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(attempt, [True, False] * 100))


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (-1, 5)])
def test_an_empty_size_is_the_callers_error(size):
    """A wanted side under 1 is a ValueError, not a bad sample."""
    with pytest.raises(ValueError, match="at least 1"):
        decode(FILES["jpeg"], size=size)


# The seam


def test_another_decoder_gets_plain_jpegs_only():
    """A Decoder sees JPEGs of one or three channels, with the shrinking; Pillow keeps the rest."""
    calls = []

    def decoder(data: bytes, shrink: int) -> np.ndarray:
        calls.append(shrink)
        with Image.open(io.BytesIO(data)) as im:
            im.draft(None, (im.width // shrink, im.height // shrink))
            return np.asarray(im.convert("RGB"))

    for name, data in FILES.items():
        calls.clear()
        assert np.array_equal(decode(data), decode(data, decoder=decoder)), name
        small = {"size": (3, 3), "draft": True}
        assert np.array_equal(decode(data, **small), decode(data, **small, decoder=decoder)), name
        decode(data, lenient=True, decoder=decoder)
        taken = name.startswith("jpeg") and name not in ("jpeg cmyk", "jpeg 2000")
        assert ([1, 4] if taken else []) == calls, name


def test_simplejpeg_equals_pillow():
    """The opt-in decoder gives Pillow's pixels, full and shrunk, and refuses damage that Pillow does not see."""
    pytest.importorskip("simplejpeg", reason="the extra `jpeg` is not installed")
    for orientation, size in ((1, None), (6, (100, 90)), (8, (150, 150))):
        data = encode(photo(701, 463), "JPEG", exif=exif(orientation))
        for draft in (False, True):
            expected = decode(data, size=size, draft=draft)
            assert np.array_equal(expected, decode(data, size=size, draft=draft, decoder=images.simplejpeg))
    grey = FILES["jpeg grey"]
    assert np.array_equal(decode(grey), decode(grey, decoder=images.simplejpeg))
    data = encode(photo(300, 200), "JPEG", quality=95)
    zeroed = data[:9000] + bytes(64) + data[9064:]
    decode(zeroed)
    assert Reason.DAMAGED_IMAGE == reason_of(zeroed, decoder=images.simplejpeg)
    assert Reason.DAMAGED_IMAGE == reason_of(data[:-20], decoder=images.simplejpeg)


def test_a_missing_decoder_says_what_to_install(monkeypatch):
    """Without the package, the error names the extra; it is not counted as a bad sample."""
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    with pytest.raises(ImportError, match=r"uv add 'mmdp\[jpeg\]'"):
        decode(FILES["jpeg"], decoder=images.simplejpeg)


def test_each_bad_image_has_a_remedy():
    """Law: a message ends with what to do."""
    for data in (b"", b"<html>not here</html>", encode(photo(64, 64), "JPEG")[:700]):
        with pytest.raises(DataError, match=r"fetch the file again$"):
            decode(data)
