"""Laws of `object_store.py`: images of a bucket like files of a folder, whatever the server or the network does.

NET-01 to NET-07 run against the server that misbehaves by script, as an S3 store and as a web server (`web_store.py`).
"""

import asyncio
import contextlib
import itertools
import os
import pickle
import socket
import subprocess
import sys
import textwrap
import threading
import time
import warnings

import pytest
from odd_names import ODD_NAMES
from servers import KEY, SECRET, Shelf, environment, localbucket, moto, rclone, rclone_at  # noqa: F401 -- fixtures

from mmdp import object_store, store
from mmdp.config import Config
from mmdp.records import ImageRef
from mmdp.refusals import DataError, Reason
from mmdp.remote import Access, FetchError, TransientError

pytestmark = pytest.mark.timeout(90)

NAMES = [
    "in.png",
    "sub/in.png",
    *ODD_NAMES,
    "x#y.png",
    "a+b&c=d.png",
]
LONG = bytes(range(256)) * 400  # more than any header that is asked for
FILES = {f"train/v1/{name}": name.encode() for name in NAMES} | {
    "train/v1/long.png": LONG,
    "train/v1/empty.png": b"",
    "train/secret.png": b"secret",
}
ROOT = "s3://pictures/train/v1"


@pytest.fixture(autouse=True)
def no_cloud(monkeypatch):
    """Nothing of the user's own environment reaches a test."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "S3_", "GOOGLE_", "AZURE_"))]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module", params=["moto", "rclone", "localbucket"])
def filled(request):
    """A real server with some pictures."""
    server = request.getfixturevalue(request.param)
    server.fill("pictures", FILES)
    return server


@pytest.fixture
def server(filled, monkeypatch):
    for name, value in environment(filled.endpoint).items():
        monkeypatch.setenv(name, value)
    use(ROOT)
    return filled


def use(root, **knobs):
    """Fetches from a root with these knobs, and with the environment as it is."""
    store.use_root(root, Access.of(Config(**knobs), root))


def read(name, limit=None, root=ROOT):
    return store.read(ImageRef(name, root), limit)


def refusal(name, limit=None, root=ROOT):
    with pytest.raises(DataError) as caught:
        read(name, limit, root)
    assert caught.value.message.isascii()
    assert "\n" not in caught.value.message
    return caught.value


def failure(name, limit=None, root=ROOT):
    with pytest.raises(FetchError) as caught:
        read(name, limit, root)
    assert "\n" not in str(caught.value)
    return caught.value


# Every server


@pytest.mark.parametrize("name", NAMES)
def test_any_plain_name_works(server, name):
    """An object's key is root and name as they stand, as in a folder."""
    assert name.encode() == read(name)


def test_dots_that_stay_inside_are_fine(server):
    """`..` goes, since a bucket has neither folders nor links."""
    assert [b"in.png"] * 3 == [read(name) for name in ("./in.png", "sub/../in.png", "sub/./..//in.png")]


@pytest.mark.parametrize(
    "name", ["../secret.png", "/train/secret.png", "http://127.0.0.1/x.png", "s3://pictures/x", "a\\b"]
)
def test_names_against_the_rules_are_refused_unasked(server, name):
    """The rules are those of folders, and hold before anything is fetched."""
    assert Reason.UNSAFE_PATH == refusal(name).reason


def test_names_that_no_object_can_have_are_refused(server):
    """Too long for a key, no text, or with a control character that the client takes in none."""
    assert Reason.MISSING_IMAGE == refusal("\u00e4" * 1000).reason
    assert Reason.INVALID_TEXT == refusal("\ud800.png").reason
    assert Reason.UNSAFE_PATH == refusal("a\tb.png").reason


@pytest.mark.filterwarnings("ignore:.*ignores ranges")
def test_a_limit_reads_the_start_alone(server):
    """At most `limit` bytes, also where the object has fewer, and where the server ignores ranges."""
    assert LONG[:4096] == read("long.png", 4096)
    assert LONG == read("long.png")
    assert b"in.png" == read("in.png", 4096)


@pytest.mark.filterwarnings("ignore:.*ignores ranges")
@pytest.mark.parametrize("limit", [None, 4096])
def test_what_is_not_there_or_empty_is_a_refused_row_that_names_the_key(server, limit):
    """MISSING_IMAGE and EMPTY_IMAGE."""
    error = refusal("nosuch.png", limit)
    assert Reason.MISSING_IMAGE == error.reason
    assert "s3://pictures/train/v1/nosuch.png" in error.message
    error = refusal("empty.png", limit)
    assert Reason.EMPTY_IMAGE == error.reason
    assert "s3://pictures/train/v1/empty.png" in error.message


def test_a_bucket_that_is_not_there_stops_the_run(server):
    """It is not one missing image after another."""
    use("s3://nosuchbucket/train")
    error = failure("in.png", root="s3://nosuchbucket/train")
    assert "no such bucket" in str(error)
    assert "NoSuchBucket" in str(error)


def test_many_come_in_the_order_they_were_named(server):
    """`read_many`: the bytes of each, and of a bad one its error, among the others."""
    names = ["in.png", "nosuch.png", "sub/in.png", "../secret.png", "long.png"]
    found = store.read_many([*(ImageRef(name, ROOT) for name in names), ImageRef("", data=b"own")])
    assert [b"in.png", b"sub/in.png", LONG, b"own"] == [found[number] for number in (0, 2, 4, 5)]
    errors = [found[number] for number in (1, 3)]
    assert all(isinstance(error, DataError) for error in errors)
    assert [Reason.MISSING_IMAGE, Reason.UNSAFE_PATH] == [error.reason for error in errors]


# What servers differ in


def test_a_server_that_ignores_ranges_is_read_whole_and_said_once(rclone, monkeypatch):  # noqa: F811
    """One warning for a store, however many images; and `reader` fetches such an image once."""
    rclone.fill("whole", {"a.png": LONG, "b.png": LONG})
    for name, value in environment(rclone.endpoint).items():
        monkeypatch.setenv(name, value)
    use("s3://whole")
    with pytest.warns(RuntimeWarning, match="s3://whole ignores ranges") as said:
        assert [LONG[:9]] * 4 == [read(name, 9, "s3://whole") for name in ("a.png", "b.png") * 2]
    assert 1 == len(said)


def test_wrong_credentials_stop_the_run(rclone, monkeypatch):  # noqa: F811
    """A real refusal of a signature: an error that says access, and names the key."""
    rclone.fill("locked", {"a.png": b"a"})
    for name, value in environment(rclone.endpoint).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    use("s3://locked", fetch_retries=1)
    error = failure("a.png", root="s3://locked")
    assert "refuses access" in str(error)
    assert "403" in str(error)
    assert "s3://locked/a.png" in str(error)
    assert "wrong" not in str(error)


def test_a_store_that_is_down_for_some_seconds_is_waited_for(tmp_path, monkeypatch):
    """A real server, killed and started again at its address: with the defaults, no error and all bytes, and a word."""
    files = {f"{number}.png": LONG[: 1000 + number] for number in range(8)}
    with rclone_at(tmp_path) as running:
        running.fill("steady", files)
    for name, value in environment(running.endpoint).items():
        monkeypatch.setenv(name, value)
    use("s3://steady")
    down = 5.0
    is_read = threading.Event()

    def start_again():
        time.sleep(down)
        with rclone_at(tmp_path, int(running.endpoint.rpartition(":")[2])):
            is_read.wait(60)

    starter = threading.Thread(target=start_again)
    started = time.monotonic()
    starter.start()
    try:
        with pytest.warns(RuntimeWarning, match="s3://steady fails .Connection refused.; it is tried again"):
            found = store.read_many([ImageRef(name, "s3://steady") for name in files])
    finally:
        is_read.set()
        starter.join()
    assert list(files.values()) == found
    assert down < time.monotonic() - started < down + 30


# What is asked


def shelf_access(monkeypatch, shelf, root="s3://b", **knobs):
    for name, value in environment(shelf.endpoint).items():
        monkeypatch.setenv(name, value)
    use(root, **knobs)


def test_a_header_costs_its_first_bytes(monkeypatch):
    """Only what is asked for is fetched; `reader` asks for more only where it has less, and for nothing twice."""
    with Shelf({"b/long.png": LONG, "b/short.png": b"short"}) as shelf:
        shelf_access(monkeypatch, shelf)
        start = store.reader(ImageRef("long.png", "s3://b"))
        assert [LONG[:4096], LONG[:10], LONG[:65536], LONG, LONG[:20]] == [
            start(limit) for limit in (4096, 10, 65536, None, 20)
        ]
        assert ["bytes=0-4095", "bytes=0-65535", ""] == [asked for _, asked in shelf.asked]
        start = store.reader(ImageRef("short.png", "s3://b"))
        assert [b"short"] * 3 == [start(limit) for limit in (4096, 65536, None)]
        assert [("b/short.png", "bytes=0-4095")] == shelf.asked[3:]


def test_a_reader_fetches_once_from_a_server_that_ignores_ranges(monkeypatch):
    """What came whole is kept."""
    with Shelf({"b/long.png": LONG}, ranges=False) as shelf:
        shelf_access(monkeypatch, shelf)
        start = store.reader(ImageRef("long.png", "s3://b"))
        with pytest.warns(RuntimeWarning, match="ignores ranges"):
            assert LONG[:4096] == start(4096)
        num_asked = len(shelf.asked)
        assert [LONG[:65536], LONG] == [start(65536), start(None)]
        assert num_asked == len(shelf.asked)


@pytest.mark.parametrize(
    ("root", "path", "settings"),
    [
        ("gs://b/train", "b/train/x.png", {"GOOGLE_BASE_URL": "", "GOOGLE_SKIP_SIGNATURE": "true"}),
        (
            "az://b/train",
            "b/train/x.png",
            {"AZURE_ENDPOINT": "", "AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_SKIP_SIGNATURE": "true"},
        ),
    ],
)
def test_the_other_clouds_are_asked_by_their_own_rules(monkeypatch, root, path, settings):
    """Google and Azure, each by the client of its own, as far as a server of ours can tell."""
    with Shelf({path: LONG}) as shelf:
        for name, value in settings.items():
            monkeypatch.setenv(name, value or shelf.endpoint)
        use(root)
        assert LONG[:4096] == read("x.png", 4096, root)
        assert LONG == read("x.png", None, root)
        assert Reason.MISSING_IMAGE == refusal("y.png", None, root).reason
        assert (path, "bytes=0-4095") == shelf.asked[0]


@pytest.mark.parametrize("profile", ["", "training"])
def test_no_credentials_are_said_plainly(monkeypatch, profile):
    """Whoever forgot them is told what to set, and where, whatever the machine's own services answer."""
    if profile:
        monkeypatch.setenv("AWS_PROFILE", profile)
    use("s3://b", connect_seconds=1, fetch_retries=0)
    error = failure("x.png", root="s3://b")
    assert "AWS_ACCESS_KEY_ID" in str(error)
    assert "AWS_SKIP_SIGNATURE" in str(error)
    assert "in the environment of this process (on a Ray cluster: of the node)" in str(error)
    assert bool(profile) == ("aws configure export-credentials --profile 'training' --format env" in str(error))


@pytest.mark.parametrize("has_answered", [False, True])
def test_a_role_that_can_t_be_had_ends_a_run_only_where_there_was_none(monkeypatch, has_answered):
    """A machine without one is told so after a moment; one that had one, and is refused for once, tries on."""
    asked = []

    async def no_role(*wanted):
        asked.append(wanted)
        raise object_store._NoRoleError("no credentials")

    client = object_store.ObjectStore("s3://b", Access.of(Config(connect_seconds=9.5), "s3://b"))
    monkeypatch.setattr(client, "_open", no_role)
    monkeypatch.setattr(object_store, "_ROLE_WAIT", 0.01)
    client._has_answered = has_answered
    with pytest.raises(TransientError if has_answered else FetchError, match="no credentials"):
        asyncio.run(client.open("k", None))
    assert 3 == len(asked)


@pytest.mark.parametrize(
    ("scheme", "words"), [("https", "no trusted TLS connection"), ("http", "speaks no HTTP: see the address")]
)
def test_what_is_no_store_at_all_is_asked_once(monkeypatch, scheme, words):
    """A wrong scheme or a wrong port, which no try would mend."""
    calls = []

    def greet(listener):
        while True:
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                calls.append(connection.recv(2000))
                connection.sendall(b"220 mail ready\r\n\r\n")
                connection.close()
            if listener.fileno() < 0:
                return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=greet, args=(listener,), daemon=True).start()
        for name, value in environment(f"{scheme}://127.0.0.1:{listener.getsockname()[1]}").items():
            monkeypatch.setenv(name, value)
        use("s3://b")
        assert words in str(failure("x.png", root="s3://b"))
        assert 1 == len(calls)
        listener.shutdown(socket.SHUT_RDWR)


def test_a_server_that_is_not_there_is_named_with_the_cause(monkeypatch):
    """After bounded tries; the address is one at which nobody listens."""
    with Shelf({}) as shelf:
        pass
    shelf_access(monkeypatch, shelf, fetch_retries=1)
    error = failure("x.png", root="s3://b")
    assert "2 tries" in str(error)
    assert "refused" in str(error).lower()
    assert "s3://b/x.png" in str(error)


def test_errors_cross_processes(monkeypatch):
    """They pickle, with key and code."""
    with Shelf({}) as shelf:
        pass
    shelf_access(monkeypatch, shelf, fetch_retries=0)
    error = failure("x.png", root="s3://b")
    again = pickle.loads(pickle.dumps(error))
    assert (type(error), str(error), error.errno) == (type(again), str(again), again.errno)


# NET-01 to NET-07


@pytest.fixture
def flaky(case_script, monkeypatch):
    return case_script("flaky_server")


@pytest.fixture(params=["s3", "http"])
def scene(request, flaky, monkeypatch):
    """Runs a scene, and gives what came of it: bytes or error, seconds, requests."""

    def run(acts, limit=None, **knobs):
        with flaky.Flaky(flaky.SCENES[acts] if isinstance(acts, str) else acts) as playing:
            root = "s3://b" if request.param == "s3" else f"{playing.endpoint}/b"
            for name, value in environment(playing.endpoint).items():
                monkeypatch.setenv(name, value)
            knobs = {"fetch_retries": 5, "read_seconds": 5.0, "fetch_seconds": 20.0} | knobs
            use(root, http_hosts=(playing.endpoint.removeprefix("http://"),), **knobs)
            started = time.monotonic()
            outcome = read_or_error(ImageRef("k.bin", root), limit)
            return outcome, time.monotonic() - started, [when for when, *_ in playing.log]

    def read_or_error(ref, limit):
        try:
            return store.read(ref, limit)
        except (DataError, OSError) as error:
            return error

    return run


LIMITS = pytest.mark.parametrize("limit", [None, 4096])


@LIMITS
@pytest.mark.parametrize(
    ("acts", "num_requests"),
    [
        ("ok", 1),
        ("slow_down_then_ok", 4),
        ("one_500", 2),
        ("bad_request_timeout", 2),
        ("too_many", 3),
        ("reset_then_ok", 3),
    ],
)
def test_what_may_pass_is_tried_again(scene, flaky, acts, num_requests, limit):
    """NET-01, NET-03, NET-07: the bytes, after as many requests as it takes."""
    outcome, _, requests = scene(acts, limit)
    if acts == "bad_request_timeout" and not isinstance(outcome, bytes):
        pytest.skip("a code of S3, which no web server has")
    assert flaky.BODY[:limit] == outcome
    assert num_requests == len(requests)


def test_tries_are_bounded_and_spread(scene):
    """NET-01: an error that names key and code; waits that start above nothing, and differ from run to run."""
    runs = []
    for _ in range(2):
        outcome, _, requests = scene("slow_down_for_ever", fetch_retries=4)
        assert isinstance(outcome, FetchError)
        assert "503" in str(outcome)
        assert "k.bin" in str(outcome)
        assert 5 == len(requests)
        runs.append([after - before for before, after in itertools.pairwise(requests)])
    assert min(runs[0] + runs[1]) > 0.05
    assert any(abs(one - other) > 0.002 for one, other in zip(*runs, strict=True))


@pytest.mark.parametrize("acts", ["cut_body_then_ok", "cut_body_for_ever"])
def test_half_a_body_is_never_taken_for_a_whole(scene, flaky, acts):
    """NET-02: all bytes or an error. (A client that asks for the rest gets the whole out of pieces.)"""
    outcome, _, requests = scene(acts, fetch_retries=3)
    assert len(requests) > 1
    if acts == "cut_body_then_ok":
        assert flaky.BODY == outcome
    else:
        assert isinstance(outcome, FetchError) or flaky.BODY == outcome


def test_a_body_that_never_comes_is_an_error(scene):
    """NET-02: nothing after the header, time and again."""
    outcome, _, requests = scene([("short", 0)], fetch_retries=2)
    assert isinstance(outcome, FetchError)
    assert "k.bin" in str(outcome)
    assert 3 == len(requests)


@pytest.mark.parametrize("ranges", [True, False])
def test_a_cut_body_is_fetched_anew_where_its_rest_can_t_be_had(monkeypatch, ranges):
    """NET-02: without an ETag, or from a server that ignores ranges, the client gives up, and we ask again."""
    with Shelf({"b/k.bin": LONG}, ranges=ranges, headers=None if not ranges else {"ETag": None}) as shelf:
        answer, cut = shelf._answer, []

        def cut_once(request):
            if cut:
                return answer(request)
            cut.append(1)
            request.close_connection = True
            write = request.wfile.write
            monkeypatch.setattr(request.wfile, "write", lambda data: write(data[:5000]), raising=True)
            return answer(request)

        shelf._answer = cut_once
        shelf_access(monkeypatch, shelf)
        assert LONG == read("k.bin", root="s3://b")
        assert [1] == cut


@LIMITS
def test_a_stall_ends_with_the_read_time(scene, flaky, limit):
    """NET-03: a server that says nothing is asked again after `read_seconds`."""
    outcome, seconds, requests = scene("stall_then_ok", limit, read_seconds=0.5)
    assert flaky.BODY[:limit] == outcome
    assert 2 == len(requests)
    assert 0.5 <= seconds < 5


def test_a_drip_ends_with_the_total_time(scene):
    """NET-03: each byte alone must not start the clock anew."""
    outcome, seconds, _ = scene("drip", fetch_seconds=1.5)
    assert isinstance(outcome, FetchError)
    assert "fetch_seconds" in str(outcome)
    assert "k.bin" in str(outcome)
    assert 1.5 <= seconds < 5


@LIMITS
def test_what_can_t_pass_is_asked_once(scene, limit):
    """NET-04: 404 is a refused row, 403 stops the run."""
    outcome, _, requests = scene("missing", limit)
    assert isinstance(outcome, DataError)
    assert Reason.MISSING_IMAGE == outcome.reason
    assert "404" in outcome.message
    assert "k.bin" in outcome.message
    assert 1 == len(requests)
    outcome, _, requests = scene("forbidden", limit)
    assert isinstance(outcome, FetchError)
    assert "refuses access" in str(outcome)
    assert "403" in str(outcome)
    assert "k.bin" in str(outcome)
    assert 1 == len(requests)


@LIMITS
def test_an_empty_object_is_a_refused_row(scene, limit):
    """NET-05."""
    outcome, _, _ = scene("empty_object", limit)
    assert isinstance(outcome, DataError)
    assert Reason.EMPTY_IMAGE == outcome.reason
    assert "k.bin" in outcome.message


def in_process(script, endpoint):
    """What a script prints in a process of its own, within a minute."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=os.environ | environment(endpoint),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    return done.stdout.splitlines()


FORK = """
    import os, signal, sys, time
    from mmdp import store
    from mmdp.records import ImageRef

    ref = ImageRef("k.bin", "s3://b")
    {before}
    for child in range(2):
        if os.fork() == 0:
            signal.alarm(20)  # a hang would end so, and not by an exit code of its own
            started = time.monotonic()
            try:
                told = len(store.read(ref))
            except RuntimeError as error:
                told = f"refused {{time.monotonic() - started < 5}} {{error}}"
            os.write(1, f"{{told}}\\n".encode())  # whole, whatever the other one says at that moment
            os._exit(7)
    print([os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(2)], len(store.read(ref)))
"""


def test_a_fork_after_fetching_is_refused_at_once():
    """NET-06: the client's threads end with a fork, and a fetch would wait for ever: the child is told what to do."""
    with Shelf({"b/k.bin": b"whole"}) as shelf:
        lines = in_process(FORK.format(before="store.read(ref)"), shelf.endpoint)
    assert 3 == len(lines)
    assert all(line.startswith("refused True") and "spawn" in line for line in lines[:2])
    assert "[7, 7] 5" == lines[2]


def test_a_fork_before_fetching_makes_its_own_client():
    """NET-06: a client belongs to one process, and is made when it is first used."""
    with Shelf({"b/k.bin": b"whole"}) as shelf:
        lines = in_process(FORK.format(before="store.use_root"), shelf.endpoint)
    assert ["5", "5", "[7, 7] 5"] == lines


def test_a_process_that_ends_while_it_fetches_ends_quietly():
    """Nothing is printed and nothing waits, though fetches are in flight that take a minute."""
    script = """
        import sys, threading, time
        from mmdp import store
        from mmdp.records import ImageRef

        refs = [ImageRef(f"{i}.png", "s3://b") for i in range(50)]
        threading.Thread(target=store.read_many, args=(refs,), daemon=True).start()
        time.sleep(0.5)
        print("end")
    """
    with Shelf({}, delay=20) as shelf:
        started = time.monotonic()
        assert ["end"] == in_process(script, shelf.endpoint)
        assert time.monotonic() - started < 15
        assert shelf.asked


def test_who_reads_folders_needs_no_client(tmp_path):
    """obstore, which takes a moment to import, is loaded with the first object that is fetched."""
    (tmp_path / "a.png").write_bytes(b"near")
    script = f"""
        import sys
        from mmdp import store
        from mmdp.records import ImageRef
        print(store.read(ImageRef("a.png", {str(tmp_path)!r})), "obstore" in sys.modules, "urllib3" in sys.modules)
    """
    assert ["b'near' False False"] == in_process(script, "")


def test_a_missing_client_is_named(monkeypatch):
    """ValueError that says what to install."""
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    monkeypatch.setitem(sys.modules, "obstore.exceptions", None)
    use("s3://b", connect_seconds=7.5)  # settings of its own, so that no client is there yet
    with pytest.raises(ValueError, match="uv add obstore"):
        read("x.png", root="s3://b")


def test_no_warning_comes_where_nothing_is_odd(monkeypatch):
    """A server that answers ranges gives rise to none."""
    with Shelf({"b/long.png": LONG, "b/empty.png": b""}) as shelf, warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ResourceWarning)  # a connection of an earlier test may be collected here
        shelf_access(monkeypatch, shelf)
        read("long.png", 9, "s3://b")
        refusal("empty.png", 9, "s3://b")
