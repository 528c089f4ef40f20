"""Samples encoded in blocks; where their images lie in a store, many headers are fetched side by side meanwhile.

Adds: `encode_blocks`. Leaves out: which samples, and what becomes of them (`sizes`).

An image header is one fetch, or two, of some 40 ms each. One by one, a million of them take half a day; so the samples
ahead are looked at in threads, which do nothing but wait, while this thread encodes text.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from functools import partial

import numpy as np

from mmdp.encode import Encoder
from mmdp.executors import Inline, Threads
from mmdp.records import Encoded, Sample
from mmdp.refusals import DataError
from mmdp.sources import Source

_AHEAD = 4
"""Samples looked at ahead for each fetch that may be in flight: so that encoding a block leaves none idle."""

Looked = tuple[Sample, list[tuple[int, int]]]


def encode_blocks(
    source: Source, encoder: Encoder, blocks: Sequence[np.ndarray], *, strict: bool
) -> Generator[list[tuple[int, Encoded | DataError]], None, None]:
    """Of each block: each index, with its encoded sample or why it can't be used.

    Args:
        source: the samples; its `max_fetches`, where it has any, is how many are looked at side by side.
        encoder: makes tokens of them.
        blocks: (K,) integers each, the indices of samples.
        strict: raise the first bad sample's error instead.

    Raises:
        DataError: in strict mode, for the first bad sample.
        OSError: a file that exists can't be read now.
    """
    num_samples = sum(map(len, blocks))
    num_fetches = max(1, min(getattr(source, "max_fetches", 1), num_samples))
    executor = Threads(num_fetches) if num_fetches > 1 else Inline()
    indices = (int(index) for block in blocks for index in block)
    with closing(executor.run(partial(_look, source, encoder), indices, depth=_AHEAD * num_fetches)) as looked:
        for block in blocks:
            results: list[tuple[int, Encoded | DataError]] = []
            for index in map(int, block):
                result = _encode(encoder, next(looked))
                if strict and isinstance(result, DataError):
                    raise result
                results.append((index, result))
            yield results


def _look(source: Source, encoder: Encoder, index: int) -> Looked | DataError:
    """A sample and the (width, height) of its images, or why it can't be used."""
    try:
        sample = source[index]
        return sample, encoder.image_sizes(sample)
    except DataError as error:
        return error


def _encode(encoder: Encoder, looked: Looked | DataError) -> Encoded | DataError:
    if isinstance(looked, DataError):
        return looked
    try:
        return encoder.encode(*looked)
    except DataError as error:
        return error
