"""Rows from a stream of sizes: the two-budget knapsack over a small buffer.

Adds: `RowStream`, one row at a time, from input that may have no end. It holds a few hundred sizes and no sample.
In: (index, tokens, images) of each sample, in order. Out: the sample indices of row after row, and a state below 4 kB.
Leaves out: packing whole arrays (`knapsack`), the order of the input and of the rows (`planner`).

The rule. Each row starts with the sample that waits longest, so nothing waits more than `buffer` rows. While the row is
far from full, the oldest go in; then the best of the buffer, one by one; and when one sample or a pair closes the gap
to the token, the row is done and the buffer is refilled. Rows of long input have no trend but at its ends: the first
are rich in long samples, and the last buffer in short ones. Four ideas make it fast and tight:

- *Lengths are bits.* The lengths that wait are the set bits of a Python integer, one integer for each number of images.
  The longest sample that fits is the highest bit not above the gap, and all pairs that close a gap are one `and` with
  the mirrored integer: no search and no tree.
- *A reserve.* A row that runs out of images while tokens are free wastes those tokens. So a sample may only use tokens
  which the images still wanted won't need; they are expected to bring as many each as the buffer holds per image.
- *One score for two budgets.* Within the reserve, the best sample uses most of what is scarce: the sum over budgets of
  (demand of the buffer) x (use by the sample) x (what the row has left), each as a share of the budget. This is the
  dot-product rule of vector bin packing (Panigrahy and others, 2011), in integers.
- *Even pairs.* Of all pairs that close a gap, the most even one goes. Very short samples are rare, and stay for the
  gaps that nothing else can close.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Any, Self

from mmdp.records import Budget
from mmdp.refusals import counted

BUFFER = 256
"""Sizes to choose from. Four rows' worth or more is enough; at 256 the state is below 4 kB."""

FAR = 6
"""While a gap is above this many mean lengths, the oldest sample will do: there is still enough to choose later."""

CLOSING = 4
"""From this many mean lengths down, a gap is worth a try to close it. 3 to 5 measure alike, 2 is worse."""


class RowStream:
    """An iterator over rows, each a list of sample indices with the oldest sample first.

    To resume, give the constructor the sizes from number `state["num_read"]` on, and load the state before the first
    row. What follows is what would have followed.

    Args:
        sizes: (index, tokens, images) of each sample, in order. Each must pass `Budget.refusal`.
        budget: what a row holds. Without an image budget, images are not looked at.
        buffer: how many sizes to choose from; a sample waits at most so many rows.

    Raises:
        ValueError: from `next`, for a size that no row can hold.

    >>> list(RowStream([(0, 5, 0), (1, 7, 0), (2, 3, 0), (3, 5, 0)], Budget(tokens=10)))
    [[0, 3], [1, 2]]
    """

    def __init__(self, sizes: Iterable[tuple[int, int, int]], budget: Budget, *, buffer: int = BUFFER) -> None:
        if buffer < 1:
            raise ValueError(f"a buffer of {buffer} sizes holds nothing: give at least 1")
        self._sizes = iter(sizes)
        self._budget = budget
        self._max_tokens = budget.tokens
        self._max_images = budget.images or 0
        # Demand, use and rest are shares of the budget: brought to the denominator max_tokens**3 * max_images**3.
        self._token_scale, self._image_scale = max(1, self._max_images) ** 3, self._max_tokens**3
        self._buffer = buffer
        self.num_read = 0
        self.num_rows = 0
        # Every sample that waits, oldest first, as [index, tokens, images, next of this size or None]; tokens turn to
        # -1 when a row takes it.
        self._arrivals: deque[list[Any]] = deque()
        self._num_waiting = self._sum_tokens = self._sum_images = 0
        # By images, then tokens: the first and the last sample that waits. The last may be gone if there is no first.
        self._first: list[dict[int, list[Any]]] = []
        self._last: list[dict[int, list[Any]]] = []
        # By images: a sample of t tokens waits where bit t of `_lengths` is set. Bit `_reach - t` of `_mirrored` says
        # the same, for lengths up to `_reach`, the longest gap that two samples were asked to close so far.
        self._lengths: list[int] = []
        self._mirrored: list[int] = []
        self._reach = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[int]:
        self._refill()
        if not self._num_waiting:
            raise StopIteration
        max_tokens, max_images = self._max_tokens, self._max_images
        tokens, images = max(1, self._sum_tokens), self._sum_images
        token_weight, image_weight = tokens * self._token_scale, images * self._image_scale
        # The images of an average row of this buffer, and the tokens that come with one image.
        mean_images = min(max_images, (images * max_tokens + tokens // 2) // tokens)
        image_tokens = tokens // max(1, images)
        far = FAR * tokens // self._num_waiting
        closing = min(max_tokens, CLOSING * tokens // self._num_waiting)
        if closing > self._reach:
            self._reach_to(min(max_tokens, 2 * closing))

        size = self._oldest()
        assert size is not None
        length, count = size
        row = [self._take(length, count)]
        gap, room = max_tokens - length, max_images - count
        while gap:
            wanted = max(0, mean_images - (max_images - room))
            if gap <= closing:
                last = self._closing(gap, room, wanted, max_images - mean_images)
                if last:
                    for length, count in last:
                        row.append(self._take(length, count))
                        gap, room = gap - length, room - count
                    break
            size = self._oldest() if gap > far else None
            if size is None or size[1] > room or size[0] > gap - max(0, wanted - size[1]) * image_tokens:
                size = self._best(gap, room, wanted, image_tokens, gap * token_weight, room * image_weight)
            if size is None:
                break
            length, count = size
            row.append(self._take(length, count))
            gap, room = gap - length, room - count
        self._num_waiting -= len(row)
        self._sum_tokens -= max_tokens - gap
        self._sum_images -= max_images - room
        self.num_rows += 1
        return row

    def state_dict(self) -> dict[str, Any]:
        """All that the next rows depend on, but for the sizes not yet read. JSON can hold it.

        `waiting` is "index:tokens:images" of each sample that waits, oldest first, in hexadecimal.
        """
        waiting = (sample for sample in self._arrivals if sample[1] >= 0)
        return {
            "budget": [self._budget.tokens, self._budget.images],
            "buffer": self._buffer,
            "num_read": self.num_read,
            "num_rows": self.num_rows,
            "waiting": " ".join(f"{index:x}:{tokens:x}:{images:x}" for index, tokens, images, _ in waiting),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where the state was taken.

        Args:
            state: from `state_dict`.

        Raises:
            ValueError: the state is of another budget or buffer, or this stream has already read sizes.
        """
        if self.num_read:
            raise ValueError(f"this stream has read {self.num_read} sizes: load a state before the first row")
        for name, own in (("budget", [self._budget.tokens, self._budget.images]), ("buffer", self._buffer)):
            if state[name] != own:
                raise ValueError(f"the state's {name} is {state[name]}, this stream's is {own}: they must be the same")
        waiting = ((int(part, 16) for part in text.split(":")) for text in state["waiting"].split())
        self._put((index, tokens, images) for index, tokens, images in waiting)
        self.num_read = state["num_read"]
        self.num_rows = state["num_rows"]

    def _refill(self) -> None:
        before = self._num_waiting
        try:
            self._put(islice(self._sizes, self._buffer - before))
        finally:
            self.num_read += self._num_waiting - before

    def _put(self, sizes: Iterable[tuple[int, int, int]]) -> None:
        """Takes samples into the buffer."""
        max_tokens, max_images, reach = self._max_tokens, self._max_images, self._reach
        lengths, mirrored = self._lengths, self._mirrored
        for index, tokens, images in sizes:
            if self._budget.images is None:
                images = 0
            if tokens.__class__ is not int or images.__class__ is not int:  # the bits of a NumPy integer end at 63
                tokens, images = int(tokens), int(images)
            if not (0 <= tokens <= max_tokens and 0 <= images <= max_images):
                raise ValueError(
                    f"sample {index} has {tokens} tokens and {counted(images, 'image')}, a row holds {max_tokens} and "
                    f"{self._budget.images}: leave out what Budget.refusal names"
                )
            while len(lengths) <= images:
                self._first.append({})
                self._last.append({})
                lengths.append(0)
                mirrored.append(0)
            sample = [index, tokens, images, None]
            first, last = self._first[images], self._last[images]
            if tokens in first:
                last[tokens][3] = sample
            else:
                first[tokens] = sample
                lengths[images] ^= 1 << tokens
                if tokens <= reach:
                    mirrored[images] ^= 1 << (reach - tokens)
            last[tokens] = sample
            self._arrivals.append(sample)
            self._num_waiting += 1
            self._sum_tokens += tokens
            self._sum_images += images

    def _oldest(self) -> tuple[int, int] | None:
        """The (tokens, images) of the sample that waits longest; None where none waits."""
        while self._arrivals:
            _, tokens, images, _ = self._arrivals[0]
            if tokens >= 0:
                return tokens, images
            self._arrivals.popleft()
        return None

    def _take(self, tokens: int, images: int) -> int:
        """Takes the oldest sample of this size out of the buffer; returns its index."""
        first = self._first[images]
        sample = first[tokens]
        if sample[3]:
            first[tokens] = sample[3]
        else:
            del first[tokens]
            self._lengths[images] ^= 1 << tokens
            if tokens <= self._reach:
                self._mirrored[images] ^= 1 << (self._reach - tokens)
        sample[1] = -1
        index: int = sample[0]
        return index

    def _reach_to(self, gap: int) -> None:
        """Makes `_mirrored` serve gaps up to this one."""
        self._reach = gap
        self._mirrored = [sum(1 << (gap - tokens) for tokens in first if tokens <= gap) for first in self._first]

    def _best(
        self, gap: int, room: int, wanted: int, image_tokens: int, token_weight: int, image_weight: int
    ) -> tuple[int, int] | None:
        """The best (tokens, images) for a row with `gap` tokens and `room` images left; None where nothing fits.

        For each image that is still wanted after the sample, `image_tokens` are to stay free.
        """
        best, best_score = None, -1
        most = min(room + 1, len(self._lengths)) - 1
        for count in range(most, -1, -1):
            limit = gap - (wanted - count) * image_tokens if count < wanted else gap
            if limit < 0:
                break  # with fewer images, the limit is lower still
            allowed = self._lengths[count]
            if allowed.bit_length() > limit + 1:
                allowed &= (2 << limit) - 1  # the bits of lengths 0..limit
            if allowed:
                length = allowed.bit_length() - 1
                score = token_weight * length + image_weight * count
                if score > best_score:
                    best, best_score = (length, count), score
        if best:
            return best
        # None keeps the reserve: the one that exceeds its limit least.
        least = 0
        for count in range(most, -1, -1):
            fitting = self._lengths[count] & ((2 << gap) - 1)
            if fitting:
                length = (fitting & -fitting).bit_length() - 1
                over = length + max(0, wanted - count) * image_tokens
                if best is None or over < least:
                    best, least = (length, count), over
        return best

    def _closing(self, gap: int, room: int, wanted: int, spare: int) -> list[tuple[int, int]]:
        """One sample or two, as (tokens, images), of exactly `gap` tokens; empty where there are none.

        Together they have as nearly `wanted` images as can be, at most `spare` more or fewer, and never above `room`.
        """
        most = min(room, 2 * (len(self._lengths) - 1))
        for off in range(min(spare, max(wanted, most - wanted)) + 1):
            for count in (wanted + off, wanted - off) if off else (wanted,):
                if 0 <= count <= most and (sizes := self._exactly(gap, count)):
                    return sizes
        return []

    def _exactly(self, gap: int, count: int) -> list[tuple[int, int]]:
        """One sample or the most even pair of exactly `gap` tokens and `count` images; empty where there is none."""
        most = len(self._lengths) - 1
        if count <= most and self._lengths[count] >> gap & 1:
            return [(gap, count)]
        half = (gap + 1) // 2
        longer, pair = gap + 1, []
        for own in range(max(0, count - most), min(count, most) + 1):
            # Bit t, before the last shift: t tokens wait with `own` images, gap - t tokens with the other images.
            pairs = (self._lengths[own] & (self._mirrored[count - own] >> (self._reach - gap))) >> half
            if pairs & 1 and 2 * half == gap and 2 * own == count and not self._first[own][half][3]:
                pairs ^= 1  # the only sample of this size can't be paired with itself
            if pairs and (length := half + (pairs & -pairs).bit_length() - 1) < longer:
                longer, pair = length, [(length, own), (gap - length, count - own)]
        return pair
