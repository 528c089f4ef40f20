"""Files that lie elsewhere, in an object store or on a web server: their addresses, and what a fetch may come to.

Adds: `is_remote` and `split_uri`; `Access`, what a process must know to fetch, without any secret; `Opened`, an answer
whose body is still to come; `pauses`, how long to wait between tries; the errors of a fetch, and `given_up`, their end.
Leaves out: asking (`object_store`, `web_store`), and what is in flight (`fetch`).
"""

from __future__ import annotations

import errno
import os
import random
import re
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self
from urllib.parse import unquote, urlsplit

from mmdp.config import Config
from mmdp.refusals import shorten

BUCKETS = ("s3", "gs", "az")
"""Schemes of object stores: Amazon S3 and all that speak like it, Google Cloud Storage, Azure Blob Storage."""

WEB = ("http", "https")

FIRST_WAIT, LONGEST_WAIT = 0.1, 15.0
"""Seconds between two tries: what the first wait is at least, and what no wait exceeds. The defaults of obstore, whose
own waits grow by chance alone: 20 of them were seen to come to 20 s, and 40 to 14 s."""

_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "S3_ENDPOINT_URL", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_ENDPOINT", "AZURE_STORAGE_ENDPOINT"),
}
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
UNSIGNED = {"s3": "AWS_SKIP_SIGNATURE", "gs": "GOOGLE_SKIP_SIGNATURE", "az": "AZURE_SKIP_SIGNATURE"}


class FetchError(OSError):
    """A file could not be fetched, all tries included. It says nothing about the row that names the file."""

    says_all = True  # `wire` says of what


class MissingObjectError(Exception):
    """The store has no such file; the text is its answer."""


class TransientError(Exception):
    """A try that failed, and is worth another; the text says how."""


class SilentError(TransientError):
    """A try that ended since no byte came for `Config.read_seconds`."""


class RestError(Exception):
    """The rest of a file can't be had by itself: the store ignores ranges, or the file is another one by now."""


class Rest(NamedTuple):
    """What is wanted of a file whose start is there already.

    Attributes:
        start: bytes that are there.
        stamp: of the file that they are from, its ETag.
    """

    start: int
    stamp: str


class Opened(Protocol):
    """An answer of a store, whose body is still to come.

    Attributes:
        size: bytes of the whole file.
        num_bytes: bytes of this body: fewer than `size` where only the start was asked for, and the store does that.
        stamp: changes with the file's content: its ETag; empty where the store tells nothing.
        resumes: the stamp is an ETag, by which the rest of a cut body can be asked for.
        modified_ns: time of the last change, in nanoseconds since 1970; 0 where the store doesn't tell it.
    """

    size: int
    num_bytes: int
    stamp: str
    modified_ns: int
    resumes: bool

    async def read(self) -> bytes:
        """The body; `TransientError` where less than `num_bytes` comes."""

    def pieces(self, num_bytes: int) -> AsyncGenerator[bytes, None]:
        """The body in pieces of at least so many bytes, the last one aside."""


class Store(Protocol):
    """What answers for a bucket, or for a web root."""

    async def open(self, key: str, limit: int | None, rest: Rest | None = None) -> Opened:
        """Asks once for a file, for its first `limit` bytes, or for its rest.

        Raises:
            MissingObjectError: there is no such file.
            TransientError: worth another try; `SilentError` where nothing came for `read_seconds`.
            RestError: no rest can be had.
            FetchError: anything else.
        """


@dataclass(frozen=True, slots=True)
class Access:
    """How a store is asked: the numbers of `Config`, and where it is. Credentials stay in each process's environment.

    Attributes:
        endpoint: of the object store; empty for the cloud's own.
        region: of S3; empty where the environment has none.
        is_unsigned: the store is public, and asked without credentials.
    """

    max_fetches: int
    max_fetch_bytes: int
    connect_seconds: float
    read_seconds: float
    fetch_seconds: float
    fetch_retries: int
    http_hosts: tuple[str, ...]
    endpoint: str
    region: str
    is_unsigned: bool

    @classmethod
    def of(cls, config: Config, root: str, environment: Mapping[str, str] | None = None) -> Self:
        """What `Config` and the environment (by default this process's) say of a root.

        Raises:
            ValueError: the environment names an endpoint that is no address.
        """
        environment = os.environ if environment is None else environment
        scheme = root.partition("://")[0].lower()
        return cls(
            max_fetches=config.max_fetches,
            max_fetch_bytes=config.max_fetch_bytes,
            connect_seconds=config.connect_seconds,
            read_seconds=config.read_seconds,
            fetch_seconds=config.fetch_seconds,
            fetch_retries=config.fetch_retries,
            http_hosts=tuple(config.http_hosts),
            endpoint=_endpoint(scheme, environment),
            region=next(filter(None, map(environment.get, _REGIONS)), ""),
            is_unsigned=environment.get(UNSIGNED.get(scheme, ""), "").lower() in ("1", "true", "yes", "on"),
        )


def pauses(access: Access) -> Iterator[float]:
    """Seconds to wait before each further try: between half of a bound and the whole of it, and the bound doubles.

    So waits grow whatever chance does, and no two processes wait the same. With the defaults of `Config`, all of them
    come to 50 s at least, and to 100 s at most.
    """
    bound = 2 * FIRST_WAIT
    for _ in range(access.fetch_retries):
        yield random.uniform(bound / 2, bound)  # noqa: S311 -- nothing secret
        bound = min(LONGEST_WAIT, 2 * bound)


def given_up(
    uri: str, failures: Sequence[TransientError], access: Access, *, is_late: bool, others_came: bool = False
) -> FetchError:
    """The error of a file that could not be had, with the knob that bounds what ended it.

    Args:
        uri: the file.
        failures: of all tries, in their order.
        access: how often and how long it was tried.
        is_late: the time was used up, and not the tries.
        others_came: the same store gave other files meanwhile.
    """
    code = errno.ETIMEDOUT if is_late else errno.EIO
    if not failures:
        found = f"not whole within {access.fetch_seconds:g} s"
        return FetchError(code, f"{found}: raise Config.fetch_seconds, or bring the data nearer", uri)
    if isinstance(failures[-1], SilentError):
        silent = sum(isinstance(failure, SilentError) for failure in failures)
        times = f"{silent} times" if silent > 1 else "once"
        return FetchError(code, f"no byte for {access.read_seconds:g} s, {times}: raise Config.read_seconds", uri)
    tries = f"{len(failures)} {'tries' if len(failures) > 1 else 'try'}"
    within, knob = (
        (f" within {access.fetch_seconds:g} s", "Config.fetch_seconds") if is_late else ("", "Config.fetch_retries")
    )
    look = "see whether the store is up and its address right"
    if others_came:
        look = "other files came meanwhile, so see whether this one can be had at all: upload it again, or drop its row"
    advice = f"{look}; {knob} says how long it is tried"
    return FetchError(code, f"{failures[-1]}, {tries}{within}: {advice}", uri)


def _endpoint(scheme: str, environment: Mapping[str, str]) -> str:
    """The address of the object store that the environment names; empty for the cloud's own."""
    variable = next(filter(environment.get, _ENDPOINTS.get(scheme, ())), "")
    endpoint = environment.get(variable, "").rstrip("/")
    try:
        parts = urlsplit(endpoint)
        is_address = parts.scheme in WEB and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # such as a port that is no number
        is_address = False
    if endpoint and (not is_address or re.search(r"[\s?#]", endpoint)):
        raise ValueError(
            f"{variable} holds {shorten(endpoint, 200)}, which is no address of a store: "
            "write http://HOST:PORT, or https:// where it has TLS"
        )
    return endpoint


def is_remote(root: str) -> bool:
    """Whether a root is a URI, and not a folder.

    >>> is_remote("s3://bucket/train"), is_remote("data/train")
    (True, False)
    """
    return _URI.match(root) is not None


def split_uri(uri: str) -> tuple[str, str]:
    """A URI to its store (scheme and bucket, or scheme and host) and the key in it.

    Raises:
        ValueError: no scheme of ours, no bucket, or a key that no file can have.

    >>> split_uri("s3://bucket/train/rows.jsonl")
    ('s3://bucket', 'train/rows.jsonl')
    """
    shown = shorten(uri, 300)
    match = _URI.match(uri)
    scheme = match.group(1).lower() if match else ""
    if match is None or scheme not in BUCKETS + WEB:
        accepted = ", ".join(f"{name}://" for name in BUCKETS + WEB)
        raise ValueError(f"{shown} can't be read: its scheme is none of {accepted}")
    place, _, key = match.group(2).partition("/")
    if not place:
        raise ValueError(f"{shown} names no bucket: write {scheme}://BUCKET/PREFIX/FILE")
    if scheme in WEB and ("@" in place or re.search(r"[?#]", match.group(2))):
        raise ValueError(f"{shown} has a user, a query or a fragment: only plain addresses are read")
    if any(part in ("", ".", "..") for part in key.rstrip("/").split("/")) and key:
        raise ValueError(f"{shown} has an empty part, or dots for a part: write its plain path")
    key = key.rstrip("/")
    return f"{scheme}://{place}", unquote(key) if scheme in WEB else key
