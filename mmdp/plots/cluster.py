"""What placing workers and passing rows by reference is worth, by scale: `cluster_bars`.

Adds: samples/s with the wait ratio of each cell, and what the card of each host sends meanwhile.
Leaves out: measuring it (`benchmarks/cluster.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from mmdp.plots.style import INK, SAMPLE_COLOURS, WIDTH, dress, layout, legend


def cluster_bars(found: Mapping[str, Mapping[str, Mapping[str, Any]]], *, title: str) -> Figure:
    """A column for each scale: above samples/s of each cell, with the wait ratio; below MB/s sent, by host.

    Args:
        found: scale to cell to its figures: `samples_per_second` and `wait_ratio` as (least, median, most), and
            `sent_bytes_per_second` by host. All scales have the same cells and hosts.
        title: what it is about.

    Raises:
        ValueError: no scale, no cell, or scales of other cells.
    """
    scales = list(found)
    if not scales or not found[scales[0]] or any(found[scale].keys() != found[scales[0]].keys() for scale in scales):
        raise ValueError("give at least one scale with at least one cell, and the same cells for all of them")
    cells = list(found[scales[0]])
    figure = Figure(figsize=(WIDTH, 6.4), layout=layout())
    panels = figure.subplots(2, len(scales), squeeze=False, sharex=True, sharey="row")
    for column, scale in enumerate(scales):
        _rates(panels[0][column], found[scale], scale, is_first=column == 0)
        _sent(panels[1][column], found[scale], is_first=column == 0)
        panels[1][column].set_xticks(range(len(cells)), [cell.replace(" by ", "\nby ") for cell in cells], fontsize=8)
    figure.suptitle(title, fontsize=11, color=INK)
    hosts = list(found[scales[0]][cells[0]]["sent_bytes_per_second"])
    legend(figure, [Patch(facecolor=_colour(n), hatch=_hatch(n), label=host) for n, host in enumerate(hosts)])
    return figure


def _rates(axes: Axes, cells: Mapping[str, Mapping[str, Any]], scale: str, *, is_first: bool) -> None:
    most = 0.0
    for number, (name, one) in enumerate(cells.items()):
        least, median, top = one["samples_per_second"]
        most = max(most, top)
        axes.bar(number, median, width=0.7, color=SAMPLE_COLOURS[0], gid=name)
        axes.vlines(number, least, top, color=INK, linewidth=1.5)
        says = f"{median:.0f}\nwaits {one['wait_ratio'][1]:.0%}"
        axes.annotate(
            says, (number, top), (0, 3), textcoords="offset points", ha="center", va="bottom", fontsize=8, color=INK
        )
    dress(axes, scale, "", "samples/s, all ranks" if is_first else "")
    axes.set_ylim(0, max(axes.get_ylim()[1], 1.25 * most))


def _sent(axes: Axes, cells: Mapping[str, Mapping[str, Any]], *, is_first: bool) -> None:
    for number, one in enumerate(cells.values()):
        below = 0.0
        for place, (host, sent) in enumerate(one["sent_bytes_per_second"].items()):
            axes.bar(
                number,
                sent / 1e6,
                bottom=below,
                width=0.7,
                color=_colour(place),
                hatch=_hatch(place),
                edgecolor="white",
                linewidth=0.5,
                gid=host,
            )
            below += sent / 1e6
    dress(axes, "", "", "MB/s sent" if is_first else "")


def _colour(place: int) -> str:
    return SAMPLE_COLOURS[place % len(SAMPLE_COLOURS)]


def _hatch(place: int) -> str:
    return ("", "..", "//")[place // len(SAMPLE_COLOURS) % 3]
