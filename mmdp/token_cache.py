"""Encoded samples on disk: measured once, read by all, resumed after Ctrl-C.

Adds: `TokenCache`, an append-only folder of five files and a memory-mapped view of them.
Leaves out: what is measured, and in which order (`measuring.py`).

| file | holds |
|---|---|
| `ids.i32`, `labels.i32` | token ids and labels of all samples, back to back, int32 |
| `layouts.i32` | tokens, vision, height, width, original height and width of all images, back to back, int32 |
| `records.bin` | one fixed record a sample: its index, where its data starts, its size, or the reason it is refused |
| `refusals.jsonl` | the message of each refusal, for people |

Data is written before its record, so a run that dies leaves at most data without a record; opening drops it.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import IO

import numpy as np

from mmdp.file_lock import locked
from mmdp.records import Encoded, ImageLayout
from mmdp.refusals import DataError, Reason

_RECORD = np.dtype(
    [
        ("index", "<i8"),
        ("token_start", "<i8"),
        ("layout_start", "<i8"),
        ("tokens", "<i4"),
        ("images", "<i4"),
        ("vision", "<i8"),
        ("label_tokens", "<i4"),
        ("reason", "<i4"),  # 0 is kept; else 1 + the place of the reason in `Reason`
        ("checksum", "<u4"),  # CRC-32 of what stands before it here, and of ids, labels and layouts
    ]
)
_REASONS = tuple(Reason)
FORMAT = f"3 {' '.join(_REASONS)}"
"""Belongs into the name of a cache's folder: a record is read by these numbers alone."""

_LAYOUT = len(fields(ImageLayout))
"""Numbers of one image in `layouts.i32`: the fields of its layout, in their order."""

_FILES = ("ids.i32", "labels.i32", "layouts.i32", "records.bin", "refusals.jsonl")


class TokenCache:
    """The encoded samples of one source and one encoder.

    Args:
        folder: made if absent. Its name holds the fingerprint of source and encoder; nothing in it checks that.

    Attributes:
        folder: where the files lie.
        records: (M,) structured array, one record for each sample measured so far, in the order of measuring.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.reload()

    def __reduce__(self) -> tuple[type[TokenCache], tuple[Path]]:
        return TokenCache, (self.folder,)

    def reload(self) -> None:
        """Takes in what another process has added."""
        self.records = _mapped(self.folder / "records.bin", _RECORD)
        self._ids = _mapped(self.folder / "ids.i32", np.dtype("<i4"))
        self._labels = _mapped(self.folder / "labels.i32", np.dtype("<i4"))
        self._layouts = _mapped(self.folder / "layouts.i32", np.dtype("<i4"))
        whole = self.records["token_start"] + self.records["tokens"] <= min(len(self._ids), len(self._labels))
        whole &= self.records["layout_start"] + _LAYOUT * self.records["images"] <= len(self._layouts)
        whole &= (self.records["reason"] >= 0) & (self.records["reason"] <= len(_REASONS))
        whole &= (self.records["tokens"] > 0) == (self.records["reason"] == 0)
        for name in ("index", "token_start", "layout_start", "images"):
            whole &= self.records[name] >= 0
        if not whole.all():  # a machine that lost power may keep a record and lose its data
            self.records = self.records[: int(np.argmin(whole))]

    def encoded(self, position: int) -> Encoded:
        """The sample of record `position`; its arrays are read-only views of the files.

        Raises:
            DataError: the sample was refused when it was measured.
            RuntimeError: the file does not hold what was written.
        """
        record = self.records[position]
        if record["reason"]:
            raise DataError(_REASONS[record["reason"] - 1], "refused when it was measured")
        tokens = slice(record["token_start"], record["token_start"] + record["tokens"])
        layouts = self._layouts[record["layout_start"] : record["layout_start"] + _LAYOUT * record["images"]]
        ids, labels = self._ids[tokens], self._labels[tokens]
        if record["checksum"] != _checksum(record.tobytes(), ids, labels, layouts):
            raise RuntimeError(f"the token cache in {self.folder} is damaged: delete this folder and measure again")
        return Encoded(
            ids=ids,
            labels=labels,
            layouts=tuple(ImageLayout(*map(int, layout)) for layout in layouts.reshape(-1, _LAYOUT)),
        )

    def is_refusal(self, position: int) -> bool:
        """Whether record `position` refuses its sample."""
        return bool(self.records[position]["reason"])

    @staticmethod
    def reasons(records: np.ndarray) -> dict[int, Reason]:
        """Sample index to reason, for those of these records that refuse their sample."""
        bad = records[records["reason"] != 0]
        return {int(index): _REASONS[reason - 1] for index, reason in zip(bad["index"], bad["reason"], strict=True)}

    def messages(self) -> dict[int, str]:
        """Sample index to the message of its last refusal; a sample may have become good since."""
        path = self.folder / "refusals.jsonl"
        messages = {}
        for line in path.read_bytes().splitlines() if path.exists() else ():
            with contextlib.suppress(ValueError):  # the last line may be cut
                entry = json.loads(line)
                messages[entry["index"]] = entry["message"]
        return messages

    @contextlib.contextmanager
    def writer(self) -> Iterator[Writer]:
        """Adds samples, one process at a time; another one waits, and says for what."""
        with locked(self.folder / "lock", "measuring into"):
            self.reload()  # another process may have measured meanwhile
            ends = (
                int((self.records["token_start"] + self.records["tokens"]).max(initial=0)) * 4,
                int((self.records["token_start"] + self.records["tokens"]).max(initial=0)) * 4,
                int((self.records["layout_start"] + _LAYOUT * self.records["images"]).max(initial=0)) * 4,
                len(self.records) * _RECORD.itemsize,
            )
            with contextlib.ExitStack() as stack:
                files = [stack.enter_context((self.folder / name).open("ab")) for name in _FILES]
                for file, end in zip(files, ends, strict=False):
                    file.truncate(end)
                    file.seek(end)
                yield Writer(files, token_end=ends[0] // 4, layout_end=ends[2] // 4)
            self.reload()


class Writer:
    """Appends encoded samples and refusals to the files of a `TokenCache`."""

    def __init__(self, files: Sequence[IO[bytes]], *, token_end: int, layout_end: int) -> None:
        self._files = files
        self._token_end = token_end
        self._layout_end = layout_end

    def add(self, samples: Sequence[tuple[int, Encoded | DataError]]) -> None:
        """Writes a block of samples: their data first, then their records."""
        ids, labels, layouts, records, refusals = self._files
        lines = []
        entries = np.zeros(len(samples), dtype=_RECORD)
        for place, (index, one) in enumerate(samples):
            if isinstance(one, DataError):
                reason = 1 + _REASONS.index(one.reason)
                entries[place] = (index, self._token_end, self._layout_end, 0, 0, 0, 0, reason, 0)
                lines.append(json.dumps({"index": index, "reason": one.reason, "message": str(one)}) + "\n")
                continue
            size = one.size
            numbers = (size.tokens, size.images, size.vision, size.label_tokens)
            entries[place] = (index, self._token_end, self._layout_end, *numbers, 0, 0)
            flat = np.array([astuple(layout) for layout in one.layouts], dtype="<i4")
            data = [np.ascontiguousarray(part, dtype="<i4") for part in (one.ids, one.labels, flat)]
            for file, part in zip((ids, labels, layouts), data, strict=True):
                file.write(part.tobytes())
            entries["checksum"][place] = _checksum(entries[place].tobytes(), *data)
            self._token_end += size.tokens
            self._layout_end += _LAYOUT * size.images
        refusals.write("".join(lines).encode())
        for file in (ids, labels, layouts, refusals):
            file.flush()
        records.write(entries.tobytes())
        records.flush()


def _checksum(record: bytes, *data: np.ndarray) -> int:
    checksum = zlib.crc32(record[: -_RECORD["checksum"].itemsize])
    for part in data:
        checksum = zlib.crc32(part.tobytes(), checksum)
    return checksum


def _mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    """The whole items of a file, memory-mapped and read-only; empty where there is none."""
    count = path.stat().st_size // dtype.itemsize if path.exists() else 0
    if not count:
        return np.empty(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,))
