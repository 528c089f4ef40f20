"""A figure of scale: how long ranks wait, over how many there are and how many actors feed them.

Adds: `wait_map`, a heat map with its numbers in it.
Leaves out: the model that they come from (`mmdp.pipeline_run`).

The colours are those of cividis, which people with any colour vision read alike; the numbers stand in the fields too.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from mmdp.plots.style import DOTS, FAINT, INK, WIDTH, dress, layout

_CHECKED = "(the model was checked with up to 4 ranks on one node; nothing that is shown here was)"
_DARK = 0.5  # wait ratio from which the field is light enough for dark letters


def wait_map(
    ratios: Sequence[Sequence[float]],
    ranks: Sequence[int],
    workers: Sequence[int],
    *,
    chosen: tuple[int, int],
    answer: str,
) -> Figure:
    """A field for each number of ranks and of actors.

    Args:
        ratios: wait ratio of each, ranks down and actors across, 0 to 1.
        ranks: how many.
        workers: actors.
        chosen: ranks and actors of the field that has a frame, if it is there.
        answer: in words; stands below.

    Raises:
        ValueError: other ratios than there are fields.
    """
    values = np.asarray(ratios, dtype=float)
    if not values.size or values.shape != (len(ranks), len(workers)):
        raise ValueError(f"ratios {values.shape} for {len(ranks)} ranks and {len(workers)} actors: give one a field")
    figure = Figure(figsize=(WIDTH, 5.2), dpi=DOTS, layout=layout())
    axes = figure.subplots()
    shown = axes.imshow(values, cmap="cividis", vmin=0, vmax=1, aspect="auto", origin="lower")
    dress(axes, f"How long ranks wait, predicted\n{_CHECKED}", "actors", "ranks")
    axes.set_xticks(range(len(workers)), [f"{one:,}" for one in workers])
    axes.set_yticks(range(len(ranks)), [f"{one:,}" for one in ranks])
    axes.tick_params(length=0)
    for (down, across), value in np.ndenumerate(values):
        is_chosen = (ranks[down], workers[across]) == chosen
        axes.text(
            *(across, down, f"{value:.0%}"),
            ha="center",
            va="center",
            fontsize=10,
            color=INK if value > _DARK else "white",
            bbox={"boxstyle": "round", "fill": False, "edgecolor": "white", "linewidth": 2} if is_chosen else None,
        )
    bar = figure.colorbar(shown, ax=axes)
    bar.set_label("wait ratio", fontsize=9)
    bar.outline.set_visible(False)
    figure.supxlabel(textwrap.fill(answer, 120), fontsize=9, color=FAINT)
    return figure
