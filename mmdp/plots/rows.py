"""The row map: what each row of a batch holds, and what of it is padding.

Adds: `row_map`; `drawn_rows`, which reads off a batch what it draws, as `DrawnRow` of `DrawnSegment`.
Leaves out: figures of many samples (`sizes`) and of one (`card`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from mmdp.plots.style import DOTS, FAINT, HATCH, INK, PADDING, SAMPLE_COLOURS, WIDTH, dress, layout, legend, share

if TYPE_CHECKING:
    from mmdp.records import Batch


_FILLER = "#f2f2f2"
"""Paler than padding, since nobody wasted it: a row of the last step that no sample is left for."""


@dataclass(frozen=True, slots=True)
class DrawnSegment:
    """One sample of a row, as the row map shows it.

    Attributes:
        tokens: image tokens included.
        image_spans: start and end of each run of image tokens, counted from the segment's first token.
        sample: its index in the source.
    """

    tokens: int
    image_spans: tuple[tuple[int, int], ...]
    sample: int


@dataclass(frozen=True, slots=True)
class DrawnRow:
    """One row of the row map.

    Attributes:
        segments: the samples in it, in order.
        length: tokens, padding included.
        is_filler: it only completes a step, and is no padding.
    """

    segments: tuple[DrawnSegment, ...]
    length: int
    is_filler: bool = False

    @property
    def num_tokens(self) -> int:
        """Real tokens: all but padding."""
        return sum(segment.tokens for segment in self.segments)


def drawn_rows(batch: Batch, image_token_id: int) -> list[DrawnRow]:
    """The rows of a batch as `row_map` takes them.

    Args:
        batch: input_ids and segments (B, L).
        image_token_id: the id that stands for image tokens.
    """
    input_ids, segments = batch.input_ids.numpy(force=True), batch.segments.numpy(force=True)  # (B, L) each
    rows = []
    # A row that lost all of its samples is empty too. Filler rows cost least, and so stand behind all others.
    empty = [place for place, samples in enumerate(batch.samples) if not samples]
    fillers = set(empty[len(empty) - batch.filler_rows :])
    for place, (ids, numbers, samples) in enumerate(zip(input_ids, segments, batch.samples, strict=True)):
        drawn = []
        for number, sample in enumerate(samples, start=1):
            inside = numbers == number
            drawn.append(DrawnSegment(int(inside.sum()), _runs(ids[inside] == image_token_id), sample))
        rows.append(DrawnRow(tuple(drawn), len(ids), place in fillers))
    return rows


def _runs(marked: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Start and end of each run of True in a (T,) bool array."""
    edges = np.flatnonzero(np.diff(marked.astype(np.int8), prepend=0, append=0))
    return tuple((int(start), int(end)) for start, end in edges.reshape(-1, 2))


def _spread(values: Sequence[int], most: int) -> list[int]:
    """At most so many of the values, from the first to the last in even steps."""
    if len(values) <= most:
        return list(values)
    return [values[round(place * (len(values) - 1) / (most - 1))] for place in range(most)]


def row_map(
    rows: Sequence[DrawnRow],
    *,
    title: str,
    length: int | None = None,
    budget: int | None = None,
    dropped: Sequence[int] = (),
    padding_left: bool = False,
    max_rows: int = 64,
) -> Figure:
    """Rows down, tokens across: what each row holds, and what of it is padding.

    Args:
        rows: of a batch, or of several; more than `max_rows` are counted in the padding share but not drawn.
        title: what was done.
        length: tokens every row was padded to.
        budget: tokens at which the line stands; by default at `length`, and no line where neither is given.
        dropped: tokens of the samples that were left out; drawn as ghosts below the rows, eight at most, from the
            shortest to the longest.
        padding_left: whether the padding stands in front.
        max_rows: draw this many rows.
    """
    budget = length if budget is None else budget
    shown, ghosts = rows[:max_rows], _spread(sorted(dropped), 8)
    full = max([row.length for row in rows] + [length or 0, 1])
    # A ghost many times as long as the rows would crush them: it leaves the picture, and says its length in words.
    span = max([full, *(min(tokens, 3 * full) for tokens in ghosts)])
    pitch = 2 if len(shown) > 24 else 1  # rows that a ghost takes: its words need the height
    lines = max(1, len(shown) + pitch * len(ghosts))
    height = 0.26 if lines <= 16 else 4.4 / lines + 0.04 if lines < 40 else 0.125
    figure = Figure(figsize=(WIDTH, 1.75 + max(height * lines, 0.8)), dpi=DOTS, layout=layout())
    axes = figure.subplots()
    thick = 0.78 if lines <= 32 else 0.86
    bars: dict[tuple[str, str], list[list[tuple[float, float]]]] = {}

    def bar(kind: str, fill: str, place: int, start: float, end: float) -> None:
        top, bottom = place - thick / 2, place + thick / 2
        bars.setdefault((kind, fill), []).append([(start, top), (end, top), (end, bottom), (start, bottom)])

    colour = 0
    for place, row in enumerate(shown):
        padding = row.length - row.num_tokens
        start = padding if padding_left else 0
        if row.is_filler:
            bar("filler", _FILLER, place, 0, row.length)
            words = "filler: completes the step"
            axes.text(row.length / 2, place, words, ha="center", va="center", color=FAINT, fontsize=8)
        elif padding:
            bar(
                "padding",
                PADDING,
                place,
                0 if padding_left else row.num_tokens,
                padding if padding_left else row.length,
            )
        for segment in row.segments:
            fill = SAMPLE_COLOURS[colour % len(SAMPLE_COLOURS)]
            colour += 1
            bar("sample", fill, place, start, start + segment.tokens)
            for first, end in segment.image_spans:
                bar("image", fill, place, start + first, start + end)
            start += segment.tokens
    for (kind, fill), corners in bars.items():
        # One collection a kind and colour: thousands of samples are drawn as fast as a few.
        drawn = PolyCollection(corners, facecolor=fill, linewidth=0, gid=kind)
        if kind == "image":
            drawn.set(hatch=HATCH, hatch_linewidth=0.9, edgecolor="white", zorder=2)
        axes.add_collection(drawn, autolim=False)
    for number, tokens in enumerate(ghosts):
        middle, tall = len(shown) - 0.5 + pitch * (number + 0.5), thick * pitch
        outline = Rectangle(
            (0, middle - tall / 2), tokens, tall, fill=False, edgecolor=FAINT, linestyle="--", gid="ghost"
        )
        axes.add_patch(outline)
        words = f"{tokens:,} tokens" + (", ends beyond the picture" if tokens > span else "")
        axes.text(span * 0.008, middle, words, va="center", color=FAINT, fontsize=8 if lines <= 32 else 7)
    if budget is not None:
        axes.axvline(budget, color=INK, linewidth=1.6, gid="budget")
    axes.set_xlim(0, span * 1.01)
    axes.set_ylim(lines - 0.5, -0.5)
    axes.set_yticks(range(0, len(shown), max(1, -(-len(shown) // 16))))
    tokens_axis = "tokens" if len(rows) == len(shown) else f"tokens (the first {len(shown)} of {len(rows)} rows)"
    dress(axes, title, tokens_axis, "row")
    filled = [row for row in rows if not row.is_filler]
    padded, real = sum(row.length for row in filled), sum(row.num_tokens for row in filled)
    keys: list[Patch | Line2D] = [Patch(facecolor=SAMPLE_COLOURS[0], label="one sample, one colour")]
    if any(segment.image_spans for row in rows for segment in row.segments):
        hatched = Patch(facecolor=SAMPLE_COLOURS[0], edgecolor="white", hatch=HATCH, linewidth=0, label="image tokens")
        keys.append(hatched)
    keys.append(Patch(facecolor=PADDING, label=f"padding: {share(padded - real, padded):.1%} of {padded:,} tokens"))
    if len(filled) < len(rows):
        label = f"filler: {len(rows) - len(filled)} of {len(rows)} rows, not counted"
        keys.append(Patch(facecolor=_FILLER, edgecolor=PADDING, label=label))
    if budget is not None:
        keys.append(Line2D([], [], color=INK, linewidth=1.6, label=f"budget: {budget:,} tokens"))
    if dropped:
        more = f" ({len(ghosts)} shown)" if len(dropped) > len(ghosts) else ""
        keys.append(Patch(facecolor="none", edgecolor=FAINT, linestyle="--", label=f"dropped: {len(dropped):,}{more}"))
    legend(figure, keys)
    return figure
