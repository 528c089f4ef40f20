"""What comes from a stream: samples encoded as they arrive, each kept until a row takes it.

Adds: `Arrivals`, one pass over a source, from its start or from where a state was saved; `Arrived`, an encoded sample;
`MarkedSource`, a source that can go on in its middle.
In: samples. Out: their sizes, for the packer, and the samples themselves, when a row has been chosen.
Leaves out: which samples share a row, and the order of rows (`stream_plan.py`); when too many are refused (`turnout`).

A sample is encoded from its text and its image headers, as `measure` does it, and no pixel is decoded. What can't be
used, or fits no row, is refused with its reason, and told with the row that was packed from what came next. Where that
befalls most of the samples, a warning says so.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, runtime_checkable

from mmdp.batching import with_patience
from mmdp.records import Budget, Encoded, Sample, Size
from mmdp.refusals import DataError, Reason, counted
from mmdp.sample_checks import check_sample
from mmdp.snapshot import Snapshot
from mmdp.turnout import Turnout

if TYPE_CHECKING:
    from mmdp.encode import Encoder

_MARK_EVERY = 64
"""Samples from one mark of the source to the next: what a resumed run may read in vain."""

_MOST_BYTES = 3600
"""Of the samples that wait and the source's mark, as JSON; with the rest, a state stays below 4 kB."""

Item = Sample | DataError


class MarkedPass(Protocol):
    """A pass that knows where it is."""

    number: int
    """Of the next sample, from the start of the stream."""

    def __iter__(self) -> Iterator[Item]: ...

    def __next__(self) -> Item: ...

    def mark(self) -> dict[str, Any] | None:
        """The place behind the last sample, as JSON can hold it, its `number` among it; None where there is no way."""


@runtime_checkable
class MarkedSource(Protocol):
    """A stream that can go on in its middle, as `tables.StreamSource` does."""

    def start_pass(self, mark: Mapping[str, Any] | None = None) -> MarkedPass:
        """A pass from the start, or from a mark on."""


@dataclass(frozen=True, slots=True, eq=False)
class Arrived:
    """One sample of a stream, encoded.

    Attributes:
        number: its place in the stream, from 0, bad rows counted.
        sample: as it came; its images are references, or the compressed bytes that the row carries.
        encoded: its tokens.
        size: what it asks of a row.
    """

    number: int
    sample: Sample
    encoded: Encoded
    size: Size

    def __repr__(self) -> str:  # short, for messages
        return f"sample {self.number} ({self.sample.source})"


class Taken(NamedTuple):
    """What one row is made of.

    Attributes:
        samples: the oldest first.
        refused: those that came before the row was full, and can't be used, with their reason.
    """

    samples: tuple[Arrived, ...]
    refused: dict[int, Reason]


class _Waiting(NamedTuple):
    """A sample that no row has taken; one that was good when a state was saved, and no longer is, keeps its size."""

    tokens: int
    images: int
    found: Arrived | Reason


class Arrivals:
    """The usable samples of one pass, as an iterator of (number, tokens, images).

    The next usable sample is always looked for before one is given: so what was refused behind the last of a stream is
    known before the last row is made.

    Args:
        source: gives samples, and a `DataError` for a row that is none.
        encoder: makes tokens of them.
        budget: what a row holds.
        start: where to go on.
        strict: raise the first bad sample's error instead of counting it.
        max_failures: raise when so many samples are bad, one after the other.

    Raises:
        ValueError: from `next`, as all of these: no sample fits a row, or the stream isn't that of the state.
        RuntimeError: too many bad samples, one after the other.
        DataError: in strict mode, for the first bad sample.
        OSError: a file that exists could not be read, three times over.
    """

    def __init__(
        self, source: Iterable[Item], encoder: Encoder, budget: Budget, start: Snapshot, strict: bool, max_failures: int
    ) -> None:
        self._source = source
        self._name = name_of(source)
        self._encoder = encoder
        self._budget = budget
        self._start = start
        self._strict = strict
        self._turnout = Turnout(self._name, budget, max_failures)
        self._waiting: dict[int, _Waiting] = {}  # by number, the oldest first
        self._refused: dict[int, Reason] = {}
        self._marks: deque[Mapping[str, Any]] = deque([start.mark] if start.mark is not None else [])
        self._read = start.read
        self._digest_at_start: str | None = ""
        self._usable = self._give()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[int, int, int]:
        return next(self._usable)

    def close(self) -> None:
        """Ends the pass: an iterator of the source is let go at once, so that it can close what it holds open."""
        self._usable.close()

    def take(self, numbers: Iterable[int]) -> Taken:
        """These samples, for a row; and all that was refused since the row before."""
        samples, refused, self._refused = [], self._refused, {}
        for number in numbers:
            found = self._waiting.pop(number).found
            if isinstance(found, Arrived):
                samples.append(found)
            else:
                refused[number] = found
        return Taken(tuple(samples), refused)

    def snapshot(self) -> Snapshot:
        """Where the pass stands, for a new one to go on."""
        before, entries = 0, []
        for number, (tokens, images, _) in self._waiting.items():
            entries.append(f"{number - before:x}:{tokens:x}:{images:x}")
            before = number
        waiting = " ".join(entries)
        needed = next(iter(self._waiting), self._read)
        while len(self._marks) > 1 and self._marks[1]["number"] <= needed:
            self._marks.popleft()
        mark = self._marks[0] if self._marks and self._marks[0]["number"] <= needed else None
        if mark is not None and len(waiting) + len(json.dumps(mark)) > _MOST_BYTES:
            mark = None
        return Snapshot(self._read, waiting, mark, self._digest())

    def began_with(self) -> Snapshot:
        """Where the pass stood when it began, with the digest of what came again. Once the first sample was given."""
        return replace(self._start, digest=self._digest_at_start)

    def _digest(self) -> str | None:
        """Of the ids of all that wait, oldest first."""
        found = [one.found for one in self._waiting.values()]
        if any(isinstance(one, Reason) for one in found):
            return None
        return digest_of([one for one in found if isinstance(one, Arrived)])

    def _give(self) -> Generator[tuple[int, int, int], None, None]:
        items = self._numbered()
        self._restore(items)
        self._digest_at_start = self._digest()
        held: Arrived | None = None
        total = self._start.read
        for number, item in items:
            total = number + 1
            one = self._judge(number, item)
            if one is None:
                continue
            if held is not None:
                self._read = number
                yield self._keep(held)
            held = one
        if held is not None:
            if not self._start.read:  # else this may be but the last few
                self._turnout.look()
            self._read = total
            yield self._keep(held)
        elif not self._start.read:
            raise ValueError(
                f"none of the {total} samples of {self._name} fits a row of {self._budget}: "
                f"{dict(self._turnout.counts)}"
            )

    def _numbered(self) -> Iterator[tuple[int, Item]]:
        """What comes, from the mark on."""
        if not isinstance(self._source, MarkedSource):
            yield from enumerate(self._source)
            return
        items = self._source.start_pass(self._start.mark)
        for number, item in enumerate(items, items.number):
            if (number + 1) % _MARK_EVERY == 0 and (mark := items.mark()) is not None:
                self._marks.append(mark)
            yield number, item

    def _restore(self, items: Iterator[tuple[int, Item]]) -> None:
        """Reads again what waited when the state was saved, and leaves the rest of what had been read."""
        sizes = {number: size for number, *size in self._start.sizes()}
        if self._start.read == (self._start.mark or {"number": 0})["number"]:
            return
        for number, item in items:
            if number in sizes:
                tokens, images = sizes[number]
                self._waiting[number] = _Waiting(tokens, images, self._again(number, item, tokens, images))
            if number + 1 == self._start.read:
                return
        raise ValueError(
            f"{self._name} ended before sample {self._start.read}, up to which it had been read when the state was "
            "saved: give the same stream, in the same order"
        )

    def _again(self, number: int, item: Item, tokens: int, images: int) -> Arrived | Reason:
        try:
            one = self._encode(number, item)
        except DataError as error:  # it leaves its row, as one that fails when the row is built
            if self._strict:
                raise
            return error.reason
        if (one.size.tokens, one.size.images) != (tokens, images):
            raise ValueError(
                f"sample {number} of {self._name} has {one.size.tokens} tokens and {counted(one.size.images, 'image')}"
                f", and had {tokens} and {images} when the state was saved: give the same stream, in the same order"
            )
        return one

    def _judge(self, number: int, item: Item) -> Arrived | None:
        """The sample, or None where it is refused."""
        try:
            one = self._encode(number, item)
        except DataError as error:
            if self._strict:
                raise
            self._refuse(number, error, is_bad=True)
            return None
        tokens, images = one.size.tokens, one.size.images
        if (reason := self._budget.refusal(tokens, images)) is not None:
            message = f"{tokens} tokens and {counted(images, 'image')} fit no row of {self._budget}"
            misfit = DataError(reason, message, source=one.sample.source, id=one.sample.id)
            self._refuse(number, misfit, is_bad=False)
            return None
        self._turnout.accept()
        return one

    def _refuse(self, number: int, error: DataError, *, is_bad: bool) -> None:
        self._refused[number] = error.reason
        self._turnout.refuse(error, is_bad=is_bad)

    def _encode(self, number: int, item: Item) -> Arrived:
        if isinstance(item, DataError):
            raise item
        check_sample(item, self._name)
        encoded = with_patience(lambda _: self._encoder.encode(item), number, name=self._name)
        return Arrived(number, item, encoded, encoded.size)

    def _keep(self, one: Arrived) -> tuple[int, int, int]:
        self._waiting[one.number] = _Waiting(one.size.tokens, one.size.images, one)
        return one.number, one.size.tokens, one.size.images


def digest_of(samples: Iterable[Arrived], before: str = "") -> str:
    """Hex digest of the numbers and ids of some samples, behind others of which `before` is the digest.

    Where there are none it is that of the others.
    """
    state, is_empty = blake2b(before.encode(), digest_size=8), True
    for one in samples:
        state.update(one.number.to_bytes(8, "little") + one.encoded.ids.tobytes())
        is_empty = False
    return before if is_empty else state.hexdigest()


def name_of(source: object) -> str:
    """What a person calls it."""
    return str(getattr(source, "name", "the stream"))
