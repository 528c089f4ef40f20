"""Figures of time: how long the trainer waits at each step, and what goes on meanwhile.

Adds: `saw_tooth`, wait and train time of each step, rung by rung; `timeline`, lanes of spans over a few steps.
Leaves out: measuring (`mmdp.wait_meter`, `mmdp.spans`), stacks (`flame`).

Waiting is grey here as padding is in the row map: what a better pipeline makes smaller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mmdp.plots.style import DOTS, INK, PADDING, SAMPLE_COLOURS, WIDTH, dress, layout, legend
from mmdp.span_table import Spans

LANES = ("fetch", "decode", "encode", "join", "transfer", "wait", "train")
"""From the store to the trainer."""

LANE_COLOURS = dict(zip(LANES, (*SAMPLE_COLOURS[:2], *SAMPLE_COLOURS[3:], PADDING, SAMPLE_COLOURS[2]), strict=True))
"""Training is green, waiting grey; the others are the work that feeds it."""

_EDGED = 0.006
"""Share of the width from which on a bar has a white edge: a narrower one would be all edge."""

_MOST_STEPS = 24
"""Bars a rung, so that six rungs stay apart at 900 pixels."""


def saw_tooth(steps: Mapping[str, Sequence[tuple[float, float]]], *, title: str) -> Figure:
    """A bar for each step given, its wait on top of its train time, all rungs on one scale.

    Args:
        steps: for each rung the (wait, train) seconds of its steps; the first 24 are drawn, all are counted.
        title: what was run.

    Raises:
        ValueError: no rung, or one without a step.
    """
    if not steps or not all(len(of_rung) for of_rung in steps.values()):
        raise ValueError(f"rungs {list(steps)}: give at least one, and the wait and train time of its steps")
    figure = Figure(figsize=(WIDTH, 4.4), dpi=DOTS, layout=layout())
    axes = figure.subplots()
    gap, left, middles = 2.0, 0.0, []
    top = max(wait + train for of_rung in steps.values() for wait, train in of_rung[:_MOST_STEPS]) or 1.0
    wide = max(len(of_rung[:_MOST_STEPS]) for of_rung in steps.values())
    for of_rung in steps.values():
        times = np.asarray(of_rung, dtype=float).reshape(-1, 2)
        wait, train = times[:_MOST_STEPS].T
        at = left + np.arange(len(wait)) * wide / len(wait) + 0.5 * wide / len(wait)
        width = 0.86 * wide / len(wait)
        axes.bar(at, train, width, color=LANE_COLOURS["train"], linewidth=0, gid="train")
        axes.bar(at, wait, width, bottom=train, color=PADDING, linewidth=0, gid="wait")
        share = times[:, 0].sum() / max(times.sum(), 1e-12)
        axes.text(
            left + wide / 2,
            float((wait + train).max()) + 0.03 * top,
            f"waits {share:.1%}" if share < 0.1 else f"waits {share:.0%}",
            ha="center",
            fontsize=10,
            color=INK,
        )
        middles.append(left + wide / 2)
        left += wide + gap
    axes.set_xlim(-gap / 2, left - gap / 2)
    axes.set_ylim(0, 1.14 * top)
    dress(axes, title, "steps, in order", "seconds a step")
    axes.set_xticks(middles, list(steps))
    axes.tick_params(axis="x", length=0)
    _fine(axes.yaxis)
    keys = [
        Patch(facecolor=PADDING, label="wait: the trainer has no batch"),
        Patch(facecolor=LANE_COLOURS["train"], label="train"),
    ]
    legend(figure, keys)
    return figure


def timeline(spans: Spans, *, title: str, first: int = 1, steps: int = 4) -> Figure:
    """What goes on in each lane over a few steps: as many bars one above the other as there are at a time.

    A lane of work that nothing is done in meanwhile is left out.

    Args:
        spans: of one rank and its workers, `train` among them.
        title: what was run.
        first: step to begin with, from 0; below 0 from the end, as in `steps[-3:]`.
        steps: how many.

    Raises:
        ValueError: there are no such steps.
    """
    train = spans.named("train")
    first = len(train) + first if first < 0 else first
    if not 0 <= first < first + steps <= len(train):
        raise ValueError(f"steps {first} to {first + steps - 1} of {len(train)}: choose steps that were recorded")
    begin = int(train.end[first - 1]) if first else int(min(spans.start.min(), train.start[0]))
    end = int(train.end[first + steps - 1])
    shown = spans[(spans.end > begin) & (spans.start < end)]
    unit, name = (1e6, "milliseconds") if end - begin < 10e9 else (1e9, "seconds")
    figure = Figure(figsize=(WIDTH, 4.4), dpi=DOTS, layout=layout())
    axes = figure.subplots()
    lanes = [lane for lane in LANES if lane in ("wait", "train") or len(shown.named(lane))]
    for place, lane in enumerate(lanes):
        found = shown.named(lane)
        most = _draw(axes, found, begin, end, unit, place, lane)
        words = f"{most} at a time" if most > 1 else ""
        if lane in ("wait", "train"):
            busy = np.minimum(found.end, end) - np.maximum(found.start, begin)
            words = f"{busy.sum() / (end - begin):.0%} of the time"
        beside = axes.get_yaxis_transform()
        axes.text(1.005, place, words, transform=beside, va="center", fontsize=9, color=INK)
    ends = (train.end[first : first + steps] - begin) / unit
    for step, (left, right) in enumerate(pairwise([0.0, *ends]), start=first):
        axes.axvline(right, color=INK, linewidth=1.0, linestyle=":")
        axes.text((left + right) / 2, -0.62, f"step {step}", ha="center", va="bottom", fontsize=9, color=INK)
    axes.set_xlim(0, (end - begin) / unit)
    axes.set_ylim(len(lanes) - 0.45, -0.95)
    dress(axes, title, f"{name} from the end of step {first - 1}" if first else name, "")
    _fine(axes.xaxis)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.tick_params(axis="y", length=0)
    return figure


def _draw(axes: Axes, spans: Spans, begin: int, end: int, unit: float, place: int, lane: str) -> int:
    """Draws spans in a lane, and gives how many there are at most at a time."""
    tracks: list[int] = []  # when each is free again
    rows = []
    for start, stop in zip(spans.start.tolist(), spans.end.tolist(), strict=True):
        row = next((row for row, free in enumerate(tracks) if free <= start), len(tracks))
        if row == len(tracks):
            tracks.append(0)
        tracks[row] = stop
        rows.append(row)
    if not rows:
        return 0
    high = 0.8 / len(tracks)
    left = (np.clip(spans.start, begin, end) - begin) / unit
    right = (np.clip(spans.end, begin, end) - begin) / unit
    low = place - 0.4 + high * np.array(rows)
    boxes = np.stack([left, low, right, low, right, low + high, left, low + high], axis=1).reshape(-1, 4, 2)
    colour = LANE_COLOURS[lane]
    is_wide = (right - left) * unit > _EDGED * (end - begin)
    edges = ["white" if wide and len(tracks) <= 8 else colour for wide in is_wide]
    axes.add_collection(PolyCollection(list(boxes), facecolors=colour, edgecolors=edges, linewidths=0.5, gid=lane))
    return len(tracks)


def _fine(axis: Axis) -> None:
    """Ticks between whole numbers too."""
    axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
