"""Laws of `mmdp.lines`: any bytes are split at newlines alone, and the kept index is never believed blindly."""

import itertools
import os
import pickle
import warnings
from hashlib import blake2b

import numpy as np
import pytest
from descriptors import open_below
from hypothesis import given, settings
from hypothesis import strategies as st

from mmdp import lines
from mmdp.lines import Lines, digest_file

BLANKS = b" \t\r\n"


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"first\nsecond\n\nthird\n")
    return path


def rows(found):
    return [found.read(index) for index in range(len(found))]


def kept_file(cache):
    (kept,) = (cache / "lines").iterdir()
    return kept


def no_pass(monkeypatch):
    def fail(*args, **options):
        raise AssertionError("the file was read again")

    monkeypatch.setattr(lines, "_scan", fail)


@pytest.fixture(scope="module")
def fresh_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("any")
    return (folder / str(number) for number in itertools.count())


pieces = st.sampled_from([b"\n", b"\r\n", b" ", b"\t", b"\xef\xbb\xbf", b"\0", b"\x0c", b"a", b"{}", b"[", b"\xff"])


@settings(max_examples=200, deadline=None)
@given(
    data=st.one_of(st.binary(max_size=60), st.lists(pieces, max_size=40).map(b"".join)),
    chunk=st.integers(1, 20),
    enough=st.integers(0, 8),
)
def test_any_bytes_are_split_as_python_splits_them(fresh_folder, data, chunk, enough):
    """Rows, line numbers and sizes are those of `bytes.split`, wherever the chunks of the pass end."""
    folder = next(fresh_folder)
    folder.mkdir()
    path = folder / "x"
    path.write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "_CHUNK_BYTES", max(chunk, 3))  # a byte-order mark is looked for in the first chunk
        patch.setattr(lines, "_TICK_NS", 0)
        found = Lines(path, folder)
        again = Lines(path, folder)
    wanted = [
        (number, line.rstrip(BLANKS))
        for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1)
        if line.strip(BLANKS)
    ]
    assert wanted == [(found.line_number(index), found.read(index).rstrip(BLANKS)) for index in range(len(found))]
    assert rows(found) == rows(again)
    assert blake2b(data, digest_size=16).hexdigest() == found.digest == again.digest
    for index, (_, line) in enumerate(wanted):
        size = found.size(index, enough)
        assert (size == len(line)) if len(line) > enough else (size <= enough)
        assert found.read(index)[:3] == found.read(index, limit=3)


def test_rows_hold_their_line_end_and_the_blank_lines_after(file, cache):
    """A row's bytes go up to the next row; JSON takes blanks at the end."""
    found = Lines(file, cache)
    assert [b"first\n", b"second\n\n", b"third\n"] == rows(found)
    assert [1, 2, 4] == [found.line_number(index) for index in range(3)]


def test_the_second_start_costs_no_pass(file, cache, monkeypatch):
    """What was found is kept and mapped."""
    first = Lines(file, cache)
    assert 1 == len(list((cache / "lines").iterdir()))  # nothing half-written stays beside it
    no_pass(monkeypatch)
    second = Lines(file, cache)
    assert rows(first) == rows(second)
    assert first.digest == second.digest


@pytest.mark.parametrize("change", ["size", "time", "both"])
def test_a_changed_file_is_read_anew(file, cache, change):
    """The index is kept for a path, a size and a time of change; any other makes it anew, in its place."""
    Lines(file, cache)
    status = file.stat()
    data = b"a\nb\nc\nd\n" if change != "time" else b"x" * (status.st_size - 2) + b"\nx"
    file.write_bytes(data)
    if change == "size":
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    found = Lines(file, cache)
    assert data.splitlines() == [row.rstrip() for row in rows(found)]
    assert 1 == len(list((cache / "lines").iterdir()))


def test_a_file_rewritten_at_once_is_read_anew(tmp_path, cache):
    """Same size, and as soon after as can be: the clock of the file system must have moved on."""
    path = tmp_path / "x.jsonl"
    for _ in range(5):
        for data in (b"aa\nb\n", b"a\nbb\n"):
            path.write_bytes(data)
            assert data.splitlines() == [row.rstrip() for row in rows(Lines(path, cache))]


@pytest.mark.parametrize(("age_ns", "waits"), [(0, 1), (10**9, 0), (-(10**12), 0)])
def test_a_file_written_just_now_is_given_a_moment(file, cache, monkeypatch, age_ns, waits):
    """Else a change within the clock's step would not show; an old file, or a clock that differs, costs no wait."""
    slept = []
    monkeypatch.setattr(lines.time, "sleep", slept.append)
    monkeypatch.setattr(lines.time, "time_ns", lambda: file.stat().st_mtime_ns + age_ns)
    Lines(file, cache)
    assert waits == len(slept)


def damage(kept, kind):
    data = bytearray(kept.read_bytes())
    if kind == "cut":
        data = data[:-8]
    elif kind == "garbage":
        data = bytearray(b"\x93NUMPY" + bytes(range(256)))
    elif kind == "zip":
        data = bytearray(b"PK\x03\x04" + bytes(100))
    elif kind == "empty":
        data = bytearray()
    elif kind == "start":
        data[-16] ^= 1
    elif kind == "count":
        data[128 + 8 * 3] ^= 1
    elif kind == "layout":
        words = np.load(kept)
        words[0] += 1
        np.save(kept, words)
        return
    elif kind == "type":
        np.save(kept, np.load(kept).astype(np.int32))
        return
    kept.write_bytes(data)


@pytest.mark.parametrize("kind", ["cut", "garbage", "zip", "empty", "start", "count", "layout", "type"])
def test_a_damaged_index_is_made_anew(file, cache, kind, monkeypatch):
    """A checksum guards it; whatever is wrong with it, the rows are right and the next start is quick again."""
    wanted = rows(Lines(file, cache))
    before = kept_file(cache).read_bytes()
    damage(kept_file(cache), kind)
    assert before != kept_file(cache).read_bytes()
    assert wanted == rows(Lines(file, cache))
    no_pass(monkeypatch)
    assert wanted == rows(Lines(file, cache))


def test_without_a_folder_to_write_the_index_is_in_memory(file, tmp_path):
    """It works all the same, says so once, and travels with the pickle, so that no worker counts again."""
    blocked = tmp_path / "blocked"
    blocked.touch()  # a file where the folder should be: even root can't write there
    with pytest.warns(RuntimeWarning, match="MMDP_CACHE") as caught:
        found = Lines(file, blocked)
    assert 1 == len(caught)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rows(Lines(file, tmp_path / "cache")) == rows(found) == rows(pickle.loads(pickle.dumps(found)))


def test_a_full_disk_leaves_nothing_half_written(file, cache, monkeypatch):
    """An error while the index is written: in memory, with a warning, and no part of a file stays."""

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        found = Lines(file, cache)
    assert [b"first\n", b"second\n\n", b"third\n"] == rows(found)
    assert [] == list((cache / "lines").iterdir())


def test_it_pickles_in_a_kilobyte(tmp_path, cache):
    """However many rows: the index is found again by its file, not carried."""
    path = tmp_path / "many"
    path.write_bytes(b"x\n" * 100_000)
    found = Lines(path, cache)
    found.read(5)
    data = pickle.dumps(found)
    assert len(data) < 2**10
    assert 100_000 == len(pickle.loads(data))
    assert b"x\n" == pickle.loads(data).read(99_999)


def test_a_lost_index_is_made_anew_by_who_needs_it(file, cache):
    """A copy that comes to a process without the cache folder's file finds the rows all the same."""
    copy = pickle.loads(pickle.dumps(Lines(file, cache)))
    kept_file(cache).unlink()
    assert [b"first\n", b"second\n\n", b"third\n"] == rows(copy)


@pytest.mark.parametrize("data", [b"first\nsecond\n\nthirD\n", b"first\nsecond\n\nthird\nfourth\n", b""])
def test_a_file_that_changes_while_it_is_read_is_an_error(file, cache, data):
    """Not one row of garbage: an error that says so, here and in a process that opens it later."""
    found = Lines(file, cache)
    copy = pickle.loads(pickle.dumps(found))
    assert b"first\n" == found.read(0)
    file.write_bytes(data)
    for reader in (found, copy):
        with pytest.raises(RuntimeError, match="changed while it was read"):
            reader.read(0)


def test_a_file_that_is_replaced_stays_readable_where_it_is_open(file, cache):
    """A rename leaves the open file alone; a process that opens it later sees that it is another."""
    found = Lines(file, cache)
    copy = pickle.loads(pickle.dumps(found))
    other = file.with_name("other")
    other.write_bytes(b"another\n")
    other.replace(file)
    assert b"first\n" == found.read(0)
    with pytest.raises(RuntimeError, match="changed"):
        copy.read(0)


def test_the_digest_of_a_file_is_that_of_its_bytes(file, cache, monkeypatch):
    """The same for the same bytes, wherever they lie; kept beside the index, and not confused with it."""
    wanted = blake2b(file.read_bytes(), digest_size=16).hexdigest()
    assert wanted == digest_file(file, cache) == Lines(file, cache).digest
    other = file.with_name("other")
    other.write_bytes(file.read_bytes())
    assert wanted == digest_file(other, cache)
    assert 3 == len(Lines(file, cache))
    no_pass(monkeypatch)
    assert wanted == digest_file(file, cache)


def test_descriptors_are_closed_with_the_last_reader(file, cache):
    """Opening many and dropping them leaves none open; a reader that lives has its own."""
    reader = Lines(file, cache)
    reader.read(0)
    held = open_below(file.parent)  # the rows, and the index that is mapped from the cache
    assert 1 == held[file]
    for _ in range(50):
        pickle.loads(pickle.dumps(Lines(file, cache))).read(0)
    assert held == open_below(file.parent)
    del reader
    assert not open_below(file.parent)
