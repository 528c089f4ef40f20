"""One sample as a person sees it.

Adds: `sample_card`. Leaves out: measuring and breaking its lines (`lettering`), decoding its images (`mmdp.images`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from mmdp.plots.lettering import BOX, FONT, cut, printable, wrap
from mmdp.plots.style import DOTS, FAINT, INK, SAMPLE_COLOURS, WIDTH
from mmdp.refusals import counted

if TYPE_CHECKING:
    from mmdp.records import Sample


def sample_card(
    sample: Sample,
    images: Sequence[np.ndarray],
    *,
    tokens: int | None = None,
    max_lines: int = 44,
    sizes: Sequence[tuple[int, int]] = (),
) -> Figure:
    """One sample as a person sees it: its images, and its turns beside them.

    Args:
        sample: ids, turns, source.
        images: N arrays (3, H, W) uint8; six at most are drawn.
        tokens: its length, for the title.
        max_lines: lines of text; turns that find no room are counted.
        sizes: width and height of the N images before they were resized; none where it is not known.
    """
    images, sizes = list(images), list(sizes)
    text_left = 3.9 if images else 0.35  # inches
    size, step = 9.5, 0.19  # points, and inches from line to line
    lines = _card_lines(sample, WIDTH - text_left - 0.3, size, max_lines)
    columns = 1 if len(images) <= 1 else 2
    grid = [images[k : k + columns] for k in range(0, min(len(images), 6), columns)]
    cell = 3.4 / columns
    below = 0.38 if columns == 2 and sizes else 0.28  # inches for the words, two lines where one is too short
    tall = [max(min(image.shape[1] / image.shape[2], 1.4) * cell for image in row) + below for row in grid]
    head = 0.78
    height = head + max(step * len(lines), sum(tall)) + 0.35
    figure = Figure(figsize=(WIDTH, height), dpi=DOTS)

    def at(x: float, y: float) -> tuple[float, float]:
        """Inches from the top left corner as fractions of the figure."""
        return x / WIDTH, 1 - y / height

    answers = sum(turn.role == "assistant" for turn in sample.turns)
    facts = [f"sample {sample.id}", counted(len(images), "image"), counted(answers, "answer")]
    facts += [counted(tokens, "token")] if tokens is not None else []
    name, missing = printable(" \u00b7 ".join(facts))
    figure.text(
        *at(0.3, 0.3), cut(name, WIDTH - 0.6, 12), fontsize=12, color=INK, va="center", font=FONT, parse_math=False
    )
    source, _ = printable(sample.source)
    figure.text(
        *at(0.3, 0.53), cut(source, WIDTH - 0.6, 8), fontsize=8, color=FAINT, va="center", font=FONT, parse_math=False
    )
    top = head
    number = 0
    for row, row_height in zip(grid, tall, strict=True):
        for column, image in enumerate(row):
            number += 1
            _, rows, across = image.shape
            wide = min(cell - 0.1, (row_height - below) * across / rows)
            down = wide * rows / across
            x, y = at(0.3 + column * cell, top + down)
            axes = figure.add_axes((x, y, wide / WIDTH, down / height), xticks=[], yticks=[], gid="image")
            axes.imshow(np.asarray(image).transpose(1, 2, 0), aspect="auto")
            for spine in axes.spines.values():
                spine.set_edgecolor("#bbbbbb")
            before = sizes[number - 1] if number <= len(sizes) else (across, rows)
            between = "\n" if columns == 2 else " "
            resized = f"{before[0]} x {before[1]},{between}resized to " if before != (across, rows) else ""
            note = f"image {number}: {resized}{across} x {rows} pixels"
            if number == 6 and len(images) > 6:
                note += f"; {len(images) - 6} more"
            figure.text(
                *at(0.3 + column * cell, top + down + 0.05),
                note,
                fontsize=8 if columns == 1 else 7,
                color=FAINT,
                va="top",
                font=FONT,
            )
        top += row_height
    for place, (line, colour) in enumerate(lines):
        text, lacking = printable(line)
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
        wrapped = wrap(f"{turn.role}: {text}", width, size, max_lines)
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
