"""Servers to fetch from: real ones for S3, each a process of its own, and a small one that shows what it was asked."""

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from email.utils import formatdate
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple, Self
from urllib.parse import unquote

import boto3
import pytest
from botocore.config import Config as Patience

KEY, SECRET = "test", "testtest"
_START_SECONDS = 60.0  # the slowest takes 3 s on an idle machine


class Server(NamedTuple):
    """A running S3 server.

    Attributes:
        name: of the product.
        endpoint: its address.
    """

    name: str
    endpoint: str

    def fill(self, bucket: str, files: Mapping[str, bytes]) -> None:
        """Makes a bucket, and an object of each file."""
        client = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            config=Patience(retries={"max_attempts": 2}, read_timeout=20, s3={"addressing_style": "path"}),
        )
        client.create_bucket(Bucket=bucket)
        for key, data in files.items():
            client.put_object(Bucket=bucket, Key=key, Body=data)


def environment(endpoint: str) -> dict[str, str]:
    """What a process must have in its environment to read from a server of ours."""
    return {"S3_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}


@contextlib.contextmanager
def serve(name: str, command: list[str], log: Path, port: int = 0) -> Iterator[Server]:
    """A server process on this port or a free one, `{port}` in its command; ended with the block."""
    wanted = port
    for _ in range(3):  # another process may take the port first
        if not wanted:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
        with log.open("wb") as out:
            process = subprocess.Popen(
                [part.replace("{port}", str(port)) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        try:
            if _answers(port, process):
                yield Server(name, f"http://127.0.0.1:{port}")
                return
        finally:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    raise RuntimeError(f"{name} did not start: {log.read_text()[-2000:]}")


def _answers(port: int, process: subprocess.Popen[bytes]) -> bool:
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
        time.sleep(0.05)
    return False


def _tool(name: str) -> str:
    """A program of this environment, or a skipped test."""
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        pytest.skip(f"{name} is not installed beside {sys.executable}: `uv sync`")
    return str(path)


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Moto, the most faithful one. A process of its own, since it would share this one's interpreter lock."""
    log = tmp_path_factory.mktemp("moto") / "log"
    with serve("moto", [_tool("moto_server"), "-H", "127.0.0.1", "-p", "{port}"], log) as server:
        yield server


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Rclone's `serve s3`, the fastest one. It checks signatures, and ignores ranges."""
    with rclone_at(tmp_path_factory.mktemp("rclone")) as server:
        yield server


@contextlib.contextmanager
def rclone_at(folder: Path, port: int = 0) -> Iterator[Server]:
    """Rclone over a folder, which keeps its buckets when the block ends."""
    (folder / "data").mkdir(exist_ok=True)
    (folder / "config").touch()
    command = [_tool("rclone"), "serve", "s3", "--config", str(folder / "config")]
    command += ["--addr", "127.0.0.1:{port}", "--auth-key", f"{KEY},{SECRET}", str(folder / "data")]
    with serve("rclone", command, folder / "log", port) as server:
        yield server


@pytest.fixture(scope="session")
def localbucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """LocalBucket, light and right; not among our own requirements."""
    pytest.importorskip("localbucket", reason="localbucket is not here: `uv pip install localbucket` adds this run")
    folder = tmp_path_factory.mktemp("localbucket")
    (folder / "data").mkdir()
    command = [sys.executable, "-m", "localbucket", "--port", "{port}", str(folder / "data")]
    with serve("localbucket", command, folder / "log") as server:
        yield server


class Shelf:
    """Files by path, over plain HTTP on the loopback, in a thread of this process; and a record of what was asked.

    Args:
        files: path (as `bucket/key`, not quoted) to content.
        delay: seconds before each answer, or path to seconds before its answer.
        ranges: answer ranges as asked.
        moved: path to the address it is redirected to.
        refused: path to the status that is answered.
        headers: instead of those that are sent; None leaves one out.

    Attributes:
        asked: (path, range or "") of each request.
        most: requests that were open at once, at most.
    """

    def __init__(
        self,
        files: Mapping[str, bytes],
        *,
        delay: float | Mapping[str, float] = 0.0,
        ranges: bool = True,
        moved: Mapping[str, str] | None = None,
        refused: Mapping[str, int] | None = None,
        headers: Mapping[str, str | None] | None = None,
    ) -> None:
        self.files = dict(files)
        self.asked: list[tuple[str, str]] = []
        self.most = self._open = 0
        self._lock = threading.Lock()
        self._delay, self._ranges, self._moved, self._headers = delay, ranges, dict(moved or {}), dict(headers or {})
        self._refused = dict(refused or {})

    def __enter__(self) -> Self:
        shelf = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                with shelf._lock:
                    shelf._open += 1
                    shelf.most = max(shelf.most, shelf._open)
                    shelf.asked.append((unquote(self.path[1:]), self.headers.get("Range", "")))
                try:
                    delay = shelf._delay
                    time.sleep(delay if isinstance(delay, float | int) else delay.get(unquote(self.path[1:]), 0))
                    shelf._answer(self)
                finally:
                    with shelf._lock:
                        shelf._open -= 1

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        self.place = f"127.0.0.1:{self._server.server_port}"
        self.endpoint = f"http://{self.place}"
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(request.path[1:])
        data = self.files.get(path)
        status, headers = 200, {"Last-Modified": formatdate(10**9, usegmt=True)}
        if path in self._moved:
            status, data, headers["Location"] = 302, b"", self._moved[path]
        elif path in self._refused:
            status, data = self._refused[path], b""
        elif data is None:
            status, data = 404, b"<Error><Code>NoSuchKey</Code></Error>"
        else:
            headers["ETag"] = etag = f'"{md5(data).hexdigest()}"'
            is_another = request.headers.get("If-Range", etag) != etag
            if request.headers.get("If-Match", etag) != etag:
                status, data = 412, b""
            elif self._ranges and not is_another and (wanted := request.headers.get("Range")):
                first, last = wanted.removeprefix("bytes=").split("-")
                part = data[int(first) : int(last) + 1 if last else None]
                if not part:
                    status, data = 416, b""
                else:
                    headers["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"
                    status, data = 206, part
        request.send_response(status)
        for name, value in ({**headers, "Content-Length": str(len(data))} | self._headers).items():
            if value is not None:
                request.send_header(name, value)
        request.end_headers()
        with contextlib.suppress(ConnectionError):
            request.wfile.write(data)
