"""What a leak does to training: the loss while it trains, and the loss of the trained model on samples alone.

Adds: `leak_curves`; `leak_bars`, for a model that is not trained, and what it says of the samples of a row.
Leaves out: training and running models (`benchmarks/leak.py`, `benchmarks/leak_pretrained.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from mmdp.plots.style import INK, SAMPLE_COLOURS, WIDTH, dress, layout

_DASHES: tuple[Literal["-", "--", "-.", ":"], ...] = ("-", "--", "-.", ":")


@dataclass(frozen=True, slots=True)
class TrainedWay:
    """One way of giving the same samples to a model.

    Attributes:
        name: for the legend.
        losses: of each step while it trained, in nats a label token.
        alone: of the trained model on samples alone, one group at a time, by the group's name; in nats a label token.
    """

    name: str
    losses: Sequence[float]
    alone: dict[str, float]


def leak_curves(ways: Sequence[TrainedWay], *, title: str, window: int = 20) -> Figure:
    """Left the loss that training shows, right the loss of the same models on samples alone, on one scale.

    Args:
        ways: at least one; all have the same groups and numbers of steps, at least `window`.
        title: what was trained on what.
        window: steps over which a curve is averaged.

    Raises:
        ValueError: no ways, too few steps, or ways of other groups.
    """
    if not ways or any(len(way.losses) < window or way.alone.keys() != ways[0].alone.keys() for way in ways):
        raise ValueError(f"give at least one way, each with at least {window} steps and the same groups of samples")
    figure = Figure(figsize=(WIDTH, 4.6), layout=layout())
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])
    keys = []
    for number, way in enumerate(ways):
        colour, dash = SAMPLE_COLOURS[number % len(SAMPLE_COLOURS)], _DASHES[number % len(_DASHES)]
        smooth = np.convolve(np.asarray(way.losses, dtype=float), np.full(window, 1 / window), mode="valid")
        steps = np.arange(window, len(way.losses) + 1)
        left.plot(steps, smooth, color=colour, linestyle=dash, linewidth=2, gid=way.name)
        keys.append(Line2D([], [], color=colour, linestyle=dash, linewidth=2, label=way.name))
    _bars(right, ways)
    figure.suptitle(title, fontsize=11, color=INK)
    dress(left, "what training shows", f"steps, mean of the last {window}", "loss, nats a label token")
    dress(right, "trained, then given each sample alone", "", "")
    right.tick_params(labelleft=True)
    groups = list(ways[0].alone)
    right.set_xticks(range(len(groups)), groups)
    right.xaxis.set_major_formatter(FuncFormatter(lambda value, _: groups[round(value)]))
    left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    left.set_ylim(0, None)
    figure.legend(handles=keys, loc="outside lower center", ncols=2, fontsize=9, frameon=False)  # the names are long
    return figure


def _bars(axes: Axes, ways: Sequence[TrainedWay]) -> None:
    width = 0.8 / len(ways)
    for number, way in enumerate(ways):
        for place, value in enumerate(way.alone.values()):
            at = place + (number - (len(ways) - 1) / 2) * width
            colour = SAMPLE_COLOURS[number % len(SAMPLE_COLOURS)]
            axes.bar(at, value, width=0.9 * width, color=colour, gid=f"{way.name}, alone")
            axes.annotate(f"{value:.2f}", (at, value), ha="center", va="bottom", fontsize=9, color=INK)


def leak_bars(ways: Mapping[str, tuple[float, Sequence[float]]], *, title: str) -> Figure:
    """Left the loss of the same samples, by how they are given; right the same by the place of a sample in its row.

    Args:
        ways: name to the mean loss, and the losses of first samples, second samples and so on; nats a label token.
        title: which model on what.
    """
    figure = Figure(figsize=(WIDTH, 4.2), layout=layout())
    left, right = figure.subplots(1, 2, width_ratios=[2, 3])
    keys = []
    for number, (name, (loss, by_place)) in enumerate(ways.items()):
        colour, dash = SAMPLE_COLOURS[number % len(SAMPLE_COLOURS)], _DASHES[number % len(_DASHES)]
        left.bar(number, loss, width=0.7, color=colour, gid=name)
        left.annotate(f"{loss:.2f}", (number, loss), ha="center", va="bottom", fontsize=10, color=INK)
        marks = "os^v"[number % 4]
        places = range(1, len(by_place) + 1)
        right.plot(
            places,
            by_place,
            color=colour,
            linestyle=dash,
            linewidth=2,
            marker=marks,
            markersize=9 - 2 * number,
            gid=name,
        )
        keys.append(Line2D([], [], color=colour, linestyle=dash, marker=marks, linewidth=2, label=name))
    figure.suptitle(title, fontsize=11, color=INK)
    dress(left, "all samples", "", "loss, nats a label token")
    dress(right, "by the place of a sample in its row", "place in the row; the last stands for all later ones", "")
    left.set_xticks([])
    left.set_ylim(0, 1.12 * max(loss for loss, _ in ways.values()))
    right.set_ylim(0, None)
    for axes in (left, right):
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    figure.legend(handles=keys, loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    return figure
