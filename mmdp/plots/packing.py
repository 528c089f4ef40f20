"""Figures of plans: rows that are packed but not built.

Adds: `planned_rows`, which turns sample indices and lengths into rows for `row_map`; `fill_curves`, how full the rows
of several packers are.
Leaves out: rows of a batch (`rows`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from mmdp.plots.rows import DrawnRow, DrawnSegment
from mmdp.plots.style import INK, SAMPLE_COLOURS, WIDTH, dress, layout, legend

_DASHES: tuple[Literal["-", "--", "-.", ":"], ...] = ("-", "--", "-.", ":")


def planned_rows(
    rows: Sequence[Sequence[int] | np.ndarray], tokens: Sequence[int] | np.ndarray, length: int
) -> list[DrawnRow]:
    """Packed sample indices as `row_map` takes them.

    Args:
        rows: the sample indices of each row.
        tokens: (N,) length of every sample.
        length: tokens a row, padding included.
    """
    return [DrawnRow(tuple(DrawnSegment(int(tokens[index]), (), int(index)) for index in row), length) for row in rows]


def fill_curves(fills: Mapping[str, Sequence[float] | np.ndarray], *, title: str, bound: int | None = None) -> Figure:
    """How full the rows are, fullest first, one line for each packer; the area above a line is padding.

    Args:
        fills: for each packer the share of each row's tokens that is real, 0 to 1.
        title: what was packed.
        bound: the lower bound on the number of rows, drawn as a line.
    """
    figure = Figure(figsize=(WIDTH, 3.6), layout=layout())
    axes = figure.subplots()
    most = max([len(fill) for fill in fills.values()] + [bound or 0, 1])
    keys = []
    for number, (name, fill) in enumerate(fills.items()):
        colour = SAMPLE_COLOURS[number % len(SAMPLE_COLOURS)]
        style = _DASHES[number % len(_DASHES)]
        ordered = np.sort(np.asarray(fill, dtype=float))[::-1]
        axes.step(
            np.arange(len(ordered) + 1), [*ordered, 0.0], where="post", color=colour, linestyle=style, linewidth=2
        )
        keys.append(Line2D([], [], color=colour, linestyle=style, linewidth=2, label=f"{name}: {len(ordered):,} rows"))
    if bound is not None:
        axes.axvline(bound, color=INK, linewidth=1.5)
        keys.append(Line2D([], [], color=INK, linewidth=1.5, label=f"lower bound: {bound:,} rows"))
    axes.set_xlim(0, most * 1.02)
    axes.set_ylim(0, 1.02)
    dress(axes, title, "rows, fullest first", "share of the row that is real tokens")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    legend(figure, keys)
    return figure
