"""What a data set is read from: a JSON-lines file, a Parquet file, either in a store, the Hub, or the demo set.

Adds: `open_source`, the protocol `Source` of what it returns, and `JsonLines`.
Leaves out: the forms of a row (`rows`), where lines start (`lines`), Parquet and the Hub (`tables`), files of a store
(`remote_source`), the bytes of images (`store`), and the choice of how many samples to use.

A source holds no list of rows: through their reference counts, it would be copied page by page into every worker. A row
is read from disk when it is asked for, so a source pickles in kilobytes, works after a fork as after a spawn, and may
be read by many threads.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Literal, Protocol, overload

from mmdp.config import Config, cache_folder
from mmdp.lines import Lines
from mmdp.records import Sample
from mmdp.refusals import DataError, Reason, shorten
from mmdp.remote import Access, is_remote, split_uri
from mmdp.remote_source import RemoteSource, keep
from mmdp.rows import parse_row, row_number
from mmdp.sample_checks import table_remedy
from mmdp.tables import StreamSource, TableSource, open_hub, open_parquet

ACCEPTED = (
    "demo, a .jsonl or .parquet file, one of a store (s3://BUCKET/FILE, gs://, az://, https:// if allowed), "
    "or hf:NAME/CONFIG (such as hf:HuggingFaceM4/the_cauldron/ai2d)"
)

_SUFFIXES = (".jsonl", ".parquet")
_TO_LINES = 'python -c "import json, sys; [print(json.dumps(row)) for row in json.load(sys.stdin)]" < IN > OUT.jsonl'
_OTHER_SUFFIXES = {
    ".json": f"holds one JSON value, and rows are lines: convert it with {_TO_LINES}",
    ".ndjson": "has lines of JSON under another name: rename it to .jsonl",
    ".gz": "is compressed, and rows are read by their place in the file: unpack it with gunzip",
    ".zst": "is compressed, and rows are read by their place in the file: unpack it with unzstd",
    ".arrow": "is a table of datasets: write its rows once with datasets.Dataset.from_file(IN).to_parquet('x.parquet')",
    ".tar": "is a shard, and rows are read by their place in the file: unpack it beside a .jsonl of its rows, "
    "or go over it with webdataset or tarfile and give its samples to mmdp.StreamLoader, see docs/own_data.md",
}
_SAVED_MARKS = {"dataset_dict.json": "['train']", "state.json": ""}
"""Files by which a folder of `datasets.save_to_disk` is known, and what to take of it."""

_OTHER_STARTS = {
    b"PAR1": "is a Parquet file: rename it to .parquet",
    b"\x1f\x8b": "is compressed: unpack it with gunzip",
    b"\xff\xfe": "is in UTF-16: convert it with iconv -f UTF-16 -t UTF-8",
    b"\xfe\xff": "is in UTF-16: convert it with iconv -f UTF-16 -t UTF-8",
}


class Source(Protocol):
    """A data set with a length: `source[i]` is a `Sample`, or raises the `DataError` of that row."""

    @property
    def name(self) -> str:
        """What a person calls it."""

    @property
    def fingerprint(self) -> str:
        """Hex digest of the content: the same rows give the same one on every machine."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


@overload
def open_source(
    uri: str | os.PathLike[str], *, config: Config | None = None, streaming: Literal[False] = False
) -> Source: ...


@overload
def open_source(
    uri: str | os.PathLike[str], *, config: Config | None = None, streaming: Literal[True]
) -> StreamSource: ...


def open_source(
    uri: str | os.PathLike[str], *, config: Config | None = None, streaming: bool = False
) -> Source | StreamSource:
    """Opens a data set for reading.

    Args:
        uri: `demo`; a `.jsonl` or `.parquet` file, whose image names are relative to its folder, on disk or in a store
            (`s3://bucket/prefix/train.jsonl`, `gs://`, `az://`, or `https://` where `http_hosts` allows it); or
            `hf:NAME/CONFIG`, the train split of a data set on the Hub, where NAME may be `org/name`, or a local folder
            laid out like one.
        config: the knobs; `image_folder`, `cache_dir`, `max_row_bytes`, `strict` and those of fetching are used.
        streaming: give samples as they come, for Parquet and the Hub: no length, and nothing is stored here.

    Raises:
        TypeError: this is no address but an object, such as a `datasets.Dataset`; the message says what to do with it.
        ValueError: this can't be read, or there is nothing in it; the message says what can be. Or images are to come
            from a store into a stream.
        FileNotFoundError: no such file, or no such folder of images.
        OSError: a store refuses or fails (`FetchError`).
    """
    if not isinstance(uri, str | os.PathLike):
        raise _no_address(uri)
    config = config or Config()
    cache = config.cache_dir or cache_folder()
    uri = re.sub(r"(?<=[^:/])/+$", "", os.fspath(uri))  # a file, however it was completed by a shell
    root = None if config.image_folder is None else _image_root(config.image_folder)
    if streaming and root is not None and is_remote(root):
        raise ValueError(f"a stream takes no images from {shorten(root, 300)}: open it without streaming")
    if is_remote(uri):
        return _open_remote(uri, root, config, cache, streaming=streaming)
    source = _open_local(uri, root, config, cache, streaming=streaming)
    if root is not None and is_remote(root):
        assert not isinstance(source, StreamSource)
        return RemoteSource(source, root, Access.of(config, root))
    return source


def _no_address(given: object) -> TypeError:
    """The error for an object where an address belongs."""
    remedy = table_remedy(given) or (
        "an object of your own that has __len__, __getitem__, name and fingerprint needs no opening, and one that only "
        "gives samples goes to mmdp.StreamLoader, see docs/own_data.md"
    )
    return TypeError(f"this {type(given).__name__} is no address of a data set: {remedy}. Accepted: {ACCEPTED}")


def _open_local(uri: str, root: str | None, config: Config, cache: Path, *, streaming: bool) -> Source | StreamSource:
    """What lies on this disk, or on the Hub, which `datasets` brings here."""
    if uri.startswith("hf:"):
        return open_hub(uri, cache, streaming=streaming, strict=config.strict, root=root)
    path = None if uri == "demo" else _existing_file(uri)
    if path is not None and path.suffix.lower() == ".parquet":
        return open_parquet(path, cache, streaming=streaming, strict=config.strict, root=root)
    if streaming:
        raise ValueError(f"{shorten(uri)} lies on the local disk and is read by row: open it without streaming")
    if path is None:
        if root is not None:
            raise ValueError("the demo set has images of its own: leave image_folder out, or name your data file")
        from mmdp import demo  # it draws pictures; whoever reads data of their own needs none of it

        return JsonLines(demo.demo_jsonl(cache), name="demo", cache=cache, max_row_bytes=config.max_row_bytes)
    return JsonLines(path, name=path.name, cache=cache, max_row_bytes=config.max_row_bytes, root=root)


def _open_remote(uri: str, root: str | None, config: Config, cache: Path, *, streaming: bool) -> Source:
    """A file of a store, kept here; its images stay where they are."""
    key = Path(split_uri(uri)[1])
    _check_suffix(uri, key)
    if streaming:
        raise ValueError(f"{shorten(uri, 300)} is fetched once and then read by row: open it without streaming")
    kept = keep(uri, Access.of(config, uri), cache)
    root = root or uri.rpartition("/")[0]
    if key.suffix.lower() == ".parquet":
        rows: Source | StreamSource = open_parquet(kept.path, cache, streaming=False, strict=config.strict, root=root)
        assert isinstance(rows, TableSource)
    else:
        rows = JsonLines(kept.path, name=key.name, cache=cache, max_row_bytes=config.max_row_bytes, root=root)
    return RemoteSource(rows, root, Access.of(config, root), kept)


def _image_root(folder: str) -> str:
    """The root that image names are relative to, as a user gives it: a folder, or the address of one in a store."""
    if is_remote(folder):
        root = folder.rstrip("/")
        split_uri(f"{root}/image")  # refuses what is no address of ours
        return root
    path = Path(folder).expanduser().absolute()
    if not path.is_dir():
        shown = shorten(str(path), 300)
        raise FileNotFoundError(f"image_folder: no such folder: {shown}. Correct it; it starts at the working folder")
    return str(path)


def _check_suffix(shown: str, path: Path) -> None:
    """Refuses a file by its name, with what to do, where it is of another kind than we read."""
    suffix = path.suffix.lower()
    if suffix in _OTHER_SUFFIXES:
        raise ValueError(f"{shorten(shown, 300)} {_OTHER_SUFFIXES[suffix]}")
    if suffix not in _SUFFIXES:
        raise ValueError(f"{shorten(shown)} is no data set that can be read. Accepted: {ACCEPTED}")


def _existing_file(uri: str) -> Path:
    """The file, if it can be read as it is; else an error that says what to do."""
    path = Path(uri).expanduser()
    shown = shorten(str(path.absolute()), 300)
    if path.is_dir():
        for mark, split in _SAVED_MARKS.items():
            if (path / mark).is_file():
                raise ValueError(
                    f"{shown} is a folder that save_to_disk of datasets has made: write its rows once with "
                    f"datasets.load_from_disk({uri!a}){split}.to_parquet('x.parquet'), and open that"
                )
        files = sorted(file.name for file in path.iterdir() if file.suffix.lower() in _SUFFIXES)
        hint = f"open one of its files: {', '.join(map(shorten, files[:10]))}" if files else "no file in it can be read"
        raise ValueError(f"{shown} is a folder: {hint}. Accepted: {ACCEPTED}")
    _check_suffix(uri, path)
    if not path.exists():
        if match := re.match(r"([a-z0-9]+):/+", uri):
            raise FileNotFoundError(f"no such file: {shown}. Was {match[1]}:// meant, with two slashes?")
        raise FileNotFoundError(f"no such file: {shown}. Correct the path; a relative one starts at the working folder")
    if not path.is_file():
        raise ValueError(f"{shown} is a pipe or a device, and rows are read by their place: save it as a file first")
    return path


class JsonLines:
    """A JSON-lines file. `Sample.source` is the file's name and its line, such as `train.jsonl:17`.

    Args:
        path: the file.
        name: what a person calls it.
        cache: folder for the index of lines.
        max_row_bytes: a longer line is refused unread.
        root: what image names are relative to; by default the file's folder.
    """

    def __init__(self, path: Path, *, name: str, cache: Path, max_row_bytes: int, root: str | None = None) -> None:
        self.name = name
        self._path = path.absolute()
        self._root = root or str(self._path.parent)
        self._label = self._path.name
        self._max_row_bytes = max_row_bytes
        self._lines = Lines(self._path, cache)
        self._refuse_other_formats()

    @property
    def fingerprint(self) -> str:
        """Hex digest of the file's bytes."""
        return self._lines.digest

    @property
    def location(self) -> str:
        """What its image names are relative to: the same rows elsewhere may have other images."""
        return self._root

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Sample:
        number = row_number(index, len(self))
        source = f"{self._label}:{self._lines.line_number(number)}"
        size = self._lines.size(number, enough=self._max_row_bytes)
        if size > self._max_row_bytes:
            raise DataError(
                Reason.ROW_TOO_LARGE,
                f"the line has {size:,} bytes, at most {self._max_row_bytes:,} are read: raise max_row_bytes",
                source=source,
            )
        row = _parse_json(self._lines.read(number), source)
        return parse_row(row, root=self._root, source=source, number=number)

    def _refuse_other_formats(self) -> None:
        """Says what the file is where it has no lines of JSON; else every line would be refused, and none says why."""
        shown = shorten(str(self._path), 300)
        if not len(self):
            raise ValueError(f"{shown} is empty: it has no line but blank ones; was it written to the end?")
        head = self._lines.read(0, limit=64)
        for start, found in _OTHER_STARTS.items():
            if head.startswith(start):
                raise ValueError(f"{shown} {found}")
        # A line that holds a whole list is one bad row among others; a list that goes on is the file.
        if head.lstrip().startswith(b"[") and (len(self) == 1 or not self._is_json(0)):
            raise ValueError(f"{shown} is one JSON array, and rows are lines: convert it with {_TO_LINES}")

    def _is_json(self, number: int) -> bool:
        if self._lines.size(number, enough=self._max_row_bytes) > self._max_row_bytes:
            return False
        try:
            _parse_json(self._lines.read(number), "")
        except DataError:
            return False
        return True


def _parse_json(line: bytes, source: str) -> object:
    """The value a line holds. Undecoded bytes are never given to `json`, which would guess at UTF-16."""
    try:
        value: object = json.loads(line.decode())
    except RecursionError:
        found = "it is nested too deep"
    except UnicodeDecodeError as error:
        found = f"byte {error.start} is not UTF-8: {shorten(line[error.start : error.start + 20])}"
    except json.JSONDecodeError as error:
        before = shorten(error.doc[error.pos : error.pos + 40], 40)
        found = f"{error.msg.removesuffix(' at')} at character {error.pos}, before {before}"
    except ValueError as error:  # a number of thousands of digits
        found = str(error)
    else:
        return value
    raise DataError(
        Reason.INVALID_JSON,
        f"the line is no JSON: {found}. Wanted one object a line: correct or remove it",
        source=source,
    )
