"""Laws of `mmdp.sources`: every good row once, every bad row by its place, from any process and at any size."""

import gc
import io
import json
import multiprocessing
import os
import pickle
import random
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import datasets
import numpy as np
import psutil
import pytest
import small
from PIL import Image

import mmdp
from mmdp import store
from mmdp.config import Config
from mmdp.encode import Encoder
from mmdp.measuring import measure
from mmdp.records import Sample
from mmdp.refusals import DataError, Reason
from mmdp.sources import open_source


@pytest.fixture(scope="module")
def handed(case_script, tmp_path_factory):
    """The folder of the handed text cases, with what is expected of each file."""
    folder = tmp_path_factory.mktemp("rows")
    case_script("make_rows").main(str(folder))
    return folder, json.loads((folder / "expected.json").read_text())


def row(number):
    return {"id": f"r{number}", "images": [], "texts": [{"user": f"What is {number}?", "assistant": str(number)}]}


def write(path, *items):
    """A file of lines; an item is a row, or a line as it is."""
    path.write_bytes(
        b"".join((item if isinstance(item, bytes) else json.dumps(item).encode()) + b"\n" for item in items)
    )
    return path


def read_all(source):
    """The samples, and the errors, of all rows."""
    samples, errors = [], []
    for number in range(len(source)):
        try:
            samples.append(source[number])
        except DataError as error:
            errors.append(error)
    return samples, errors


# Opening


def test_a_list_of_rows(tmp_path):
    """Length, indices from both ends, IndexError beyond, numbers of NumPy; iteration ends."""
    source = open_source(write(tmp_path / "x.jsonl", row(0), row(1), row(2)))
    assert 3 == len(source)
    assert ["r0", "r1", "r2"] == [sample.id for sample in source]
    assert (source[2], source[0]) == (source[-1], source[-3])
    assert source[1] == source[np.int64(1)]
    for index in (3, -4):
        with pytest.raises(IndexError, match="of 3"):
            source[index]
    with pytest.raises(TypeError):
        source["0"]
    assert "x.jsonl" == source.name


def test_images_are_relative_to_the_file(handed):
    """The root of every reference is the file's folder, and the store finds it."""
    folder, _ = handed
    (image,) = open_source(folder / "labels.jsonl")[0].images
    assert (str(folder), "red.png") == (image.root, image.name)
    assert (folder / "red.png").read_bytes() == store.read(image)


def test_a_path_may_be_relative(tmp_path, monkeypatch):
    """It means what it meant when it was opened, whatever the working folder is later."""
    write(tmp_path / "x.jsonl", row(0))
    monkeypatch.chdir(tmp_path)
    source = open_source("x.jsonl")
    monkeypatch.chdir("/")
    copy = pickle.loads(pickle.dumps(source))
    assert source[0] == copy[0]


def test_the_demo_set_is_lines_of_its_own(tmp_path, monkeypatch):
    """`demo` asks `mmdp.demo` for its file, in the cache folder, and is called by that name."""
    asked = []

    def demo_jsonl(cache):
        asked.append(cache)
        return write(tmp_path / "train.jsonl", row(0))

    monkeypatch.setitem(sys.modules, "mmdp.demo", SimpleNamespace(demo_jsonl=demo_jsonl))
    monkeypatch.setattr("mmdp.demo", sys.modules["mmdp.demo"], raising=False)
    source = open_source("demo", config=Config(cache_dir=tmp_path / "cache"))
    assert [tmp_path / "cache"] == asked
    assert ("demo", "train.jsonl:1", 1) == (source.name, source[0].source, len(source))


def test_the_fingerprint_is_of_the_content(tmp_path):
    """The same bytes elsewhere give the same one; one other byte gives another."""
    (tmp_path / "b").mkdir()
    first = open_source(write(tmp_path / "a.jsonl", row(0)))
    second = open_source(write(tmp_path / "b" / "c.jsonl", row(0)))
    third = open_source(write(tmp_path / "d.jsonl", row(1)))
    assert first.fingerprint == second.fingerprint != third.fingerprint
    assert bytes.fromhex(first.fingerprint)


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("s3://bucket/train.csv", ["s3://BUCKET/FILE", "hf:NAME/CONFIG"]),
        ("s3://bucket/train.jsonl.gz", ["gunzip"]),
        ("s3://bucket", ["s3://BUCKET/FILE"]),
        ("ftp://host/train.jsonl", ["s3://", "https://"]),
        ("https://host/train.jsonl", ["http_hosts", "'host'"]),
        ("https://user@host/train.jsonl", ["plain addresses"]),
        ("https://host/train.jsonl?key=1", ["plain addresses"]),
        ("train.csv", ["demo", ".jsonl", ".parquet", "hf:NAME/CONFIG"]),
        ("the_cauldron", ["demo", ".jsonl", ".parquet", "hf:NAME/CONFIG"]),
        ("", [".jsonl"]),
        ("train.json", ["python -c", "one JSON value"]),
        ("train.jsonl.gz", ["gunzip"]),
        ("train.jsonl.zst", ["unzstd"]),
        ("shard-000.tar", ["shard", "unpack it beside a .jsonl", "StreamLoader", "docs/own_data.md"]),
        ("train.ndjson", ["rename"]),
        ("hf:", ["hf:NAME/CONFIG"]),
        ("hf:name", ["hf:NAME/CONFIG"]),
        ("hf:org/", ["hf:NAME/CONFIG"]),
    ],
)
def test_what_cant_be_read_is_said_with_the_way_out(uri, words, tmp_path, monkeypatch):
    """ValueError: what was given, what is accepted, what to do."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r".") as caught:
        open_source(uri)
    assert not [word for word in words if word not in str(caught.value)]


def test_a_missing_file_is_named_in_full(tmp_path, monkeypatch):
    """FileNotFoundError with the whole path, since the working folder is the usual cause."""
    monkeypatch.chdir(tmp_path)
    for name in ("x.jsonl", "x.parquet"):
        with pytest.raises(FileNotFoundError, match=str(tmp_path / name)):
            open_source(name)


def test_an_address_with_one_slash_is_told():
    """It reads as a path, and is none."""
    with pytest.raises(FileNotFoundError, match=r"Was s3:// meant, with two slashes\?"):
        mmdp.open_source("s3:/bucket/train.jsonl")


def test_a_folder_says_which_of_its_files_can_be_read(tmp_path):
    """A folder is no data set, but its files may be."""
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match="no file in it"):
        open_source(tmp_path)
    write(tmp_path / "train.jsonl", row(0))
    (tmp_path / "val.parquet").touch()
    with pytest.raises(ValueError, match=r"'train\.jsonl', 'val\.parquet'"):
        open_source(tmp_path)
    (tmp_path / "dir.jsonl").mkdir()
    with pytest.raises(ValueError, match="is a folder"):
        open_source(tmp_path / "dir.jsonl")


def table():
    """Three rows in memory, one with a picture that lies in it as a file."""
    rows = [row(number) for number in range(3)]
    file = io.BytesIO()
    Image.new("RGB", (9, 7), "red").save(file, "PNG")
    rows[1]["images"] = [{"bytes": file.getvalue(), "path": None}]
    made = datasets.Dataset.from_list(rows)
    return made.cast_column("images", datasets.List(datasets.Image())), file.getvalue()


def test_a_table_in_memory_says_how_to_open_it(tmp_path, monkeypatch):
    """A `datasets.Dataset`, whole or in splits: the code that the error names opens it, pictures byte for byte."""
    monkeypatch.chdir(tmp_path)
    rows, file = table()
    encoder = Encoder(small.tokenizer(), "fixed:4:side=8")
    for given in (rows, datasets.DatasetDict({"all": rows}), rows.to_iterable_dataset()):
        with pytest.raises(TypeError, match=f"this {type(given).__name__} is no address") as opened:
            open_source(given)
        with pytest.raises(ValueError, match=f"this {type(given).__name__} is no source") as measured:
            measure(given, encoder, cache=tmp_path)
        for error in (opened, measured):
            assert isinstance(given, datasets.IterableDataset) == ("mmdp.StreamLoader" in str(error.value))
            write_it, open_it = re.search(
                r"once with (.*?\)), and open that with (mmdp\.\S+?\))", str(error.value)
            ).groups()
            eval(f"given{write_it}", {"given": given})
            source = eval(open_it, {"mmdp": mmdp})
            assert ["r0", "r1", "r2"] == [sample.id for sample in read_all(source)[0]]
            assert file == source[1].images[0].data


def test_a_table_of_paths_is_opened_by_way_of_the_disk(tmp_path, monkeypatch):
    """`to_parquet` leaves files that are named by path where they are; saved and loaded, the table holds them."""
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (9, 7), "red").save("a.png")
    rows = datasets.Dataset.from_list([row(0) | {"images": [str(tmp_path / "a.png")]}])
    rows = rows.cast_column("images", datasets.List(datasets.Image()))
    rows.to_parquet("x.parquet")
    assert open_source("x.parquet")[0].images[0].data is None  # why the error goes on to say what it says
    with pytest.raises(TypeError, match="by path, save_to_disk takes the files in: write what load_from_disk then"):
        open_source(rows)
    rows.save_to_disk("saved")
    datasets.load_from_disk("saved").to_parquet("x.parquet")
    assert (tmp_path / "a.png").read_bytes() == open_source("x.parquet")[0].images[0].data
    with pytest.raises(TypeError) as caught:
        open_source(SimpleNamespace(to_parquet=None))
    assert "save_to_disk" not in str(caught.value)


def test_what_is_no_address_is_said_with_the_way_in():
    for given in ([row(0)], 7, None):
        with pytest.raises(TypeError, match=r"is no address .*__getitem__.*StreamLoader.*Accepted: demo, a \.jsonl"):
            open_source(given)


def test_a_saved_table_says_how_to_open_it(tmp_path, monkeypatch):
    """A folder of `save_to_disk`, of one table or of splits, and the file in it: the code in the error opens them."""
    monkeypatch.chdir(tmp_path)
    rows, file = table()
    rows.save_to_disk("one")
    datasets.DatasetDict({"train": rows}).save_to_disk("split")
    for uri in ("one", "split", "one/data-00000-of-00001.arrow"):
        with pytest.raises(ValueError, match="write its rows once with") as caught:
            open_source(uri)
        code = re.search(r"once with (datasets\S+)\.to_parquet\('x\.parquet'\)", str(caught.value)).group(1)
        eval(code.replace("(IN)", f"({uri!r})"), {"datasets": datasets}).to_parquet("x.parquet")
        source = open_source("x.parquet")
        assert ["r0", "r1", "r2"] == [sample.id for sample in read_all(source)[0]]
        assert file == source[1].images[0].data


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    """Rows are read by their place, which a pipe has not."""
    os.mkfifo(tmp_path / "x.jsonl")
    with pytest.raises(ValueError, match="pipe"):
        open_source(tmp_path / "x.jsonl")


def test_lines_are_not_streamed(tmp_path):
    """A file on disk is read by row; asking for a stream says so."""
    with pytest.raises(ValueError, match="without streaming"):
        open_source(write(tmp_path / "x.jsonl", row(0)), streaming=True)


# The bytes of the file


@pytest.mark.parametrize(
    ("name", "bad_lines"),
    [
        ("bom", []),
        ("crlf", []),
        ("blank_lines", []),
        ("no_last_newline", []),
        ("cut_tail", [4]),
        ("one_bad_line", [2]),
        ("separators", []),
    ],
)
def test_handed_bytes(handed, name, bad_lines):
    """TXT-10: good rows once, each bad line by its number in the file, and kept + refused = read."""
    folder, expected = handed
    (wanted,) = expected[f"{name}.jsonl"]
    source = open_source(folder / f"{name}.jsonl")
    samples, errors = read_all(source)
    assert wanted["rows"] == len(samples)
    assert len(source) == len(samples) + len(errors)
    assert [f"{name}.jsonl:{line}" for line in bad_lines] == [error.source for error in errors]
    assert {Reason.INVALID_JSON} >= {error.reason for error in errors}


def test_line_numbers_are_those_of_the_file(handed):
    """TXT-10: with blank lines between."""
    folder, _ = handed
    samples, _ = read_all(open_source(folder / "blank_lines.jsonl"))
    lines = (folder / "blank_lines.jsonl").read_bytes().split(b"\n")
    assert [number for number, line in enumerate(lines, 1) if line.strip()] == [
        int(sample.source.rpartition(":")[2]) for sample in samples
    ]
    assert b"" == lines[0]


def test_separators_inside_strings_stay(handed):
    """TXT-10: U+2028 and U+0085 are letters of the text."""
    folder, _ = handed
    assert ["a\u2028b", "c\u0085d"] == [turn.text for turn in open_source(folder / "separators.jsonl")[0].turns]


@pytest.mark.parametrize("data", [b"", b"\n", b" \r\n\t\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
def test_a_file_without_a_row_is_an_error(tmp_path, data):
    """TXT-10: not an endless loop over nothing."""
    (tmp_path / "x.jsonl").write_bytes(data)
    with pytest.raises(ValueError, match="empty"):
        open_source(tmp_path / "x.jsonl")


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b'[{"a": 1},\n{"a": 2}]\n', "JSON array"),
        (b'[{"a": 1}]', "JSON array"),
        (b'\n [\n{"a": 1}\n]\n', "JSON array"),
        (b"[" + b"1," * 10_000, "JSON array"),
        (b"PAR1\0\0\0\0PAR1", "Parquet"),
        (b"\x1f\x8b\x08\0\0\0", "gunzip"),
        ('{"a": 1}\n'.encode("utf-16"), "UTF-16"),
    ],
)
def test_another_format_under_this_name_is_named(tmp_path, data, word):
    """TXT-10: one error for the file, not one refusal a line."""
    (tmp_path / "x.jsonl").write_bytes(data)
    with pytest.raises(ValueError, match=word):
        open_source(tmp_path / "x.jsonl", config=Config(max_row_bytes=1000))


def test_the_handed_array_says_how_to_convert(handed, tmp_path):
    """TXT-10: and the way out works."""
    folder, _ = handed
    with pytest.raises(ValueError, match="JSON array") as caught:
        open_source(folder / "array.jsonl")
    assert "json.load(sys.stdin)" in str(caught.value)
    with pytest.raises(ValueError, match="empty"):
        open_source(folder / "nothing_in_it.jsonl")


def test_a_list_on_one_line_is_one_bad_row(tmp_path):
    """It stands first and looks like an array, but the other rows are good."""
    source = open_source(write(tmp_path / "x.jsonl", [1, 2], row(0)))
    samples, errors = read_all(source)
    assert (["r0"], [Reason.INVALID_JSON]) == ([sample.id for sample in samples], [error.reason for error in errors])


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"nonsense",
        b"3",
        b'"text"',
        b"null",
        b"{}{}",
        b'{"a": "\xff"}',
        b"\xef\xbb\xbf{}",
        b"\0\0\0\0",
        b"\x0c",
        b'{"a": "tab\there"}',
        b"[" * 100_000,
        b'{"a": ' * 100_000,
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": "\xed\xa0\x80"}',
    ],
)
def test_a_line_that_is_no_object_is_one_bad_row(tmp_path, line):
    """INVALID_JSON with the line's number; its neighbours are read."""
    samples, errors = read_all(open_source(write(tmp_path / "x.jsonl", row(0), line, row(2))))
    assert ["r0", "r2"] == [sample.id for sample in samples]
    (error,) = errors
    assert (Reason.INVALID_JSON, "x.jsonl:2") == (error.reason, error.source)
    assert error.message.isascii()
    assert len(error.message) < 300


def test_a_line_over_the_limit_is_refused_unread(tmp_path, monkeypatch):
    """ROW_TOO_LARGE above max_row_bytes; exactly as many are kept, line end and blank lines not counted."""
    size = len(json.dumps(row(1)))
    path = write(tmp_path / "x.jsonl", row(1), b"\r\n \n" * 1000, row(10_000), row(2))
    source = open_source(path, config=Config(max_row_bytes=size))
    assert "r1" == source[0].id
    with monkeypatch.context() as patch:
        patch.setattr(type(source._lines), "read", None)
        with pytest.raises(DataError) as caught:
            source[1]
    assert (Reason.ROW_TOO_LARGE, "x.jsonl:2003") == (caught.value.reason, caught.value.source)
    assert "r2" == source[2].id


def test_nan_and_repeated_keys_are_jsons_own_business(tmp_path):
    """Python's reader takes them; neither ends a run."""
    line = b'{"texts": 3, "texts": [{"user": "a", "assistant": "b"}], "score": NaN, "x": Infinity}'
    assert ("a", "b") == tuple(turn.text for turn in open_source(write(tmp_path / "x.jsonl", line))[0].turns)


@pytest.mark.parametrize("name", ["labels", "inject", "counts", "forms", "nothing", "long", "roles", "mixed_types"])
def test_handed_rows_end_to_end(handed, name):
    """TXT-01 to TXT-13: source and store together give each row's verdict, as far as no size or template decides."""
    folder, expected = handed
    source = open_source(folder / f"{name}.jsonl")
    verdicts = []
    for number in range(len(source)):
        try:
            for image in source[number].images:
                store.read(image)
            verdicts.append("keep")
        except DataError:
            verdicts.append("reject")
    wanted = [entry["verdict"] for entry in expected[f"{name}.jsonl"]]
    if name == "long":
        wanted = ["keep"] * len(wanted)  # the budget's verdict comes later
    assert wanted == verdicts


def test_real_rows(shared):
    """All 565 rows of the real set are read, as the file has them, with every image in its place."""
    path = shared / "data" / "real-vqa" / "train.jsonl"
    samples, errors = read_all(open_source(path))
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    assert ([], 565) == (errors, len(samples))
    for index, (wanted, sample) in enumerate(zip(rows, samples, strict=True)):
        assert (wanted["id"], f"train.jsonl:{index + 1}") == (sample.id, sample.source)
        assert wanted["images"] == [image.name for image in sample.images]
        texts = [text for turn in wanted["texts"] for text in (turn["user"], turn["assistant"])]
        assert texts == [turn.text for turn in sample.turns]
        assert all(store.read(image, 4) for image in sample.images)
    assert {0, 1, 2, 3, 4, 5, 6} == {len(sample.images) for sample in samples}


def test_any_file_gives_samples_or_data_errors(tmp_path):
    """Lines mutated byte by byte, by seed: no other error, and kept + refused = read."""
    roll = random.Random(0)
    good = [json.dumps(row(number)).encode() for number in range(50)]
    kept, refused = 0, 0
    for number in range(40):
        lines = []
        for line in good:
            line = bytearray(line)
            for _ in range(roll.choice([0, 0, 1, 1, 3])):
                place = roll.randrange(len(line))
                line[place : place + roll.randrange(3)] = roll.randbytes(roll.randrange(3))
            lines.append(bytes(line))
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(b"\n".join(lines) + roll.randbytes(roll.randrange(200)))
        source = open_source(path)
        samples, errors = read_all(source)
        assert len(source) == len(samples) + len(errors)
        assert all(isinstance(sample, Sample) for sample in samples)
        kept, refused = kept + len(samples), refused + len(errors)
    assert min(kept, refused) > 300


# Processes, threads, memory


def send(function, connection, *args):
    """Runs in a child: sends what the function returns."""
    connection.send(function(*args))
    connection.close()


def in_processes(method, function, every_args):
    """What the function returns in one process each, all at once."""
    context = multiprocessing.get_context(method)
    started = []
    for args in every_args:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=send, args=(function, sender, *args), daemon=True)
        process.start()
        sender.close()
        started.append((process, receiver))
    try:
        return [receiver.recv() for _, receiver in started]
    finally:
        for process, receiver in started:
            receiver.close()
            process.join(30)
            assert process.exitcode == 0


def samples_of(source, numbers):
    return [source[number] for number in numbers]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_rows_are_the_same_in_other_processes(tmp_path, method):
    """A source opened and read in the parent works in children that are forked or that get it pickled."""
    source = open_source(write(tmp_path / "x.jsonl", *map(row, range(100))))
    wanted = samples_of(source, range(100))
    halves = in_processes(method, samples_of, [(source, range(50)), (source, range(50, 100))])
    assert wanted == halves[0] + halves[1]
    assert wanted == samples_of(source, range(100))  # the parent's own file is still open


def test_a_source_is_small(tmp_path):
    """It pickles in two kilobytes, however many rows it has."""
    assert len(pickle.dumps(open_source(write(tmp_path / "x.jsonl", *map(row, range(50_000)))))) < 2**11


def test_many_threads_read_one_source(tmp_path):
    """Each gets the row it asked for, also where all of them come to a source just unpickled."""
    source = open_source(write(tmp_path / "x.jsonl", *map(row, range(1000))))
    copy = pickle.loads(pickle.dumps(source))
    numbers = random.Random(0).choices(range(1000), k=20_000)
    with ThreadPoolExecutor(16) as pool:
        ids = list(pool.map(lambda number: copy[number].id, numbers))
    assert [f"r{number}" for number in numbers] == ids


def private_bytes():
    gc.collect()
    return psutil.Process().memory_full_info().uss


def read_share(source, numbers):
    """Reads the rows of a worker: how many, by how much its private memory grew, and by how much if it keeps some."""
    before = private_bytes()
    num_read = sum(source[number].turns[1].text == f"{number:07}" for number in numbers)
    grown = private_bytes() - before
    held = samples_of(source, numbers[:10_000])
    return num_read, grown, private_bytes() - before - grown, len(held)


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="private memory is read from Linux's /proc")
def test_a_million_rows_cost_the_workers_no_memory(tmp_path):
    """MEM-01: over an epoch of 1 000 000 rows on 4 workers, none grows by a tenth of the rows' size.

    To save time, every fourth row is read: that touches each page of the file and of the index, as all rows would.
    """
    num_rows, num_workers, stride = 1_000_000, 4, 4
    path = tmp_path / "x.jsonl"
    with path.open("w") as file:
        for number in range(num_rows):
            file.write(f'{{"id": {number}, "texts": [{{"user": "What is {number}?", "assistant": "{number:07}"}}]}}\n')
    limit = path.stat().st_size / 10
    source = open_source(path)
    assert num_rows == len(source)
    share = num_rows // num_workers
    shares = [range(worker * share, (worker + 1) * share, stride) for worker in range(num_workers)]
    results = in_processes("spawn", read_share, [(source, numbers) for numbers in shares])
    assert num_rows // stride == sum(num_read for num_read, *_ in results)
    for _, grown, kept, num_kept in results:
        assert grown < limit
        assert kept > num_kept * 100  # rows that are kept would show: the measure sees what it is to see
