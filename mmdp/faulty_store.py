"""A folder as an object store on this machine that fails by script, one fault at a time, and counts how often.

Adds: `FaultyStore`; `Fault`, which gets are struck, and by what.
Leaves out: what must come of it (`drill`), a store that works and is far away (`local_store`).

It answers GET as S3 does, with ETags and ranges, in threads of this process: only so is the script at hand, and a drill
is about what comes out, not about how fast. Which gets are struck depends on the key and on how often it was asked for,
never on chance or on who came first, except where a fault strikes every so many gets of all.
"""

from __future__ import annotations

import math
import os
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal, Self, TypeAlias
from urllib.parse import unquote, urlsplit

from mmdp.local_store import BUCKET, s3_environment

Kind: TypeAlias = Literal["refuse", "cut", "reset", "stall", "late"]

LATENCY = 0.005
"""Seconds before each answer."""

_STALL_SECONDS = 60.0  # longer than any client here waits for a byte


@dataclass(frozen=True, slots=True)
class Fault:
    """What a store does wrong, and to which gets.

    | kind | the store |
    |---|---|
    | refuse | answers `status` with the error code `code` |
    | cut | announces the whole body, sends half of it, and closes |
    | reset | resets the connection before any answer |
    | stall | takes the request, and says nothing any more |
    | late | answers as it should, `seconds` later |

    Attributes:
        kind: as above.
        status: of an answer that refuses.
        code: likewise; as S3 names it.
        seconds: that a late answer takes.
        share: of the keys that are struck at all, 0 to 1; which ones is a matter of their names.
        times: that a key is struck: its first so many gets.
        every: of all gets that could be struck, each so many-th is.
        suffixes: keys that end otherwise are spared; all where there are none.
    """

    kind: Kind
    status: int = 503
    code: str = "SlowDown"
    seconds: float = 0.0
    share: float = 1.0
    times: float = math.inf
    every: int = 1
    suffixes: tuple[str, ...] = (".png", ".jpg")

    def reaches(self, key: str) -> bool:
        """Whether a key is among those that are struck.

        >>> Fault("reset").reaches("a.png"), Fault("reset").reaches("train.jsonl")
        (True, False)
        """
        if self.suffixes and not key.endswith(self.suffixes):
            return False
        return int.from_bytes(blake2b(key.encode(), digest_size=8).digest()) < self.share * 2**64


class FaultyStore:
    """Serves a folder, read-only, on the loopback, inside `with`.

    Args:
        folder: with the files of a data set. Those that are there now are served.
        latency: seconds before each answer.

    Attributes:
        uri: stands for the folder, inside `with self.asked()`.
    """

    uri = f"s3://{BUCKET}"

    def __init__(self, folder: Path, *, latency: float = LATENCY) -> None:
        self.files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        self.latency = latency
        self.over = threading.Event()
        self.open: set[socket.socket] = set()
        self._fault: Fault | None = None
        self._lock = threading.Lock()
        self._gets: Counter[str] = Counter()  # of keys that the fault reaches
        self._struck: Counter[str] = Counter()

    def play(self, fault: Fault) -> None:
        """From now on, this fault; counting starts anew."""
        with self._lock:
            self._fault = fault
            self._gets.clear()
            self._struck.clear()

    def heal(self) -> Counter[str]:
        """From now on, no fault; returns each key that was struck, and how often."""
        with self._lock:
            self._fault = None
            return Counter(self._struck)

    def struck_by(self, key: str) -> Fault | None:
        """The fault that a get of this key meets now; None where it meets none."""
        with self._lock:
            fault = self._fault
            if fault is None or not fault.reaches(key):
                return None
            self._gets[key] += 1
            if self._gets[key] > fault.times or self._gets.total() % fault.every != fault.every // 2:
                return None
            self._struck[key] += 1
            return fault

    @contextmanager
    def asked(self) -> Iterator[str]:
        """Has this process's environment name the store meanwhile; what is opened remembers it. Yields the URI."""
        with s3_environment(f"http://127.0.0.1:{self._server.server_port}"):
            yield self.uri

    def __enter__(self) -> Self:
        self._server = _Server(self)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="mmdp-store", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self.open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # as many connections as a client opens at once; the default is 5

    def __init__(self, store: FaultyStore) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.store = store

    def handle_error(self, *request: object) -> None:
        """A client that has gone is no matter."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 2**16  # head and body go out together
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.server.store.open.add(self.connection)

    def finish(self) -> None:
        self.server.store.open.discard(self.connection)
        super().finish()

    def do_GET(self) -> None:
        store = self.server.store
        key = unquote(urlsplit(self.path).path).removeprefix(f"/{BUCKET}/")
        store.over.wait(store.latency)
        fault = store.struck_by(key)
        if fault is not None and fault.kind == "reset":
            self._reset()
        elif fault is not None and fault.kind == "stall":
            store.over.wait(_STALL_SECONDS)
            self.close_connection = True
        elif fault is not None and fault.kind == "refuse":
            self._refuse(fault.status, fault.code)
        elif key not in store.files:
            self._refuse(404, "NoSuchKey")
        else:
            if fault is not None and fault.kind == "late":
                store.over.wait(fault.seconds)
            self._answer(store.files[key].read_bytes(), is_cut=fault is not None and fault.kind == "cut")

    def log_message(self, *message: object) -> None:
        pass

    def _answer(self, body: bytes, *, is_cut: bool) -> None:
        size, start = len(body), 0
        etag = blake2b(body, digest_size=16).hexdigest()
        wanted = self.headers.get("Range")
        if wanted is not None:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start = int(first)
            body = body[start : int(last) + 1 if last else size]
        self.send_response(200 if wanted is None else 206)
        if wanted is not None:
            self.send_header("Content-Range", f"bytes {start}-{start + len(body) - 1}/{size}")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{etag}"')
        self.send_header("Last-Modified", "Sun, 09 Sep 2001 01:46:40 GMT")
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if is_cut else body)
        self.close_connection |= is_cut

    def _refuse(self, status: int, code: str) -> None:
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>by script</Message></Error>".encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _reset(self) -> None:
        """Ends the connection so that the client sees a reset, not an end."""
        self.close_connection = True
        self.server.store.open.discard(self.connection)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(self.connection.detach())
