"""The sizes of all samples, measured once, without decoding a pixel.

Adds: `measure(source, encoder)` and its result, `Sizes`. Text is tokenised, image headers are read, bad samples are
refused and counted; ids and labels go to a cache on disk, from which rows are built later. A run that is stopped goes
on where it was.
Leaves out: which samples share a row (`planner.py`).
"""

from __future__ import annotations

import tempfile
import threading
import warnings
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from mmdp.config import cache_folder
from mmdp.encode import Encoder
from mmdp.encode_blocks import encode_blocks
from mmdp.progress import track
from mmdp.records import Budget, Encoded
from mmdp.refusals import DataError, Reason
from mmdp.sources import Source
from mmdp.token_cache import FORMAT, TokenCache

_BLOCK = 64
"""Samples measured and written at a time: what Ctrl-C can cost, and the stretch that is read in file order."""

_WARN_SHARE = 0.05
"""Say so when more than this share of the samples fits no row."""

_KEEP_SHARE = 0.99
"""A suggested budget holds this share of the samples."""


@dataclass(slots=True, eq=False)
class Sizes:
    """What each of the N samples of a source asks of a row.

    Lazy sizes (`measure(..., lazy=True)`) are filled in as they are asked for: by `require`, which the planner calls.

    Attributes:
        tokens: (N,) int32, image placeholders included; 0 for a sample that is skipped, or not measured yet.
        images: (N,) int32.
        vision: (N,) int64, patches or tiles.
        label_tokens: (N,) int32.
        skipped: index to reason, for samples that can't be used whatever the budget.
        fingerprint: of source and encoder; ranks that differ in it do not plan alike.
        cache: ids, labels and layouts of each sample.
    """

    tokens: np.ndarray
    images: np.ndarray
    vision: np.ndarray
    label_tokens: np.ndarray
    skipped: dict[int, Reason]
    fingerprint: str
    cache: TokenCache = field(repr=False)
    _position: np.ndarray = field(repr=False)  # (N,) int64, the record of each sample in the cache; -1 for none yet
    _measuring: _Measuring | None = field(default=None, repr=False)
    _num_read: int = field(default=0, repr=False)  # records of the cache that are taken in

    def __len__(self) -> int:
        return len(self.tokens)

    def __reduce__(self) -> tuple[Any, ...]:
        # Nothing is copied to workers: they map the cache. What is measured later, `encoded` finds there.
        return _read_sizes, (self.cache, len(self), self.fingerprint)

    @property
    def complete(self) -> bool:
        """Whether every sample is measured."""
        return bool((self._position >= 0).all())

    def require(self, indices: np.ndarray) -> None:
        """Makes sure that these samples are measured; only lazy sizes ever have something to do.

        Raises:
            DataError: in strict mode, for a bad sample.
        """
        if self._measuring is None:
            return
        with self._measuring.lock:
            missing = indices[self._position[indices] < 0]
            if len(missing):
                self._measuring.add(missing, self.cache)
                self._update()

    def encoded(self, index: int) -> Encoded:
        """Sample `index` as it was measured, from the cache; its arrays are read-only.

        Raises:
            DataError: the sample is one of `skipped`.
            KeyError: it is not measured yet.
        """
        if self._position[index] < 0:
            self.cache.reload()
            self._update()
        if self._position[index] < 0:
            raise KeyError(f"sample {index} is not measured yet: call `require`")
        return self.cache.encoded(int(self._position[index]))

    def _update(self) -> None:
        """Takes in what has come to the cache since the last time; of two records of a sample the later one holds."""
        new = self.cache.records[self._num_read :]
        place = np.arange(self._num_read, self._num_read + len(new))
        self._num_read += len(new)
        inside = new["index"] < len(self)
        new, place = new[inside], place[inside]
        index = new["index"]
        for name in ("tokens", "images", "vision", "label_tokens"):
            getattr(self, name)[index] = new[name]
        self.skipped.update(self.cache.reasons(new))
        self._position[index] = place  # last, since readers take no lock
        for sample in [sample for sample in self.skipped if not self.cache.is_refusal(self._position[sample])]:
            del self.skipped[sample]

    def messages(self) -> dict[int, str]:
        """Index to message, for the samples in `skipped`: file, line, id, field, what was found."""
        return {index: text for index, text in self.cache.messages().items() if index in self.skipped}

    def kept(self, budget: Budget | None = None) -> np.ndarray:
        """(K,) rising indices of the samples that can be used, and that fit a row of the budget where one is given."""
        usable = np.ones(len(self), dtype=bool)
        usable[list(self.skipped)] = False
        if budget is not None:
            usable[list(self.refused(budget))] = False
        return np.flatnonzero(usable)

    def refused(self, budget: Budget) -> dict[int, Reason]:
        """Index to reason, for samples that fit no row of the budget; those in `skipped` aside."""
        over_images = np.zeros(len(self), dtype=bool) if budget.images is None else self.images > budget.images
        found = np.flatnonzero((self.tokens > budget.tokens) | over_images)
        refused = {}
        for index in map(int, found):
            reason = budget.refusal(int(self.tokens[index]), int(self.images[index]))
            if reason is not None and index not in self.skipped:
                refused[index] = reason
        return refused

    def counts(self, budget: Budget | None = None) -> dict[str, int]:
        """How many samples are left out, by reason."""
        reasons = Counter(map(str, self.skipped.values()))
        if budget is not None:
            reasons.update(map(str, self.refused(budget).values()))
        return dict(sorted(reasons.items()))

    def suggest(self, tokens: int | None = None) -> Budget:
        """A budget for these samples: tokens that hold 99 % of them, and images in proportion.

        Images follow tokens: a row of L tokens holds about L / (mean tokens) samples, and so that many times the mean
        number of images. A smaller image budget leaves tokens empty.

        Args:
            tokens: keep this number of tokens, and suggest the images for it.
        """
        kept = self.kept()
        if not len(kept):
            raise ValueError("no sample can be used, so no budget can be suggested: see `messages()` for the reasons")
        lengths, images = self.tokens[kept], self.images[kept]
        if tokens is None:
            longest = int(np.quantile(lengths, _KEEP_SHARE, method="higher"))
            tokens = -(-longest // 64) * 64
        in_proportion = tokens * float(images.mean()) / float(lengths.mean())
        most = int(np.quantile(images, _KEEP_SHARE, method="higher"))
        return Budget(tokens=tokens, images=max(most, round(in_proportion)))


@dataclass(frozen=True, slots=True)
class _Measuring:
    """What lazy sizes need to measure on."""

    source: Source
    encoder: Encoder
    strict: bool
    lock: threading.Lock

    def add(self, missing: np.ndarray, cache: TokenCache) -> None:
        with cache.writer() as writer:
            for results in encode_blocks(self.source, self.encoder, [missing], strict=self.strict):
                writer.add(results)


def measure(
    source: Source,
    encoder: Encoder,
    *,
    budget: Budget | None = None,
    samples: int | None = None,
    strict: bool = False,
    lazy: bool = False,
    cache: Path | None = None,
) -> Sizes:
    """The size of every sample, from text and image headers alone.

    What was measured before, by this process or another, is read from the cache. Images are taken to stay as they are;
    only a sample whose image was refused is looked at again, since a missing file may have come. One that changes its
    size later is refused when its row is built.

    Args:
        source: the samples.
        encoder: what makes tokens of them.
        budget: warn, with a better one, when more than 5 % of the samples fit no row of it.
        samples: measure only the first so many samples.
        strict: raise the first bad sample's error instead of counting it.
        lazy: return at once; a plan measures what its next rows need. Lengths, counts and `skipped` are true only when
            all is measured, after an epoch or `len(plan.epoch(0))`.
        cache: where token caches lie; by default `config.cache_folder()`.

    Raises:
        DataError: in strict mode, for the first bad sample.
        OSError: a file that exists can't be read now; a transient error is never a reason to skip a sample.
        ValueError: no sample can be used.
    """
    fingerprint = fingerprint_of(source, encoder)
    tokens = _open_cache(source, fingerprint, (cache or cache_folder()) / "tokens")
    total = len(source) if samples is None else min(samples, len(source))
    if lazy:
        sizes = _read_sizes(tokens, total, fingerprint)
        sizes._measuring = _Measuring(source, encoder, strict, threading.Lock())
        return sizes
    _retry(tokens, source, encoder, _read_sizes(tokens, total, fingerprint).skipped)
    if len(_missing(tokens, total)):
        with tokens.writer() as writer:
            missing = _missing(tokens, total)
            blocks = [missing[start : start + _BLOCK] for start in range(0, len(missing), _BLOCK)]
            # In a shuffled order, so that whoever stops early has seen a fair part of the file.
            order = np.random.default_rng(0).permutation(len(blocks))
            blocks = [blocks[number] for number in order]
            with closing(encode_blocks(source, encoder, blocks, strict=strict)) as encoded:
                for _ in track(blocks, f"measuring {source.name}", unit_size=_BLOCK):
                    writer.add(next(encoded))
    sizes = _read_sizes(tokens, total, fingerprint)
    for index in sorted(sizes.skipped) if strict else ():
        encoder.encode(source[index])  # raises again what an earlier, lenient run counted
    _report_misfits(sizes, budget)
    return sizes


def _open_cache(source: Source, fingerprint: str, parent: Path) -> TokenCache:
    """The token cache of this source, in its own folder: the same rows in two places may have two sets of images."""
    text = f"{FORMAT} {fingerprint} {getattr(source, 'location', '')}"
    place = blake2b(text.encode(), digest_size=16).hexdigest()
    folder = parent / place
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        folder = Path(tempfile.mkdtemp(prefix="mmdp-tokens-"))
        warnings.warn(
            f"no token cache can be kept in {parent} ({error.strerror}): measuring into a temporary folder. "
            "MMDP_CACHE names another place",
            stacklevel=3,
        )
    return TokenCache(folder)


def fingerprint_of(source: Source, encoder: Encoder) -> str:
    """Hex digest of what decides every size: the content of the source, and the encoder."""
    return blake2b(f"{source.fingerprint} {encoder.fingerprint}".encode(), digest_size=16).hexdigest()


def _missing(tokens: TokenCache, total: int) -> np.ndarray:
    """(M,) indices below `total` that are not measured yet."""
    todo = np.ones(total, dtype=bool)
    index = tokens.records["index"]
    todo[index[index < total]] = False
    return np.flatnonzero(todo)


def _retry(tokens: TokenCache, source: Source, encoder: Encoder, skipped: dict[int, Reason]) -> None:
    """Measures again what may be good by now, and notes what has changed."""
    again = [index for index, reason in skipped.items() if reason.may_pass]
    results: list[tuple[int, Encoded | DataError]] = []
    blocks = [np.array(again[start : start + _BLOCK]) for start in range(0, len(again), _BLOCK)]
    with closing(encode_blocks(source, encoder, blocks, strict=False)) as encoded:
        for _ in track(blocks, f"looking again at refused rows of {source.name}", unit_size=_BLOCK):
            results += next(encoded)
    changed = [(index, one) for index, one in results if not isinstance(one, DataError) or one.reason != skipped[index]]
    if changed:
        with tokens.writer() as writer:
            writer.add(changed)


def _read_sizes(tokens: TokenCache, total: int, fingerprint: str) -> Sizes:
    """The sizes of the first `total` samples, as far as they are in the cache."""
    small = [np.zeros(total, dtype=np.int32) for _ in range(3)]
    sizes = Sizes(
        tokens=small[0],
        images=small[1],
        vision=np.zeros(total, dtype=np.int64),
        label_tokens=small[2],
        skipped={},
        fingerprint=fingerprint,
        cache=tokens,
        _position=np.full(total, -1, dtype=np.int64),
    )
    sizes._update()
    return sizes


def _report_misfits(sizes: Sizes, budget: Budget | None) -> None:
    if len(sizes.skipped) == len(sizes):
        first = next(iter(sizes.messages().values()), "")
        raise ValueError(f"none of the {len(sizes)} samples can be used: {sizes.counts()}. The first: {first}")
    if budget is None:
        return
    misfits = len(sizes.refused(budget))
    usable = len(sizes) - len(sizes.skipped)
    if misfits > _WARN_SHARE * usable:
        better = sizes.suggest()
        warnings.warn(
            f"{misfits} of {usable} samples ({misfits / usable:.0%}) fit no row of {budget.tokens} tokens and "
            f"{budget.images} images. `--max-tokens {better.tokens} --max-images {better.images}` holds "
            f"{_KEEP_SHARE:.0%} of them",
            stacklevel=3,
        )
