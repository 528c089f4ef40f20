"""Numbers that are the same on every machine: keys to shuffle by, and digests of rows.

Adds: `shuffle_keys`, `row_digests`. Leaves out: what is shuffled, and who compares digests (`planner.py`, `steps.py`).
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np


def shuffle_keys(numbers: np.ndarray, seed: int, epoch: int, *, salt: int) -> np.ndarray:
    """(N,) uint64 keys to sort by: SplitMix64 of each number, from a start that seed, epoch and salt decide.

    A hash of our own, because NumPy may change what a seed gives from one release to the next.
    """
    digest = blake2b(f"{seed} {epoch} {salt}".encode(), digest_size=8).digest()
    return _mixed(numbers * np.uint64(0x9E3779B97F4A7C15) + np.uint64(int.from_bytes(digest, "little")))


def row_digests(flat: np.ndarray, offsets: np.ndarray, first_row: int, before: np.uint64) -> np.ndarray:
    """(R,) uint64, for each row of a window a digest of it and of all rows before it.

    Args:
        flat: (N,) sample indices of all its rows.
        offsets: (R + 1,) where each row begins in them.
        first_row: number of its first row in the epoch.
        before: the digest of the rows before the window.
    """
    lengths = np.diff(offsets)
    rows = np.arange(first_row, first_row + len(lengths), dtype=np.uint64)
    places = np.arange(len(flat), dtype=np.uint64) - np.repeat(offsets[:-1], lengths).astype(np.uint64)
    words = _mixed(_mixed(flat.astype(np.uint64) + (places << np.uint64(32))) + np.repeat(rows, lengths))
    found: np.ndarray = np.cumsum(np.add.reduceat(words, offsets[:-1])) + before
    return found


def _mixed(keys: np.ndarray) -> np.ndarray:
    """(N,) uint64, each key through the finisher of SplitMix64."""
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = keys ^ (keys >> np.uint64(31))
    return mixed
