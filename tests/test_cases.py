"""The handed cases from the field, end to end: a source, an encoder, `measure`, and rows that are built.

What single modules decide is tested beside them; here a whole run meets every case of the groups Images, Text and
Safety. Rules that hold for all: no bad row ends a run, every refusal is counted under a named reason, its message names
file, line and field, and kept + refused = read.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mmdp
from mmdp.records import IGNORE, Budget
from mmdp.refusals import DataError, Reason
from mmdp.sizes import Sizes

pytestmark = pytest.mark.filterwarnings("ignore:.* samples can't be used")


@pytest.fixture(scope="module")
def cases(shared, tmp_path_factory):
    """Runs a handed script once, and gives back its folder and what it expects."""
    made: dict[str, tuple[Path, dict]] = {}

    def make(script: str) -> tuple[Path, dict]:
        if script not in made:
            folder = tmp_path_factory.mktemp(script)
            command = [sys.executable, shared / "cases" / f"{script}.py", folder]
            subprocess.run(command, check=True, capture_output=True)
            made[script] = folder, json.loads((folder / "expected.json").read_text())
        return made[script]

    return make


@pytest.fixture(scope="module")
def encoder(case_script):
    """64 tokens an image, with the handed tokenizer whose role header takes several tokens."""
    return mmdp.Encoder(case_script("tiny_tokenizers").build("plain"), "fixed:64")


def run(path: Path, encoder: mmdp.Encoder, cache: Path) -> tuple[mmdp.open_source, Sizes]:
    source = mmdp.open_source(path)
    sizes = mmdp.measure(source, encoder, cache=cache)
    messages = sizes.messages()
    assert len(source) == len(sizes.kept()) + len(sizes.skipped)
    assert sizes.skipped.keys() == messages.keys()
    for index, message in messages.items():
        assert f"{path.name}:" in message
        assert sizes.skipped[index] in message
        assert message.isascii()
        assert "\n" not in message
    return source, sizes


ROWS = ["labels", "inject", "counts", "forms", "nothing", "roles", "mixed_types"]


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_kept_or_refused_as_expected(cases, encoder, tmp_path, name):
    """TXT-01 to 08, 11, 13: each row by its verdict; images and learnt text of each kept one are as expected."""
    folder, expected = cases("make_rows")
    source, sizes = run(folder / f"{name}.jsonl", encoder, tmp_path)
    entries = expected[f"{name}.jsonl"]
    assert len(entries) == len(source)
    for index, entry in enumerate(entries):
        if entry["verdict"] == "reject":
            assert index in sizes.skipped, entry["note"]
            with pytest.raises(DataError):
                encoder.encode(source[index])
            continue
        assert index not in sizes.skipped, (entry["note"], sizes.messages().get(index))
        encoded = sizes.encoded(index)
        assert entry["images"] == len(encoded.layouts)
        assert 64 * entry["images"] == int((encoded.ids == encoder.image_id).sum())
        if entry["supervised"]:
            wanted = "".join(f"{text}<|im_end|>" for text in entry["supervised"])
            assert wanted == encoder.tokenizer.decode(encoded.labels[encoded.labels != IGNORE]), entry["note"]
        row = mmdp.RowBuilder(source, encoder, sizes)([index])
        assert (entry["images"], {}) == (len(row.images), row.skipped)


def test_rows_longer_than_the_limit_are_dropped_whole(cases, encoder, tmp_path):
    """TXT-09: with 100 tokens a row and 64 a picture, nothing is cut, and what does not fit is counted."""
    folder, expected = cases("make_rows")
    _, sizes = run(folder / "long.jsonl", encoder, tmp_path)
    refused = sizes.refused(Budget(100))
    wanted = [index for index, entry in enumerate(expected["long.jsonl"]) if entry["verdict"] == "reject"]
    assert wanted == list(refused)
    assert {Reason.TOO_LONG} == set(refused.values())
    assert {"too_long": 3} == sizes.counts(Budget(100))
    assert [0] == sizes.kept(Budget(100)).tolist()


BYTES = ["bom", "crlf", "blank_lines", "no_last_newline", "cut_tail", "one_bad_line", "separators"]


@pytest.mark.parametrize("name", BYTES)
def test_files_are_read_byte_by_byte_as_expected(cases, encoder, tmp_path, name):
    """TXT-10: good rows once, each bad line refused by its number in the file."""
    folder, expected = cases("make_rows")
    _, sizes = run(folder / f"{name}.jsonl", encoder, tmp_path)
    assert expected[f"{name}.jsonl"][0]["rows"] == len(sizes.kept())
    bad_line = {"cut_tail": 4, "one_bad_line": 2}.get(name)
    assert ([f"{name}.jsonl:{bad_line}:"] if bad_line else []) == [
        message.split(" ")[0] for message in sizes.messages().values()
    ]


@pytest.mark.parametrize(("name", "word"), [("array", "array"), ("nothing_in_it", "no rows|empty")])
def test_a_file_without_rows_is_a_clear_error(cases, name, word):
    """TXT-10: one JSON array, and an empty file: said at once, never an endless loop."""
    folder, _ = cases("make_rows")
    with pytest.raises(ValueError, match=word):
        mmdp.open_source(folder / f"{name}.jsonl")


def test_every_image_is_right_or_refused(cases, encoder, tmp_path):
    """IMG-01 to 12: a row for each picture; what measures well and can't be decoded is counted when it is built."""
    folder, expected = cases("make_images")
    path = folder / "rows.jsonl"
    names = sorted(expected)
    rows = [{"images": [name], "texts": [{"user": "0", "assistant": "1"}]} for name in names]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source, sizes = run(path, encoder, tmp_path)
    build = mmdp.RowBuilder(source, encoder, sizes)
    skipped = {**sizes.skipped, **build([int(index) for index in sizes.kept()]).skipped}
    assert sorted(index for index, name in enumerate(names) if expected[name]["verdict"] == "reject") == sorted(skipped)
    named = {names[index]: reason for index, reason in skipped.items()}
    assert (Reason.EMPTY_IMAGE, Reason.NOT_AN_IMAGE) == (named["empty.jpg"], named["error_page.jpg"])
    assert Reason.DAMAGED_IMAGE == named["truncated.jpg"] == named["cut_last_bytes.jpg"]
    assert Reason.IMAGE_TOO_LARGE == named["header_bomb.png"] == named["real_bomb.png"]
    for index in sizes.kept():
        width, height = expected[names[index]]["size"] or (None, None)
        if width:
            assert [(width, height)] == encoder.image_sizes(source[int(index)])
    for name in ("truncated.jpg", "header_bomb.png"):
        with pytest.raises(DataError, match=rf"rows\.jsonl:{names.index(name) + 1} .*images\[0\] = '{name}'"):
            mmdp.RowBuilder(source, encoder, strict=True)([names.index(name)])


def test_an_extreme_strip_costs_what_was_planned_or_is_refused(cases, shared, tmp_path):
    """IMG-10: a family with a limit on the aspect refuses the strip by name; one without keeps its promise."""
    folder, _ = cases("make_images")
    (folder / "strip.jsonl").write_text(
        json.dumps({"images": ["strip_6000x2.png"], "texts": [{"user": "0", "assistant": "1"}]}) + "\n"
    )
    source = mmdp.open_source(folder / "strip.jsonl")
    qwen = mmdp.Encoder(str(shared / "tokenizers" / "qwen"), "qwen3_vl")
    with pytest.raises(DataError, match=r"aspect|ratio") as caught:
        qwen.encode(source[0])
    assert Reason.IMAGE_ASPECT == caught.value.reason
    fixed = mmdp.Encoder(str(shared / "tokenizers" / "qwen"), "fixed:64")
    encoded = fixed.encode(source[0])
    assert [(3, 256, 256)] == [image.shape for image in fixed.pixels(source[0], encoded)]


@pytest.mark.timeout(60)
def test_no_row_reads_outside_its_folder(cases, case_script, encoder, tmp_path):
    """SEC-01 to 06: each row by its verdict; the secret picture is in no batch; the pipe makes nobody wait."""
    folder, expected = cases("make_paths")
    source, sizes = run(folder / "data" / "rows.jsonl", encoder, tmp_path)
    rejected = [index for index, entry in enumerate(expected) if entry["verdict"] == "reject"]
    assert rejected == sorted(sizes.skipped)
    assert 15 == len(rejected)
    secret = np.array(case_script("make_paths").SECRET, dtype=np.uint8)
    build = mmdp.RowBuilder(source, encoder)  # no measured sizes: every row is tried anew
    row = build(list(range(len(source))))
    assert rejected == sorted(row.skipped)
    assert len(expected) - len(rejected) == len(row.images)
    for image in row.images:
        assert not (image == secret[:, None, None]).all(axis=0).any()


def test_each_reason_is_in_the_table_of_what_to_do():
    """docs/troubleshooting.md, "Samples are missing": once each, and none that does not exist."""
    page = (Path(__file__).resolve().parent.parent / "docs" / "troubleshooting.md").read_text()
    table = page.split("## Samples are missing")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(map(str, Reason)) == sorted(re.findall(r"`(\w+)`", "".join(cells)))
