"""Files of S3, Google Cloud Storage and Azure, through obstore. The only importer of it.

Adds: `ObjectStore`, one bucket as a `remote.Store`.
Leaves out: what is in flight, and which failure is tried again here (`fetch`).

Credentials come from the environment, as the tools of each cloud read them (`AWS_ACCESS_KEY_ID` and so on); none is
kept, logged or pickled here. What the client does by itself, found out against a server that misbehaves by script:

| the answer | the client |
|---|---|
| 5xx, 429, 408, a refused or reset connection, no byte for `read_seconds` | tries again, with growing random waits |
| a body cut short, of an object with an ETag | fetches the rest, if the object is still the same |
| a body cut short, without an ETag or from a store that ignores ranges | gives up: `TransientError` |
| 400 RequestTimeout | gives up: `TransientError` |
| 401, 403, 404 and all else | gives up, after one request |

Its threads do not live on in a forked process, and a fetch there would wait for ever. So a process that was forked
after its parent had fetched is told so at once.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from mmdp.fetch_loop import held
from mmdp.refusals import DataError, Reason, shorten
from mmdp.remote import FIRST_WAIT, LONGEST_WAIT, Access, FetchError, MissingObjectError, TransientError

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult
    from obstore.store import AzureConfig, AzureStore, ClientConfig, GCSConfig, GCSStore, RetryConfig, S3Config, S3Store

_NO_LIMIT = timedelta(days=1)
"""For one request of the client: `fetch` keeps the time of a whole fetch, and a large download has none."""

_GONE = ("NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted", "AccountNotFound", "InvalidBucketName")
_TRANSIENT = ("RequestTimeout",)
_CREDENTIALS = ("ExpiredToken", "InvalidToken", "TokenRefreshRequired", "AuthorizationHeaderMalformed")
_HOW_TO_SIGN = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE=true for a public bucket",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or GOOGLE_SKIP_SIGNATURE=true for a public bucket",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or AZURE_SKIP_SIGNATURE=true for a public one",
}
_ASKS_THE_MACHINE = "169.254.169.254"  # where a client looks for credentials that it was given by no other way

_user: int | None = None  # the process that has used the client, this one or one that it was forked from


class _RangeError(Exception):
    """The answer to a range was none."""


class ObjectStore:
    """A bucket or container, for the process that made it.

    Args:
        place: scheme and name, such as `s3://bucket`.
        access: time limits, tries, and the endpoint.

    Raises:
        ValueError: obstore is not there, or the settings make no client.
        RuntimeError: this process was forked from one that has fetched.
    """

    def __init__(self, place: str, access: Access) -> None:
        _claim()
        self._place = place
        self._scheme = place.partition("://")[0]
        self._client = _client(place, access)

    async def open(self, key: str, limit: int | None) -> _Answer:
        """As `remote.Store`."""
        if limit is None:
            return await self._get(key)
        try:
            return await self._get(key, {"range": (0, limit)})
        except _RangeError:  # an empty object has no range either
            return await self._get(key)

    async def _get(self, key: str, options: GetOptions | None = None) -> _Answer:
        import obstore

        try:
            result = await held(obstore.get_async(self._client, key, options=options))
        except ValueError as error:  # a control character: the client takes it in no key
            raise DataError(
                Reason.UNSAFE_PATH, f"{shorten(key)} can't be asked for: {shorten(_said(error), 200)}; rename it"
            ) from None
        except Exception as error:
            raise self.explain(error, key) from None
        return _Answer(self, key, result)

    def explain(self, error: Exception, key: str, *, resumes: bool = True) -> Exception:
        """An error of the client as one of ours, with a plain word and a remedy.

        Args:
            error: of the client.
            key: what was asked for.
            resumes: whether the client had tried to fetch the rest of a cut body.
        """
        said, uri = _said(error), f"{self._place}/{key}"
        status = next(iter(re.findall(r"status code: (\d{3})", said)), "")
        code = next(iter(re.findall(r"<Code>(\w+)</Code>", said)), "")
        answer = f"{status} {code}".strip()
        if _ASKS_THE_MACHINE in said or "must be specified" in said:
            return FetchError(errno.EACCES, f"no credentials: {_HOW_TO_SIGN[self._scheme]}", uri)
        if code in _GONE or "bucket does not exist" in said:
            return FetchError(errno.ENOENT, f"{answer}: no such bucket; correct its name, or the endpoint", uri)
        if status == "404" or isinstance(error, FileNotFoundError):
            return MissingObjectError(answer or "404")
        if status in ("401", "403") or code in _CREDENTIALS:
            return FetchError(
                errno.EACCES,
                f"{answer}: the store refuses access. Check that the credentials may read and list the bucket (where "
                f"they may not list, a missing object is refused too): {_HOW_TO_SIGN[self._scheme]}",
                uri,
            )
        if code in _TRANSIENT:
            return TransientError(answer)
        if status == "416" or "non-partial response" in said or "Content-Range" in said:
            return _RangeError(answer or said)
        if not status and not resumes:
            return TransientError("the body was cut short")
        tries = next(iter(re.findall(r"after (\d+) retries", said)), "")
        return FetchError(errno.EIO, f"{answer or _cause(error)}{f', {int(tries) + 1} tries' if tries else ''}", uri)


class _Answer:
    """As `remote.Opened`."""

    def __init__(self, store: ObjectStore, key: str, result: GetResult) -> None:
        meta, (start, end) = result.meta, result.range
        self.size = meta["size"]
        self.num_bytes = end - start
        changed = meta["last_modified"] - datetime(1970, 1, 1, tzinfo=UTC)  # 0 where the store says nothing
        self.modified_ns = int(changed / timedelta(microseconds=1)) * 1000
        self.stamp = meta["e_tag"] or (f"{self.modified_ns} {self.size}" if self.modified_ns else "")
        self._store = store
        self._key = key
        self._result = result
        self._resumes = meta["e_tag"] is not None

    async def read(self) -> bytes:
        try:
            return bytes(await held(self._result.bytes_async()))
        except Exception as error:
            raise self._explain(error) from None

    async def pieces(self, num_bytes: int) -> AsyncIterator[bytes]:
        coming = self._result.stream(min_chunk_size=num_bytes)
        while True:
            try:
                piece = await held(anext(coming))
            except StopAsyncIteration:
                return
            except Exception as error:
                raise self._explain(error) from None
            yield bytes(piece)

    def _explain(self, error: Exception) -> Exception:
        explained = self._store.explain(error, self._key, resumes=self._resumes)
        # The store ignored the range of the rest, so only the whole can be had.
        return TransientError("the body was cut short") if isinstance(explained, _RangeError) else explained


def _claim() -> None:
    """Notes that this process fetches; refuses where the process it was forked from did."""
    global _user
    if _user not in (None, os.getpid()):
        raise RuntimeError(
            f"process {os.getpid()} was forked after process {_user} had fetched from an object store, and no thread "
            'of the client survives that. Start workers by "spawn": give a DataLoader multiprocessing_context="spawn", '
            "or use `mmdp.Loader` with threads, its own processes, or Ray"
        )
    _user = os.getpid()


def _client(place: str, access: Access) -> S3Store | GCSStore | AzureStore:
    try:
        from obstore.exceptions import BaseError
        from obstore.store import AzureStore, GCSStore, S3Store
    except ImportError as error:
        raise ValueError(f"{shorten(place)} needs the package obstore: install it with `uv add obstore`") from error
    scheme, _, name = place.partition("://")
    options: ClientConfig = {
        "connect_timeout": timedelta(seconds=access.connect_seconds),
        "read_timeout": timedelta(seconds=access.read_seconds),
        "timeout": _NO_LIMIT,
    }
    retries: RetryConfig = {
        "max_retries": access.fetch_retries,
        "retry_timeout": timedelta(seconds=access.fetch_seconds),
        "backoff": {
            "init_backoff": timedelta(seconds=FIRST_WAIT),
            "max_backoff": timedelta(seconds=LONGEST_WAIT),
            "base": 2,
        },
    }
    if access.endpoint.startswith("http://"):
        options["allow_http"] = True
    try:
        if scheme == "gs":
            google: GCSConfig = {"base_url": access.endpoint} if access.endpoint else {}
            if access.is_unsigned:
                google["skip_signature"] = True
            return GCSStore(name, config=google, client_options=options, retry_config=retries)
        if scheme == "az":
            azure: AzureConfig = {"endpoint": access.endpoint} if access.endpoint else {}
            if access.is_unsigned:
                azure["skip_signature"] = True
            return AzureStore(name, config=azure, client_options=options, retry_config=retries)
        amazon: S3Config = {"endpoint": access.endpoint} if access.endpoint else {}
        if access.region:
            amazon["region"] = access.region
        if access.is_unsigned:
            amazon["skip_signature"] = True
        return S3Store(name, config=amazon, client_options=options, retry_config=retries)
    except (BaseError, ValueError) as error:
        raise ValueError(f"{shorten(place)} can't be opened: {_said(error)}; {_HOW_TO_SIGN[scheme]}") from error


def _said(error: Exception) -> str:
    """The client's words without its debugging, and without the query of an address, which may hold a signature."""
    return re.sub(r"(https?://[^\s?]*)\?\S+", r"\1", str(error).partition("\n\nDebug source")[0]).strip()


def _cause(error: Exception) -> str:
    """The innermost words of an error, such as `Connection refused`."""
    causes: list[str] = re.findall(r'(?:message|error): "([^"]+)"', str(error))
    return causes[-1] if causes else _said(error).rpartition(" - ")[2]
