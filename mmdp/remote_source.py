"""Data sets of a store: the file of rows fetched once and kept, the images fetched from beside it when they are wanted.

Adds: `keep`, a file of a store as one on disk; `RemoteSource`, a source whose file was kept.
Leaves out: the forms of files and rows (`sources`, `tables`), and images (`store`).

The kept file lies in the cache folder, under a name made of its address and its ETag: the same content is fetched once,
another one comes to another place, and a process that still reads the old one goes on. It appears whole or not at all,
and of several processes one fetches while the others wait.

A source travels to other processes with its address and its settings, never with credentials. On a machine where the
kept file isn't there yet, it is fetched again; if it has changed meanwhile, that is an error, since plans would differ.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmdp.fetch import stream
from mmdp.file_lock import locked
from mmdp.progress import track
from mmdp.records import Sample
from mmdp.refusals import shorten
from mmdp.remote import Access, MissingObjectError, Opened, TransientError, given_up, is_remote, pauses, split_uri
from mmdp.store import use_root

if TYPE_CHECKING:
    from mmdp.sources import Source

_PIECE_BYTES = 8 * 2**20
"""Fetched and written at a time: what a progress bar counts."""


@dataclass(frozen=True, slots=True)
class KeptFile:
    """A file of a store, and its copy on this disk.

    Attributes:
        uri: where it is from.
        access: how its store is asked.
        path: of the copy.
        stamp: what the store said of its content.
    """

    uri: str
    access: Access
    path: Path
    stamp: str

    def fetch(self) -> None:
        """Makes sure that the copy is there.

        Raises:
            RuntimeError: the store has another content by now.
            FileNotFoundError: the store has no such file any more.
            FetchError: it can't be had.
        """
        if self.path.exists():
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self.path.parent / "lock", "fetching into"):
            if not self.path.exists():
                self._fetch()

    def _fetch(self) -> None:
        failures: list[TransientError] = []
        for pause in (*pauses(self.access), 0.0):
            opened, pieces = _open(self.uri, self.access)
            if opened.stamp != self.stamp:
                raise RuntimeError(f"{self.uri} has changed since it was opened: open the source again")
            try:
                self._write(opened, pieces)
            except TransientError as error:
                failures.append(error)
                time.sleep(pause)
            else:
                return
        raise given_up(self.uri, failures, self.access, is_late=False)

    def _write(self, opened: Opened, pieces: Iterator[bytes]) -> None:
        with tempfile.NamedTemporaryFile(dir=self.path.parent, suffix=".part", delete=False) as part:
            try:
                blocks = range(-(-opened.size // _PIECE_BYTES))
                what = f"fetching {self.path.name} (MiB)"
                ends = [-(-min(opened.size, end * _PIECE_BYTES) // 2**20) for end in range(len(blocks) + 1)]  # in MiB
                counted = track(blocks, what, size=lambda block: ends[block + 1] - ends[block])
                for _, piece in zip(counted, pieces, strict=False):
                    part.write(piece)
                if part.tell() != opened.size:
                    raise TransientError(f"{part.tell():,} of {opened.size:,} bytes came")
                part.flush()
                # The same on every machine, so that an index of its lines made on one holds on the others.
                os.utime(part.name, ns=(opened.modified_ns, opened.modified_ns))
                Path(part.name).replace(self.path)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    Path(part.name).unlink()
                raise


def keep(uri: str, access: Access, cache: Path) -> KeptFile:
    """A file of a store as a file in the cache folder, fetched unless this content was fetched before.

    Raises:
        ValueError: an address that can't be read, an empty file, or one of which nobody can tell whether it changes.
        FileNotFoundError: no such file.
        FetchError: it can't be had.
    """
    opened, _ = _open(uri, access)
    shown = shorten(uri, 300)
    if not opened.size:
        raise ValueError(f"{shown} is empty: was it written to the end?")
    if not opened.stamp:
        raise ValueError(f"{shown} has neither ETag nor Last-Modified, so a copy might be out of date: download it")
    place = blake2b(f"{access.endpoint} {uri} {opened.stamp}".encode(), digest_size=16).hexdigest()
    kept = KeptFile(uri, access, cache / "fetched" / place / uri.rpartition("/")[2], opened.stamp)
    kept.fetch()
    return kept


def _open(uri: str, access: Access) -> tuple[Opened, Iterator[bytes]]:
    try:
        return stream(*split_uri(uri), access, _PIECE_BYTES)
    except MissingObjectError as error:
        raise FileNotFoundError(f"no such file: {uri} ({error}). Correct the address, or upload it") from None


class RemoteSource:
    """A source whose rows, or whose images, or both, are in a store: the rows are kept here, the images stay there.

    Args:
        rows: the source of the file, kept or of this disk.
        root: what its image names are relative to.
        access: how the store of the images is asked, where they are in one.
        kept: the file, where it is from a store.
    """

    def __init__(self, rows: Source, root: str, access: Access, kept: KeptFile | None = None) -> None:
        self._rows = rows
        self._root = root
        self._access = access
        self._kept = kept
        self._arrive()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._arrive()

    def _arrive(self) -> None:
        """In each process: the rows must be there, and images be fetched as was said."""
        if self._kept is not None:
            self._kept.fetch()
        if is_remote(self._root):
            use_root(self._root, self._access)

    @property
    def name(self) -> str:
        """What a person calls it."""
        return self._rows.name

    @property
    def fingerprint(self) -> str:
        """Hex digest of the content of its rows."""
        return self._rows.fingerprint

    @property
    def location(self) -> str:
        """Where the images are: the same rows elsewhere may have others."""
        return f"{self._access.endpoint} {self._root}"

    @property
    def max_fetches(self) -> int:
        """How many of its images may be fetched at a time."""
        return self._access.max_fetches if is_remote(self._root) else 1

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        return self._rows[index]
