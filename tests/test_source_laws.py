"""Laws of every source: those of the package, and one written by hand. A new one is entered in `MAKERS`."""

import io
import pickle
import random
import re
import sys
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import small
from PIL import Image

import mmdp
from mmdp.config import Config
from mmdp.local_store import serve
from mmdp.records import ImageRef, Sample, Turn
from mmdp.refusals import DataError, Reason
from mmdp.sample_checks import check_sample
from mmdp.sources import Source

NUM = 12


@dataclass(frozen=True)
class Folder:
    """A source as one writes it by hand: a sample for each picture of a folder, asked for its colour."""

    root: Path
    names: tuple[str, ...]
    answer: str = "red"

    name = "folder"

    @property
    def fingerprint(self) -> str:
        return blake2b(repr((self.names, self.answer)).encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Sample:
        image = ImageRef(self.names[index], root=str(self.root))
        turns = (Turn("user", (0, "What colour?")), Turn("assistant", (self.answer,)))
        return Sample(self.names[index], (image,), turns, f"{self.name}:{index}")


def by_hand(folder: Path, words: str) -> Source:
    small.write_data(folder, (1,), repeat=NUM)
    return Folder(folder, tuple(f"{number}-0.png" for number in range(NUM)), answer=words)


def lines(folder: Path, words: str) -> Source:
    path = small.write_data(folder, (1, 0, 2), repeat=NUM // 3)
    path.write_text(path.read_text().replace("what is it", words))
    return mmdp.open_source(path)


def table(folder: Path, words: str) -> Source:
    folder.mkdir(parents=True)
    rows = [{"id": f"{number}", "texts": [{"user": words, "assistant": f"{number}"}]} for number in range(NUM)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    return mmdp.open_source(folder / "train.parquet")


def hub(folder: Path, words: str) -> Source:
    table(folder, words)
    return mmdp.open_source(f"hf:{folder}/default", config=Config(cache_dir=folder / "cache"))


def mix(folder: Path, words: str) -> Source:
    return mmdp.mix([(lines(folder / "lines", words), 0.5), (by_hand(folder / "by hand", words), 0.5)])


MAKERS: dict[str, Callable[[Path, str], Source]] = {
    "by hand": by_hand,
    "lines": lines,
    "parquet": table,
    "hub": hub,
    "mix": mix,
}


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.long if name == "hub" else ()) for name in MAKERS])
def make(request, tmp_path, monkeypatch):
    """Makes the source in a folder below this one: name, words that its samples hold -> the source."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return lambda name="data", words="what is it": MAKERS[request.param](tmp_path / name, words)


def test_it_has_a_length_and_ends_there(make):
    """Numbers from 0 to the length, and an IndexError behind it: so a loop over it ends."""
    source = make()
    assert len(source) == NUM == len(list(source))
    with pytest.raises(IndexError):
        source[NUM]
    assert source.name


def test_its_samples_are_whole(make):
    source = make()
    for index in range(NUM):
        check_sample(source[index])
    assert len({source[index].id for index in range(NUM)}) == NUM == len({source[index].source for index in range(NUM)})


def test_a_row_is_the_same_whenever_it_is_read(make):
    """In any order, by threads, from a copy that was pickled: and the copy is small, for it goes to every worker."""
    source = make()
    wanted = [source[index] for index in range(NUM)]
    copy = pickle.loads(pickle.dumps(source))
    numbers = random.Random(0).choices(range(NUM), k=300)
    with ThreadPoolExecutor(8) as pool:
        assert [wanted[number] for number in numbers] == list(pool.map(copy.__getitem__, numbers))
    assert len(pickle.dumps(source)) < 2**12


def test_the_fingerprint_is_of_the_content(make):
    assert make("a").fingerprint == make("b").fingerprint
    assert make("a2").fingerprint != make("c", words="who is it").fingerprint
    source = make("d")
    assert source.fingerprint == source.fingerprint == pickle.loads(pickle.dumps(source)).fingerprint


def test_it_is_measured_planned_and_loaded(make, tmp_path):
    """Each sample comes once, in rows that hold what was measured, with one executor as with another."""
    source, encoder = make(), mmdp.Encoder(small.tokenizer(), "fixed:4:side=8")
    sizes = mmdp.measure(source, encoder, cache=tmp_path / "cache")
    assert not sizes.skipped
    assert len(sizes) == NUM
    plan = mmdp.plan(sizes, mmdp.Budget(200, 4))
    batches = {}
    for executor in ("inline", "processes"):
        batches[executor] = list(mmdp.Loader(source, encoder, plan, batch_size=2, executor=executor, num_workers=2))
    seen = [sample for batch in batches["inline"] for row in batch.samples for sample in row]
    assert sorted(seen) == list(range(NUM))
    for one, other in zip(batches["inline"], batches["processes"], strict=True):
        assert np.array_equal(one.input_ids, other.input_ids)
        assert one.samples == other.samples


def test_it_may_lie_in_a_store(tmp_path):
    """The same law for rows and images behind a network: what is read is what lies on the disk."""
    near = lines(tmp_path / "data", "what is it")
    with serve(tmp_path / "data") as uri:
        far = mmdp.open_source(f"{uri}/{near.name}", config=Config(cache_dir=tmp_path / "cache"))
        assert far.fingerprint == near.fingerprint
        assert len(far) == len(near)
        assert [far[index].turns for index in range(NUM)] == [near[index].turns for index in range(NUM)]


def test_the_one_that_the_guide_shows_works(tmp_path, monkeypatch):
    """docs/own_data.md: its code as it stands there, over pictures where it looks for them."""
    text = (Path(__file__).resolve().parent.parent / "docs" / "own_data.md").read_text()
    code = text.split("## Any other form")[1].split("```python\n")[1].split("```")[0]
    shown: dict[str, Any] = {"__name__": "shown"}
    monkeypatch.setitem(sys.modules, "shown", types.ModuleType("shown"))  # where a dataclass looks itself up
    exec(code, shown)
    small.write_data(tmp_path / "my" / "images", (1, 1))
    monkeypatch.chdir(tmp_path)
    source = shown["Captions"]((("0-0.png", "A fox."), ("1-0.png", "An owl."), ("gone.png", "A hen.")))
    encoder = mmdp.Encoder(small.tokenizer(), "fixed:4:side=8")
    sizes = mmdp.measure(source, encoder, cache=tmp_path / "cache")
    assert {2: Reason.MISSING_IMAGE} == sizes.skipped
    (batch,) = mmdp.Loader(source, encoder, mmdp.plan(sizes, mmdp.Budget(200, 4)), batch_size=1)
    assert [0, 1] == sorted(batch.samples[0])


def test_the_stream_that_the_guide_shows_works(tmp_path, monkeypatch):
    """docs/own_data.md: rows of any iterable; a bad one is counted, and the loop can be repeated."""
    text = (Path(__file__).resolve().parent.parent / "docs" / "own_data.md").read_text()
    code = text.split("## Large data")[1].split("```python\n")[1].split("```")[0]
    shown: dict[str, Any] = {"mmdp": mmdp}
    exec(code, shown)
    small.write_data(tmp_path / "my" / "images", (1, 1))
    monkeypatch.chdir(tmp_path)
    turns = [{"user": "what is it", "assistant": "fox"}]
    rows = [{"images": ["0-0.png"], "texts": turns}, {"image": "1-0.png"}, {"texts": turns}]
    encoder = mmdp.Encoder(small.tokenizer(), "fixed:4:side=8")
    loader = mmdp.StreamLoader(shown["Rows"](rows), encoder, mmdp.Budget(200, 4), batch_size=1)
    for _ in range(2):
        (batch,) = loader
        assert [0, 2] == sorted(batch.samples[0])
        assert {1: Reason.WRONG_FORM} == dict(batch.skipped)


@pytest.mark.parametrize("key", ["images", "image"])
def test_a_streamed_set_of_datasets_comes_as_the_guide_says(key, recwarn):
    """docs/own_data.md: after its `cast_column` every row comes; without it 7 of 8 are refused, and it is said."""
    text = (Path(__file__).resolve().parent.parent / "docs" / "own_data.md").read_text()
    blocks = [part.split("```")[0] for part in text.split("## Large data")[1].split("```python\n")[1:3]]
    cast = {re.search(r'"(\w+)"', line).group(1): line for line in blocks[1].splitlines()}
    shown: dict[str, Any] = {"mmdp": mmdp, "datasets": datasets}
    exec(blocks[0], shown)
    with io.BytesIO() as file:
        Image.new("RGB", (9, 7), "red").save(file, "PNG")
        one = {"bytes": file.getvalue(), "path": None}
    given = {True: [one] if key == "images" else one, False: [] if key == "images" else None}
    rows = [
        {key: given[number % 8 > 0], "texts": [{"user": "what is it", "assistant": "fox"}]} for number in range(400)
    ]
    feature = datasets.List(datasets.Image()) if key == "images" else datasets.Image()
    decoded = datasets.Dataset.from_list(rows).cast_column(key, feature).to_iterable_dataset()
    encoder = mmdp.Encoder(small.tokenizer(), "fixed:4:side=8")
    loader = mmdp.StreamLoader(shown["Rows"](decoded), encoder, mmdp.Budget(200, 4), batch_size=1)
    assert 50 == sum(len(row) for batch in loader for row in batch.samples)
    (said,) = [str(one.message) for one in recwarn if "are left out" in str(one.message)]
    assert re.match(
        r"224 of the 256 samples that mine has given .*'wrong_form': 224.* First: mine:1, .*cast_column", said
    )
    recwarn.clear()
    shown["dataset"] = decoded
    exec(cast[key], shown)
    loader = mmdp.StreamLoader(shown["Rows"](shown["dataset"]), encoder, mmdp.Budget(200, 4), batch_size=1)
    batches = list(loader)
    assert 400 == sum(len(row) for batch in batches for row in batch.samples)
    assert 350 == sum(len(batch.images) for batch in batches)
    assert not [one for one in recwarn if "are left out" in str(one.message)]


# What a source gives that is no sample


GOOD = Sample("7", (ImageRef("a.png"),), (Turn("user", (0, "Why?")), Turn("assistant", ("So.",))), "mine:7")


@dataclass(frozen=True)
class Gives:
    """A source that gives this, whatever it is."""

    what: object
    name = "mine"
    fingerprint = "0"

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> object:
        return self.what


@pytest.mark.parametrize(
    ("sample", "reason", "field"),
    [
        (replace(GOOD, turns=(Turn("human", (0, "Why?")), GOOD.turns[1])), Reason.UNKNOWN_ROLE, "turns[0].role"),
        (replace(GOOD, turns=(GOOD.turns[0], Turn("assistant", (" \n",)))), Reason.NO_ANSWER, "turns[1]"),
        (replace(GOOD, turns=(GOOD.turns[0], Turn("assistant", ())), images=()), Reason.NO_ANSWER, "turns[1]"),
        (replace(GOOD, turns=GOOD.turns[:1]), Reason.NO_ANSWER, "turns"),
        (replace(GOOD, turns=()), Reason.NO_ANSWER, "turns"),
        (replace(GOOD, images=()), Reason.IMAGE_PLACES, "turns"),
        (replace(GOOD, images=GOOD.images * 2), Reason.IMAGE_PLACES, "turns"),
        (
            replace(GOOD, turns=(Turn("user", (1, 0)), GOOD.turns[1]), images=GOOD.images * 2),
            Reason.IMAGE_PLACES,
            "turns",
        ),
        (replace(GOOD, turns=(Turn("user", (0, None)), GOOD.turns[1])), Reason.WRONG_FORM, "turns[0].parts"),
        (replace(GOOD, images=("a.png",)), Reason.WRONG_FORM, "images[0]"),
    ],
)
def test_a_sample_that_would_become_another_is_refused(sample, reason, field, tmp_path):
    """With its place, by the check, and by `measure` and a stream, which count it."""
    check_sample(GOOD)
    with pytest.raises(DataError) as caught:
        check_sample(sample)
    assert (caught.value.reason, caught.value.field, caught.value.source) == (reason, field, "mine:7")
    encoder = mmdp.Encoder(small.tokenizer(), "fixed:4:side=8")
    with pytest.raises(ValueError, match=rf"none of the 1 samples can be used.*{reason}.*mine:7"):
        mmdp.measure(Gives(sample), encoder, cache=tmp_path)
    with pytest.raises(ValueError, match=rf"none of the 1 samples of the stream fits.*{reason}"):
        list(mmdp.StreamLoader([sample], encoder, mmdp.Budget(64, 2), batch_size=1))


@pytest.mark.parametrize("what", [None, {"id": "7"}, "a.png"])
def test_what_is_no_sample_is_the_sources_fault(what, tmp_path):
    """No bad sample, which is counted, but an error that stops."""
    encoder = mmdp.Encoder(small.tokenizer(), "fixed:4:side=8")
    with pytest.raises(ValueError, match=r"gave .*, wanted a Sample.*parse_row"):
        mmdp.measure(Gives(what), encoder, cache=tmp_path)


@pytest.mark.parametrize("what", [[GOOD], "train.jsonl", {"a": 1}, None])
def test_what_is_no_source_is_refused_with_the_way_out(what, tmp_path):
    encoder = mmdp.Encoder(small.tokenizer(), "fixed:4:side=8")
    with pytest.raises(ValueError, match=r"is no source, it lacks .*fingerprint.*open_source"):
        mmdp.measure(what, encoder, cache=tmp_path)
