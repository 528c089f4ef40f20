r"""Where the rows of a file start: found once, kept on disk, so that any row is one read away.

Adds: `Lines`, the rows of a file of lines as bytes, and `digest_file`, the content hash of any file. Leaves out: what a
row means (`sources`, `rows`).

One pass over the file finds the newlines and the content hash together. What it finds lies in the cache folder as an
array of int64, 8 bytes a row, and is memory-mapped: a million rows cost no memory, a second start costs no pass, and
the workers of a machine share its pages. It is made again when the file's size or time of change differ, or when its
own checksum does. Where the cache folder can't be written, it is held in memory, and a warning says so.

A line ends at `\n` and nowhere else. A byte-order mark at the start of the file is skipped, and so are lines of blanks
alone (JSON's: space, tab, carriage return); line numbers stay those of the file.
"""

from __future__ import annotations

import os
import tempfile
import time
import warnings
import zlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

_BLANKS = b" \t\r\n"
_IS_SOLID = ~np.isin(np.arange(256), list(_BLANKS))  # (256,) bool, by byte
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_CHUNK_BYTES = 4 * 2**20  # fits a processor's cache, and is large enough that the cost of a call doesn't show
_TICK_NS = 20_000_000  # the time stamps of files move in steps; Linux's are 10 ms at most

# The array: this header, where each row starts and the last one ends, and the row after each blank line.
_LAYOUT, _SIZE, _MTIME, _NUM_ROWS, _NUM_BLANK, _CHECKSUM, _DIGEST, _HEADER = 0, 1, 2, 3, 4, 5, slice(6, 8), 8
_THIS_LAYOUT = 1  # one more whenever the array's meaning changes

_Stamp = tuple[int, int]  # size in bytes, time of the last change in ns


class _File:
    """An open file, closed when nobody holds it any more. It is read by place only, so forks and threads share it."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # bound here: `os` may be gone at exit
        if hasattr(self, "descriptor"):
            close(self.descriptor)

    def stamp(self) -> _Stamp:
        status = os.fstat(self.descriptor)
        return status.st_size, status.st_mtime_ns

    def read(self, start: int, size: int) -> bytes:
        return os.pread(self.descriptor, size, start)


@dataclass(frozen=True, slots=True)
class _Opened:
    """What a process reads rows with.

    Attributes:
        file: the file of lines.
        starts: (N + 1,) int64, where each row starts, and where the last one ends.
        blank: (M,) int64, rising: for each blank line the row that follows it.
    """

    file: _File
    starts: np.ndarray
    blank: np.ndarray


class Lines:
    """The rows of a file, by number from 0. Pickles in a kilobyte; may be read by many threads.

    Args:
        path: the file, which must not change as long as it is read.
        cache: folder that keeps the index.

    Attributes:
        digest: hex digest of the file's bytes.
    """

    def __init__(self, path: Path, cache: Path) -> None:
        self._path = path
        self._cache = cache
        file = _File(path)
        words, is_kept = _index(path, file, cache, rows=True)
        self._stamp: _Stamp = (int(words[_SIZE]), int(words[_MTIME]))
        self._num_rows = int(words[_NUM_ROWS])
        self.digest = _digest(words)
        self._words = None if is_kept else words  # pickles along only where no file holds it
        self._opened: _Opened | None = _opened(file, words)

    def __len__(self) -> int:
        return self._num_rows

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}

    def read(self, index: int, limit: int | None = None) -> bytes:
        """A row's bytes, with its line end and any blank lines that follow it; the first `limit` of them where given.

        Raises:
            RuntimeError: the file changed since it was opened, so its rows are no longer where they were.
        """
        opened = self._open()
        start, end = int(opened.starts[index]), int(opened.starts[index + 1])
        if limit is not None:
            end = min(end, start + limit)
        data = opened.file.read(start, end - start)
        while data and len(data) < end - start:  # the kernel reads at most 2 GiB at once
            data += (more := opened.file.read(start + len(data), end - start - len(data)))
            if not more:
                break
        if opened.file.stamp() != self._stamp:
            raise self._changed()
        return data

    def size(self, index: int, enough: int) -> int:
        """Bytes of a row without the blanks after it; exact where there are more than `enough`, else at most that.

        Telling the blanks takes a read, and a row that is short with them needs none.
        """
        opened = self._open()
        start, end = int(opened.starts[index]), int(opened.starts[index + 1])
        while end - start > enough:
            block = opened.file.read(max(start, end - 2**16), min(end - start, 2**16))
            num_solid = len(block.rstrip(_BLANKS))
            end -= len(block) - num_solid
            if num_solid or not block:
                break
        return end - start

    def line_number(self, index: int) -> int:
        """The line of the file on which a row stands, from 1."""
        blank = self._open().blank
        return index + 1 + (int(np.searchsorted(blank, index, side="right")) if len(blank) else 0)

    def _open(self) -> _Opened:
        opened = self._opened
        if opened is None:  # in another process now; two threads may both come here, and either result serves both
            file = _File(self._path)
            if file.stamp() != self._stamp:
                raise self._changed()
            words = _index(self._path, file, self._cache, rows=True)[0] if self._words is None else self._words
            opened = self._opened = _opened(file, words)
        return opened

    def _changed(self) -> RuntimeError:
        return RuntimeError(f"{self._path} changed while it was read: leave it alone, and open the source again")


def digest_file(path: Path, cache: Path) -> str:
    """Hex digest of a file's bytes, kept in the cache folder."""
    return _digest(_index(path, _File(path), cache, rows=False)[0])


def _opened(file: _File, words: np.ndarray) -> _Opened:
    end = _HEADER + int(words[_NUM_ROWS]) + 1
    return _Opened(file, words[_HEADER:end], words[end:])


def _digest(words: np.ndarray) -> str:
    return words[_DIGEST].astype("<i8").tobytes().hex()


def _index(path: Path, file: _File, cache: Path, *, rows: bool) -> tuple[np.ndarray, bool]:
    """The array for a file, from the cache folder or made now, and whether the cache folder has it."""
    name = blake2b(os.fsencode(path.resolve()), digest_size=16).hexdigest()
    kept = cache / "lines" / f"{name}.{'rows' if rows else 'digest'}.npy"
    stamp = file.stamp()
    words = _load(kept, stamp)
    if words is not None:
        return words, True
    if 0 <= time.time_ns() - stamp[1] < _TICK_NS:
        time.sleep(_TICK_NS / 1e9)  # written just now: from here on, a change shows in the time of change
    made = _scan(file, stamp, rows=rows)
    if file.stamp() != stamp:
        raise RuntimeError(f"{path} changed while its lines were counted: wait until it is written, and open it again")
    if not _keep(made, kept):
        return made, False
    words = _load(kept, stamp)  # memory-mapped from here on
    return (made, False) if words is None else (words, True)


def _scan(file: _File, stamp: _Stamp, *, rows: bool) -> np.ndarray:
    """Reads the file once from end to end: its content hash and, where rows are wanted, their places."""
    digest = blake2b(digest_size=16)
    found = array("q", bytes(8 * _HEADER))  # grows in place: 8 bytes a row, at no time twice that
    blank = array("q")
    position = 0
    line_start, line_is_solid = 0, False  # of the line that reaches into this chunk
    while chunk := file.read(position, _CHUNK_BYTES):
        digest.update(chunk)
        if position == 0 and chunk.startswith(_BYTE_ORDER_MARK):
            position = line_start = len(_BYTE_ORDER_MARK)
            chunk = chunk[position:]
        data = np.frombuffer(chunk, np.uint8)
        if rows and len(data):
            newlines = np.flatnonzero(data == ord("\n"))
            begins = np.concatenate(([0], newlines + 1))
            begins = begins[begins < len(data)]
            is_solid = np.maximum.reduceat(data, begins) > ord(" ")
            if not is_solid.all():  # a blank line, or one of control characters alone, which is a bad row
                is_solid = np.logical_or.reduceat(_IS_SOLID[data], begins)
            is_solid[0] |= line_is_solid
            begins += position
            begins[0] = line_start
            solid_lines = is_solid[: len(newlines)]
            blank.frombytes((len(found) - _HEADER + np.cumsum(solid_lines)[~solid_lines]).tobytes())
            found.frombytes(begins[: len(newlines)][solid_lines].tobytes())
            if len(begins) > len(newlines):
                line_start, line_is_solid = int(begins[-1]), bool(is_solid[-1])
            else:
                line_start, line_is_solid = position + len(data), False
        position += len(data)
    if line_is_solid:  # the last line has no line end
        found.append(line_start)
    num_rows = len(found) - _HEADER
    found.append(position)
    found.extend(blank)
    words = np.frombuffer(found, np.int64)
    words[[_LAYOUT, _SIZE, _MTIME, _NUM_ROWS, _NUM_BLANK]] = _THIS_LAYOUT, *stamp, num_rows, len(blank)
    words[_DIGEST] = np.frombuffer(digest.digest(), "<i8")
    words[_CHECKSUM] = zlib.crc32(words.data)
    return words


def _load(kept: Path, stamp: _Stamp) -> np.ndarray | None:
    """The kept array, memory-mapped; None where there is none, or it is damaged, or of another state of the file."""
    try:
        words = np.asarray(np.lib.format.open_memmap(kept, mode="r"))
    except (OSError, ValueError, EOFError):
        return None
    if words.dtype != np.int64 or words.ndim != 1 or len(words) < _HEADER + 1:
        return None
    if (int(words[_LAYOUT]), int(words[_SIZE]), int(words[_MTIME])) != (_THIS_LAYOUT, *stamp):
        return None
    header = words[:_HEADER].copy()
    header[_CHECKSUM] = 0
    is_whole = int(words[_CHECKSUM]) == zlib.crc32(words[_HEADER:].data, zlib.crc32(header.data))
    return words if is_whole else None


def _keep(words: np.ndarray, kept: Path) -> bool:
    """Writes the array, in one piece or not at all, so that no process ever maps half of one."""
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=kept.parent, suffix=".part", delete=False) as part:
            try:
                np.save(part, words)
                part.flush()
                Path(part.name).replace(kept)
            except BaseException:
                Path(part.name).unlink()
                raise
    except OSError as error:
        warnings.warn(
            f"can't write below {kept.parent} ({error.strerror}): where rows start is found anew each time and held in "
            "memory; name a folder that can be written in MMDP_CACHE or cache_dir",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True
