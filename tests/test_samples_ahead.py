"""Two halves of building a row give the row that a call gives, whatever is wrong with a sample or an image."""

import asyncio
import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
from odd_sources import Exact, Wrapped
from small import tokenizer, write_data

import mmdp
from mmdp.batching import RowBuilder
from mmdp.encode import Encoder
from mmdp.refusals import DataError, Reason
from mmdp.samples_ahead import fetch_samples
from mmdp.sources import Source


def in_two(build: RowBuilder, indices):
    return build.assemble(asyncio.run(build.fetch(indices)))


def same(one, other) -> bool:
    arrays = ("ids", "labels", "positions", "segments", "image_segments")
    return (
        all(np.array_equal(getattr(one, name), getattr(other, name)) for name in arrays)
        and [image.tobytes() for image in one.images] == [image.tobytes() for image in other.images]
        and (one.samples, dict(one.skipped), one.layouts) == (other.samples, dict(other.skipped), other.layouts)
    )


@pytest.fixture(scope="module")
def damaged(tmp_path_factory) -> RowBuilder:
    """Twelve samples; after they were measured one image goes, one is cut, and one sample's first image is cut and its
    second gone."""
    folder = tmp_path_factory.mktemp("data")
    source = mmdp.open_source(write_data(folder, (1, 0, 2, 1)))
    encoder = Encoder(tokenizer(), "fixed:4:side=16")
    build = RowBuilder(source, encoder, mmdp.measure(source, encoder))
    for name in ("0-0.png", "2-0.png"):
        (folder / name).write_bytes((folder / name).read_bytes()[:60])
    for name in ("2-1.png", "3-0.png"):
        (folder / name).unlink()
    return build


def test_both_halves_give_the_row_of_a_call(damaged):
    """Every row, also with samples that fail: the same tokens, pixels and reasons, each counted where it is met."""
    rows = [(0, 1, 2, 3), (4, 5, 6), (), (7,), (3, 3, 1), (11, 10, 9, 8)]
    for row in rows:
        assert same(damaged(row), in_two(damaged, row))
    reasons = in_two(damaged, rows[0]).skipped
    assert {0: Reason.DAMAGED_IMAGE, 2: Reason.DAMAGED_IMAGE, 3: Reason.MISSING_IMAGE} == reasons
    assert not any(one.skipped for one in map(damaged, rows[1:2])), "whole samples stay whole"


@pytest.mark.parametrize("row", [(1, 2), (3, 0), (-1,), (99,)])
def test_both_halves_raise_what_a_call_raises(damaged, row):
    """In strict mode, and for an index that is not there: the same class and the same words."""
    strict = replace(damaged, strict=True)
    errors = []
    for build in (strict, lambda indices: in_two(strict, indices)):
        with pytest.raises((DataError, IndexError)) as caught:
            build(row)
        errors.append((type(caught.value), str(caught.value)))
    assert errors[0] == errors[1]


def test_images_are_in_the_samples_before_anything_is_decoded(damaged, tmp_path):
    """The second half reads no file; without `images`, the first reads none either."""
    source = mmdp.open_source(write_data(tmp_path, (2, 1)))
    found = asyncio.run(fetch_samples(source, [0, 1]))
    for path in tmp_path.glob("*.png"):
        path.unlink()
    assert [2, 1] == [sum(bool(image.data) for image in found[index].images) for index in (0, 1)]
    assert [2, 1] == [len(found[index].images) for index in (0, 1)]
    bare = asyncio.run(fetch_samples(source, [0, 1], images=False))
    assert [source[0], source[1]] == [bare[0], bare[1]]


@dataclass(frozen=True)
class Tired(Wrapped):
    """Fails twice at a sample, then gives it."""

    bad: int
    tries: list

    def __getitem__(self, index: int):
        if index == self.bad and len(self.tries) < 2:
            self.tries.append(index)
            raise OSError(5, "the disk is tired")
        return self.source[index]


def test_an_error_that_passes_costs_no_sample():
    """The first half lets it be, and the second has the patience for it."""
    source: Source = Exact([5, 6, 7])
    tired = Tired(source, 1, [])
    build = RowBuilder(tired, source)
    assert (0, 1, 2) == in_two(build, (0, 1, 2)).samples
    assert [1, 1] == tired.tries


def test_rows_carry_their_own_bytes(tmp_path):
    """An image whose bytes stand in the row is not read at all."""
    path = write_data(tmp_path, (1,), repeat=1)
    source = mmdp.open_source(path)
    whole = source[0]
    inside = replace(whole, images=(replace(whole.images[0], data=b"here", root="s3://nowhere"),))
    found = asyncio.run(fetch_samples([inside], [0]))
    assert inside == found[0]
    assert json.loads(path.read_text())["id"] == "s0"
