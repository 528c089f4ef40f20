"""Laws of `mmdp.tables`: what a table holds is what lines of the same rows hold, and bytes stay bytes."""

import json
import logging
import multiprocessing
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmdp import store
from mmdp.config import Config
from mmdp.records import ImageRef
from mmdp.refusals import DataError, Reason
from mmdp.sources import open_source
from mmdp.tables import StreamSource, TableSource

PNG = b"\x89PNG\r\n\x1a\n, and no picture after it"


@pytest.fixture(autouse=True)
def own_hub_cache(tmp_path_factory, monkeypatch):
    """What `datasets` keeps for the Hub goes below the tests' folder, and nothing is asked of the network."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("hub-cache")))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def real(shared):
    return shared / "data" / "real-vqa"


def write(path, rows, **options):
    pq.write_table(pa.Table.from_pylist(rows, **options), path)
    return path


def pair(number):
    return {"user": f"What is {number}?", "assistant": str(number), "source": "book"}


def cauldron(num_rows):
    return [{"images": [{"bytes": PNG, "path": None}], "texts": [pair(number)]} for number in range(num_rows)]


@pytest.fixture
def repository(tmp_path):
    """A local folder laid out like a data set on the Hub, with two configurations."""
    folder = tmp_path / "org" / "pictures"
    for name in ("ai2d", "other"):
        (folder / name).mkdir(parents=True)
    write(folder / "ai2d" / "train-00000-of-00002.parquet", cauldron(3))
    write(folder / "ai2d" / "train-00001-of-00002.parquet", cauldron(2))
    write(folder / "other" / "train-00000-of-00001.parquet", cauldron(1))
    (folder / "README.md").write_text(
        "---\nconfigs:\n"
        + "".join(
            f"- config_name: {name}\n  data_files:\n  - split: train\n    path: {name}/train-*\n"
            for name in ("ai2d", "other")
        )
        + "---\n"
    )
    return folder


# Parquet


def test_a_table_and_lines_of_the_same_rows_are_the_same(real):
    """All 203 rows of the real Parquet file are the first ones of the lines; each image is the file's own bytes."""
    table, lines = open_source(real / "train.parquet"), open_source(real / "train.jsonl")
    ids = (real / "train.parquet.ids.txt").read_text().split("\n")[:-1]
    assert 203 == len(table) == len(ids)
    assert isinstance(table, TableSource)
    num_images = 0
    for number, name in enumerate(ids):
        found, wanted = table[number], lines[number]
        assert (name, str(number)) == (wanted.id, found.id)  # the table has no column of ids
        assert wanted.turns == found.turns
        assert [store.read(image) for image in wanted.images] == [image.data for image in found.images]
        num_images += len(found.images)
    assert num_images > 203
    assert f"train.parquet[{number}]" == found.source


def test_a_table_is_a_list_of_rows(tmp_path):
    """Length, indices from both ends, IndexError beyond; iteration ends."""
    source = open_source(write(tmp_path / "x.parquet", cauldron(3)))
    assert ["0", "1", "2"] == [sample.id for sample in source]
    assert source[2] == source[-1]
    for index in (3, -4):
        with pytest.raises(IndexError, match="of 3"):
            source[index]
    assert "x.parquet" == source.name


def test_an_image_is_not_decoded(tmp_path):
    """Bytes that are no picture are given as they are, though the file says the column holds images."""
    import datasets

    features = datasets.Features(
        {"images": [datasets.Image()], "texts": [dict.fromkeys(pair(0), datasets.Value("string"))]}
    )
    path = tmp_path / "x.parquet"
    datasets.Dataset.from_list(cauldron(2), features=features).to_parquet(path)
    assert b"Image" in pq.read_schema(path).metadata[b"huggingface"]
    for source in (open_source(path), open_source(path, streaming=True)):
        assert [(ImageRef("", str(tmp_path), PNG),)] * 2 == [sample.images for sample in source]


def test_images_by_name_are_relative_to_the_file(tmp_path):
    """A column of names is read as the lines' are, through the same rules."""
    (tmp_path / "a.png").write_bytes(PNG)
    rows = [{"images": [name], "texts": [pair(0)]} for name in ("a.png", "../a.png")]
    source = open_source(write(tmp_path / "x.parquet", rows))
    assert PNG == store.read(source[0].images[0])
    with pytest.raises(DataError, match="unsafe_path"):
        store.read(source[1].images[0])


def test_other_row_forms_are_read_from_columns(tmp_path):
    """Conversations and messages; a column that is null in a row is absent there; other columns are not looked at."""
    talk = [{"from": "human", "value": "<image>\nWhy?"}, {"from": "gpt", "value": "So."}]
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "Why?"}]
    chat = [{"role": "user", "content": parts}, {"role": "assistant", "content": [{"type": "text", "text": "So."}]}]
    rows = [
        {"id": 7, "image": {"bytes": PNG, "path": "a.png"}, "conversations": talk, "messages": None, "when": 1},
        {"id": 8, "image": {"bytes": PNG, "path": "a.png"}, "conversations": None, "messages": chat, "when": 2},
    ]
    first, second = open_source(write(tmp_path / "x.parquet", rows))
    assert ("7", "8") == (first.id, second.id)
    assert (first.turns, first.images) == (second.turns, second.images)
    assert (0, "Why?") == first.turns[0].parts


def test_a_bad_row_is_refused_by_its_number(tmp_path):
    """DataError with the table's name, the row and the field; the others are read."""
    rows = cauldron(3)
    rows[1]["texts"][0]["assistant"] = None
    source = open_source(write(tmp_path / "x.parquet", rows))
    with pytest.raises(DataError) as caught:
        source[1]
    error = caught.value
    assert (Reason.NO_ANSWER, "x.parquet[1]", "texts[0].assistant") == (error.reason, error.source, error.field)
    assert ["0", "2"] == [source[0].id, source[2].id]


def test_text_that_is_not_utf8_is_one_bad_row(tmp_path):
    """Arrow does not look; the row is refused when it is read."""
    text = pa.array([b"fine", b"\xff\xfe"]).cast(pa.binary()).view(pa.string())
    turns = pa.StructArray.from_arrays([text, text], ["user", "assistant"])
    texts = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), turns)
    pq.write_table(pa.table({"texts": texts}), tmp_path / "x.parquet")
    source = open_source(tmp_path / "x.parquet")
    assert "fine" == source[0].turns[0].text
    with pytest.raises(DataError, match=re.escape("x.parquet[1]: invalid_text")):
        source[1]


@pytest.mark.parametrize("name", ["a[1].parquet", "a*.parquet", "a b%20?.PARQUET", "\u00e4\u6f22.parquet"])
def test_a_file_of_any_name_is_read(tmp_path, name):
    """The name is a name, and no pattern."""
    (tmp_path / "a1.parquet").touch()
    assert 2 == len(open_source(write(tmp_path / name, cauldron(2))))


def test_a_table_that_changed_is_read_anew(tmp_path):
    """What was unpacked before is of another state of the file."""
    path = tmp_path / "x.parquet"
    first = open_source(write(path, cauldron(2)))
    second = open_source(write(path, cauldron(3)))
    assert (2, 3) == (len(first), len(second))
    assert first.fingerprint != second.fingerprint


def test_the_fingerprint_is_of_the_content(tmp_path):
    """The same file elsewhere has the same one."""
    (tmp_path / "b").mkdir()
    path = write(tmp_path / "x.parquet", cauldron(2))
    (tmp_path / "b" / "y.parquet").write_bytes(path.read_bytes())
    assert open_source(path).fingerprint == open_source(tmp_path / "b" / "y.parquet").fingerprint


def test_a_file_that_is_no_table_says_so(tmp_path, real):
    """Cut, damaged, something else, without a known column, or empty: ValueError with the path and the cause."""
    path = tmp_path / "x.parquet"
    whole = (real / "train.parquet").read_bytes()
    damaged = bytearray(whole)
    damaged[1000:9_000_000] = bytes(9_000_000 - 1000)
    for data in (whole[: len(whole) // 2], bytes(damaged), b"junk", b""):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="is it whole") as caught:
            open_source(path)
        assert str(path) in str(caught.value)
    with pytest.raises(ValueError, match="texts, conversations, messages"):
        open_source(write(path, [{"question": "Why?", "answer": "So."}]))
    schema = pa.schema({"texts": pa.list_(pa.struct(dict.fromkeys(pair(0), pa.string())))})
    with pytest.raises(ValueError, match="has it rows"):
        open_source(write(path, [], schema=schema))
    pq.ParquetWriter(path, schema).close()
    with pytest.raises(ValueError, match="has it rows"):
        open_source(path)


def test_without_a_folder_to_write_the_table_is_unpacked_elsewhere(tmp_path):
    """It works all the same, and says so."""
    blocked = tmp_path / "blocked"
    blocked.touch()  # a file where the folder should be: even root can't write there
    path = write(tmp_path / "x.parquet", cauldron(2))
    with pytest.warns(RuntimeWarning, match="MMDP_CACHE"):
        source = open_source(path, config=Config(cache_dir=blocked))
    assert 2 == len(list(source))


# Streams


def test_a_stream_gives_the_same_samples(tmp_path):
    """Streamed or by number, the samples are the same; a stream has no length, and begins anew each time."""
    path = write(tmp_path / "x.parquet", cauldron(5))
    stream = open_source(path, streaming=True)
    assert isinstance(stream, StreamSource)
    assert not hasattr(stream, "__len__")
    assert list(open_source(path)) == list(stream) == list(stream)
    assert {} == stream.skipped


def test_bad_rows_of_a_stream_are_counted_or_raised(tmp_path, caplog):
    """Left out and counted by reason, said once a reason; in strict mode the first one is raised."""
    rows = cauldron(6)
    for number in (1, 4):
        rows[number]["texts"][0]["assistant"] = ""
    rows[2]["texts"] = []
    path = write(tmp_path / "x.parquet", rows)
    stream = open_source(path, streaming=True)
    with caplog.at_level(logging.WARNING, logger="mmdp.tables"):
        samples = list(stream)
    assert ["0", "3", "5"] == [sample.id for sample in samples]
    assert {Reason.NO_ANSWER: 3} == stream.skipped
    assert len(rows) == len(samples) + sum(stream.skipped.values())
    (record,) = caplog.records
    assert "x.parquet[1]" in record.getMessage()
    assert {"no_answer": 3} == json.loads(json.dumps(stream.skipped))
    with pytest.raises(DataError, match=re.escape("x.parquet[1]")):
        list(open_source(path, config=Config(strict=True), streaming=True))


def test_a_stream_goes_on_from_every_mark(repository):
    """Law 12: over row groups and shards, also from the mark of a pass that had itself gone on from one."""
    first_shard = repository / "ai2d" / "train-00000-of-00002.parquet"
    pq.write_table(pa.Table.from_pylist(cauldron(13)), first_shard, row_group_size=5)
    stream = open_source(f"hf:{repository}/ai2d", streaming=True)
    whole = stream.start_pass()
    assert whole.mark() is None
    samples, marks = [], []
    for sample in whole:
        samples.append(sample)
        marks.append(json.loads(json.dumps(whole.mark())))
    assert list(stream) == samples
    assert list(range(1, 16)) == [mark["number"] for mark in marks]
    for number, mark in enumerate(marks, 1):
        again = stream.start_pass(mark)
        assert samples[number : number + 1] == list(islice(again, 1))
        assert samples[number + 1 :] == list(stream.start_pass(again.mark()))


def test_passes_of_one_stream_do_not_move_each_other(repository):
    """`datasets` keeps the place of a pass in the data set; each pass has its own, in threads too."""
    stream = open_source(f"hf:{repository}/ai2d", streaming=True)
    wanted = list(stream)
    assert [(one, one) for one in wanted] == list(zip(stream, stream, strict=True))
    first = iter(stream)
    ahead = [next(first)]
    with ThreadPoolExecutor(4) as pool:
        assert [wanted] * 12 == list(pool.map(lambda _: list(stream), range(12)))
    assert wanted == ahead + list(first)


def test_a_pass_gives_bad_rows_as_their_errors(tmp_path):
    """So that whoever plans can tell them; nothing is counted twice, and in strict mode the first one is raised."""
    rows = cauldron(4)
    rows[2]["texts"] = []
    path = write(tmp_path / "x.parquet", rows)
    stream = open_source(path, streaming=True)
    items = list(stream.start_pass())
    assert [False, False, True, False] == [isinstance(item, DataError) for item in items]
    assert "x.parquet[2]" in str(items[2])
    assert {} == stream.skipped
    with pytest.raises(DataError, match=re.escape("x.parquet[2]")):
        list(open_source(path, config=Config(strict=True), streaming=True).start_pass())


# The Hub


def test_a_repository_is_read_by_its_configuration(repository):
    """The code path of the Hub, on a local folder laid out like one: shards in order, one configuration each."""
    source = open_source(f"hf:{repository}/ai2d")
    assert [str(number) for number in (0, 1, 2, 0, 1)] == [sample.turns[1].text for sample in source]
    assert {PNG} == {image.data for sample in source for image in sample.images}
    assert f"{repository}/ai2d[4]" == source[4].source
    assert f"hf:{repository}/ai2d" == source.name
    assert 1 == len(open_source(f"hf:{repository}/other"))
    assert list(source) == list(open_source(f"hf:{repository}/ai2d", streaming=True))


def test_a_repository_says_which_configurations_it_has(repository):
    """The name of one that it lacks is a ValueError that lists them; so is a configuration without a train split."""
    with pytest.raises(ValueError, match=r"/nosuch.*ai2d"):
        open_source(f"hf:{repository}/nosuch")
    readme = repository / "README.md"
    readme.write_text(readme.read_text().replace("split: train", "split: test"))
    for streaming in (False, True):
        with pytest.raises(ValueError, match=r"/ai2d.*train"):
            open_source(f"hf:{repository}/ai2d", streaming=streaming)


def test_the_fingerprint_of_a_repository_is_of_its_files(repository, tmp_path):
    """The same files in another folder, at another time, give the same one; another configuration does not."""
    copy = tmp_path / "elsewhere"
    first = open_source(f"hf:{repository}/ai2d").fingerprint
    other = open_source(f"hf:{repository}/other").fingerprint
    repository.rename(copy)
    (copy / "ai2d" / "train-00000-of-00002.parquet").touch()
    assert first == open_source(f"hf:{copy}/ai2d").fingerprint != other


def test_the_fingerprint_of_the_hub_is_of_its_commit(repository, monkeypatch):
    """Where the files are remote, the commit stands for them: it is the builder's hash."""
    import datasets

    real = datasets.load_dataset_builder

    def remote(commit):
        def load(*args, **options):
            builder = real(*args, **options)
            as_dataset, prepare = builder.as_dataset, builder.download_and_prepare
            prepare()
            builder.config.data_files = {"train": [f"hf://datasets/org/pictures@{commit}/ai2d/train.parquet"]}
            builder.hash = commit
            builder.as_dataset, builder.download_and_prepare = as_dataset, lambda: None
            return builder

        monkeypatch.setattr(datasets, "load_dataset_builder", load)
        return open_source(f"hf:{repository}/ai2d").fingerprint

    assert remote("c0ffee") == remote("c0ffee") != remote("decade")


# Processes and threads


def samples_of(source, numbers):
    return [source[number] for number in numbers]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_rows_are_the_same_in_other_processes(tmp_path, method):
    """A table read in the parent works in a child that is forked or that gets it pickled, in few bytes."""
    source = open_source(write(tmp_path / "x.parquet", cauldron(200)))
    wanted = samples_of(source, range(200))
    assert len(pickle.dumps(source)) < 2**13
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert wanted == pool.apply_async(samples_of, (source, range(200))).get(100)


def test_many_threads_read_one_table(tmp_path):
    """Each gets the row it asked for."""
    source = open_source(write(tmp_path / "x.parquet", cauldron(100)))
    numbers = [number * 37 % 100 for number in range(2000)]
    with ThreadPoolExecutor(8) as pool:
        assert [str(number) for number in numbers] == list(pool.map(lambda number: source[number].id, numbers))


# What `datasets` writes where the rows of a column differ


FORMS_THAT_DIFFER = {
    "contents of two types": [
        {
            "images": ["a.png"],
            "messages": [
                {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
                {"role": "assistant", "content": "A fox."},
            ],
        }
    ],
    "keys of some turns": [
        {
            "messages": [
                {"role": "user", "content": "one?"},
                {"role": "assistant", "content": "first", "weight": 0},
                {"role": "user", "content": "two?"},
                {"role": "assistant", "content": "second"},
            ]
        }
    ],
    "conversations": [
        {
            "system": "Be brief.",
            "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", "loss": True}],
        },
        {"conversations": [{"from": "human", "value": "q", "tags": 7}, {"from": "gpt", "value": "a", "tags": [1]}]},
    ],
    "texts": [
        {"texts": [{"user": "q", "assistant": "a", "source": 1}, {"user": "q", "assistant": '"b"', "source": "x"}]},
    ],
}


@pytest.mark.parametrize("rows", FORMS_THAT_DIFFER.values(), ids=FORMS_THAT_DIFFER)
@pytest.mark.parametrize("way", ["parquet", "hub", "save_to_disk"])
@pytest.mark.parametrize("streaming", [False, True], ids=["table", "stream"])
def test_json_of_datasets_is_read_as_the_lines_that_it_was(tmp_path, rows, way, streaming):
    """Law: `datasets` keeps such columns as text of JSON (`Json`), and the samples are those of the JSON lines."""
    import datasets

    lines = tmp_path / "hub" / "train.jsonl"
    lines.parent.mkdir()
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    wanted = [(one.turns, [image.name for image in one.images]) for one in open_source(lines)]
    uri = f"hf:{lines.parent}/default"
    if way != "hub":
        table = datasets.load_dataset("json", data_files=str(lines), split="train", cache_dir=str(tmp_path / "cache"))
        assert "Json" in str(table.features), "the case did not arise"
        if way == "save_to_disk":
            table.save_to_disk(str(tmp_path / "saved"))
            table = datasets.load_from_disk(str(tmp_path / "saved"))
        uri = str(tmp_path / "train.parquet")
        table.to_parquet(uri)
    source = open_source(uri, config=Config(cache_dir=tmp_path / "ours"), streaming=streaming)
    assert wanted == [(one.turns, [image.name for image in one.images]) for one in source]


def test_a_field_that_is_no_json_is_one_bad_row(tmp_path):
    """As a line that is none: named by its number, and the others are read."""
    turns = ['{"user": "q", "assistant": "a"}', '{"user": ', '{"user": "q", "assistant": "b"}']
    fields = pa.ExtensionArray.from_storage(pa.json_(), pa.array(turns))
    table = pa.table({"texts": pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), fields)})
    pq.write_table(table, tmp_path / "x.parquet")
    source = open_source(tmp_path / "x.parquet", config=Config(cache_dir=tmp_path / "ours"))
    with pytest.raises(DataError, match="holds none") as caught:
        source[1]
    assert (Reason.INVALID_JSON, "x.parquet[1]") == (caught.value.reason, caught.value.source)
    assert ["a", "b"] == [source[number].turns[1].text for number in (0, 2)]
