"""Which token of a packed row may see which: `sight`.

Adds: the causal triangle of a row, cut into a block for each sample, beside the one that a mask of ones, or a cache,
makes of it. Leaves out: making such masks (`mmdp.masks`), and proving it on a model (`mmdp.isolation`).

Models of transformers (5.24, `masking_utils.py`) cut a row where its positions do not go up by one. They look for that
only where they get no mask and make no cache; else each token sees all before it, whatever the positions say.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Polygon

from mmdp.plots.style import DOTS, INK, PADDING, SAMPLE_COLOURS, WIDTH, dress, layout, legend

_LEAK = "#222222"


def sight(positions: np.ndarray, segments: np.ndarray, *, title: str) -> Figure:
    """Left what each token sees by the positions, right what it sees with a mask of ones or a cache.

    Args:
        positions: (L,) integers, of one row of a batch.
        segments: (L,) integers, 1..k, 0 for padding.
        title: which row.

    Raises:
        ValueError: no token, or not one segment for each position.
    """
    if not len(positions) or len(positions) != len(segments):
        raise ValueError(f"{len(positions)} positions and {len(segments)} segments: give those of one row")
    starts = [0, *(np.flatnonzero(np.diff(positions) != 1) + 1).tolist()]
    runs = list(pairwise([*starts, len(positions)]))
    whole = len(positions) * (len(positions) + 1) // 2  # of all pairs of tokens, those that look back or at themselves
    own = sum((end - start) * (end - start + 1) // 2 for start, end in runs)
    figure = Figure(figsize=(WIDTH, 5.4), dpi=DOTS, layout=layout())
    figure.suptitle(title, fontsize=12, color=INK)
    panels = figure.subplots(2, 2, sharex=True, height_ratios=[1, 4])
    for axes in panels[0]:
        for start, end in runs:
            axes.plot(range(start, end), positions[start:end], color=INK, linewidth=1.4, gid="positions")
        axes.set_ylim(0, max(1, 1.15 * float(positions.max())))
    dress(panels[0][0], "no mask, no cache: positions are looked at", "", "position", ticks=3)
    dress(panels[0][1], "a mask of ones, or a cache: they are not", "", "", ticks=3)
    left, right = panels[1]
    _triangle(right, 0, len(positions), _LEAK, "leak")
    for axes in (left, right):
        number = 0
        for start, end in runs:
            is_padding = not segments[start]
            colour = PADDING if is_padding else SAMPLE_COLOURS[number % len(SAMPLE_COLOURS)]
            number += not is_padding
            _triangle(axes, start, end, colour, "padding" if is_padding else "sample")
        axes.set_xlim(0, len(positions))
        axes.set_ylim(len(positions), 0)
    dress(left, "each token sees its own sample alone", "token that is seen", "token that looks", ticks=6)
    wrong = f"{1 - own / whole:.0%} of what is seen belongs to others" if own < whole else "one sample: nothing to mix"
    dress(right, wrong, "token that is seen", "", ticks=6)
    keys = [Patch(facecolor=SAMPLE_COLOURS[0], label="sees its own sample, one colour each")]
    if own < whole:
        keys.append(Patch(facecolor=_LEAK, label="sees another sample: a leak"))
    if not segments.all():
        keys.append(Patch(facecolor=PADDING, label="padding, a block of its own"))
    legend(figure, keys)
    return figure


def _triangle(axes: Axes, start: int, end: int, colour: str, kind: str) -> None:
    """All pairs of tokens in a run where one sees the other, or itself."""
    axes.add_patch(Polygon([(start, start), (start, end), (end, end)], facecolor=colour, linewidth=0, gid=kind))
