"""Laws of `mixture.py`: each sample as often as its weight says, as itself, wherever rows are built."""

import pickle
import re
from collections import Counter
from fractions import Fraction
from math import inf, nan
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from odd_sources import Wrapped
from runs import digest, rows_of
from servers import Shelf
from small import tokenizer, write_data

import mmdp
from mmdp.config import Config
from mmdp.records import Sample, Turn
from mmdp.refusals import DataError, Reason

BUDGET = mmdp.Budget(64, 3)


class Counted:
    """So many samples, each with its number for an id."""

    def __init__(self, count: int, name: str = "counted") -> None:
        self.count, self.name, self.fingerprint = count, name, f"{name} {count}"

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        return Sample(str(index), (), (Turn("assistant", ("x",)),), f"{self.name}[{index}]")


@pytest.fixture(scope="module")
def encoder() -> mmdp.Encoder:
    return mmdp.Encoder(tokenizer(), "fixed:4:side=16")


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[mmdp.sources.Source]:
    """Of 12, 8 and 20 samples, with images and without."""
    folder = tmp_path_factory.mktemp("mix")
    shapes = {"a": ((1, 0, 2), 4), "b": ((0, 1), 4), "c": ((1, 1, 0, 2), 5)}
    return [
        mmdp.open_source(write_data(folder / name, images, repeat=repeat).rename(folder / name / f"{name}.jsonl"))
        for name, (images, repeat) in shapes.items()
    ]


def planned(source, encoder, cache, **options):
    sizes = mmdp.measure(source, encoder, cache=cache)
    return mmdp.plan(sizes, BUDGET, window=8, block=2, buffer=16, **options)


def places(source, indices) -> Counter[tuple[int, int]]:
    return Counter(source.origin(index) for index in indices)


# What is taken

WEIGHTS = st.one_of(st.integers(1, 4), st.floats(0.05, 4.0), st.fractions(Fraction(1, 9), 4))


@given(st.lists(st.tuples(st.integers(1, 60), WEIGHTS), min_size=1, max_size=4), st.integers(0, 5))
def test_each_sample_comes_as_often_as_its_weight_says(entries, seed):
    """All of a source floor(weight) times, some once more, and in all its share to the nearest sample."""
    wanted = [int(float(weight) * count + 0.5) for count, weight in entries]
    sources = [Counted(count, f"source {number}") for number, (count, _) in enumerate(entries)]
    pairs = [(source, weight) for source, (_, weight) in zip(sources, entries, strict=True)]
    if 0 in wanted:
        with pytest.raises(ValueError, match="takes no sample"):
            mmdp.mix(pairs, seed=seed)
        return
    source = mmdp.mix(pairs, seed=seed)
    assert sum(wanted) == len(source)
    found = places(source, range(len(source)))
    for number, (count, _) in enumerate(entries):
        times = [found[number, own] for own in range(count)]
        assert wanted[number] == sum(times)
        assert wanted[number] // count == min(times)
        assert max(times) <= wanted[number] // count + 1
    for index in (*range(len(source)), -1):
        number, own = source.origin(index)
        assert sources[number][own] == source[index]
    with pytest.raises(IndexError):
        source[len(source)]


def test_a_fraction_is_spread_over_its_source():
    """One of every four rows in a row, and not always the same one of four; so do a fifth more of all."""
    quarter = mmdp.mix([(Counted(400), 0.25)])
    taken = [quarter.origin(index)[1] for index in range(100)]
    assert list(range(100)) == [own // 4 for own in taken]
    assert {0, 1, 2, 3} == {own % 4 for own in taken}
    more = mmdp.mix([(Counted(400), 1.2)])
    assert list(range(400)) == [more.origin(index)[1] for index in range(400)]
    assert list(range(80)) == [more.origin(index)[1] // 5 for index in range(400, 480)]


def test_the_seed_decides_a_fraction_the_same_on_every_machine():
    """Written down once: other rows on another machine would be another data set under the same fingerprint."""
    chosen = [[mmdp.mix([(Counted(20), 0.3)], seed=seed).origin(index)[1] for index in range(6)] for seed in range(3)]
    assert [[0, 5, 9, 10, 15, 16], [1, 4, 8, 10, 15, 16], [1, 4, 7, 10, 15, 17]] == chosen
    # Whatever else is mixed in, so that one source can be left out of a comparison.
    beside = mmdp.mix([(Counted(7, "other"), 1), (Counted(20), 0.3)])
    assert chosen[0] == [beside.origin(index)[1] for index in range(7, 13)]


def test_the_fingerprint_is_of_sources_weights_and_seed():
    one, other = Counted(9), Counted(9, "other")
    mixes = [
        mmdp.mix([(one, 1), (other, 2)]),
        mmdp.mix([(one, 2), (other, 1)]),
        mmdp.mix([(other, 2), (one, 1)]),
        mmdp.mix([(one, 1), (other, 2)], seed=1),
        mmdp.mix([(one, 1)]),
        mmdp.mix([(Counted(10), 1), (other, 2)]),
    ]
    assert len(mixes) == len({each.fingerprint for each in mixes})
    assert mixes[0].fingerprint == mmdp.mix([(Counted(9), 1.0), (other, np.float32(2))]).fingerprint
    assert bytes.fromhex(mixes[0].fingerprint)


def test_a_mix_of_mixes():
    """Each is a source; the name tells what is in what."""
    inner = mmdp.mix([(Counted(8, "a"), 0.5), (Counted(2, "b"), 1)])
    outer = mmdp.mix([(inner, 2), (Counted(3, "c"), 1)])
    assert "2 x (0.5 x a + 1 x b) + 1 x c" == outer.name
    assert "<Mixture of 15 samples: 2 x (0.5 x a + 1 x b) + 1 x c>" == repr(outer)
    assert {"a": 8, "b": 4, "c": 3} == Counter(outer[index].source.partition("[")[0] for index in range(15))
    assert "a mix of 5 sources" == mmdp.mix([(Counted(3), 1)] * 5).name


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([], "nothing to mix: give at least one"),
        ([(Counted(3), 0)], "'counted' is 0: give a number above 0"),
        ([(Counted(3), -1.0)], "'counted' is -1.0: give a number above 0"),
        ([(Counted(3), nan)], "'counted' is nan: give"),
        ([(Counted(3), inf)], "'counted' is inf: give"),
        ([(Counted(3), 10**400)], "'counted' is 1000"),
        ([(Counted(3), True)], "'counted' is True: give"),
        ([(Counted(3), "2")], "'counted' is '2': give"),
        ([(Counted(3), None)], "'counted' is None: give"),
        (
            [(Counted(3), 1), (Counted(3, "rare"), 0.1)],
            "weight 0.1 takes no sample of 'rare', which has 3: give a larger",
        ),
        ([(Counted(0), 1)], "weight 1 takes no sample of 'counted', which has 0"),
        ([(Counted(3), 2e9)], "more than 2,147,483,647 samples: give smaller weights"),
        ([(Counted(3), 1), ("train.jsonl", 1)], "entry 1 of the mix: 'train.jsonl' is no source, it lacks name, fing"),
        ([(iter("ab"), 1)], "is no source, it lacks __len__"),
        ([Counted(3)], "entry 0 of the mix is"),
        ([(Counted(3), 1, 1)], "entry 0 of the mix is"),
        (Counted(3), "is no list of sources: give [(source, weight), ...]"),
        (None, "is no list of sources"),
    ],
)
def test_what_is_no_mix_is_refused_with_what_to_give(given, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        mmdp.mix(given)


@pytest.mark.parametrize("seed", [True, 0.5, None, "0"])
def test_a_seed_is_a_whole_number(seed):
    """Also one of NumPy."""
    with pytest.raises(TypeError, match=r"give a whole number"):
        mmdp.mix([(Counted(3), 1)], seed=seed)
    assert mmdp.mix([(Counted(3), 1)], seed=np.int64(5)).fingerprint == mmdp.mix([(Counted(3), 1)], seed=5).fingerprint


# As any source


def test_an_epoch_delivers_exactly_these(files, encoder, tmp_path, any_executor):
    """By file and line: the first once, the second three times, of the third five of twenty; with every executor."""
    source = mmdp.mix([*zip(files, (1, 3, 0.25), strict=True)])
    plan = planned(source, encoder, tmp_path)
    wanted = Counter(source[index].source for index in range(len(source)))
    assert {"a.jsonl": 12, "b.jsonl": 24, "c.jsonl": 5} == _by_file(wanted)
    with mmdp.Loader(source, encoder, plan, batch_size=2, executor=any_executor) as loader:
        for _ in range(2):
            batches = list(loader)
            seen = [sample for batch in batches for row in batch.samples for sample in row]
            assert list(range(41)) == sorted(seen)
            assert wanted == Counter(source[index].source for index in seen)
            assert {3} == {count for place, count in wanted.items() if place.startswith("b")}
    inline = mmdp.Loader(source, encoder, plan, batch_size=2, executor="inline")
    list(inline)
    assert [digest(batch) for batch in batches] == [digest(batch) for batch in inline]


def _by_file(sources: Counter[str]) -> dict[str, int]:
    return {
        name: sum(count for place, count in sources.items() if place.startswith(name))
        for name in sorted({place.partition(":")[0] for place in sources})
    }


def test_rows_hold_what_each_source_alone_would_give(files, encoder, tmp_path):
    """Tokens and pixels of a sample of the mix are those of its own source."""
    source = mmdp.mix([*zip(files, (1, 2, 0.5), strict=True)])
    build = mmdp.RowBuilder(source, encoder, mmdp.measure(source, encoder, cache=tmp_path))
    own = [mmdp.RowBuilder(file, encoder) for file in files]
    for index in range(len(source)):
        number, place = source.origin(index)
        one, other = build([index]), own[number]([place])
        assert np.array_equal(one.ids, other.ids)
        assert len(one.images) == len(other.images)
        assert all(map(np.array_equal, one.images, other.images))


def test_a_run_is_resumed_exactly(files, encoder, tmp_path):
    """From the state behind any batch, in a copy that was pickled."""
    source = mmdp.mix([*zip(files, (1, 2, 0.5), strict=True)])
    plan = planned(source, encoder, tmp_path)
    batches = list(mmdp.Loader(source, encoder, plan, batch_size=2, executor="inline"))
    assert len(batches) > 4
    for place in (0, 3, len(batches) - 2):
        copy = pickle.loads(pickle.dumps(source))
        again = mmdp.Loader(copy, encoder, planned(copy, encoder, tmp_path), batch_size=2, executor="inline")
        again.load_state_dict(batches[place].state)
        assert [digest(batch) for batch in batches[place + 1 :]] == [digest(batch) for batch in again]


def test_a_state_of_another_mix_is_refused(files, encoder, tmp_path):
    """Another weight, seed, order or source: samples would come twice or never. Also where as many."""
    first = mmdp.mix([*zip(files, (1, 2, 0.5), strict=True)])
    loader = mmdp.Loader(first, encoder, planned(first, encoder, tmp_path), batch_size=2, executor="inline")
    state = next(iter(loader)).state
    others = [
        mmdp.mix([*zip(files, (1, 2, 0.55), strict=True)]),
        mmdp.mix([*zip(files, (1, 2, 0.5), strict=True)], seed=1),
        mmdp.mix([*zip(files[::-1], (0.5, 2, 1), strict=True)]),
        mmdp.mix([*zip(files[:2], (1, 2), strict=True)]),
    ]
    assert len(first) == len(others[1]) == len(others[2])
    for other in others:
        fresh = mmdp.Loader(other, encoder, planned(other, encoder, tmp_path), batch_size=2, executor="inline")
        with pytest.raises(ValueError, match=r"another plan, which differs in the data \(source, its rows"):
            fresh.load_state_dict(state)


def test_messages_name_each_samples_own_file_line_and_id(tmp_path, encoder):
    """A bad row that comes three times is refused three times; in strict mode it is raised."""
    good = mmdp.open_source(write_data(tmp_path / "good", (0, 0)))
    path = write_data(tmp_path / "mended", (0, 1, 0))
    (tmp_path / "mended" / "4-0.png").unlink()
    source = mmdp.mix([(good, 1), (mmdp.open_source(path), 3)])
    sizes = mmdp.measure(source, encoder, cache=tmp_path)
    bad = [index for index in range(len(source)) if source.origin(index) == (1, 4)]
    assert 3 == len(bad)
    assert dict.fromkeys(bad, Reason.MISSING_IMAGE) == sizes.skipped
    messages = sizes.messages()
    assert all(message.startswith("rows.jsonl:5 (id 's4')") for message in messages.values())
    with pytest.raises(DataError, match=r"rows\.jsonl:5 \(id 's4'\).*missing_image"):
        mmdp.measure(source, encoder, strict=True, cache=tmp_path)


def test_it_is_small_whatever_its_size(tmp_path):
    """It goes to every worker: its sources, and some numbers. A million samples find their place in a moment."""
    source = mmdp.mix([(Counted(10**6), 1.7), (Counted(10**9, "large"), 1.5)])
    assert len(pickle.dumps(source)) < 2**10
    copy = pickle.loads(pickle.dumps(source))
    assert (source.fingerprint, len(source)) == (copy.fingerprint, 1_501_700_000)
    numbers = range(0, len(source), 10**6 + 7)
    assert [source.origin(number) for number in numbers] == [copy.origin(number) for number in numbers]


# Where the sources lie


def test_the_same_rows_over_other_images_are_measured_anew(tmp_path, encoder):
    """As of one source: the folder of the images tells token caches apart, since no row does."""
    path = write_data(tmp_path / "rows", (1, 1))
    pictures = write_data(tmp_path / "pictures", (1, 1)).parent
    (pictures / "0-0.png").unlink()
    here = mmdp.mix([(mmdp.open_source(path), 1)])
    there = mmdp.mix([(mmdp.open_source(path, config=Config(image_folder=str(pictures))), 1)])
    assert here.fingerprint == there.fingerprint
    assert not mmdp.measure(here, encoder, cache=tmp_path).skipped
    assert {0: Reason.MISSING_IMAGE} == mmdp.measure(there, encoder, cache=tmp_path).skipped


@pytest.mark.parametrize("executor", ["inline", "threads", "processes"])
def test_each_source_fetches_as_it_was_opened(executor, files, encoder, tmp_path):
    """Rows here and there, images on two servers and this disk: the batches are those of the same files on the disk."""
    near = mmdp.mix([*zip(files, (1, 2, 0.5), strict=True)])
    folders = [Path(file.location) for file in files]
    shelves = [{f"set/{path.name}": path.read_bytes() for path in folder.iterdir()} for folder in folders]
    with Shelf(shelves[0]) as one, Shelf(shelves[1]) as two:
        config = Config(cache_dir=tmp_path / "cache", http_hosts=(one.place,), max_fetches=3)
        whole = mmdp.open_source(f"{one.endpoint}/set/a.jsonl", config=config)
        config = Config(
            cache_dir=tmp_path / "cache", http_hosts=(two.place,), max_fetches=5, image_folder=f"{two.endpoint}/set"
        )
        images = mmdp.open_source(folders[1] / "b.jsonl", config=config)
        far = mmdp.mix([(whole, 1), (images, 2), (files[2], 0.5)])
        assert 5 == far.max_fetches
        assert near.fingerprint == far.fingerprint
        assert near.location != far.location
        one.asked.clear()
        found = []
        for source in (near, far):
            plan = planned(source, encoder, tmp_path)
            with mmdp.Loader(source, encoder, plan, batch_size=2, executor=executor, num_workers=2) as loader:
                found.append([rows_of(batch) for batch in loader])
        assert found[0] == found[1]
        for shelf, folder in ((one, folders[0]), (two, folders[1])):
            assert {f"set/{path.name}" for path in folder.glob("*.png")} == {name for name, _ in shelf.asked}


def test_a_source_of_ones_own_is_mixed_like_any_other(files):
    """It has none of what sources of this package have beyond the protocol."""
    source = mmdp.mix([(Wrapped(files[0]), 0.5), (Counted(3), 1)])
    assert 1 == source.max_fetches
    assert source.location == mmdp.mix([(Counted(3), 1), (Counted(3), 1)]).location


def test_the_mix_that_the_guide_shows_works(tmp_path, monkeypatch, encoder):
    """docs/own_data.md: its code as it stands there; then measured and planned as it says."""
    text = (Path(__file__).resolve().parent.parent / "docs" / "own_data.md").read_text()
    code = text.split("## Several data sets")[1].split("```python\n")[1].split("```")[0]
    write_data(tmp_path / "my", (1, 0), repeat=4).rename(tmp_path / "my" / "train.jsonl")
    write_data(tmp_path / "my", (0,), repeat=16).rename(tmp_path / "my" / "chat.jsonl")
    rows = [{"texts": [{"user": "what is it", "assistant": f"{number}"}]} for number in range(5)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "my" / "charts.parquet")
    monkeypatch.chdir(tmp_path)
    shown: dict[str, mmdp.mixture.Mixture] = {}
    exec(code, shown)
    source = shown["source"]
    sources = [source[index].source for index in range(len(source))]
    assert {"train": 8, "charts": 15, "chat": 4} == Counter(re.split(r"\W", place)[0] for place in sources)
    sizes = mmdp.measure(source, encoder, cache=tmp_path)
    assert not sizes.skipped
    assert (0, 3) == source.origin(3)
    seen = [index for row in mmdp.plan(sizes, BUDGET).epoch(0) for index in row.tolist()]
    assert list(range(27)) == sorted(seen)
