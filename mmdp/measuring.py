"""The sizes of all samples, measured once, without decoding a pixel.

Adds: `measure(source, encoder)`. Text is tokenised, image headers are read, bad samples are refused and counted; ids
and labels go to a cache on disk, from which rows are built later. A run that is stopped goes on where it was.
Leaves out: what came out (`sizes.py`), the files of the cache (`token_cache.py`), the command (`measure.py`).
"""

from __future__ import annotations

import tempfile
import warnings
from contextlib import closing
from functools import partial
from hashlib import blake2b
from pathlib import Path

import numpy as np

from mmdp.config import cache_folder
from mmdp.encode import Encoder
from mmdp.encode_blocks import encode_blocks
from mmdp.fingerprints import fingerprint_of
from mmdp.progress import track
from mmdp.records import Budget, Encoded
from mmdp.refusals import DataError, Reason, counted
from mmdp.sizes import ALARM_SHARE, KEEP_SHARE, Sizes, read_sizes
from mmdp.sources import Source
from mmdp.token_cache import FORMAT, TokenCache

_BLOCK = 64
"""Samples measured and written at a time: what Ctrl-C can cost, and the stretch that is read in file order."""

_WARN_SHARE = 0.05
"""Say so when more than this share of the samples fits no row."""


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
        return read_sizes(tokens, total, fingerprint, partial(_add, tokens, source, encoder, strict))
    _retry(tokens, source, encoder, read_sizes(tokens, total, fingerprint).skipped)
    if len(_missing(tokens, total)):
        with tokens.writer() as writer:
            missing = _missing(tokens, total)
            blocks = [missing[start : start + _BLOCK] for start in range(0, len(missing), _BLOCK)]
            # In a shuffled order, so that whoever stops early has seen a fair part of the file.
            order = np.random.default_rng(0).permutation(len(blocks))
            blocks = [blocks[number] for number in order]
            with closing(encode_blocks(source, encoder, blocks, strict=strict)) as encoded:
                for _ in track(blocks, f"measuring {source.name}", size=len):
                    writer.add(next(encoded))
    sizes = read_sizes(tokens, total, fingerprint)
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


def _missing(tokens: TokenCache, total: int) -> np.ndarray:
    """(M,) indices below `total` that are not measured yet."""
    todo = np.ones(total, dtype=bool)
    index = tokens.records["index"]
    todo[index[index < total]] = False
    return np.flatnonzero(todo)


def _add(tokens: TokenCache, source: Source, encoder: Encoder, strict: bool, missing: np.ndarray) -> None:
    """Measures these samples, (M,) indices, into the cache."""
    with tokens.writer() as writer:
        for results in encode_blocks(source, encoder, [missing], strict=strict):
            writer.add(results)


def _retry(tokens: TokenCache, source: Source, encoder: Encoder, skipped: dict[int, Reason]) -> None:
    """Measures again what may be good by now, and notes what has changed."""
    again = [index for index, reason in skipped.items() if reason.may_pass]
    results: list[tuple[int, Encoded | DataError]] = []
    blocks = [np.array(again[start : start + _BLOCK]) for start in range(0, len(again), _BLOCK)]
    with closing(encode_blocks(source, encoder, blocks, strict=False)) as encoded:
        for _ in track(blocks, f"looking again at refused rows of {source.name}", size=len):
            results += next(encoded)
    changed = [(index, one) for index, one in results if not isinstance(one, DataError) or one.reason != skipped[index]]
    if changed:
        with tokens.writer() as writer:
            writer.add(changed)


def _report_misfits(sizes: Sizes, budget: Budget | None) -> None:
    if len(sizes.skipped) == len(sizes):
        first = next(iter(sizes.messages().values()), "")
        raise ValueError(f"none of the {len(sizes)} samples can be used: {sizes.counts()}. The first: {first}")
    if len(sizes.skipped) > ALARM_SHARE * len(sizes):
        first = next(iter(sizes.messages().values()), "")
        warnings.warn(
            f"{len(sizes.skipped)} of {counted(len(sizes), 'sample')} can't be used: {sizes.counts()}. First: {first}",
            stacklevel=3,
        )
    if budget is None:
        return
    misfits = len(sizes.refused(budget))
    usable = len(sizes) - len(sizes.skipped)
    if misfits > _WARN_SHARE * usable:
        better = sizes.suggest()
        has_limit = budget.images is not None
        images = f" and {budget.images} images" if has_limit else ""
        flag = f" --max-images {better.images}" if has_limit else ""
        warnings.warn(
            f"{misfits} of {counted(usable, 'sample')} ({misfits / usable:.0%}) fit no row of "
            f"{budget.tokens} tokens{images}. `--max-tokens {better.tokens}{flag}` holds {KEEP_SHARE:.0%} of them",
            stacklevel=3,
        )
