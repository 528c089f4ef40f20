"""Laws of `mmdp.store`: bytes from inside the data folder, by rule and not by luck."""

import asyncio
import contextlib
import json
import os
import pickle
import socket
import threading

import pytest
from descriptors import open_below
from odd_names import ODD_NAMES

from mmdp import store
from mmdp.records import ImageRef
from mmdp.refusals import DataError, Reason
from mmdp.rows import parse_row


@pytest.fixture
def folder(tmp_path):
    """A data folder with one file, in a folder that holds a secret."""
    data = tmp_path / "data"
    (data / "sub").mkdir(parents=True)
    (data / "in.png").write_bytes(b"inside")
    (data / "sub" / "in.png").write_bytes(b"below")
    (tmp_path / "secret.png").write_bytes(b"secret")
    return data


def read(folder, name, limit=None):
    return store.read(ImageRef(name, str(folder)), limit)


def refusal(folder, name):
    with pytest.raises(DataError) as caught:
        read(folder, name)
    assert "\n" not in caught.value.message
    assert caught.value.message.isascii()
    assert len(caught.value.message) < 400
    return caught.value


def within(seconds, function):
    """What the function returns or raises, if that takes no longer."""
    outcome = []

    def target():
        try:
            outcome.append((function(), None))
        except Exception as error:
            outcome.append((None, error))

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it waits for ever"
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


def test_bytes_that_travel_with_the_row_are_given_back():
    """A reference with bytes of its own reads no file, whatever its name says."""
    ref = ImageRef("../secret.png", "/nowhere", b"own bytes")
    assert store.read(ref) == b"own bytes"
    assert store.read(ref, 3) == b"own"
    assert store.read(ImageRef("", "", b"")) == b""


def test_a_limit_reads_the_start_alone(folder):
    """At most `limit` bytes, from the start; all where the file has fewer."""
    assert read(folder, "in.png", 2) == b"in"
    assert read(folder, "in.png", 100) == b"inside"
    assert read(folder, "in.png") == b"inside"


def test_an_empty_file_is_no_bytes(folder):
    """Zero bytes are what the file holds; their verdict is the image reader's."""
    (folder / "empty.png").touch()
    assert read(folder, "empty.png") == b""


@pytest.mark.parametrize("name", ODD_NAMES)
def test_any_plain_name_works(folder, name):
    """Blanks, letters of any script, percent signs, marks of the shell: a name is a name."""
    (folder / name).write_bytes(b"found")
    assert read(folder, name) == b"found"


@pytest.mark.parametrize("name", ["./in.png", "sub/../in.png", "sub/./../in.png", "sub//..//in.png"])
def test_dots_that_stay_inside_are_fine(folder, name):
    """A name may go down and up again, as long as it never leaves."""
    assert read(folder, name) == b"inside"


def test_a_colon_can_be_written(folder):
    """The message's remedy for a colon in a name works."""
    (folder / "a:b.png").write_bytes(b"found")
    assert "./a:b.png" in refusal(folder, "a:b.png").message
    assert read(folder, "./a:b.png") == b"found"
    (folder / "12:30.png").write_bytes(b"half past")
    assert read(folder, "12:30.png") == b"half past"


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("../secret.png", "climbs out"),
        ("sub/../../secret.png", "climbs out"),
        ("../data/in.png", "climbs out"),
        ("/etc/passwd", "absolute"),
        ("//host/share/x.png", "absolute"),
        ("..\\secret.png", "backslash"),
        ("\\\\host\\x.png", "backslash"),
        ("C:\\x.png", "scheme"),
        ("C:/x.png", "scheme"),
        ("file:///etc/passwd", "scheme"),
        ("FILE:/etc/passwd", "scheme"),
        ("http://127.0.0.1:9/x.png", "scheme"),
        ("https://[::1]/x.png", "scheme"),
        ("s3://bucket/x.png", "scheme"),
        ("data:image/png;base64,AAAA", "scheme"),
        ("in.png\0.txt", "NUL"),
        ("sub", "folder"),
        ("sub/", "folder"),
        ("in.png/", "folder"),
        (".", "folder"),
        ("sub/..", "folder"),
        ("/", "absolute"),
    ],
)
def test_names_against_the_rules_are_refused_by_name(folder, name, word):
    """UNSAFE_PATH, with the rule that is broken in the message."""
    error = refusal(folder, name)
    assert error.reason == Reason.UNSAFE_PATH
    assert word in error.message


@pytest.mark.parametrize(
    "name", ["~/x.png", "$HOME/x.png", "${HOME}/x.png", "nosuch.png", "nosuch/x.png", "in.png/x.png"]
)
def test_a_name_without_a_file_is_missing(folder, name):
    """MISSING_IMAGE; a home folder or a variable is not expanded, so it is a name without a file."""
    assert refusal(folder, name).reason == Reason.MISSING_IMAGE


def test_names_that_no_file_can_have_are_refused(folder):
    """Empty, too long, or not encodable: a refused row, not a crash."""
    assert refusal(folder, "").reason == Reason.WRONG_FORM
    assert refusal(folder, "x" * 100_000).reason == Reason.MISSING_IMAGE
    assert refusal(folder, "/".join(["x"] * 100_000)).reason == Reason.MISSING_IMAGE
    assert refusal(folder, "\ud800.png").reason == Reason.INVALID_TEXT


def test_links_that_stay_inside_are_followed(folder):
    """A link to a file or a folder inside is as good as the file."""
    (folder / "link.png").symlink_to("in.png")
    (folder / "absolute.png").symlink_to(folder / "in.png")
    (folder / "dir").symlink_to("sub")
    (folder / "chain").symlink_to("dir")
    assert read(folder, "link.png") == b"inside"
    assert read(folder, "absolute.png") == b"inside"
    assert read(folder, "chain/in.png") == b"below"
    assert read(folder, "dir/../link.png") == b"inside"


def test_links_that_lead_out_are_refused(folder):
    """UNSAFE_PATH, whether the link is the file, a folder on the way, or reached over others."""
    (folder / "out.png").symlink_to(folder.parent / "secret.png")
    (folder / "up").symlink_to("..")
    (folder / "hop").symlink_to("up")
    (folder / "self").symlink_to(".")
    assert b"secret" == (folder / "hop" / "secret.png").read_bytes()
    for name in ("out.png", "up/secret.png", "hop/secret.png", "self/out.png", "up", "self"):
        assert refusal(folder, name).reason == Reason.UNSAFE_PATH, name
    assert read(folder, "self/self/in.png") == b"inside"
    assert read(folder, "up/data/in.png") == b"inside"


def test_a_neighbour_of_like_name_is_outside(folder):
    """`data-2` beside `data` is not inside it: whole names are compared, not letters."""
    beside = folder.parent / "data-2"
    beside.mkdir()
    (beside / "x.png").write_bytes(b"secret")
    (folder / "x.png").symlink_to(beside / "x.png")
    assert refusal(folder, "x.png").reason == Reason.UNSAFE_PATH


def test_loops_of_links_are_refused(folder):
    """A link to itself, or two to each other."""
    (folder / "loop.png").symlink_to("loop.png")
    (folder / "a").symlink_to("b")
    (folder / "b").symlink_to("a")
    for name in ("loop.png", "a/in.png"):
        error = refusal(folder, name)
        assert error.reason == Reason.UNSAFE_PATH
        assert "circle" in error.message


def test_a_data_folder_reached_over_a_link_is_fine(folder):
    """The root is the user's, so it is resolved and not distrusted."""
    root = folder.parent / "root"
    root.symlink_to(folder)
    (folder / "link.png").symlink_to(folder / "in.png")
    assert read(root, "in.png") == b"inside"
    assert read(root, "link.png") == b"inside"


def test_only_regular_files_are_opened(folder):
    """A pipe, a socket and a device are refused at once; nothing is taken out of them."""
    os.mkfifo(folder / "pipe.png")
    with socket.socket(socket.AF_UNIX) as server:
        with contextlib.chdir(folder):  # a socket's address is short
            server.bind("socket.png")
        for name in ("pipe.png", "socket.png"):
            error = within(5, lambda name=name: refusal(folder, name))
            assert error.reason == Reason.UNSAFE_PATH
            assert "device" in error.message
    error = within(5, lambda: refusal("/dev", "zero"))
    assert error.reason == Reason.UNSAFE_PATH


def test_a_pipe_put_in_place_after_the_check_never_blocks(folder, monkeypatch):
    """The type is asked of what was opened, not only of what was there before."""
    real = os.stat
    swapped = []

    def swap(name, **options):
        result = real(name, **options)
        (folder / "in.png").unlink()
        os.mkfifo(folder / "in.png")
        swapped.append(name)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", swap)
        error = within(5, lambda: refusal(folder, "in.png"))
    assert swapped == ["in.png"]
    assert error.reason == Reason.UNSAFE_PATH


def test_a_link_put_in_place_after_the_check_is_not_followed(folder, monkeypatch):
    """Between check and open, a file is exchanged for a link that leads out: refused."""
    real = os.stat
    swapped = []

    def swap(name, **options):
        result = real(name, **options)
        if not swapped:
            (folder / "in.png").unlink()
            (folder / "in.png").symlink_to("../secret.png")
            swapped.append(name)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", swap)
        error = refusal(folder, "in.png")
    assert swapped == ["in.png"]
    assert error.reason == Reason.UNSAFE_PATH


def test_no_permission_is_no_reason_to_skip(folder, monkeypatch):
    """An error of the machine is an OSError with the whole path and what to do, never a DataError."""
    real = os.open

    def deny(path, flags, *args, **options):
        if path == "in.png":
            raise PermissionError(13, "Permission denied", path)
        return real(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", deny)
    with pytest.raises(PermissionError) as caught:
        read(folder, "in.png")
    assert caught.value.filename == str(folder / "in.png")
    assert "make it readable" in str(caught.value)


def test_a_data_folder_that_is_gone_stops_the_run(tmp_path):
    """It is not one missing image after another."""
    with pytest.raises(FileNotFoundError, match="no such data folder"):
        read(tmp_path / "unmounted", "in.png")


def test_a_source_without_a_folder_has_no_files():
    """A name without a root and without bytes is a missing image; a bad name is still called bad."""
    assert refusal("", "in.png").reason == Reason.MISSING_IMAGE
    assert refusal("", "/etc/passwd").reason == Reason.UNSAFE_PATH


@pytest.mark.parametrize("name", ["../in.png", "http://host/in.png", "/in.png", "a\\b.png", "", "x" * 100_000])
@pytest.mark.parametrize("root", ["s3://bucket/train", "gs://bucket", "az://container", "https://host/x"])
def test_names_keep_the_same_rules_below_any_root(folder, root, name):
    """A bad name is refused as below a folder, and nothing is asked for it."""
    near, far = refusal(folder, name), refusal(root, name)
    assert (near.reason, near.message) == (far.reason, far.message)


@pytest.mark.parametrize("root", ["ftp://host/train", "file:///etc", "s3://", "s3:///train", "s3://bucket/../other"])
def test_a_root_that_no_store_has_is_an_error_of_the_user(root):
    """ValueError, not a row that is skipped."""
    with pytest.raises(ValueError, match=r"can't be read|names no bucket|its plain path"):
        read(root, "in.png")


def test_many_are_read_like_one(folder):
    """`read_many` gives what `read` gives or raises, in the order of the references."""
    (folder / "loop.png").symlink_to("loop.png")
    names = ["in.png", "nosuch.png", "sub/in.png", "loop.png"]
    found = store.read_many([ImageRef(name, str(folder)) for name in names], 3)
    assert [b"ins", b"bel"] == [found[0], found[2]]
    for number in (1, 3):
        assert str(refusal(folder, names[number])) == str(found[number])


def test_an_event_loop_reads_folders_too(folder):
    """`aread`, beside other work of the loop."""

    async def both():
        return await asyncio.gather(*(store.aread(ImageRef(name, str(folder)), 2) for name in ("in.png", "sub/in.png")))

    assert [b"in", b"be"] == asyncio.run(both())
    with pytest.raises(DataError):
        asyncio.run(store.aread(ImageRef("nosuch.png", str(folder))))


def test_a_file_over_the_limit_is_refused_unread(folder):
    """A file larger than the cap is refused by its size, even where only its start is asked for."""
    with (folder / "huge.png").open("wb") as file:
        file.truncate(store.MAX_FILE_BYTES + 1)  # a hole: no disk is used
    assert refusal(folder, "huge.png").reason == Reason.IMAGE_TOO_LARGE
    with pytest.raises(DataError, match="image_too_large"):
        read(folder, "huge.png", 10)


def test_no_descriptor_stays_open(folder):
    """Neither a file read nor a name refused leaves one behind."""
    os.mkfifo(folder / "pipe.png")
    (folder / "link.png").symlink_to("in.png")
    (folder / "out.png").symlink_to("../secret.png")
    for name in ("in.png", "sub/in.png", "link.png"):
        read(folder, name)
    for name in ("pipe.png", "out.png", "sub", "nosuch/x.png", "in.png/x.png", "sub/nosuch.png"):
        refusal(folder, name)
    assert not open_below(folder.parent)


def test_messages_are_short_and_printable(folder):
    """A name of control characters or of a megabyte can't flood or steer a terminal."""
    for name in ("sub/../" * 10**6 + "x", "\x1b[2J\r\n\u202e.png", "a" * 2**20, "http://" + "a" * 2**20):
        refusal(folder, name)  # checks the message


def test_refusals_cross_processes(folder):
    """The error pickles with its reason and words."""
    error = refusal(folder, "../x.png")
    assert str(error) == str(pickle.loads(pickle.dumps(error)))


def test_handed_paths(case_script, tmp_path):
    """SEC-01 to SEC-06: each row kept or refused as expected, none waits, and the secret is never read."""
    case_script("make_paths").main(str(tmp_path))
    expected = json.loads((tmp_path / "expected.json").read_text())
    secret = (tmp_path / "outside" / "secret.png").read_bytes()
    verdicts, reasons = [], set()
    for number, line in enumerate((tmp_path / "data" / "rows.jsonl").read_text().splitlines()):
        sample = parse_row(json.loads(line), root=str(tmp_path / "data"), source="rows.jsonl", number=number)
        (image,) = sample.images
        try:
            data = within(5, lambda image=image: store.read(image))
        except DataError as error:
            verdicts.append("reject")
            reasons.add(error.reason)
        else:
            verdicts.append("keep")
            assert data != secret
    assert [entry["verdict"] for entry in expected] == verdicts
    assert {"keep", "reject"} == set(verdicts)
    assert {Reason.UNSAFE_PATH, Reason.MISSING_IMAGE} == reasons
