"""Rows of a table: a Parquet file, or a data set on the Hub, through `datasets` with image decoding off.

Adds: `TableSource` (any row by number), `StreamSource` (samples as they come), its `StreamPass`, and what opens them.
The only importer of `datasets`. Leaves out: the forms of a row (`rows`).

Rows are taken as Arrow, so an image column gives the file's own bytes; what `datasets` keeps as text of JSON, where the
rows of a column differ in their types or keys, is read here. A table is unpacked once on disk (a file into
our cache folder, the Hub's into that of `datasets`), memory-mapped, and shared by all workers; a stream stores nothing.
"""

from __future__ import annotations

import atexit
import glob
import json
import logging
import pickle
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

from mmdp.lines import digest_file
from mmdp.records import Sample
from mmdp.refusals import DataError, Reason, shorten
from mmdp.rows import FORMS, KEYS, parse_row, row_number

_SPLIT = "train"

_log = logging.getLogger(__name__)


class TableSource:
    """A table of `datasets`, memory-mapped; images stay the bytes they are. `Sample.source` is such as `NAME[17]`.

    Args:
        table: the rows, as Arrow.
        name: what a person calls it.
        label: the head of every `Sample.source`.
        root: folder for images that are given by name; empty where there is none.
        fingerprint: hex digest of the content.
    """

    def __init__(self, table: Any, *, name: str, label: str, root: str, fingerprint: str) -> None:
        self.name = name
        self.fingerprint = fingerprint
        self._table = table
        self._label = label
        self._root = root

    @property
    def location(self) -> str:
        """What its image names are relative to: the same rows elsewhere may have other images."""
        return self._root

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Sample:
        number = row_number(index, len(self))
        return _parse_arrow(self._table[number], self._label, self._root, number)


class StreamSource:
    """Samples as they come; bad rows are left out and counted. Each iteration is one pass from the start.

    Args:
        rows: tables of one row each.
        name: what a person calls it.
        label: the head of every `Sample.source`.
        root: folder for images that are given by name; empty where there is none.
        strict: raise the first bad row's `DataError` instead of counting it.

    Attributes:
        skipped: how many rows were left out in all passes so far, by reason.
    """

    def __init__(self, rows: Iterable[Any], *, name: str, label: str, root: str, strict: bool) -> None:
        self.name = name
        self.skipped: Counter[str] = Counter()
        self._rows = rows
        self._label = label
        self._root = root
        self._strict = strict

    def __iter__(self) -> Iterator[Sample]:
        for item in self.start_pass():
            if isinstance(item, DataError):
                self.skipped[item.reason] += 1
                if self.skipped[item.reason] == 1:
                    _log.warning("skipped, and so are all others of this kind: %s", item)
            else:
                yield item

    def start_pass(self, mark: Mapping[str, Any] | None = None) -> StreamPass:
        """A pass with its bad rows, from the start, or from a mark of another pass on; it counts nothing in `skipped`.

        Args:
            mark: from `StreamPass.mark`, of the same data.
        """
        # A copy, since `datasets` keeps the place of a pass in the data set: two passes at once would move each other.
        # By pickle: `copy.deepcopy` fails in threads, where the file systems that it copies enter a dict it is reading.
        can_move = hasattr(self._rows, "load_state_dict")
        rows = pickle.loads(pickle.dumps(self._rows)) if can_move else self._rows  # noqa: S301 -- our own bytes
        parse = partial(_parse_arrow, label=self._label, root=self._root)
        return StreamPass(rows, parse, mark, strict=self._strict)


class StreamPass:
    """One pass over a stream: an iterator of samples, and of the `DataError` of each bad row.

    Args:
        rows: what `datasets` gives; nobody else goes over it.
        parse: makes a sample of a row and its number.
        mark: where to go on; None for the start.
        strict: raise the first bad row's `DataError`.

    Attributes:
        number: of the next row, from the start of the stream.
    """

    def __init__(
        self, rows: Any, parse: Callable[..., Sample], mark: Mapping[str, Any] | None, *, strict: bool
    ) -> None:
        self.number = 0
        if mark is not None:
            self.number = mark["number"]
            rows.load_state_dict(mark["rows"])
        self._rows = rows
        self._open: Iterator[Any] = iter(rows)
        self._parse = parse
        self._strict = strict

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Sample | DataError:
        row = next(self._open)
        number, self.number = self.number, self.number + 1
        try:
            return self._parse(row, number=number)
        except DataError as error:
            if self._strict:
                raise
            return error

    def mark(self) -> dict[str, Any] | None:
        """The place behind the last row, as JSON can hold it: some 400 bytes, whatever the number of rows.

        Returns:
            None at the start of a stream, and where its rows tell no place.
        """
        if not self.number or not hasattr(self._rows, "state_dict"):
            return None
        return {"number": self.number, "rows": self._rows.state_dict()}


def _parse_arrow(table: Any, label: str, root: str, number: int) -> Sample:
    """The sample of a table of one row."""
    source = f"{label}[{number}]"
    try:
        (row,) = table.to_pylist()
        for field in table.schema:
            if _has_json(field.type):
                row[field.name] = _read_json(row[field.name], field.type)
    except UnicodeDecodeError as error:
        raise DataError(
            Reason.INVALID_TEXT, f"text of the row is not UTF-8 ({error.reason}): write it anew", source=source
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataError(
            Reason.INVALID_JSON, f"a field of the type `Json` holds none ({error}): write it anew", source=source
        ) from None
    return parse_row(row, root=root, source=source, number=number)


@lru_cache(maxsize=256)
def _has_json(kind: Any) -> bool:
    """Whether an Arrow type has text of JSON (`arrow.json`, which `datasets` writes for `Json`) somewhere in it."""
    if _is_json(kind):
        return True
    return any(_has_json(kind.field(number).type) for number in range(kind.num_fields))


def _is_json(kind: Any) -> bool:
    return getattr(kind, "extension_name", "") == "arrow.json"


def _read_json(value: Any, kind: Any) -> Any:
    """The value of an Arrow type, as Python gives it, with what is text of JSON read."""
    if value is None or not _has_json(kind):
        return value
    if _is_json(kind):
        return json.loads(value)
    if isinstance(value, Mapping):
        kinds = {kind.field(number).name: kind.field(number).type for number in range(kind.num_fields)}
        return {name: _read_json(one, kinds[name]) for name, one in value.items()}
    return [_read_json(one, kind.field(0).type) for one in value]


def open_parquet(
    path: Path, cache: Path, *, streaming: bool, strict: bool, root: str | None = None
) -> TableSource | StreamSource:
    """Opens a Parquet file; images that are given by name are relative to `root`, by default its folder.

    Raises:
        ValueError: it is damaged or empty, or no column is that of a row form.
    """
    from datasets import load_dataset_builder
    from datasets.exceptions import DatasetGenerationError

    path = path.absolute()
    place = {"name": path.name, "label": path.name, "root": root or str(path.parent)}
    try:
        unpacked = str(_writable(cache / "parquet"))
        builder = load_dataset_builder("parquet", data_files=glob.escape(str(path)), cache_dir=unpacked)
        table = _train_split(builder, streaming=streaming)
    except (ValueError, DatasetGenerationError) as error:  # Arrow's own errors are ValueErrors
        cause = error.__cause__ or error
        raise ValueError(
            f"{shorten(str(path), 300)} can't be read as Parquet: {cause}; is it whole, has it rows?"
        ) from error
    table = _columns(table, path.name)
    if streaming:
        return StreamSource(table, strict=strict, **place)
    return TableSource(table, fingerprint=digest_file(path, cache), **place)


def open_hub(
    uri: str, cache: Path, *, streaming: bool, strict: bool, root: str | None = None
) -> TableSource | StreamSource:
    """Opens `hf:NAME/CONFIG`: the train split of a configuration of a data set.

    Images that are given by name are relative to `root`, by default the data set's folder, if it is a local one.

    Raises:
        ValueError: no configuration is named, or none of that name exists; it is empty, or no column is that of a row
            form.
    """
    label = uri.removeprefix("hf:")
    repository, _, name = label.rpartition("/")
    if not repository or not name:
        raise ValueError(f"{shorten(uri)} names no configuration: write hf:NAME/CONFIG, such as hf:NAME/default")
    from datasets import load_dataset_builder

    try:
        builder = load_dataset_builder(repository, name)
        table = _train_split(builder, streaming=streaming)
    except ValueError as error:
        raise ValueError(f"{shorten(uri, 300)} can't be read: {error}") from error
    table = _columns(table, uri)
    folder = Path(repository).absolute()
    place = {"name": uri, "label": label, "root": root or (str(folder) if folder.is_dir() else "")}
    if streaming:
        return StreamSource(table, strict=strict, **place)
    # On the Hub, the builder's hash is that of the commit. A local folder's has a time in it, so there the files count.
    files = [str(file) for file in (builder.config.data_files or {}).get(_SPLIT, [])]
    content = [digest_file(Path(file), cache) for file in files if "://" not in file] or [label, builder.hash]
    fingerprint = blake2b("\n".join(content).encode(), digest_size=16).hexdigest()
    return TableSource(table, fingerprint=fingerprint, **place)


def _train_split(builder: Any, *, streaming: bool) -> Any:
    if streaming:
        return builder.as_streaming_dataset(split=_SPLIT)
    builder.download_and_prepare()
    return builder.as_dataset(split=_SPLIT)


def _columns(table: Any, name: str) -> Any:
    """The table with the columns that rows are made of, as Arrow: so no image is decoded, and no other column read."""
    if (columns := table.column_names) is not None:
        if not set(columns) & set(FORMS):
            found = f"{name} has the columns {shorten(columns, 200)}, wanted one of {', '.join(FORMS)}"
            raise ValueError(f"{found}: bring its rows into one of these forms (docs/own_data.md)")
        table = table.select_columns([column for column in columns if column in KEYS])
    return table.with_format("arrow")


def _writable(folder: Path) -> Path:
    """The folder, if files can be made in it; else one that lives as long as the process."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        instead = tempfile.mkdtemp(prefix="mmdp-")
        atexit.register(shutil.rmtree, instead, ignore_errors=True)
        warnings.warn(
            f"can't write below {folder} ({error.strerror}): the table is unpacked into {instead} until the process "
            "ends; name a folder that can be written in MMDP_CACHE or cache_dir",
            RuntimeWarning,
            stacklevel=2,
        )
        return Path(instead)
