"""The figures: one grammar for all, and the only package that imports matplotlib.

Adds: `row_map` (with `drawn_rows`, which reads it off a batch), `sorted_lengths`, `histograms`, `sample_card`;
`planned_rows` and `fill_curves`, for rows that are packed and not built; `sight`, who sees whom in a row;
`padding_strip`, for stages; `saw_tooth`, `timeline` and `flame`, for time; `save`.
In: data. Out: a Figure, 900 pixels wide once saved. Leaves out: where figures go and when they are shown (`mmdp.cli`).

The grammar: rows go down and tokens across; each sample has a colour; image tokens are hatched; padding is light grey,
on the side where it is; the budget is a line; a dropped sample is a ghost, an outline without a filling.

Figures are built without pyplot, so they touch no global state and need no screen. Nothing in them depends on the
clock: the same data gives the same bytes.
"""

from __future__ import annotations

from mmdp.plots.card import sample_card
from mmdp.plots.flame import flame
from mmdp.plots.packing import fill_curves, planned_rows
from mmdp.plots.rows import DrawnRow, DrawnSegment, drawn_rows, row_map
from mmdp.plots.sight import sight
from mmdp.plots.sizes import histograms, sorted_lengths
from mmdp.plots.strip import padding_strip
from mmdp.plots.style import PADDING, SAMPLE_COLOURS, save
from mmdp.plots.timeline import saw_tooth, timeline

__all__ = [
    "PADDING",
    "SAMPLE_COLOURS",
    "DrawnRow",
    "DrawnSegment",
    "drawn_rows",
    "fill_curves",
    "flame",
    "histograms",
    "padding_strip",
    "planned_rows",
    "row_map",
    "sample_card",
    "save",
    "saw_tooth",
    "sight",
    "sorted_lengths",
    "timeline",
]
