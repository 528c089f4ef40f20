"""Laws of `Config.image_folder`: images apart from the rows are those beside them, wherever either of them lies."""

import json
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from runs import digest
from small import write_data

import mmdp
from mmdp import store
from mmdp.config import Config
from mmdp.local_store import BUCKET, IMAGES_BUCKET, serve
from mmdp.refusals import Reason

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore:.*ignores ranges")]


@pytest.fixture
def apart(tmp_path):
    """A data set with its images beside it, and the same with the rows in one folder and the images in another."""
    beside = write_data(tmp_path / "images", repeat=2)
    rows = [json.loads(line) for line in beside.read_text().splitlines()]
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text(beside.read_text())
    for folder in ("images", "rows"):
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / folder / "train.parquet")
    beside.rename(beside.parent / "train.jsonl")
    return tmp_path / "images" / "train.jsonl", tmp_path / "rows", tmp_path / "images"


@pytest.fixture
def encoder():
    return mmdp.Encoder("demo", "fixed:64")


def batches(source, encoder, cache, executor="threads"):
    plan = mmdp.plan(mmdp.measure(source, encoder, cache=cache), mmdp.Budget(tokens=200, images=2))
    return [digest(one) for one in mmdp.Loader(source, encoder, plan, batch_size=2, executor=executor, num_workers=2)]


@pytest.mark.parametrize("name", ["train.jsonl", "train.parquet"])
@pytest.mark.parametrize(("far_rows", "far_images"), [(False, False), (False, True), (True, False), (True, True)])
def test_the_batches_are_those_of_images_beside_the_rows(name, far_rows, far_images, apart, encoder, tmp_path):
    """JSONL and Parquet, each of rows and images on the disk or in a store."""
    beside, rows, images = apart
    cache = tmp_path / "cache"
    expected = batches(mmdp.open_source(beside.parent / name), encoder, cache)
    with serve(rows, images=images, latency_ms=0):
        folder = f"s3://{IMAGES_BUCKET}/" if far_images else str(images)
        config = Config(image_folder=folder, cache_dir=cache)
        source = mmdp.open_source(f"s3://{BUCKET}/{name}" if far_rows else rows / name, config=config)
        assert far_images == (getattr(source, "max_fetches", 1) > 1)
        assert len(expected) > 1
        assert expected == batches(source, encoder, cache)


def test_worker_processes_fetch_them_as_was_said(apart, encoder, tmp_path):
    """Rows of this disk, images of a store: in other processes too, where the environment has forgotten the server."""
    beside, rows, images = apart
    expected = [store.read(image) for sample in mmdp.open_source(beside) for image in sample.images]
    script = """
        import os, pickle, sys
        from mmdp import store

        source = pickle.load(sys.stdin.buffer)
        pickle.dump([store.read(image) for sample in source for image in sample.images], sys.stdout.buffer)
    """
    with serve(rows, images=images, latency_ms=0):
        config = Config(image_folder=f"s3://{IMAGES_BUCKET}", cache_dir=tmp_path / "cache")
        source = mmdp.open_source(rows / "train.jsonl", config=config)
        forgetful = {name: value for name, value in os.environ.items() if "ENDPOINT" not in name}
        assert forgetful.keys() != os.environ.keys()
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)],
            input=pickle.dumps(source),
            stdout=subprocess.PIPE,
            env=forgetful,
            timeout=60,
            check=True,
        )
        assert expected == pickle.loads(done.stdout)
        assert batches(mmdp.open_source(beside), encoder, tmp_path / "cache") == batches(
            source, encoder, tmp_path / "cache", executor="processes"
        )


def test_a_relative_folder_means_what_it_meant(apart, monkeypatch):
    """Whatever the working folder is later."""
    images = apart[2]
    monkeypatch.chdir(images.parent)
    source = mmdp.open_source("rows/train.jsonl", config=Config(image_folder="images"))
    monkeypatch.chdir("/")
    assert str(images) == source[0].images[0].root
    assert store.read(source[0].images[0])


@pytest.mark.parametrize("name", ["train.jsonl", "train.parquet"])
def test_the_same_rows_with_other_images_are_measured_anew(name, apart, encoder, tmp_path):
    """Sizes are kept by what the images are relative to."""
    _, rows, images = apart
    other = write_data(tmp_path / "other").parent
    sources = [mmdp.open_source(rows / name, config=Config(image_folder=str(folder))) for folder in (images, other)]
    assert sources[0].fingerprint == sources[1].fingerprint
    first, second = (mmdp.measure(source, encoder, cache=tmp_path / "cache") for source in sources)
    assert first.cache.folder != second.cache.folder


def test_a_stream_has_them_too(apart):
    """From a folder of this disk; not from a store, where its worker processes could not know how to ask."""
    _, rows, images = apart
    config = Config(image_folder=str(images))
    stream = mmdp.open_source(rows / "train.parquet", config=config, streaming=True)
    assert {str(images)} == {image.root for sample in stream for image in sample.images}
    with pytest.raises(ValueError, match=r"a stream takes no images from 's3://b/images': open it without streaming"):
        mmdp.open_source(rows / "train.parquet", config=Config(image_folder="s3://b/images"), streaming=True)


def test_a_local_data_set_of_the_hubs_form_has_them_too(apart, tmp_path):
    """A folder laid out like a data set on the Hub, and images elsewhere."""
    _, rows, images = apart
    hub = tmp_path / "hub"
    hub.mkdir()
    (rows / "train.parquet").rename(hub / "train.parquet")
    config = Config(image_folder=str(images), cache_dir=tmp_path / "cache")
    source = mmdp.open_source(f"hf:{hub}/default", config=config)
    assert store.read(source[0].images[0]) == Path(images, source[0].images[0].name).read_bytes()


def test_a_name_may_not_leave_it(apart, tmp_path):
    """The folder that was named is the one that names stay in, and not that of the rows."""
    _, rows, images = apart
    (rows / "train.jsonl").write_text(
        json.dumps({"images": ["../rows/train.jsonl"], "texts": [{"user": "q", "assistant": "a"}]}) + "\n"
    )
    source = mmdp.open_source(rows / "train.jsonl", config=Config(image_folder=str(images)))
    with pytest.raises(mmdp.DataError, match="climbs out") as refused:
        store.read(source[0].images[0])
    assert refused.value.reason is Reason.UNSAFE_PATH


@pytest.mark.parametrize(
    ("data", "folder", "error", "says"),
    [
        ("train.jsonl", "nowhere", FileNotFoundError, r"image_folder: no such folder: '/.*nowhere'\. Correct it"),
        ("train.jsonl", "train.jsonl", FileNotFoundError, r"image_folder: no such folder: '/.*train\.jsonl'"),
        ("train.jsonl", "ftp://host/images", ValueError, r"its scheme is none of s3://"),
        ("train.jsonl", "s3://", ValueError, r"s3://"),
        ("demo", ".", ValueError, r"the demo set has images of its own: leave image_folder out"),
    ],
)
def test_what_is_no_folder_is_refused(data, folder, error, says, apart, monkeypatch):
    """When the source is opened, and not once for each row."""
    _, rows, _ = apart
    monkeypatch.chdir(rows)
    with pytest.raises(error, match=says):
        mmdp.open_source(data, config=Config(image_folder=folder))
