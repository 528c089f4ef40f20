"""The flame graph: which functions a thread spends its time in, callers above what they call.

Adds: `flame`. In: the stacks that `mmdp.stacks.sampled` saw. Leaves out: looking at the thread.

After B. Gregg, "The Flame Graph" (CACM 59(6), 2016), but growing down: width is time, depth is calls, order is by name.
The colour says what the time goes to, as in the timeline; it begins where a stack enters that part of the package.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import PercentFormatter

from mmdp.plots.lettering import cut, inches
from mmdp.plots.style import DOTS, INK, WIDTH, dress, layout, legend
from mmdp.plots.timeline import LANE_COLOURS

PARTS: Mapping[str, str] = {
    "mmdp.store.": "fetch",
    "mmdp.image_sizes.": "decode",
    "mmdp.images.": "decode",
    "mmdp.resampling.": "decode",
    "mmdp.chat.": "encode",
    "mmdp.row_builder.join": "join",
    "mmdp.batching.batch": "join",
    "mmdp.ladder.simulated": "train",
    "mmdp.ladder.tiny": "train",
}
"""What the functions of a module do, by the start of their name. More may be given to `flame`."""

_OTHER = "#e8e8e8"
_DARK = {LANE_COLOURS[lane] for lane in ("fetch", "transfer", "train")}
_MOST_DEEP = 16
_NARROWEST = 0.004
"""Share of the width below which a frame is not drawn: four pixels of 900."""


@dataclass(slots=True)
class _Frame:
    name: str
    time: float = 0.0
    below: dict[str, _Frame] = field(default_factory=dict)


def flame(
    stacks: Mapping[tuple[str, ...], float], *, title: str, parts: Mapping[str, str] = PARTS, start: str | None = None
) -> Figure:
    """A flame graph.

    Args:
        stacks: time of each stack, of names outermost first; in any unit.
        title: what was run.
        parts: start of a name to the lane (`timeline.LANES`) whose colour it and all below it have.
        start: leave out what lies above the first function whose name ends so.

    Raises:
        ValueError: no stack, or none with `start`.
    """
    root = _Frame("")
    for stack, time in stacks.items():
        at = next((place for place, name in enumerate(stack) if start is None or name.endswith(start)), None)
        if at is None or time <= 0:
            continue
        frame = root
        frame.time += time
        for name in stack[at:][:_MOST_DEEP]:
            frame = frame.below.setdefault(name, _Frame(name))
            frame.time += time
    if not root.time:
        raise ValueError(f"{len(stacks)} stacks, none with time in {start or 'it'}: watch the thread for longer")
    boxes = list(_boxes(root, 0.0, 0, "", parts, root.time))
    deepest = max(depth for _, _, _, depth, _ in boxes)
    figure = Figure(figsize=(WIDTH, 1.5 + 0.24 * (deepest + 1)), dpi=DOTS, layout=layout())
    axes = figure.subplots()
    for name, left, wide, depth, lane in boxes:
        colour, ends = LANE_COLOURS.get(lane, _OTHER), left + wide
        beside = [(start, start + width) for _, start, width, level, _ in boxes if level == depth]
        before = max((end for start, end in beside if start < left), default=0.0)
        after = min((start for start, _ in beside if start > left), default=1.0)
        _box(axes, name, (left, ends), depth, colour, (before, after))
    axes.set_xlim(0, 1)
    axes.set_ylim(deepest + 1, 0)
    dress(axes, title, "share of the time; callers above what they call", "")
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 1])
    shares = _shares(root, parts)
    keys = [
        Patch(facecolor=LANE_COLOURS.get(lane, _OTHER), label=f"{lane}: {share / root.time:.0%}")
        for lane, share in sorted(shares.items(), key=lambda one: -one[1])
        if share / root.time >= 0.005
    ]
    legend(figure, keys)
    return figure


def _lane(name: str, lane: str, parts: Mapping[str, str]) -> str:
    if lane:
        return lane
    return next((part for begins, part in parts.items() if name.startswith(begins)), "")


def _boxes(
    frame: _Frame, left: float, depth: int, lane: str, parts: Mapping[str, str], total: float
) -> Iterator[tuple[str, float, float, int, str]]:
    """Name, left end, width, depth and lane of each frame below one that is wide enough to be seen."""
    for name in sorted(frame.below):
        below = frame.below[name]
        wide = below.time / total
        if wide >= _NARROWEST:
            own = _lane(name, lane, parts)
            yield name, left, wide, depth, own
            yield from _boxes(below, left, depth + 1, own, parts, total)
        left += wide


def _box(
    axes: Axes, name: str, ends: tuple[float, float], depth: int, colour: str, neighbours: tuple[float, float]
) -> None:
    """A frame from one end to the other, and its name: in it, else beside it where nothing stands."""
    left, right = ends
    frame = Rectangle((left, depth), right - left, 0.94, facecolor=colour, edgecolor="white", linewidth=0.6, gid=name)
    axes.add_patch(frame)

    def room(start: float, end: float) -> float:
        return (end - start) * (WIDTH - 0.5) - 0.08

    def write(words: str, at: float, ink: str, ha: Literal["left", "right"]) -> None:
        text = axes.text(at, depth + 0.48, words, va="center", ha=ha, fontsize=7.5, color=ink)
        text.set(clip_on=True, parse_math=False)

    short = name.removeprefix("mmdp.")
    last = short.rsplit(".", 1)[-1]
    inside = short if inches(short, 7.5) <= room(left, right) else cut(last, room(left, right), 7.5)
    before, after = neighbours
    if inside in (short, last) or len(inside) > len("...") + 2:
        write(inside, left + 0.004, "white" if colour in _DARK else INK, "left")
    elif inches(last, 7.5) <= room(right, after):
        write(last, right + 0.004, INK, "left")
    elif inches(last, 7.5) <= room(before, left):
        write(last, left - 0.004, INK, "right")


def _shares(root: _Frame, parts: Mapping[str, str]) -> dict[str, float]:
    """Time of each lane, `other` for the rest."""
    shares: dict[str, float] = {}

    def walk(frame: _Frame, lane: str) -> None:
        own = frame.time - sum(below.time for below in frame.below.values())
        shares[lane or "other"] = shares.get(lane or "other", 0.0) + own
        for name, below in frame.below.items():
            walk(below, _lane(name, lane, parts))

    walk(root, "")
    return shares
