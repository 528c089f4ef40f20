"""The figures: one grammar for all, and the only module that imports matplotlib.

Adds: `row_map` (with `drawn_rows`, which reads it off a batch), `sorted_lengths`, `histograms`, `sample_card`; `save`.
In: data. Out: a Figure, 900 pixels wide once saved. Leaves out: where figures go and when they are shown (`cli.py`).

The grammar: rows go down and tokens across; each sample has a colour; image tokens are hatched; padding is light grey,
on the side where it is; the budget is a line; a dropped sample is a ghost, an outline without a filling.

Figures are built without pyplot, so they touch no global state and need no screen. Nothing in them depends on the
clock: the same data gives the same bytes.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

if TYPE_CHECKING:
    from mmdp.records import Batch, Sample

SAMPLE_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
"""Okabe and Ito, "Color Universal Design" (2008), without black and without yellow, which is faint on white."""

PADDING = "#d9d9d9"
INK = "#222222"
FAINT = "#666666"
HATCH = "////"
WIDTH, DOTS = 9.0, 100  # inches, and dots an inch: the 900 pixels at which GitHub shows a figure
FONT = FontProperties(family="DejaVu Sans")  # ships with matplotlib, so a figure is the same everywhere
BOX = "\u25a1"  # stands for a character that the font lacks


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
    """

    segments: tuple[DrawnSegment, ...]
    length: int

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
    for ids, numbers, samples in zip(input_ids, segments, batch.samples, strict=True):
        drawn = []
        for number, sample in enumerate(samples, start=1):
            inside = numbers == number
            drawn.append(DrawnSegment(int(inside.sum()), _runs(ids[inside] == image_token_id), sample))
        rows.append(DrawnRow(tuple(drawn), len(ids)))
    return rows


def _runs(marked: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Start and end of each run of True in a (T,) bool array."""
    edges = np.flatnonzero(np.diff(marked.astype(np.int8), prepend=0, append=0))
    return tuple((int(start), int(end)) for start, end in edges.reshape(-1, 2))


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
        dropped: tokens of the samples that were left out; drawn as ghosts below the rows, eight at most.
        padding_left: whether the padding stands in front.
        max_rows: draw this many rows.
    """
    budget = length if budget is None else budget
    shown, ghosts = rows[:max_rows], sorted(dropped)[:8]
    full = max([row.length for row in rows] + [length or 0, 1])
    # A ghost many times as long as the rows would crush them: it leaves the picture, and says its length in words.
    span = max([full, *(min(tokens, 1.5 * full) for tokens in ghosts)])
    pitch = 2 if len(shown) > 24 else 1  # rows that a ghost takes: its words need the height
    lines = max(1, len(shown) + pitch * len(ghosts))
    height = 0.26 if lines <= 16 else 4.4 / lines + 0.04 if lines < 40 else 0.125
    figure = Figure(figsize=(WIDTH, 1.75 + max(height * lines, 0.8)), dpi=DOTS, layout=_layout())
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
        if padding:
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
        axes.text(
            span * 0.008, middle, f"{tokens:,} tokens", va="center", color=FAINT, fontsize=8 if lines <= 32 else 7
        )
    if budget is not None:
        axes.axvline(budget, color=INK, linewidth=1.6, gid="budget")
    axes.set_xlim(0, span * 1.01)
    axes.set_ylim(lines - 0.5, -0.5)
    axes.set_yticks(range(0, len(shown), max(1, -(-len(shown) // 16))))
    tokens_axis = "tokens" if len(rows) == len(shown) else f"tokens (the first {len(shown)} of {len(rows)} rows)"
    _dress(axes, title, tokens_axis, "row")
    padded, real = sum(row.length for row in rows), sum(row.num_tokens for row in rows)
    keys: list[Patch | Line2D] = [
        Patch(facecolor=SAMPLE_COLOURS[0], label="one sample, one colour"),
        Patch(facecolor=SAMPLE_COLOURS[0], edgecolor="white", hatch=HATCH, linewidth=0, label="image tokens"),
        Patch(facecolor=PADDING, label=f"padding: {_share(padded - real, padded):.1%} of {padded:,} tokens"),
    ]
    if budget is not None:
        keys.append(Line2D([], [], color=INK, linewidth=1.6, label=f"budget: {budget:,} tokens"))
    if dropped:
        more = f" ({len(ghosts)} shown)" if len(dropped) > len(ghosts) else ""
        keys.append(Patch(facecolor="none", edgecolor=FAINT, linestyle="--", label=f"dropped: {len(dropped):,}{more}"))
    _legend(figure, keys)
    return figure


def sorted_lengths(tokens: Sequence[int] | np.ndarray, *, title: str, budget: int | None = None) -> Figure:
    """All samples by length, each padded to the longest: how much grey one rectangle for all would hold.

    Args:
        tokens: (N,) tokens of each sample.
        title: what is shown.
        budget: pad to this instead; longer samples become ghosts.
    """
    lengths = np.sort(np.asarray(tokens, dtype=np.int64))
    kept = lengths if budget is None else lengths[lengths <= budget]
    full = int(lengths.max(initial=1)) if budget is None else budget
    figure = Figure(figsize=(WIDTH, 4.6), dpi=DOTS, layout=_layout())
    axes = figure.subplots()
    _steps(axes, kept, 0, facecolor=SAMPLE_COLOURS[0], linewidth=0, gid="sample")
    _steps(axes, np.full(len(kept), full), 0, left=kept, facecolor=PADDING, linewidth=0, gid="padding")
    ghosts = lengths[len(kept) :]
    if len(ghosts):
        _steps(axes, ghosts, len(kept), facecolor="none", edgecolor=FAINT, linestyle="--", linewidth=1.1, gid="ghost")
    marks = [("median", int(np.median(lengths))), ("longest", int(lengths[-1]))] if len(lengths) else []
    for name, value in marks:
        row = int(np.searchsorted(lengths, value))
        axes.plot([value], [row + 0.5], marker="o", color=INK, markersize=5)
        left = value > 0.6 * max(full, int(lengths[-1]))
        axes.annotate(
            f"{name}: {value:,}",
            (value, row + 0.5),
            xytext=(-9 if left else 9, 9),
            textcoords="offset points",
            ha="right" if left else "left",
            va="center",
            fontsize=9,
            color=INK,
            bbox={"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
        )
    if budget is not None:
        axes.axvline(budget, color=INK, linewidth=1.6, gid="budget")
    axes.set_xlim(0, max(full, int(lengths.max(initial=1))) * 1.01)
    axes.set_ylim(max(1, len(lengths)), 0)
    _dress(axes, title, "tokens", "samples, shortest first")
    total = full * len(kept)
    keys: list[Patch | Line2D] = [
        Patch(facecolor=SAMPLE_COLOURS[0], label=f"samples: {int(kept.sum()):,} tokens"),
        Patch(
            facecolor=PADDING, label=f"padding to {full:,} each: {_share(total - kept.sum(), total):.1%} of all tokens"
        ),
    ]
    if budget is not None:
        keys.append(Line2D([], [], color=INK, linewidth=1.6, label=f"budget: {budget:,} tokens"))
    if len(ghosts):
        keys.append(Patch(facecolor="none", edgecolor=FAINT, linestyle="--", label=f"dropped: {len(ghosts):,}"))
    _legend(figure, keys)
    return figure


def _steps(axes: Axes, right: np.ndarray, first: int, *, left: np.ndarray | int = 0, **style: object) -> None:
    """Fills one band of height 1 a sample, from `left` to `right` (N,), the first at height `first`."""
    edges = np.arange(first, first + len(right) + 1)
    ends = np.append(right, right[-1:])
    starts = np.append(left, left[-1:]) if isinstance(left, np.ndarray) else left
    axes.fill_betweenx(edges, starts, ends, step="post", **style)  # type: ignore[arg-type]


def histograms(
    tokens: Sequence[int] | np.ndarray,
    turns: Sequence[int] | np.ndarray,
    image_sizes: Sequence[tuple[int, int]],
    *,
    title: str = "",
) -> Figure:
    """Three panels: tokens a sample, turns a sample, and the sizes of the images.

    Args:
        tokens: (N,) tokens of each sample.
        turns: question and answer pairs of each sample, (N,).
        image_sizes: width and height of each image, in pixels.
        title: what is shown; none where empty.
    """
    figure = Figure(figsize=(WIDTH, 3.4), dpi=DOTS, layout=_layout())
    if title:
        figure.suptitle(title, fontsize=12, color=INK, parse_math=False)
    left, middle, right = figure.subplots(1, 3)
    lengths, pairs = np.asarray(tokens, dtype=np.int64), np.asarray(turns, dtype=np.int64)
    sizes = np.asarray(image_sizes, dtype=np.int64).reshape(-1, 2)
    about_tokens, about_turns, about_images = "no tokens", "no turns", "no images"
    if len(lengths):
        left.hist(lengths, bins=min(40, len(np.unique(lengths))), color=SAMPLE_COLOURS[0])
        left.axvline(float(np.median(lengths)), color=INK, linewidth=1.4, linestyle=":")
        about_tokens = f"median {np.median(lengths):,.0f}, longest {lengths.max():,}"
    if len(pairs):
        counts = np.bincount(pairs)
        middle.bar(np.arange(len(counts)), counts, width=0.85, color=SAMPLE_COLOURS[2])
        middle.set_xlim(pairs.min() - 0.6, pairs.max() + 0.6)
        about_turns = f"mean {pairs.mean():.2f}, most {pairs.max()}"
    if len(sizes):
        shown = sizes[:: -(-len(sizes) // 4000)]  # 4000 dots show the cloud; a million would take minutes
        faint = float(np.clip(60 / len(shown) ** 0.75, 0.08, 0.7))
        right.scatter(shown[:, 0], shown[:, 1], s=14, color=SAMPLE_COLOURS[5], alpha=faint, linewidths=0)
        right.set_xlim(0, sizes[:, 0].max() * 1.05)
        right.set_ylim(0, sizes[:, 1].max() * 1.05)
        middle_size = np.median(sizes, axis=0)
        about_images = f"{_count(len(sizes), 'image')}, median {middle_size[0]:,.0f} x {middle_size[1]:,.0f}"
    _dress(left, about_tokens, "tokens a sample", "samples", ticks=5)
    _dress(middle, about_turns, "turns a sample", "samples", ticks=5)
    _dress(right, about_images, "width, pixels", "height, pixels", ticks=5)
    for axes in (left, middle, right):
        axes.title.set_fontsize(10)
    return figure


def sample_card(
    sample: Sample, images: Sequence[np.ndarray], *, tokens: int | None = None, max_lines: int = 44
) -> Figure:
    """One sample as a person sees it: its images, and its turns beside them.

    Args:
        sample: ids, turns, source.
        images: N arrays (3, H, W) uint8; six at most are drawn.
        tokens: its length, for the title.
        max_lines: lines of text; turns that find no room are counted.
    """
    images = list(images)
    text_left = 3.9 if images else 0.35  # inches
    size, step = 9.5, 0.19  # points, and inches from line to line
    lines = _card_lines(sample, WIDTH - text_left - 0.3, size, max_lines)
    columns = 1 if len(images) <= 1 else 2
    grid = [images[k : k + columns] for k in range(0, min(len(images), 6), columns)]
    cell = 3.4 / columns
    tall = [max(min(image.shape[1] / image.shape[2], 1.4) * cell for image in row) + 0.28 for row in grid]
    head = 0.78
    height = head + max(step * len(lines), sum(tall)) + 0.35
    figure = Figure(figsize=(WIDTH, height), dpi=DOTS)

    def at(x: float, y: float) -> tuple[float, float]:
        """Inches from the top left corner as fractions of the figure."""
        return x / WIDTH, 1 - y / height

    answers = sum(turn.role == "assistant" for turn in sample.turns)
    facts = [f"sample {sample.id}", _count(len(images), "image"), _count(answers, "answer")]
    facts += [_count(tokens, "token")] if tokens is not None else []
    name, missing = _printable(" \u00b7 ".join(facts))
    figure.text(
        *at(0.3, 0.3), _cut(name, WIDTH - 0.6, 12), fontsize=12, color=INK, va="center", font=FONT, parse_math=False
    )
    source, _ = _printable(sample.source)
    figure.text(
        *at(0.3, 0.53), _cut(source, WIDTH - 0.6, 8), fontsize=8, color=FAINT, va="center", font=FONT, parse_math=False
    )
    top = head
    number = 0
    for row, row_height in zip(grid, tall, strict=True):
        for column, image in enumerate(row):
            number += 1
            _, rows, across = image.shape
            wide = min(cell - 0.1, (row_height - 0.28) * across / rows)
            down = wide * rows / across
            x, y = at(0.3 + column * cell, top + down)
            axes = figure.add_axes((x, y, wide / WIDTH, down / height), xticks=[], yticks=[], gid="image")
            axes.imshow(np.asarray(image).transpose(1, 2, 0), aspect="auto")
            for spine in axes.spines.values():
                spine.set_edgecolor("#bbbbbb")
            note = f"image {number}: {across} x {rows} pixels"
            if number == 6 and len(images) > 6:
                note += f"; {len(images) - 6} more"
            figure.text(
                *at(0.3 + column * cell, top + down + 0.11),
                note,
                fontsize=8 if columns == 1 else 7,
                color=FAINT,
                va="center",
                font=FONT,
            )
        top += row_height
    for place, (line, colour) in enumerate(lines):
        text, lacking = _printable(line)
        missing += lacking
        position = at(text_left, head + 0.1 + step * place)
        figure.text(*position, text, fontsize=size, color=colour, va="center", font=FONT, parse_math=False)
    if missing:
        note = f"{BOX}: {missing} characters that this font can't draw"
        figure.text(*at(text_left, height - 0.14), note, fontsize=8, color=FAINT, va="center", font=FONT)
    return figure


def _card_lines(sample: Sample, width: float, size: float, max_lines: int) -> list[tuple[str, str]]:
    """The turns as lines of text with their colours, cut to `max_lines`."""
    colours = {"user": INK, "assistant": SAMPLE_COLOURS[0], "system": FAINT}
    lines: list[tuple[str, str]] = []
    for number, turn in enumerate(sample.turns):
        text = "".join(part if isinstance(part, str) else f"[image {part + 1}] " for part in turn.parts)
        wrapped = _wrap(f"{turn.role}: {text}", width, size, max_lines)
        left = max_lines - len(lines)
        after = len(sample.turns) - number - 1
        if len(wrapped) + (after > 0) > left:
            keep = max(0, left - 1)
            if keep >= 2:
                lines += [(line, colours[turn.role]) for line in wrapped[:keep]]
                said = f"... the rest of this turn, and {after} more" if after else "... the rest of this turn"
            else:
                said = f"... {after + 1} more turns"
            return [*lines, (said, FAINT)]
        lines += [(line, colours[turn.role]) for line in wrapped]
        if turn.role == "assistant" and after and len(lines) < max_lines - 1:
            lines.append(("", INK))
    return lines


@cache
def _advance(character: str) -> float:
    """How far a character moves the pen, in inches at one point of size."""
    font = get_font(findfont(FONT))
    font.set_size(72, 72)
    return font.load_char(ord(character)).linearHoriAdvance / 65536 / 72 / 72


def _inches(text: str, size: float) -> float:
    """How wide a text comes out."""
    return sum(map(_advance, _printable(text)[0])) * size


def _wrap(text: str, width: float, size: float, max_lines: int) -> list[str]:
    """Lines at most `width` inches wide; a word that is wider is broken. Stops one line after `max_lines`."""
    lines: list[str] = []
    for paragraph in text.split("\n"):
        line, used = "", 0.0
        for word in re.split("( )", paragraph):
            wide = _inches(word, size)
            if used + wide > width and line:
                lines.append(line)
                line, used = "", 0.0
                if word == " ":
                    continue
            if wide > width:
                for character in word:
                    step = _inches(character, size)
                    if used + step > width:
                        lines.append(line)
                        line, used = "", 0.0
                        if len(lines) > max_lines:
                            return lines
                    line, used = line + character, used + step
            else:
                line, used = line + word, used + wide
        lines.append(line)
        if len(lines) > max_lines:
            return lines
    return lines


def _cut(text: str, width: float, size: float) -> str:
    """The text, its end cut off where it is wider than `width` inches."""
    if _inches(text, size) <= width:
        return text
    while text and _inches(f"{text}...", size) > width:
        text = text[:-1]
    return f"{text}..."


@cache
def _known() -> frozenset[int]:
    """The characters the font can draw."""
    return frozenset(get_font(findfont(FONT)).get_charmap())


def _printable(text: str) -> tuple[str, int]:
    """The text with a box for each character that the font lacks, and how many these are."""
    drawn, missing = [], 0
    for character in text:
        if ord(character) in _known():
            drawn.append(character)
        elif unicodedata.category(character) in ("Cc", "Cf", "Mn", "Zs"):
            drawn.append(" " if character.isspace() else "")
        else:
            drawn.append(BOX)
            missing += 1
    return "".join(drawn), missing


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _layout() -> ConstrainedLayoutEngine:
    return ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08)


def _dress(axes: Axes, title: str, across: str, down: str, ticks: int = 8) -> None:
    """Title, names of the axes with their units, thousands with commas, and no frame that says nothing."""
    axes.set_title(title, fontsize=11, color=INK, parse_math=False, wrap=True)
    axes.set_xlabel(across, fontsize=9)
    axes.set_ylabel(down, fontsize=9)
    axes.tick_params(labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    for axis in (axes.xaxis, axes.yaxis):
        if not isinstance(axis.get_major_locator(), FixedLocator):
            axis.set_major_locator(MaxNLocator(ticks, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _legend(figure: Figure, keys: Sequence[Patch | Line2D]) -> None:
    columns = len(keys) if len(keys) <= 4 else 3
    figure.legend(handles=list(keys), loc="outside lower center", ncols=columns, fontsize=9, frameon=False)


def save(figure: Figure, path: Path) -> Path:
    """Writes a figure as PNG, makes its folder, and returns the path. The same figure gives the same bytes.

    Args:
        figure: to be written.
        path: ends in `.png`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The version of matplotlib would be the only text in the file, and it says nothing about the data.
    figure.savefig(path, format="png", dpi=DOTS, metadata={"Software": None})
    return path
