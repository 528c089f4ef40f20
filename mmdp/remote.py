"""Files that lie elsewhere, in an object store or on a web server: their addresses, and what a fetch may come to.

Adds: `is_remote` and `split_uri`; `Access`, what a process must know to fetch, without any secret; `Opened`, an answer
whose body is still to come; the errors of a fetch.
Leaves out: asking (`object_store`, `web_store`), and what is in flight (`fetch`).
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Protocol, Self
from urllib.parse import unquote

from mmdp.config import Config
from mmdp.refusals import shorten

BUCKETS = ("s3", "gs", "az")
"""Schemes of object stores: Amazon S3 and all that speak like it, Google Cloud Storage, Azure Blob Storage."""

WEB = ("http", "https")

FIRST_WAIT, LONGEST_WAIT = 0.1, 15.0
"""Seconds between two tries: the first wait, and what no wait exceeds. The defaults of obstore."""

_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "S3_ENDPOINT_URL", "AWS_ENDPOINT_URL"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_ENDPOINT",),
}
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
_UNSIGNED = {"s3": "AWS_SKIP_SIGNATURE", "gs": "GOOGLE_SKIP_SIGNATURE", "az": "AZURE_SKIP_SIGNATURE"}


class FetchError(OSError):
    """A file could not be fetched, all tries included. It says nothing about the row that names the file."""


class MissingObjectError(Exception):
    """The store has no such file; the text is its answer."""


class TransientError(Exception):
    """A try that failed, and is worth another; the text says how."""


class Opened(Protocol):
    """An answer of a store, whose body is still to come.

    Attributes:
        size: bytes of the whole file.
        num_bytes: bytes of this body: fewer than `size` where only the start was asked for, and the store does that.
        stamp: changes with the file's content: its ETag; empty where the store tells nothing.
        modified_ns: time of the last change, in nanoseconds since 1970; 0 where the store doesn't tell it.
    """

    size: int
    num_bytes: int
    stamp: str
    modified_ns: int

    async def read(self) -> bytes:
        """The body; `TransientError` where less than `num_bytes` comes."""

    def pieces(self, num_bytes: int) -> AsyncIterator[bytes]:
        """The body in pieces of at least so many bytes, the last one aside."""


class Store(Protocol):
    """What answers for a bucket, or for a web root."""

    async def open(self, key: str, limit: int | None) -> Opened:
        """Asks for a file, or for its first `limit` bytes.

        Raises:
            MissingObjectError: there is no such file.
            TransientError: worth another try.
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
        """What `Config` and the environment (by default this process's) say of a root."""
        environment = os.environ if environment is None else environment
        scheme = root.partition("://")[0].lower()
        endpoints = _ENDPOINTS.get(scheme, ())
        return cls(
            max_fetches=config.max_fetches,
            max_fetch_bytes=config.max_fetch_bytes,
            connect_seconds=config.connect_seconds,
            read_seconds=config.read_seconds,
            fetch_seconds=config.fetch_seconds,
            fetch_retries=config.fetch_retries,
            http_hosts=tuple(config.http_hosts),
            endpoint=next(filter(None, map(environment.get, endpoints)), "").rstrip("/"),
            region=next(filter(None, map(environment.get, _REGIONS)), ""),
            is_unsigned=environment.get(_UNSIGNED.get(scheme, ""), "").lower() in ("1", "true", "yes", "on"),
        )


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
