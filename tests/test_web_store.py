"""Laws of `web_store.py`: nothing is fetched from a host that was not named, and nothing from inside (SEC-05).

What servers and networks do wrong is tested with `test_object_store.py`, for both kinds of stores.
"""

import json
import ssl

import pytest
from servers import Shelf

import mmdp
from mmdp import store
from mmdp.config import Config
from mmdp.records import ImageRef
from mmdp.refusals import DataError, Reason
from mmdp.remote import Access, FetchError
from mmdp.rows import parse_row
from mmdp.web_store import is_public

pytestmark = pytest.mark.timeout(60)


def read(root, name="a.png", limit=None, hosts=()):
    store.use_root(root, Access.of(Config(http_hosts=hosts, fetch_retries=1), root))
    return store.read(ImageRef(name, root), limit)


@pytest.fixture
def shelf():
    with Shelf({"x/a.png": b"from the web", "x/50% \u00e4.png": b"odd"}) as shelf:
        yield shelf


def test_the_web_is_off_unless_the_host_is_named(shelf):
    """By default no host may be read, and nothing is asked of it; the error says what to write."""
    for hosts in [(), ("example.org",), ("127.0.0.1",), (f"{shelf.place}1",), (f"[{shelf.place}]",)]:
        with pytest.raises(ValueError, match=r"http_hosts=\('127\.0\.0\.1:"):
            read(f"{shelf.endpoint}/x", hosts=hosts)
    with pytest.raises(ValueError, match="http_hosts"):
        store.read(ImageRef("a.png", "https://example.org/x"))
    assert [] == shelf.asked


def test_a_host_that_is_named_is_read(shelf):
    """Whole or the start; names are quoted as the web wants them."""
    root, hosts = f"{shelf.endpoint}/x", (shelf.place,)
    assert b"from the web" == read(root, hosts=hosts)
    assert b"from" == read(root, limit=4, hosts=hosts)
    assert b"odd" == read(root, "50% \u00e4.png", hosts=hosts)
    assert [("x/a.png", ""), ("x/a.png", "bytes=0-3"), ("x/50% \u00e4.png", "")] == shelf.asked


def test_a_name_that_leads_inside_is_refused(shelf):
    """A host given by name may not lead to a private address, though it is named; the address itself may be."""
    port = shelf.place.rpartition(":")[2]
    with pytest.raises(ValueError, match=r"leads to the private address"):
        read(f"http://localhost:{port}/x", hosts=(f"localhost:{port}",))
    assert [] == shelf.asked


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:169.254.169.254", False),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
    ],
)
def test_private_addresses_are_known_in_all_their_forms(address, expected):
    """Loopback, private, link-local (the cloud's own), shared, multicast; also inside an IPv6 address."""
    assert expected == is_public(address)


def test_redirects_are_checked_like_the_first_address(shelf):
    """To a host that was not named: refused, and never asked. To one that was: followed."""
    with Shelf({}, moved={"x/a.png": f"{shelf.endpoint}/x/a.png", "x/b.png": "/x/a.png"}) as first:
        root = f"{first.endpoint}/x"
        with pytest.raises(ValueError, match=f"'{shelf.place}' is where .* redirects to"):
            read(root, hosts=(first.place,))
        assert [] == shelf.asked
        assert b"from the web" == read(root, hosts=(first.place, shelf.place))
        assert b"from the web" == read(root, "b.png", hosts=(first.place, shelf.place))


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://127.0.0.1/x", "//169.254.169.254/latest/meta-data/"])
def test_redirects_to_other_schemes_and_to_the_cloud_are_refused(target):
    """Whatever a server answers, only the web is read, and only where it was allowed."""
    with (
        Shelf({}, moved={"x/a.png": target}) as shelf,
        pytest.raises(ValueError, match=r"redirects to"),
    ):
        read(f"{shelf.endpoint}/x", hosts=(shelf.place,))


def test_redirects_that_never_end_are_an_error():
    """Bounded, and named."""
    with Shelf({}, moved={"x/a.png": "/x/a.png"}) as shelf:
        with pytest.raises(FetchError, match=r"more than 5 redirects.*/x/a\.png"):
            read(f"{shelf.endpoint}/x", hosts=(shelf.place,))
        assert 6 == len(shelf.asked)


def test_a_length_must_be_told():
    """Without one, nobody knows whether a body is whole: an error of the server."""
    with (
        Shelf({"x/a.png": b"data"}, headers={"Content-Length": None, "Connection": "close"}) as shelf,
        pytest.raises(FetchError, match="how long it is"),
    ):
        read(f"{shelf.endpoint}/x", hosts=(shelf.place,))


def test_no_plain_server_is_taken_for_a_secure_one(shelf):
    """`https` to a server without it: an error, not plain text."""
    with pytest.raises(FetchError, match=r"(?i)ssl|tls"):
        read(f"https://{shelf.place}/x", hosts=(shelf.place,))
    assert ssl.HAS_SNI


def test_handed_rows_fetch_nothing(case_script, tmp_path, monkeypatch):
    """SEC-05: rows that name web addresses are refused, whatever hosts are allowed."""
    case_script("make_paths").main(str(tmp_path))
    lines = (tmp_path / "data" / "rows.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines if "http" in line or "169.254" in line]
    assert len(rows) >= 3
    with Shelf({}) as shelf:
        root = f"{shelf.endpoint}/x"
        for number, row in enumerate(rows):
            (image,) = parse_row(row, root=root, source="rows.jsonl", number=number).images
            with pytest.raises(DataError) as caught:
                read(root, image.name, hosts=(shelf.place, "127.0.0.1", "169.254.169.254"))
            assert Reason.UNSAFE_PATH == caught.value.reason
        assert [] == shelf.asked


def test_a_data_set_on_the_web_is_opened_where_it_is_allowed(tmp_path):
    """`open_source` with `http_hosts`; its images come from beside it."""
    row = {"image": "a.png", "texts": [{"user": "What is it?", "assistant": "A fox."}]}
    with Shelf({"x/rows.jsonl": json.dumps(row).encode(), "x/a.png": b"from the web"}) as shelf:
        config = Config(http_hosts=(shelf.place,), cache_dir=tmp_path)
        source = mmdp.open_source(f"{shelf.endpoint}/x/rows.jsonl", config=config)
        assert b"from the web" == store.read(source[0].images[0])
        with pytest.raises(ValueError, match="http_hosts"):
            mmdp.open_source(f"{shelf.endpoint}/x/rows.jsonl", config=Config(cache_dir=tmp_path))
