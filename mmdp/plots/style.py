"""What all figures share: colours and sizes, the dress of an axis, the legend, and saving.

Adds: `SAMPLE_COLOURS` and the other constants; `layout`, `dress`, `legend`, `save`; `share` for captions.
Leaves out: what is drawn (`rows`, `sizes`, `card`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

SAMPLE_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
"""Okabe and Ito, "Color Universal Design" (2008), without black and without yellow, which is faint on white."""

PADDING = "#d9d9d9"
INK = "#222222"
FAINT = "#666666"
HATCH = "////"
WIDTH, DOTS = 9.0, 100  # inches, and dots an inch: the 900 pixels at which GitHub shows a figure


def share(part: int, whole: int) -> float:
    """Part over whole; 0 where there is nothing."""
    return part / whole if whole else 0.0


def layout() -> ConstrainedLayoutEngine:
    """Room for everything, labels included."""
    return ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08)


def dress(axes: Axes, title: str, across: str, down: str, ticks: int = 8) -> None:
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


def legend(figure: Figure, keys: Sequence[Patch | Line2D]) -> None:
    """The legend below the figure, in at most four columns."""
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
