"""What each sample asks of a row, as it was measured: arrays, and what was left out for which reason.

Adds: `Sizes`, a view of the token cache: which samples fit a budget, which budget would fit them, the ids and labels of
each; `read_sizes`, which makes one.
Leaves out: measuring (`measuring.py`), and which samples share a row (`planner.py`).
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mmdp.knapsack import pack
from mmdp.records import Budget, Encoded
from mmdp.refusals import DataError, Reason, counted
from mmdp.token_cache import TokenCache

if TYPE_CHECKING:
    from mmdp.sources import Source

KEEP_SHARE = 0.99
"""A suggested budget holds this share of the samples."""

MOST_SHARE = 0.95
"""Another holds this share, where the longest few samples alone ask for the rest."""

_MUCH_LESS = 0.75
"""It is worth telling where it has at most this share of the tokens of the other."""

ALARM_SHARE = 0.5
"""Say so when more than this share of the samples can't be used: most often a wrong folder or tokenizer."""

_MORE_ROWS = 1.02
"""A suggested number of images may cost so many times the rows of any number: fewer images spread more evenly."""

_TRIED = 4096
"""Samples that are packed to find it, evenly from all: some 20 ms each time."""

_FULL = 0.95
"""Rows of a suggested budget are at least so full: a row of one sample and a half is padded as if none were packed."""

_MOST_A_ROW = 16
"""Samples a row, in the mean, beyond which no longer row is suggested for that."""


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
    _measure: Callable[[np.ndarray], None] | None = field(default=None, repr=False)  # what fills in lazy sizes
    _num_read: int = field(default=0, repr=False)  # records of the cache that are taken in
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)  # one thread measures at a time

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        told = f"{int(self.tokens.sum()):,} tokens, {counted(int(self.images.sum()), 'image')}"
        missing = int((self._position < 0).sum())
        later = f", {missing:,} not measured yet" if missing else ""
        return f"<Sizes of {counted(len(self), 'sample')}: {told}, {len(self.skipped):,} can't be used{later}>"

    def __reduce__(self) -> tuple[Any, ...]:
        # Nothing is copied to workers: they map the cache. What is measured later, `encoded` finds there.
        return read_sizes, (self.cache, len(self), self.fingerprint)

    @property
    def complete(self) -> bool:
        """Whether every sample is measured."""
        return bool((self._position >= 0).all())

    def require(self, indices: np.ndarray) -> None:
        """Makes sure that these samples are measured; only lazy sizes ever have something to do.

        Raises:
            DataError: in strict mode, for a bad sample.
        """
        if self._measure is None:
            return
        with self._lock:
            missing = indices[self._position[indices] < 0]
            if len(missing):
                self._measure(missing)
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

    def messages(self, budget: Budget | None = None, source: Source | None = None) -> dict[int, str]:
        """Index to message, for the samples in `skipped`: file, line, id, field, what was found.

        Args:
            budget: tell those it refuses as well.
            source: what was measured; where it is given, their file, line and id are told too, and not only which
                sample it is. Each of them is read for it.
        """
        texts = {index: text for index, text in self.cache.messages().items() if index in self.skipped}
        if budget is None:
            return texts
        limit = f"{budget.tokens:,} tokens" + ("" if budget.images is None else f", images: {budget.images}")
        for index, reason in self.refused(budget).items():
            has = f"{self.tokens[index]:,} tokens, images: {self.images[index]}"
            error = DataError(reason, f"it has {has}; a row holds {limit}: raise the budget, or split the sample")
            if source is not None:
                sample = source[index]
                error = error.at(source=sample.source, id=sample.id)
            texts[index] = str(error.at(source=f"sample {index}, counted from 0"))
        return texts

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

    def suggestions(self) -> list[tuple[str, Budget]]:
        """Budgets for these samples, each with the share that it holds, such as `99 %`.

        The second, for 95 %, is there only where it has far fewer tokens: then a few long samples ask for the first.

        Raises:
            ValueError: no sample can be used.
        """
        most, fewer = self.suggest(), self.suggest(share=MOST_SHARE)
        found = [(f"{KEEP_SHARE:.0%}".replace("%", " %"), most)]
        if fewer.tokens <= _MUCH_LESS * most.tokens:
            found.append((f"{MOST_SHARE:.0%}".replace("%", " %"), fewer))
        return found

    def suggest(self, tokens: int | None = None, *, share: float = KEEP_SHARE) -> Budget:
        """A budget for these samples: tokens that hold 99 % of them, and enough images not to close rows early.

        Rows are long enough to be packed full, too: where lengths are even, a row of the longest would hold one sample.

        Images follow tokens: a row of L tokens holds about L / (mean tokens) samples, and so that many times the mean
        number of images. More are needed than that mean, since rows differ: so some thousand samples are packed with
        other numbers, and the least is suggested with which they need at most 2 % more rows than with any number.

        Args:
            tokens: keep this number of tokens, and suggest the images for it.
            share: of the samples, to be held where `tokens` is None.

        Raises:
            ValueError: no sample can be used, or none fits so many tokens.
        """
        kept = self.kept()
        if not len(kept):
            raise ValueError("no sample can be used, so no budget can be suggested: see `messages()` for the reasons")
        if tokens is None:
            longest = int(np.quantile(self.tokens[kept], share, method="inverted_cdf"))
            tokens = self._long_enough(kept, longest)
        fitting = kept[self.tokens[kept] <= tokens]
        if not len(fitting):
            raise ValueError(f"no sample fits {tokens} tokens: the shortest has {self.tokens[kept].min()}")
        tried = fitting[:: -(-len(fitting) // _TRIED)]
        lengths, images = self.tokens[tried], self.images[tried]
        free = pack(lengths, None, Budget(tokens=tokens))
        enough = _MORE_ROWS * len(free)
        most = max(int(images[row].sum()) for row in free)  # with so many, these very rows could be packed
        least = int(np.quantile(images, KEEP_SHARE, method="inverted_cdf"))

        def do(number: int) -> bool:
            possible = images <= number
            return len(pack(lengths[possible], images[possible], Budget(tokens, number))) <= enough

        return Budget(tokens, least + bisect_left(range(least, most), True, key=do))

    def _long_enough(self, kept: np.ndarray, longest: int) -> int:
        """Tokens a row, a multiple of 64 and at least `longest`, from which on rows are packed full."""
        tokens = -(-longest // 64) * 64
        fitting = kept[self.tokens[kept] <= tokens]
        lengths = self.tokens[fitting[:: -(-len(fitting) // _TRIED)]]
        while tokens < _MOST_A_ROW * lengths.mean():
            filled = sorted(int(lengths[row].sum()) for row in pack(lengths, None, Budget(tokens=tokens)))
            if sum(filled[1:]) >= _FULL * tokens * (len(filled) - 1):  # what is left over fills one row as it can
                break
            tokens = -(-tokens * 5 // (4 * 64)) * 64
        return tokens


def read_sizes(
    tokens: TokenCache, total: int, fingerprint: str, measure: Callable[[np.ndarray], None] | None = None
) -> Sizes:
    """The sizes of the first `total` samples, as far as they are in the cache.

    Args:
        tokens: the cache.
        total: samples.
        fingerprint: of source and encoder.
        measure: given (M,) indices, adds their records to the cache; what makes the sizes lazy.
    """
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
        _measure=measure,
    )
    sizes._update()
    return sizes
