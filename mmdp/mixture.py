"""Several data sets as one: each gone over so many times an epoch as its weight says.

Adds: `mix`, and the `Mixture` that it returns. In: sources with their weights. Out: a source, which is measured,
planned and loaded like any other.
Leaves out: the order of samples, and which of them share a row: a plan shuffles those of all sources together.

A mixture holds its sources and a few numbers: which sample stands at an index is reckoned when it is asked for. So it
pickles as small as its sources, which fetch rows and images in other processes each as it does alone.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from hashlib import blake2b
from itertools import accumulate
from numbers import Real
from operator import index
from typing import SupportsIndex

from mmdp.records import Sample
from mmdp.refusals import counted, shorten
from mmdp.rows import row_number
from mmdp.sample_checks import check_source
from mmdp.sources import Source

_MOST_SAMPLES = 2**31 - 1
"""Of an epoch: a plan numbers them in 32 bits."""

_MOST_NAMED = 4
"""Sources that the name of a mixture tells; of more it gives the number."""


def mix(sources: Iterable[tuple[Source, float]], *, seed: int = 0) -> Mixture:
    """Several sources as one.

    A weight says how many times an epoch goes over a source: 1 once, 3 three times. A fraction takes a subset: 0.25 one
    of every four samples, spread over the whole source, and 1.5 all of them and one of every two again. It is the same
    subset in every epoch; the seed, with the content of the source, decides which. An epoch has `weight * len(source)`
    samples of each source, rounded, a half upwards.

    Each sample keeps the id, the file and the line that it has in its own source, and messages name these. The
    fingerprint is of all fingerprints, weights and the seed: a state of another mix is refused.

    A sample that comes three times an epoch is three samples to all else: it is measured three times, packed and
    shuffled three times, and counted three times where it is bad. All of the first source stand in front, then all of
    the second: so `measure(..., samples=N)` sees no fair part of a mix; to try a little of each, give smaller weights.

    Args:
        sources: (source, weight) of each. The same source may come twice; where both weights are fractions, the two
            subsets overlap, so give it once with the sum.
        seed: which samples a fraction takes.

    Raises:
        ValueError: there is no source, or something that is none; a weight is not a finite number above 0, or takes no
            sample; or an epoch has more samples than a plan can number.
        TypeError: the seed is no whole number.
    """
    if not isinstance(sources, Iterable):
        raise ValueError(f"{shorten(sources)} is no list of sources: give [(source, weight), ...]")
    seed = _whole(seed)
    parts = [_part(number, entry, seed) for number, entry in enumerate(sources)]
    if not parts:
        raise ValueError("there is nothing to mix: give at least one (source, weight)")
    if sum(part.count for part in parts) > _MOST_SAMPLES:
        raise ValueError(f"an epoch of the mix has more than {_MOST_SAMPLES:,} samples: give smaller weights")
    return Mixture(parts, seed)


class Mixture:
    """A source of several, made by `mix`. `Sample.source` is that of the sample's own source.

    Args:
        parts: each source, and what is taken of it.
        seed: which samples a fraction takes.
    """

    def __init__(self, parts: list[_Part], seed: int) -> None:
        self._parts = parts
        self._ends = list(accumulate(part.count for part in parts))
        self._seed = seed

    def __repr__(self) -> str:
        return f"<Mixture of {counted(len(self), 'sample')}: {self.name}>"

    @property
    def name(self) -> str:
        """What a person calls it: its sources with their weights."""
        if len(self._parts) > _MOST_NAMED:
            return f"a mix of {len(self._parts)} sources"
        named = [(part.weight, part.source.name, isinstance(part.source, Mixture)) for part in self._parts]
        return " + ".join(
            f"{weight:g} x ({name})" if is_mix else f"{weight:g} x {name}" for weight, name, is_mix in named
        )

    @property
    def fingerprint(self) -> str:
        """Hex digest of the content of all sources, their weights, and the seed."""
        told = [(part.source.fingerprint, part.weight) for part in self._parts]
        return blake2b(repr((told, self._seed)).encode(), digest_size=16).hexdigest()

    @property
    def location(self) -> str:
        """Where the images of each are: the same rows elsewhere may have others."""
        return repr([getattr(part.source, "location", "") for part in self._parts])

    @property
    def max_fetches(self) -> int:
        """How many of its images may be fetched at a time."""
        return max(getattr(part.source, "max_fetches", 1) for part in self._parts)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Sample:
        number, own = self.origin(index)
        return self._parts[number].source[own]

    def origin(self, index: int) -> tuple[int, int]:
        """Which source a sample is from, counted from 0 as they were given, and its index there.

        Raises:
            IndexError: the mixture has no such sample.
        """
        place = row_number(index, len(self))
        number = bisect_right(self._ends, place)
        part = self._parts[number]
        return number, part.index(place - (self._ends[number] - part.count))


class _Part:
    """One source of a mixture, and what is taken of it: some times all, and then a subset.

    Args:
        source: the samples.
        weight: how many times an epoch goes over it.
        seed: which samples a fraction takes.

    Attributes:
        count: samples that an epoch takes.
    """

    def __init__(self, source: Source, weight: float, seed: int) -> None:
        self.source = source
        self.weight = weight
        self.count = math.floor(weight * len(source) + 0.5)
        self._length = len(source)
        self._salt = f"{seed} {source.fingerprint}"

    def index(self, place: int) -> int:
        """The sample of the source that stands at this place, 0 to `count` - 1."""
        times, rest = divmod(self.count, self._length)
        if place < times * self._length:
            return place % self._length
        # The source in as many stretches as the rest has samples, and one by chance of each: spread, and yet not every
        # fourth, which would always be the same of four questions on one picture.
        stretch = place - times * self._length
        start, end = stretch * self._length // rest, (stretch + 1) * self._length // rest
        drawn = blake2b(f"{self._salt} {stretch}".encode(), digest_size=8).digest()
        return start + int.from_bytes(drawn, "little") % (end - start)


def _whole(seed: object) -> int:
    """The seed as an integer, also where NumPy made it."""
    if isinstance(seed, bool) or not isinstance(seed, SupportsIndex):
        raise TypeError(f"seed is {shorten(seed)}: give a whole number")
    return index(seed)


def _part(number: int, entry: object, seed: int) -> _Part:
    """One entry of a mix, checked.

    Raises:
        ValueError: it is no pair of a source and a weight that takes something of it.
    """
    if not isinstance(entry, tuple | list) or len(entry) != 2:
        raise ValueError(f"entry {number} of the mix is {shorten(entry)}: give (source, weight)")
    source, weight = entry
    try:
        check_source(source)
    except ValueError as error:
        raise ValueError(f"entry {number} of the mix: {error}") from None
    if isinstance(weight, bool) or not isinstance(weight, Real) or weight <= 0 or not weight <= _MOST_SAMPLES:
        raise ValueError(
            f"the weight of {shorten(source.name)} is {shorten(weight)}: give a number above 0, how often an epoch "
            "goes over it, or leave the source out"
        )
    part = _Part(source, float(weight), seed)
    if not part.count:
        raise ValueError(
            f"weight {part.weight:g} takes no sample of {shorten(source.name)}, which has {len(source):,}: give "
            "a larger one, or leave the source out"
        )
    return part
