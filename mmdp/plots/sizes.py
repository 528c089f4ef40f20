"""How large the samples of a data set are: all of them by length, and in histograms.

Adds: `sorted_lengths`, `histograms`. Leaves out: how they fill rows (`rows`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from mmdp.plots.style import DOTS, FAINT, INK, PADDING, SAMPLE_COLOURS, WIDTH, dress, layout, legend, share
from mmdp.refusals import counted


def sorted_lengths(tokens: Sequence[int] | np.ndarray, *, title: str, budget: int | None = None) -> Figure:
    """All samples by length, each padded to the longest: how much grey one rectangle for all would hold.

    Args:
        tokens: (N,) tokens of each sample.
        title: what is shown.
        budget: pad to this instead; longer samples become ghosts.
    """
    lengths = np.sort(np.asarray(tokens, dtype=np.int64))
    kept = lengths if budget is None else lengths[lengths <= budget]
    full = int(lengths.max(initial=1)) if budget is None else budget
    figure = Figure(figsize=(WIDTH, 4.6), dpi=DOTS, layout=layout())
    axes = figure.subplots()
    _steps(axes, kept, 0, facecolor=SAMPLE_COLOURS[0], linewidth=0, gid="sample")
    _steps(axes, np.full(len(kept), full), 0, left=kept, facecolor=PADDING, linewidth=0, gid="padding")
    ghosts = lengths[len(kept) :]
    if len(ghosts):
        _steps(axes, ghosts, len(kept), facecolor="none", edgecolor=FAINT, linestyle="--", linewidth=1.1, gid="ghost")
    marks = [("median", int(np.median(lengths))), ("longest", int(lengths[-1]))] if len(lengths) else []
    for name, value in marks:
        row = int(np.searchsorted(lengths, value))
        axes.plot([value], [row + 0.5], marker="o", color=INK, markersize=5)
        left = value > 0.6 * max(full, int(lengths[-1]))
        axes.annotate(
            f"{name}: {value:,}",
            (value, row + 0.5),
            xytext=(-9 if left else 9, 9),
            textcoords="offset points",
            ha="right" if left else "left",
            va="center",
            fontsize=9,
            color=INK,
            bbox={"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
        )
    if budget is not None:
        axes.axvline(budget, color=INK, linewidth=1.6, gid="budget")
    axes.set_xlim(0, max(full, int(lengths.max(initial=1))) * 1.01)
    axes.set_ylim(max(1, len(lengths)), 0)
    dress(axes, title, "tokens", "samples, shortest first")
    total = full * len(kept)
    keys: list[Patch | Line2D] = [
        Patch(facecolor=SAMPLE_COLOURS[0], label=f"samples: {int(kept.sum()):,} tokens"),
        Patch(
            facecolor=PADDING, label=f"padding to {full:,} each: {share(total - kept.sum(), total):.1%} of all tokens"
        ),
    ]
    if budget is not None:
        keys.append(Line2D([], [], color=INK, linewidth=1.6, label=f"budget: {budget:,} tokens"))
    if len(ghosts):
        keys.append(Patch(facecolor="none", edgecolor=FAINT, linestyle="--", label=f"dropped: {len(ghosts):,}"))
    legend(figure, keys)
    return figure


def _steps(axes: Axes, right: np.ndarray, first: int, *, left: np.ndarray | int = 0, **style: object) -> None:
    """Fills one band of height 1 a sample, from `left` to `right` (N,), the first at height `first`."""
    edges = np.arange(first, first + len(right) + 1)
    ends = np.append(right, right[-1:])
    starts = np.append(left, left[-1:]) if isinstance(left, np.ndarray) else left
    axes.fill_betweenx(edges, starts, ends, step="post", **style)  # type: ignore[arg-type]


def histograms(
    tokens: Sequence[int] | np.ndarray,
    turns: Sequence[int] | np.ndarray,
    image_sizes: Sequence[tuple[int, int]],
    *,
    title: str = "",
) -> Figure:
    """Three panels: tokens a sample, answers a sample, and the sizes of the images.

    Args:
        tokens: (N,) tokens of each sample.
        turns: answers of each sample, (N,): pairs of a question and an answer.
        image_sizes: width and height of each image, in pixels.
        title: what is shown; none where empty.
    """
    figure = Figure(figsize=(WIDTH, 3.4), dpi=DOTS, layout=layout())
    if title:
        figure.suptitle(title, fontsize=12, color=INK, parse_math=False)
    left, middle, right = figure.subplots(1, 3)
    lengths, pairs = np.asarray(tokens, dtype=np.int64), np.asarray(turns, dtype=np.int64)
    sizes = np.asarray(image_sizes, dtype=np.int64).reshape(-1, 2)
    about_tokens, about_turns, about_images = "no tokens", "no answers", "no images"
    if len(lengths):
        left.hist(lengths, bins=min(40, len(np.unique(lengths))), color=SAMPLE_COLOURS[0])
        left.axvline(float(np.median(lengths)), color=INK, linewidth=1.4, linestyle=":")
        about_tokens = f"tokens: median {np.median(lengths):,.0f}, longest {lengths.max():,}"
    if len(pairs):
        counts = np.bincount(pairs)
        middle.bar(np.arange(len(counts)), counts, width=0.85, color=SAMPLE_COLOURS[2])
        middle.set_xlim(pairs.min() - 0.6, pairs.max() + 0.6)
        about_turns = f"answers: mean {pairs.mean():.2f}, most {pairs.max()}"
    if len(sizes):
        shown = sizes[:: -(-len(sizes) // 4000)]  # 4000 dots show the cloud; a million would take minutes
        faint = float(np.clip(60 / len(shown) ** 0.75, 0.08, 0.7))
        right.scatter(shown[:, 0], shown[:, 1], s=14, color=SAMPLE_COLOURS[5], alpha=faint, linewidths=0)
        right.set_xlim(0, sizes[:, 0].max() * 1.05)
        right.set_ylim(0, sizes[:, 1].max() * 1.05)
        middle_size = np.median(sizes, axis=0)
        about_images = f"{counted(len(sizes), 'image')}, median {middle_size[0]:,.0f} x {middle_size[1]:,.0f}"
    dress(left, about_tokens, "tokens a sample", "samples", ticks=5)
    dress(middle, about_turns, "answers a sample", "samples", ticks=5)
    dress(right, about_images, "width, pixels", "height, pixels", ticks=5)
    for axes in (left, middle, right):
        axes.title.set_fontsize(10)
    return figure
