"""Laws of `remote_source.py`: a data set in a store is the same data set, fetched once, and read from any process."""

import json
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time
from hashlib import md5
from pathlib import Path

import pytest
from runs import digest
from servers import Shelf, environment, localbucket, moto, rclone  # noqa: F401 -- fixtures
from small import tokenizer, write_data

import mmdp
from mmdp import demo, remote_source
from mmdp.config import Config
from mmdp.refusals import Reason
from mmdp.remote import Access, FetchError

pytestmark = pytest.mark.timeout(120)

ROW = {"images": ["a.png"], "texts": [{"user": "What is it?", "assistant": "A fox."}]}


def lines(*answers):
    return b"".join(
        json.dumps(ROW | {"texts": [{"user": "What is it?", "assistant": answer}]}).encode() + b"\n"
        for answer in answers
    )


@pytest.fixture(autouse=True)
def at_home(monkeypatch):
    """Nothing of the user's own environment reaches a test."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "S3_"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def point_at(monkeypatch):
    def point_at(endpoint):
        for name, value in environment(endpoint).items():
            monkeypatch.setenv(name, value)

    return point_at


def upload(server, bucket, folder, prefix):
    """All files of a folder; then the address of what is there."""
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    if server is None:
        return {f"{bucket}/{prefix}/{name}": data for name, data in files.items()}
    server.fill(bucket, {f"{prefix}/{name}": data for name, data in files.items()})
    return None


def demo_rows(folder, num_rows):
    """The first rows of the demo set, and their images, in a folder."""
    path = demo.demo_jsonl(Path(os.environ["MMDP_CACHE"]))
    kept = path.read_text().splitlines()[:num_rows]
    for line in kept:
        for name in json.loads(line)["images"]:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((path.parent / name).read_bytes())
    (folder / "train.jsonl").write_text("\n".join(kept))
    return folder / "train.jsonl"


def batches(source, encoder, cache, executor="threads"):
    """The digests of all batches of an epoch, and the sizes."""
    sizes = mmdp.measure(source, encoder, cache=cache)
    plan = mmdp.plan(sizes, mmdp.Budget(tokens=1024, images=9), seed=0)
    loader = mmdp.Loader(source, encoder, plan, batch_size=4, executor=executor, num_workers=2)
    return [digest(one) for one in loader], sizes


@pytest.mark.filterwarnings("ignore:.*ignores ranges")
@pytest.mark.parametrize("server", ["moto", "rclone", "localbucket"])
def test_the_demo_set_in_a_store_gives_the_same_batches(server, request, point_at, tmp_path):
    """End to end: opened, measured and loaded, bit for bit as from the folder it was uploaded from."""
    server = request.getfixturevalue(server)
    path = demo_rows(tmp_path / "near", 80)
    upload(server, "demo", path.parent, "sets/v1")
    point_at(server.endpoint)
    near, far = mmdp.open_source(path), mmdp.open_source("s3://demo/sets/v1/train.jsonl")
    assert (near.fingerprint, near.name, len(near)) == (far.fingerprint, far.name, len(far))
    encoder = mmdp.Encoder("demo", "fixed:64")
    expected, near_sizes = batches(near, encoder, tmp_path / "cache")
    found, far_sizes = batches(far, encoder, tmp_path / "cache")
    assert len(expected) > 2
    assert expected == found
    for name in ("tokens", "images", "vision", "label_tokens"):
        assert getattr(near_sizes, name).tolist() == getattr(far_sizes, name).tolist()
    assert near_sizes.cache.folder != far_sizes.cache.folder  # the same rows may have other images elsewhere


def test_other_processes_read_it_too(point_at, tmp_path):
    """A process gets the source by pickle, makes a client of its own, and reads the same rows and images."""
    path = write_data(tmp_path / "near")
    script = """
        import pickle, sys
        from hashlib import md5
        from mmdp import store

        source = pickle.load(sys.stdin.buffer)
        refs = [image for index in range(len(source)) for image in source[index].images]
        print(source.fingerprint, md5(b"".join(store.read_many(refs))).hexdigest(), "torch" in sys.modules)
    """
    with Shelf(upload(None, "b", path.parent, "v1")) as shelf:
        point_at(shelf.endpoint)
        source = mmdp.open_source("s3://b/v1/rows.jsonl", config=Config(cache_dir=tmp_path / "cache"))
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)],
            input=pickle.dumps(source),
            stdout=subprocess.PIPE,
            timeout=60,
            check=True,
        )
    images = [(path.parent / image.name).read_bytes() for index in range(12) for image in source[index].images]
    expected = [source.fingerprint, md5(b"".join(images)).hexdigest(), "False"]
    assert len(images) > 8
    assert expected == done.stdout.decode().split()


def test_the_rows_are_fetched_once_and_again_when_they_change(point_at, tmp_path):
    """By ETag: the same content is not fetched twice; another one is; whoever reads the old one goes on."""
    config = Config(cache_dir=tmp_path)
    with Shelf({"b/v1/rows.jsonl": lines("A fox.")}) as shelf:
        point_at(shelf.endpoint)
        first = mmdp.open_source("s3://b/v1/rows.jsonl", config=config)
        kept = list(tmp_path.rglob("rows.jsonl"))
        assert 1 == len(kept)
        inode = kept[0].stat().st_ino
        again = mmdp.open_source("s3://b/v1/rows.jsonl", config=config)
        assert inode == kept[0].stat().st_ino
        shelf.files["b/v1/rows.jsonl"] = lines("A fox.", "An owl.")
        second = mmdp.open_source("s3://b/v1/rows.jsonl", config=config)
    assert (1, 1, 2) == (len(first), len(again), len(second))
    assert first.fingerprint == again.fingerprint != second.fingerprint
    assert "A fox." == first[0].turns[1].text
    assert 2 == len(list(tmp_path.rglob("rows.jsonl")))


def test_a_source_that_travels_is_fetched_where_it_isn_t_there(point_at, tmp_path):
    """On another machine the file is fetched again, to where it was; another content by now is an error."""
    with Shelf({"b/v1/rows.jsonl": lines("A fox.")}) as shelf:
        point_at(shelf.endpoint)
        source = mmdp.open_source("s3://b/v1/rows.jsonl", config=Config(cache_dir=tmp_path))
        pickled = pickle.dumps(source)
        assert len(pickled) < 4096
        assert b"testtest" not in pickled  # the secret key
        (kept,) = tmp_path.rglob("rows.jsonl")
        kept.unlink()
        again = pickle.loads(pickled)
        assert (source.fingerprint, source.location) == (again.fingerprint, again.location)
        assert source[0] == again[0]
        kept.unlink()
        shelf.files["b/v1/rows.jsonl"] = lines("An owl.")
        with pytest.raises(RuntimeError, match="has changed"):
            pickle.loads(pickled)


def test_the_settings_travel_with_the_source(point_at, monkeypatch, tmp_path):
    """The endpoint it was opened at is the one its images are from, whatever the environment says later."""
    from mmdp import store

    with Shelf({"b/v1/rows.jsonl": lines("A fox."), "b/v1/a.png": b"an image"}) as shelf:
        point_at(shelf.endpoint)
        pickled = pickle.dumps(mmdp.open_source("s3://b/v1/rows.jsonl", config=Config(cache_dir=tmp_path)))
        monkeypatch.delenv("S3_ENDPOINT_URL")
        (image,) = pickle.loads(pickled)[0].images
        assert ("a.png", "s3://b/v1") == (image.name, image.root)
        assert b"an image" == store.read(image)


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL_S3", "S3_ENDPOINT_URL", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"])
def test_the_endpoint_is_taken_from_the_environment(name):
    """By any of its usual names, and from nowhere else."""
    assert "http://host:9000" == Access.of(Config(), "s3://b", {name: "http://host:9000/"}).endpoint
    assert "" == Access.of(Config(), "gs://b", {name: "http://host:9000"}).endpoint
    assert "" == Access.of(Config(), "s3://b", {}).endpoint


@pytest.mark.parametrize(
    ("name", "root"),
    [
        *((name, "s3://b") for name in ("AWS_ENDPOINT_URL_S3", "S3_ENDPOINT_URL", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")),
        ("GOOGLE_BASE_URL", "gs://b"),
        ("AZURE_ENDPOINT", "az://b"),
        ("AZURE_STORAGE_ENDPOINT", "az://b"),
    ],
)
def test_an_endpoint_that_is_no_address_is_refused_by_name(monkeypatch, name, root):
    """When the data is opened, before anything is fetched: which variable, what it holds, and how an address looks."""
    for value in ("127.0.0.1:5777", "minio", "//host:9000", "s3://host", "http://", "http://host:port", "http://a b"):
        with pytest.raises(ValueError, match=rf"{name} holds '{value.rstrip('/')}'.*http://HOST:PORT, or https://"):
            Access.of(Config(), root, {name: value})
        monkeypatch.setenv(name, value)
        with pytest.raises(ValueError, match=name):
            mmdp.open_source(f"{root}/rows.jsonl")
    for value in ("http://127.0.0.1:5777", "https://[::1]:9000", "https://host/path"):
        assert value == Access.of(Config(), root, {name: value}).endpoint


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL_S3", "S3_ENDPOINT_URL", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"])
def test_a_store_is_reached_by_each_name_of_its_endpoint(point_at, monkeypatch, tmp_path, name):
    """Plain http too, which the client by itself refuses."""
    with Shelf({"b/rows.jsonl": lines("A fox.")}) as shelf:
        point_at(shelf.endpoint)
        monkeypatch.delenv("S3_ENDPOINT_URL")
        monkeypatch.setenv(name, shelf.endpoint)
        assert 1 == len(mmdp.open_source("s3://b/rows.jsonl", config=Config(cache_dir=tmp_path)))


def test_the_settings_that_the_guide_shows_work(point_at, monkeypatch, tmp_path):
    """docs/own_data.md: its code as it stands there; the knobs reach the store's client, with the source."""
    text = (Path(__file__).resolve().parent.parent / "docs" / "own_data.md").read_text()
    code = text.split("## An object store")[1].split("```python\n")[1].split("```")[0]
    monkeypatch.setenv("MMDP_CACHE", str(tmp_path))
    with Shelf({"my-bucket/train.jsonl": lines("A fox.")}) as shelf:
        point_at(shelf.endpoint)
        shown: dict[str, mmdp.sources.RemoteSource] = {}
        exec(code, shown)
        assert "A fox." == shown["source"][0].turns[1].text
        access = shown["source"]._access
    assert (120, 900, 60) == (access.fetch_retries, access.fetch_seconds, access.read_seconds)


def test_a_slash_behind_the_file_changes_nothing(point_at, tmp_path):
    """Rows are named by their file, and images lie beside it, however a shell has completed the address."""
    from mmdp import store

    files = {"b/v1/rows.jsonl": lines("A fox."), "b/v1/a.png": b"an image"}
    with Shelf(files | {f"{path}/": data for path, data in files.items()}) as shelf:
        point_at(shelf.endpoint)
        roots = {"s3://b/v1": (), f"{shelf.endpoint}/b/v1": (shelf.place,)}
        for root, hosts in roots.items():
            for end in ("", "/", "//"):
                config = Config(cache_dir=tmp_path, http_hosts=hosts)
                sample = mmdp.open_source(f"{root}/rows.jsonl{end}", config=config)[0]
                assert "rows.jsonl:1" == sample.source
                assert root == sample.images[0].root
                assert b"an image" == store.read(sample.images[0])
    (tmp_path / "rows.jsonl").write_bytes(lines("A fox."))
    assert "rows.jsonl:1" == mmdp.open_source(f"{tmp_path}/rows.jsonl/")[0].source
    for bucket in ("s3://", "s3://b", "s3://b/"):
        with pytest.raises(ValueError, match=r"no data set that can be read|no bucket"):
            mmdp.open_source(bucket)


def test_the_file_appears_whole_or_not_at_all(point_at, tmp_path, monkeypatch):
    """A fetch that fails, or is interrupted, leaves nothing; the next one starts anew."""
    with Shelf({"b/rows.jsonl": lines("A fox.")}) as shelf:
        point_at(shelf.endpoint)
        for error in (KeyboardInterrupt, OSError):
            with monkeypatch.context() as patch:

                def fail(*args, error=error, **options):
                    raise error

                patch.setattr(remote_source.os, "utime", fail)
                with pytest.raises(error):
                    mmdp.open_source("s3://b/rows.jsonl", config=Config(cache_dir=tmp_path))
            assert ["lock"] == [path.name for path in tmp_path.rglob("*") if path.is_file()]
        assert 1 == len(mmdp.open_source("s3://b/rows.jsonl", config=Config(cache_dir=tmp_path)))


def test_several_processes_open_it_at_once(point_at, tmp_path):
    """One fetches, the others wait; all have it whole."""
    data = lines(*(f"A fox, {number} times." for number in range(3000)))
    script = f"""
        import mmdp
        from pathlib import Path
        from mmdp.config import Config
        print(len(mmdp.open_source("s3://b/rows.jsonl", config=Config(cache_dir=Path({str(tmp_path)!r})))))
    """
    with Shelf({"b/rows.jsonl": data}, delay=0.2) as shelf:
        command = [sys.executable, "-c", textwrap.dedent(script)]
        children = [
            subprocess.Popen(command, env=os.environ | environment(shelf.endpoint), stdout=subprocess.PIPE)
            for _ in range(3)
        ]
        assert [b"3000\n"] * 3 == [child.communicate(timeout=90)[0] for child in children]
    assert 1 == len(list(tmp_path.rglob("rows.jsonl")))
    assert [] == list(tmp_path.rglob("*.part"))


def test_a_large_file_comes_with_a_bar_and_survives_a_cut(point_at, tmp_path, monkeypatch):
    """In pieces, each counted; a body that ends early is fetched anew."""
    data = lines("A fox.") * 5000
    seen = []
    monkeypatch.setattr(remote_source, "_PIECE_BYTES", 2**16)
    monkeypatch.setattr(
        remote_source,
        "track",
        lambda items, what, size: seen.append((sum(map(size, items)), len(items), what)) or iter(items),
    )
    with Shelf({"b/rows.jsonl": data}, headers={"ETag": None}) as shelf:
        answer, cuts = shelf._answer, []

        def cut_second(request):
            if len(shelf.asked) == 2:
                cuts.append(1)
                request.close_connection = True
                write = request.wfile.write
                request.wfile.write = lambda data: write(data[:100_000])
            return answer(request)

        shelf._answer = cut_second
        point_at(shelf.endpoint)
        source = mmdp.open_source("s3://b/rows.jsonl", config=Config(cache_dir=tmp_path))
    assert [1] == cuts
    assert 5000 == len(source)
    assert [(-(-len(data) // 2**20), -(-len(data) // 2**16), "fetching rows.jsonl (MiB)")] * 2 == seen


@pytest.mark.parametrize(
    ("files", "headers", "error", "words"),
    [
        ({}, {}, FileNotFoundError, "no such file: s3://b/rows.jsonl"),
        ({"b/rows.jsonl": b""}, {}, ValueError, "is empty"),
        ({"b/rows.jsonl": b"\n\n"}, {}, ValueError, "is empty"),
        ({"b/rows.jsonl": b"[1]"}, {}, ValueError, "one JSON array"),
        ({"b/rows.jsonl": b"{}"}, {"ETag": None, "Last-Modified": None}, ValueError, "neither ETag nor"),
    ],
)
def test_what_can_t_be_opened_is_said(point_at, tmp_path, files, headers, error, words):
    """Missing, empty, of another form, or of no known state."""
    with Shelf(files, headers=headers) as shelf:
        point_at(shelf.endpoint)
        with pytest.raises(error, match=words):
            mmdp.open_source("s3://b/rows.jsonl", config=Config(cache_dir=tmp_path))


def test_a_store_that_refuses_stops_at_once(point_at, tmp_path):
    """403 on the rows: an error that says access."""
    with Shelf({}, refused={"b/rows.jsonl": 403}) as shelf:
        point_at(shelf.endpoint)
        with pytest.raises(FetchError, match="refuses access"):
            mmdp.open_source("s3://b/rows.jsonl", config=Config(cache_dir=tmp_path))
        assert 1 == len(shelf.asked)


@pytest.mark.parametrize("is_unsigned", [True, False])
def test_measuring_says_which_row_a_store_refuses(point_at, tmp_path, monkeypatch, is_unsigned):
    """Through the command: a few lines, with the file, the row's line and a remedy that was not taken already."""
    path = write_data(tmp_path / "near", (1, 1, 1))
    files = upload(None, "b", path.parent, "v1")
    with Shelf(files, refused={"b/v1/1-0.png": 403}) as shelf:
        point_at(shelf.endpoint)
        if is_unsigned:
            monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
        command = [sys.executable, "-m", "mmdp.measure", "s3://b/v1/rows.jsonl"]
        around = {name: value for name, value in os.environ.items() if name != "MMDP_TRACEBACK"}
        around["MMDP_CACHE"] = str(tmp_path)
        done = subprocess.run(command, env=around, capture_output=True, text=True, timeout=100, check=False)
    first, *more = done.stderr.splitlines()
    assert 1 == done.returncode
    assert first.startswith("error: [Errno 13] 403")
    assert is_unsigned == ("It was asked without credentials (AWS_SKIP_SIGNATURE)" in first)
    assert is_unsigned != ("set AWS_ACCESS_KEY_ID" in first)
    assert first.endswith("'s3://b/v1/1-0.png'")
    assert ["  while reading images[0] of rows.jsonl:2", "  (MMDP_TRACEBACK=1 shows where)"] == more


def test_streams_of_a_store_are_refused(tmp_path):
    """It is fetched once and read by row; said before anything is fetched."""
    with pytest.raises(ValueError, match="without streaming"):
        mmdp.open_source("s3://b/rows.jsonl", streaming=True)


def test_headers_are_fetched_side_by_side(point_at, tmp_path):
    """Measuring waits for a few answers, not for one after another; and fetches no image whole."""
    path = write_data(tmp_path / "near", repeat=20)
    files = upload(None, "b", path.parent, "v1")
    images = [key for key in files if key.endswith(".png")]
    with Shelf(files, delay=dict.fromkeys(images, 0.1)) as shelf:
        point_at(shelf.endpoint)
        encoder = mmdp.Encoder(tokenizer(), "fixed:16")
        near = mmdp.measure(mmdp.open_source(path), encoder, cache=tmp_path / "a")
        far = mmdp.open_source("s3://b/v1/rows.jsonl", config=Config(cache_dir=tmp_path, max_fetches=16))
        started = time.monotonic()
        sizes = mmdp.measure(far, encoder, cache=tmp_path / "b")
        seconds = time.monotonic() - started
        assert near.tokens.tolist() == sizes.tokens.tolist()
        assert 8 <= shelf.most <= 16
        asked = [headers for key, headers in shelf.asked if key.endswith(".png")]
        assert {"bytes=0-4095"} == set(asked)
        assert len(images) == len(asked)
        assert seconds < 0.1 * len(images) / 2


def test_what_a_store_has_refused_is_not_asked_again(point_at, tmp_path):
    """A row is tried again after an error of a disk; a store was asked as often as it may help."""
    path = write_data(tmp_path / "near", (1,))
    files = upload(None, "b", path.parent, "v1")
    with Shelf(files) as shelf:
        point_at(shelf.endpoint)
        source = mmdp.open_source("s3://b/v1/rows.jsonl")
        build = mmdp.RowBuilder(source, mmdp.Encoder(tokenizer(), "fixed:16"))
        assert (0,) == build([0]).samples
        shelf._refused["b/v1/0-0.png"] = 403
        before = len(shelf.asked)
        with pytest.raises(FetchError, match="refuses access"):
            build([0])
        assert 1 == len(shelf.asked) - before


@pytest.mark.parametrize("side_by_side", [True, False])
def test_a_row_waits_once_for_all_its_images(point_at, tmp_path, side_by_side):
    """Fetched at once or one by one, the row is the same, and an image that is not there is asked for once."""
    path = write_data(tmp_path / "near", (2, 2, 0, 1))
    encoder = mmdp.Encoder(tokenizer(), "fixed:16")
    near = mmdp.open_source(path)
    wanted = mmdp.RowBuilder(near, encoder, mmdp.measure(near, encoder, cache=tmp_path / "a"))([0, 2, 3])
    files = upload(None, "b", path.parent, "v1")
    with Shelf(files) as shelf:
        point_at(shelf.endpoint)
        source = mmdp.open_source("s3://b/v1/rows.jsonl")
        sizes = mmdp.measure(source, encoder, cache=tmp_path / "b")
        build = mmdp.RowBuilder(source, encoder, sizes, side_by_side=side_by_side)
        del shelf.files["b/v1/1-1.png"]
        shelf._delay = 0.2
        shelf.asked.clear()
        shelf.most = 0
        row = build([0, 1, 2, 3])
        assert wanted.samples == row.samples
        assert {1: Reason.MISSING_IMAGE} == row.skipped
        assert all((one == other).all() for one, other in zip(wanted.images, row.images, strict=True))
        assert (5 if side_by_side else 1) == shelf.most
        assert sorted(f"b/v1/{name}.png" for name in ("0-0", "0-1", "1-0", "1-1", "3-0")) == sorted(
            key for key, _ in shelf.asked
        )


def test_lazy_sizes_and_strict_ones_work_the_same(point_at, tmp_path):
    """A missing image is counted by its reason, or raised; lazily, when it is asked for."""
    path = write_data(tmp_path / "near")
    files = upload(None, "b", path.parent, "v1")
    del files["b/v1/2-1.png"]
    encoder = mmdp.Encoder(tokenizer(), "fixed:16")
    with Shelf(files) as shelf:
        point_at(shelf.endpoint)
        source = mmdp.open_source("s3://b/v1/rows.jsonl")
        sizes = mmdp.measure(source, encoder, cache=tmp_path / "a", lazy=True)
        plan = mmdp.plan(sizes, mmdp.Budget(tokens=256, images=9), seed=0)
        assert len(plan.epoch(0)) > 1
        assert {2: Reason.MISSING_IMAGE} == sizes.skipped
        with pytest.raises(mmdp.DataError, match=r"2-1\.png"):
            mmdp.measure(source, encoder, cache=tmp_path / "b", strict=True)
        assert 0 == sum(thread.name == "mmdp-worker" for thread in threading.enumerate())


def test_a_parquet_file_is_kept_likewise(point_at, tmp_path):
    """Its images by name come from beside it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from mmdp import store

    table = pa.Table.from_pylist([ROW, ROW | {"images": ["b.png"]}])
    pq.write_table(table, tmp_path / "x.parquet")
    files = {"b/v1/x.parquet": (tmp_path / "x.parquet").read_bytes(), "b/v1/b.png": b"an image"}
    with Shelf(files) as shelf:
        point_at(shelf.endpoint)
        source = mmdp.open_source("s3://b/v1/x.parquet", config=Config(cache_dir=tmp_path))
        assert 2 == len(source)
        assert b"an image" == store.read(source[1].images[0])
        assert "x.parquet[1]" == source[1].source
