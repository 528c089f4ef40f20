"""Laws of `measuring.py`, `sizes.py` and `token_cache.py`: measured once, counted whole, resumed exactly."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from small import MARKS, QWEN_MARKS, tokenizer, write_data

import mmdp
from mmdp import token_cache
from mmdp.config import Config
from mmdp.knapsack import pack
from mmdp.measuring import measure
from mmdp.records import Budget
from mmdp.refusals import DataError, Reason
from mmdp.sizes import Sizes, read_sizes
from mmdp.token_cache import TokenCache


@pytest.fixture
def encoder():
    return mmdp.Encoder(tokenizer(), "fixed:4")


def measuring_process(path: Path, cache: Path) -> subprocess.Popen:
    """Another process that measures a data set into this cache. It prints when it begins, and what it has found."""
    folder = cache.parent / "tokenizer"
    if not folder.exists():
        tokenizer().save_pretrained(folder)
    script = (
        "import sys, mmdp\nfrom pathlib import Path\n"
        "source = mmdp.open_source(sys.argv[1]); encoder = mmdp.Encoder(sys.argv[2], 'fixed:4')\n"
        "print('ready', flush=True); sizes = mmdp.measure(source, encoder, cache=Path(sys.argv[3]))\n"
        "print(len(sizes.kept()), int(sizes.tokens.sum()))\n"
    )
    arguments = [sys.executable, "-c", script, str(path), str(folder), str(cache)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def test_sizes_are_those_of_the_encoded_samples(tmp_path, encoder):
    """Law 4: token for token and image for image, and the cache gives back ids, labels and layouts."""
    source = mmdp.open_source(write_data(tmp_path))
    sizes = measure(source, encoder, cache=tmp_path)
    for index in range(len(source)):
        wanted, got = encoder.encode(source[index]), sizes.encoded(index)
        assert (len(wanted.ids), len(wanted.layouts)) == (sizes.tokens[index], sizes.images[index])
        assert (wanted.size.label_tokens, wanted.size.vision) == (sizes.label_tokens[index], sizes.vision[index])
        assert np.array_equal(wanted.ids, got.ids)
        assert np.array_equal(wanted.labels, got.labels)
        assert wanted.layouts == got.layouts
        assert not got.ids.flags.writeable
    assert [1, 0, 2, 1] * 3 == sizes.images.tolist()


def test_measuring_decodes_no_pixel_and_happens_once(tmp_path, encoder, monkeypatch):
    """Plan first, pixels last: images cut behind their header measure alike, and a second call encodes nothing."""
    path = write_data(tmp_path)
    for image in tmp_path.glob("*.png"):
        image.write_bytes(image.read_bytes()[:60])
    source = mmdp.open_source(path)
    first = measure(source, encoder, cache=tmp_path)
    assert {} == first.skipped
    monkeypatch.setattr(type(encoder), "encode", lambda *_: pytest.fail("encoded again"))
    again = measure(source, encoder, cache=tmp_path)
    assert first.tokens.tolist() == again.tokens.tolist()
    assert first.fingerprint == again.fingerprint


def test_kept_and_refused_are_all_that_was_read(tmp_path, encoder):
    """Every row is kept or counted under a reason, and its message names file, line, id and field."""
    path = write_data(tmp_path)
    (tmp_path / "0-0.png").write_bytes(b"")
    (tmp_path / "3-0.png").write_bytes(b"<html>404</html>")
    path.write_text(path.read_text() + '{"texts": []}\n{broken\n')
    source = mmdp.open_source(path)
    sizes = measure(source, encoder, cache=tmp_path)
    assert 14 == len(source) == len(sizes.kept()) + len(sizes.skipped)
    assert {0: Reason.EMPTY_IMAGE, 3: Reason.NOT_AN_IMAGE, 13: Reason.INVALID_JSON} == {
        index: reason for index, reason in sizes.skipped.items() if index != 12
    }
    assert Counter(sizes.counts()) == Counter(map(str, sizes.skipped.values()))
    messages = sizes.messages()
    assert sizes.skipped.keys() == messages.keys()
    assert "rows.jsonl:1 (id 's0'), field images[0] = '0-0.png'" in messages[0]
    assert "rows.jsonl:14" in messages[13]
    with pytest.raises(DataError, match=r"rows\.jsonl:1 "):
        measure(source, encoder, cache=tmp_path, strict=True)
    with pytest.raises(DataError):
        sizes.encoded(0)


def test_what_a_budget_refuses_is_told_with_its_place(tmp_path, encoder):
    """File, line and id, as of a bad row, where the source is at hand; else which sample it is. And what to do."""
    source = mmdp.open_source(write_data(tmp_path, (1, 0, 3), repeat=1))
    sizes = measure(source, encoder, cache=tmp_path)
    budget = Budget(tokens=int(sizes.tokens[1]), images=9)
    says = f": too_long: it has {sizes.tokens[2]:,} tokens, images: 3; a row holds {budget.tokens} tokens, images: 9: "
    with_place, without = sizes.messages(budget, source)[2], sizes.messages(budget)[2]
    assert with_place.startswith("rows.jsonl:3 (id 's2')" + says)
    assert without.startswith("sample 2, counted from 0" + says)
    assert "raise the budget" in without
    assert [0, 2] == sorted(sizes.messages(budget))
    (text,) = sizes.messages(Budget(tokens=10_000, images=2), source).values()
    assert text.startswith("rows.jsonl:3 (id 's2'): too_many_images: ")


def test_strict_raises_the_first_bad_sample_of_a_fresh_run(tmp_path, encoder):
    """In strict mode a bad row ends the run, with its own message."""
    path = write_data(tmp_path, (0,), repeat=1)
    path.write_text(path.read_text() + "{broken\n")
    with pytest.raises(DataError, match=r"rows\.jsonl:2"):
        measure(mmdp.open_source(path), encoder, cache=tmp_path, strict=True)


def test_an_image_that_came_later_is_found(tmp_path, encoder):
    """A refusal for an image is looked at again; other refusals are not."""
    path = write_data(tmp_path)
    image = (tmp_path / "0-0.png").read_bytes()
    (tmp_path / "0-0.png").unlink()
    source = mmdp.open_source(path)
    assert {0: Reason.MISSING_IMAGE} == measure(source, encoder, cache=tmp_path).skipped
    (tmp_path / "0-0.png").write_bytes(b"x")
    assert {0: Reason.NOT_AN_IMAGE} == measure(source, encoder, cache=tmp_path).skipped
    (tmp_path / "0-0.png").write_bytes(image)
    sizes = measure(source, encoder, cache=tmp_path)
    assert {} == sizes.skipped
    assert {} == sizes.messages()
    assert 12 == len(sizes.kept())
    assert len(encoder.encode(source[0]).ids) == len(sizes.encoded(0).ids)


def test_a_transient_error_is_no_reason_to_skip(tmp_path, encoder, monkeypatch):
    """An OSError stops the run; what was measured stays, and the next run goes on."""
    path = write_data(tmp_path, (0,), repeat=200)
    source = mmdp.open_source(path)
    real, calls = type(encoder).encode, []

    def failing(self, sample, *sizes):
        calls.append(sample.id)
        if len(calls) == 100:
            raise OSError("the disk went away")
        return real(self, sample, *sizes)

    monkeypatch.setattr(type(encoder), "encode", failing)
    with pytest.raises(OSError, match="went away"):
        measure(source, encoder, cache=tmp_path)
    sizes = measure(source, encoder, cache=tmp_path)
    assert {} == sizes.skipped
    assert 200 == len(set(calls))
    assert len(calls) < 200 + 100


def test_a_killed_run_goes_on_where_it_was(tmp_path):
    """kill -9 in the middle: the next run measures the rest only, and its sizes are those of an undisturbed run."""
    path = write_data(tmp_path / "data", (1, 0), repeat=600)
    child = measuring_process(path, tmp_path / "killed")
    assert "ready\n" == child.stdout.readline()
    records = lambda: list((tmp_path / "killed").glob("tokens/*/records.bin"))  # noqa: E731
    deadline = time.monotonic() + 60
    while not (records() and records()[0].stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    child.wait(10)
    child.stdout.close()
    itemsize = token_cache._RECORD.itemsize
    assert 0 < records()[0].stat().st_size < 1200 * itemsize
    with records()[0].open("ab") as file:
        file.write(b"half a record")  # as if killed while writing
    source = mmdp.open_source(path)
    encoder = mmdp.Encoder(str(tmp_path / "tokenizer"), "fixed:4")
    resumed = measure(source, encoder, cache=tmp_path / "killed")
    fresh = measure(source, encoder, cache=tmp_path / "fresh")
    for index in range(1200):
        assert np.array_equal(fresh.encoded(index).ids, resumed.encoded(index).ids)
        assert fresh.encoded(index).layouts == resumed.encoded(index).layouts
    assert fresh.fingerprint == resumed.fingerprint
    assert 1200 * itemsize == records()[0].stat().st_size


def test_records_whose_data_is_lost_are_measured_again(tmp_path, encoder):
    """A machine that lost power may keep a record and lose its tokens: such a record does not count."""
    source = mmdp.open_source(write_data(tmp_path))
    first = measure(source, encoder, cache=tmp_path)
    wanted = [first.encoded(index).ids.tolist() for index in range(12)]
    ids = next(tmp_path.glob("tokens/*/ids.i32"))
    os.truncate(ids, ids.stat().st_size - 10)
    sizes = measure(source, encoder, cache=tmp_path)
    assert wanted == [sizes.encoded(index).ids.tolist() for index in range(12)]


@pytest.mark.parametrize("name", ["ids.i32", "labels.i32", "layouts.i32"])
def test_damaged_data_is_never_delivered(tmp_path, encoder, name):
    """A cache whose bytes are not those that were written says so, and which folder to delete."""
    source = mmdp.open_source(write_data(tmp_path))
    sizes = measure(source, encoder, cache=tmp_path)
    path = next(tmp_path.glob(f"tokens/*/{name}"))
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(RuntimeError, match="damaged: delete this folder"):
        pickle.loads(pickle.dumps(sizes)).encoded(0)


@pytest.mark.parametrize("field", ["reason", "index", "tokens"])
def test_damaged_records_are_measured_again(tmp_path, encoder, field):
    """A record that can't be right is dropped with all behind it."""
    source = mmdp.open_source(write_data(tmp_path))
    wanted = measure(source, encoder, cache=tmp_path).tokens.tolist()
    path = next(tmp_path.glob("tokens/*/records.bin"))
    records = np.fromfile(path, token_cache._RECORD)
    records[field][4] = {"reason": 255, "index": -5, "tokens": 0}[field]
    records.tofile(path)
    assert wanted == measure(source, encoder, cache=tmp_path).tokens.tolist()


def test_the_same_rows_in_two_places_have_their_own_sizes(tmp_path):
    """Same JSON lines, other images: nothing of the one is taken for the other."""
    encoder = mmdp.Encoder(tokenizer(marks=[*MARKS, *QWEN_MARKS]), "qwen3_vl:min_pixels=1024")
    found = []
    for name, side in (("a", 64), ("b", 320)):
        path = write_data(tmp_path / name, (1,), repeat=1)
        Image.new("RGB", (side, side)).save(tmp_path / name / "0-0.png")
        found.append(int(measure(mmdp.open_source(path), encoder, cache=tmp_path).tokens[0]))
    assert (64 // 32) ** 2 - (320 // 32) ** 2 == found[0] - found[1]


def test_an_image_that_changed_its_size_is_refused_when_its_row_is_built(tmp_path):
    """Law 4: what was measured is delivered, or the sample leaves its row with a reason."""
    encoder = mmdp.Encoder(tokenizer(marks=[*MARKS, *QWEN_MARKS]), "qwen3_vl:min_pixels=1024")
    source = mmdp.open_source(write_data(tmp_path, (1, 1), repeat=1))
    sizes = measure(source, encoder, cache=tmp_path)
    Image.new("RGB", (320, 320)).save(tmp_path / "0-0.png")
    row = mmdp.RowBuilder(source, encoder, sizes)([0, 1])
    assert ({0: Reason.CHANGED_IMAGE}, (1,)) == (row.skipped, row.samples)


def test_sizes_of_other_data_are_refused(tmp_path, encoder):
    """Sizes go with the source and encoder they were measured with."""
    source = mmdp.open_source(write_data(tmp_path / "a"))
    other = mmdp.open_source(write_data(tmp_path / "b", (0, 1)))
    with pytest.raises(ValueError, match="another source or encoder"):
        mmdp.RowBuilder(other, encoder, measure(source, encoder, cache=tmp_path))


def test_a_raised_limit_and_a_mended_image_count_at_once(tmp_path, encoder):
    """What may be good by now is looked at again in every run, also in one that measures more; strict notices."""
    path = write_data(tmp_path, (0, 1), repeat=40)
    image = (tmp_path / "3-0.png").read_bytes()
    (tmp_path / "3-0.png").unlink()
    small = mmdp.open_source(path, config=Config(max_row_bytes=85))
    assert {1: Reason.ROW_TOO_LARGE} == measure(small, encoder, samples=2, cache=tmp_path).skipped
    source = mmdp.open_source(path)
    assert {3: Reason.MISSING_IMAGE} == measure(source, encoder, samples=10, cache=tmp_path).skipped
    (tmp_path / "3-0.png").write_bytes(image)
    assert {} == measure(source, encoder, cache=tmp_path, strict=True).skipped


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_folder_that_can_not_be_written_is_said(tmp_path, encoder):
    """A read-only cache: measured into a temporary folder, with a warning that names the variable."""
    (tmp_path / "cache").mkdir(mode=0o500)
    with pytest.warns(UserWarning, match="MMDP_CACHE"):
        measure(mmdp.open_source(write_data(tmp_path / "data")), encoder, cache=tmp_path / "cache")


def test_a_cache_folder_that_is_a_file_is_said(tmp_path, encoder):
    """As above, in a way that stops root too."""
    (tmp_path / "cache").write_text("")
    source = mmdp.open_source(write_data(tmp_path / "data"))
    with pytest.warns(UserWarning, match="MMDP_CACHE"):
        assert 12 == len(measure(source, encoder, cache=tmp_path / "cache").kept())


def test_other_settings_have_other_caches(tmp_path, encoder):
    """The fingerprint holds source and encoder: nothing stale is ever read."""
    path = write_data(tmp_path)
    first = measure(mmdp.open_source(path), encoder, cache=tmp_path)
    other = measure(mmdp.open_source(path), mmdp.Encoder(tokenizer(), "fixed:5"), cache=tmp_path)
    assert first.fingerprint != other.fingerprint
    assert (first.tokens + first.images).tolist() == other.tokens.tolist()
    path.write_text(path.read_text().replace("fox", "owl fox"))
    changed = measure(mmdp.open_source(path), encoder, cache=tmp_path)
    assert first.fingerprint != changed.fingerprint
    assert (changed.tokens > first.tokens).all()


def test_a_budget_that_many_samples_miss_is_said_with_a_better_one(tmp_path, encoder):
    """More than 5 % over: a warning with a budget that holds 99 %; at most 5 %: none."""
    source = mmdp.open_source(write_data(tmp_path))
    sizes = measure(source, encoder, cache=tmp_path)
    tight = Budget(tokens=int(np.median(sizes.tokens)), images=1)
    with pytest.warns(UserWarning, match=r"fit no row .* --max-images") as caught:
        measure(source, encoder, budget=tight, cache=tmp_path)
    better = sizes.suggest()
    assert f"--max-tokens {better.tokens} --max-images {better.images}" in str(caught[0].message)
    assert {} == sizes.refused(better)
    over = set(np.flatnonzero((sizes.tokens > tight.tokens) | (sizes.images > 1)).tolist())
    assert over == set(sizes.refused(tight))
    assert 12 == len(sizes.kept(tight)) + len(over)
    measure(source, encoder, budget=better, cache=tmp_path)


def sizes_of(tokens: list[int], images: list[int], folder: Path) -> Sizes:
    """Sizes as `measure` leaves them, without a source."""
    sizes = read_sizes(TokenCache(folder), len(tokens), "made")
    sizes.tokens[:], sizes.images[:] = tokens, images
    return sizes


def test_a_budget_without_the_few_longest_is_suggested_too(tmp_path):
    """Where a handful of samples asks for a row of many times the tokens; not where lengths are even."""
    even = sizes_of(list(range(100, 200)), [1] * 100, tmp_path / "even")
    assert [("99 %", even.suggest())] == even.suggestions()
    spiky = sizes_of([*range(100, 197), 3000, 3000, 9000], [1] * 100, tmp_path / "spiky")
    (_, most), (share, fewer) = spiky.suggestions()
    assert ("95 %", 3008, 320) == (share, most.tokens, fewer.tokens)
    assert fewer == spiky.suggest(share=0.95)
    assert 3 == len(spiky.refused(fewer))


@pytest.mark.parametrize(
    "tokens",
    [
        pytest.param([134] * 600, id="all alike"),
        pytest.param(list(range(100, 200)) * 6, id="even"),
        pytest.param(np.random.default_rng(0).lognormal(5.5, 0.8, 2000).astype(int).tolist(), id="as text is"),
    ],
)
def test_rows_of_a_suggested_budget_are_full(tokens, tmp_path):
    """Also where lengths are so even that a row of the longest would hold but one sample, and a third of padding."""
    sizes = sizes_of(tokens, [0] * len(tokens), tmp_path)
    for _, budget in sizes.suggestions():
        fitting = np.array([length for length in tokens if length <= budget.tokens])
        rows = pack(fitting, None, budget)
        assert fitting.sum() >= 0.95 * budget.tokens * (len(rows) - 1)
        assert budget.tokens <= max(2 * max(tokens), 20 * np.mean(tokens))


@pytest.mark.parametrize(
    ("tokens", "images", "wanted"),
    [([283] * 200, [3] * 200, 9), ([250] * 12, [2] * 12, 8), ([700], [1], 1), ([100] * 50, [0] * 50, 0)],
)
def test_no_more_images_are_suggested_than_rows_ever_hold(tmp_path, tokens, images, wanted):
    """The least with which rows are as few, and not what the mean of all samples would give."""
    assert wanted == sizes_of(tokens, images, tmp_path).suggest(1024).images


@pytest.mark.parametrize("num_samples", [40, 900])
def test_the_least_number_of_images_is_suggested(tmp_path, num_samples):
    """One fewer costs more rows than 2 %."""
    draw = np.random.default_rng(num_samples)
    tokens, images = draw.integers(60, 500, num_samples), draw.integers(0, 4, num_samples)
    suggested = sizes_of(tokens.tolist(), images.tolist(), tmp_path).suggest(1024).images
    assert suggested is not None
    free, enough, fewer = (len(pack(tokens, images, Budget(1024, most))) for most in (None, suggested, suggested - 1))
    assert enough <= 1.02 * free < fewer


@pytest.mark.parametrize("num_tokens", [256, 512, 1024, 4096])
def test_a_suggested_number_of_images_does_not_close_rows_early(tmp_path, num_tokens):
    """With it, rows are at most 2 % more than with any number, also where a few samples bring most images."""
    random = np.random.default_rng(num_tokens)
    images = random.choice([0, 0, 0, 1, 1, 6], 2000)
    tokens = np.minimum(20 * images + random.integers(40, 120, 2000), 250)
    sizes = sizes_of(tokens.tolist(), images.tolist(), tmp_path)
    better = sizes.suggest(num_tokens)
    assert num_tokens == better.tokens
    assert better.images is not None
    least = len(pack(tokens, None, Budget(num_tokens)))
    assert len(pack(tokens, images, better)) <= max(1.02 * least, least + 1)
    assert better.images < 3 * num_tokens * images.sum() / tokens.sum() + 6  # no more than is of use


def test_few_samples_get_no_more_images_than_their_rows_hold(tmp_path):
    """Where one row more or less is a large share, the suggestion stays at what rows without a limit would hold."""
    random = np.random.default_rng(3)
    tokens, images = random.integers(300, 900, 45), random.integers(1, 3, 45)
    suggested = sizes_of(tokens.tolist(), images.tolist(), tmp_path).suggest(1024).images
    free = pack(tokens, None, Budget(1024))
    assert suggested is not None
    assert images.max() <= suggested <= max(images[row].sum() for row in free) < images.sum()


def test_samples_that_do_not_fit_have_no_say_in_the_images(tmp_path):
    """Long samples without images do not lower the number that is suggested for a budget they don't fit."""
    tokens, images = [100, 90, 110] * 20 + [5000] * 20, [1] * 60 + [0] * 20
    sizes = sizes_of(tokens, images, tmp_path)
    assert sizes_of(tokens[:60], images[:60], tmp_path).suggest(1000) == sizes.suggest(1000)
    assert 7 == len(pack(tokens[:60], None, Budget(1000)))
    assert 9 == sizes.suggest(1000).images  # of seven rows, six of nine and one of six
    with pytest.raises(ValueError, match="no sample fits 50 tokens: the shortest has 90"):
        sizes.suggest(50)


def test_no_usable_sample_is_an_error(tmp_path, encoder):
    """PACK-05: an epoch that yields nothing is an error, with the counts and the first message."""
    path = tmp_path / "rows.jsonl"
    path.write_text("{broken\n" * 3)
    with pytest.raises(ValueError, match=r"none of the 3 samples.*invalid_json.*rows\.jsonl:1"):
        measure(mmdp.open_source(path), encoder, cache=tmp_path)


def test_sizes_travel_to_workers(tmp_path, encoder):
    """A pickle holds no tokens: a worker maps the files anew."""
    sizes = measure(mmdp.open_source(write_data(tmp_path)), encoder, cache=tmp_path)
    other = pickle.loads(pickle.dumps(sizes))
    assert sizes.encoded(2).ids.tolist() == other.encoded(2).ids.tolist()


def test_the_first_samples_only(tmp_path, encoder):
    """`samples` measures the first so many, and more of them later."""
    source = mmdp.open_source(write_data(tmp_path))
    few = measure(source, encoder, samples=5, cache=tmp_path)
    more = measure(source, encoder, samples=100, cache=tmp_path)
    assert (5, 12) == (len(few), len(more))
    assert few.tokens.tolist() == more.tokens[:5].tolist()


def test_two_processes_measure_at_once(tmp_path):
    """The second waits for the first, and both have the whole."""
    path = write_data(tmp_path / "data", (0,), repeat=500)
    children = [measuring_process(path, tmp_path / "cache") for _ in range(2)]
    first, second = (child.communicate(timeout=120)[0] for child in children)
    assert first == second
    assert first.startswith("ready\n500 ")


def test_the_command_measures_beforehand(tmp_path):
    """`python -m mmdp.measure DATA` fills the cache and says what it found; the function stays callable."""
    path = write_data(tmp_path / "data")
    tokenizer().save_pretrained(tmp_path / "tokenizer")
    environment = {**os.environ, "MMDP_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-W", "error::RuntimeWarning", "-m", "mmdp.measure", str(path)]
    command += ["--tokenizer", str(tmp_path / "tokenizer"), "--vision", "fixed:4", "--max-tokens", "64"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "12 samples of rows.jsonl: 12 can be used" in done.stdout
    assert list((tmp_path / "cache").glob("tokens/*/records.bin"))
    check = "import mmdp.measure; assert callable(mmdp.measure); import mmdp; mmdp.measure"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_real_rows(shared, tmp_path):
    """565 real rows with the real SmolLM2 tokenizer: all are kept, with the images the rows have."""
    source = mmdp.open_source(shared / "data" / "real-vqa" / "train.jsonl")
    sizes = measure(source, mmdp.Encoder(str(shared / "tokenizers" / "smollm2")), cache=tmp_path)
    rows = [json.loads(line) for line in (shared / "data" / "real-vqa" / "train.jsonl").read_bytes().splitlines()]
    assert {} == sizes.skipped
    assert [len(row["images"]) for row in rows] == sizes.images.tolist()
    assert 720 == sizes.images.sum()  # 698 files, some used by several rows
