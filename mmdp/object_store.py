"""Files of S3, Google Cloud Storage and Azure, through obstore. The only importer of it.

Adds: `ObjectStore`, one bucket as a `remote.Store`.
Leaves out: what is in flight, and which failure is tried again here (`fetch`).

Credentials come from the environment, as the tools of each cloud read them (`AWS_ACCESS_KEY_ID` and so on), or from the
machine's own role; none is kept, logged or pickled here. The client asks once, and its answers mean:

| the answer | here |
|---|---|
| 5xx, 429, 408, 400 RequestTimeout, a refused or reset connection, a body cut short | `TransientError` |
| no byte for `read_seconds` | `SilentError` |
| no connection within `connect_seconds`, no address for the name | `TransientError`: a network may come back |
| 404 | `MissingObjectError` |
| 401, 403, a certificate that is refused, and all else | `FetchError`: no try would help |
| the machine has no role to ask for | `FetchError`, if it had none before either |

The client would try again by itself, but with waits that grow by chance alone, and only for so long after the start of
a download; so `fetch` does, with waits of ours.

Its threads do not live on in a forked process, and a fetch there would wait for ever. So a process that was forked
after its parent had fetched is told so at once.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
from collections.abc import AsyncGenerator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from mmdp.fetch_loop import held
from mmdp.refusals import DataError, Reason, shorten
from mmdp.remote import (
    UNSIGNED,
    Access,
    FetchError,
    MissingObjectError,
    Rest,
    RestError,
    SilentError,
    TransientError,
)

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult
    from obstore.store import AzureConfig, AzureStore, ClientConfig, GCSConfig, GCSStore, RetryConfig, S3Config, S3Store

_NO_LIMIT = timedelta(days=1)
"""For one request of the client: `fetch` keeps the time of a whole fetch, and a large download has none."""

_GONE = ("NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted", "AccountNotFound", "InvalidBucketName")
_TRANSIENT = ("RequestTimeout",)
_TRY_AGAIN = re.compile("5..|429|408")  # statuses
_TRUST = ("InvalidData", "InvalidCertificate", "invalid peer certificate")  # no TLS there, or none that is trusted
_CREDENTIALS = ("ExpiredToken", "InvalidToken", "TokenRefreshRequired", "AuthorizationHeaderMalformed")
_HOW_TO_SIGN = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE=true for a public bucket",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or GOOGLE_SKIP_SIGNATURE=true for a public bucket",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or AZURE_SKIP_SIGNATURE=true for a public one",
}
_ASKS_THE_MACHINE = "169.254.169.254"  # where a client looks for credentials that it was given by no other way
_ROLE_TRIES, _ROLE_WAIT = 3, 0.5  # seconds; many processes of one machine that ask for its role at once are refused

_user: int | None = None  # the process that has used the client, this one or one that it was forked from


class _RangeError(Exception):
    """The answer to a range was none."""


class _NoRoleError(Exception):
    """The client was given no credentials, and the machine's own role can't be had; the text says what to do."""


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
        self._access = access
        self._has_answered = False
        self._client = _client(place, access)

    async def open(self, key: str, limit: int | None, rest: Rest | None = None) -> _Answer:
        """As `remote.Store`."""
        for _ in range(_ROLE_TRIES - 1):
            try:
                return await self._open(key, limit, rest)
            except _NoRoleError:
                await asyncio.sleep(_ROLE_WAIT)
        try:
            return await self._open(key, limit, rest)
        except _NoRoleError as error:
            if self._has_answered:
                raise TransientError(str(error)) from None
            raise FetchError(errno.EACCES, str(error), f"{self._place}/{key}") from None

    async def _open(self, key: str, limit: int | None, rest: Rest | None) -> _Answer:
        if rest is not None:
            try:
                return await self._get(key, {"range": {"offset": rest.start}, "if_match": rest.stamp})
            except _RangeError as error:
                raise RestError(str(error)) from None
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
        self._has_answered = True
        return _Answer(self, key, result)

    def explain(self, error: Exception, key: str) -> Exception:
        """An error of the client as one of ours, with a plain word and a remedy."""
        said, uri = _said(error), f"{self._place}/{key}"
        status = next(iter(re.findall(r"status code: (\d{3})", said)), "")
        code = next(iter(re.findall(r"<Code>(\w+)</Code>", said)), "")
        answer = f"{status} {code}".strip()
        if _ASKS_THE_MACHINE in said:
            return _NoRoleError(_no_credentials(self._scheme))
        if "must be specified" in said:
            return FetchError(errno.EACCES, _no_credentials(self._scheme), uri)
        if code in _GONE or "bucket does not exist" in said:
            return FetchError(errno.ENOENT, f"{answer}: no such bucket; correct its name, or the endpoint", uri)
        if status == "404" or isinstance(error, FileNotFoundError):
            return MissingObjectError(answer or "404")
        if status in ("401", "403") or code in _CREDENTIALS:
            how = (
                "Check that the credentials may read and list the bucket (where they may not list, a missing object is "
                f"refused too): {_HOW_TO_SIGN[self._scheme]}"
            )
            if self._access.is_unsigned:
                how = f"It was asked without credentials ({UNSIGNED[self._scheme]}), and is not public, or not there"
            return FetchError(errno.EACCES, f"{answer}: the store refuses access. {how}", uri)
        if code in _TRANSIENT or _TRY_AGAIN.fullmatch(status):
            return TransientError(answer)
        if status in ("412", "416") or "non-partial response" in said or "Content-Range" in said:
            return _RangeError(answer or said)
        if "HTTP error" in said:
            return self._explain_silence(error, uri)
        return FetchError(errno.EIO, answer or _cause(error), uri)

    def _explain_silence(self, error: Exception, uri: str) -> Exception:
        """An error without an answer of the store: only what the client writes for its developers says which."""
        detail = str(error)
        kind = next(iter(re.findall(r"HttpError \{\s*kind: (\w+)", detail)), "")
        if any(word in detail for word in _TRUST):
            cause = f"no trusted TLS connection ({_cause(error)}): see its certificate, and https:// of its endpoint"
            return FetchError(errno.EIO, cause, uri)
        if "body error" in detail and kind != "Timeout":
            return TransientError("the body was cut short")
        if kind == "Timeout" and re.search(r"\(\s*Connect,", detail):
            return TransientError(f"no connection within {self._access.connect_seconds:g} s (Config.connect_seconds)")
        if kind == "Timeout":
            return SilentError(f"no byte for {self._access.read_seconds:g} s")
        if "IncompleteMessage" in detail:
            return TransientError("the connection ended before an answer")
        if kind in ("Connect", "Interrupted", "Request"):
            return TransientError(_cause(error))
        cause = "what answers there speaks no HTTP: see the address of its endpoint" if "Parse(" in detail else ""
        return FetchError(errno.EIO, cause or _cause(error), uri)


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
        self.resumes = meta["e_tag"] is not None

    async def read(self) -> bytes:
        try:
            return bytes(await held(self._result.bytes_async()))
        except Exception as error:
            raise self._store.explain(error, self._key) from None

    async def pieces(self, num_bytes: int) -> AsyncGenerator[bytes, None]:
        coming = self._result.stream(min_chunk_size=num_bytes)
        while True:
            try:
                piece = await held(anext(coming))
            except StopAsyncIteration:
                return
            except Exception as error:
                raise self._store.explain(error, self._key) from None
            yield bytes(piece)


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
    retries: RetryConfig = {"max_retries": 0}
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


def _no_credentials(scheme: str) -> str:
    """What to do without any; on a cluster, who starts a run is not who fetches."""
    where = "in the environment of this process (on a Ray cluster: of the node)"
    profiles = ""
    if scheme == "s3" and (profile := os.environ.get("AWS_PROFILE")):
        command = f"aws configure export-credentials --profile {shorten(profile, 60)} --format env"
        profiles = f". Profiles are not read: `{command}` prints what to set"
    return f"no credentials: {_HOW_TO_SIGN[scheme]}, {where}{profiles}"


def _said(error: Exception) -> str:
    """The client's words without its debugging, and without the query of an address, which may hold a signature."""
    return re.sub(r"(https?://[^\s?]*)\?\S+", r"\1", str(error).partition("\n\nDebug source")[0]).strip()


def _cause(error: Exception) -> str:
    """The innermost words of an error, such as `Connection refused`."""
    causes: list[str] = re.findall(r'(?:message|error): "([^"]+)"', str(error))
    return causes[-1] if causes else _said(error).rpartition(" - ")[2]
