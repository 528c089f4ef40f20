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

_DASHES: tuple[Literal["-", "--", "-.", ":"], ...] = ("-", "--", ":", "-.")
_KNOWN = ("greedy", "ffd", "bfd", "knapsack")
"""Packers with a colour of their own, the same in every picture; others get the colours behind these."""


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

    The last packer is the one it is about: its line is thick and lies below the thin ones, so that they show on it.

    Args:
        fills: for each packer the share of each row's tokens that is real, 0 to 1.
        title: what was packed.
        bound: the lower bound on the number of rows, drawn as a line.
    """
    figure = Figure(figsize=(WIDTH, 3.6), layout=layout())
    axes = figure.subplots()
    most = max([len(fill) for fill in fills.values()] + [bound or 0, 1])
    keys = []
    others = [name for name in fills if name.split()[0] not in _KNOWN]
    for number, (name, fill) in enumerate(fills.items()):
        place = len(_KNOWN) + others.index(name) if name in others else _KNOWN.index(name.split()[0])
        colour = SAMPLE_COLOURS[place % len(SAMPLE_COLOURS)]
        is_last = number == len(fills) - 1
        style, wide = _DASHES[0 if is_last else number % len(_DASHES)], 5.0 if is_last else 2.0
        ordered = np.sort(np.asarray(fill, dtype=float))[::-1]
        axes.step(
            np.arange(len(ordered) + 1),
            [*ordered, 0.0],
            where="post",
            color=colour,
            linestyle=style,
            linewidth=wide,
            zorder=2.0 if is_last else 2.1,
        )
        label = f"{name}: {len(ordered):,} rows"
        keys.append(Line2D([], [], color=colour, linestyle=style, linewidth=wide, label=label))
    if bound is not None:
        axes.axvline(bound, color=INK, linewidth=1.5, zorder=2.2)
        keys.append(Line2D([], [], color=INK, linewidth=1.5, label=f"lower bound: {bound:,} rows"))
    axes.set_xlim(0, most * 1.02)
    axes.set_ylim(0, 1.02)
    dress(axes, title, "rows, fullest first", "real tokens, share of the row")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    legend(figure, keys)
    return figure
