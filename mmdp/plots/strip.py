"""What goes through a model in one epoch, stage by stage, on one scale: `padding_strip`.

Leaves out: single batches (`rows`).
"""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from mmdp.metrics import padding_share
from mmdp.plots.style import FAINT, INK, PADDING, SAMPLE_COLOURS, WIDTH, dress, layout, legend


def padding_strip(epochs: Mapping[str, tuple[int, int, int]], *, title: str) -> Figure:
    """A bar for each stage: real tokens, behind them padding, behind that what was dropped, as a ghost.

    Args:
        epochs: for each stage the tokens of an epoch: real, padding, and those of dropped samples.
        title: whose epoch.
    """
    figure = Figure(figsize=(WIDTH, 1.3 + 0.55 * len(epochs)), layout=layout())
    axes = figure.subplots()
    for place, (real, padding, dropped) in enumerate(epochs.values()):
        axes.barh(place, real, color=SAMPLE_COLOURS[0], height=0.62)
        axes.barh(place, padding, left=real, color=PADDING, height=0.62)
        if dropped:
            axes.barh(place, dropped, left=real + padding, color="none", edgecolor=FAINT, linestyle="--", height=0.62)
        lost = f", {dropped / (real + dropped):.0%} of all tokens dropped" if dropped else ""
        text = f" padding {padding_share(padding, real):.1%}{lost}"
        axes.text(real + padding + dropped, place, text, va="center", ha="left", fontsize=9, color=INK)
    longest = max((sum(parts) for parts in epochs.values()), default=0) or 1
    axes.set_xlim(0, longest * 1.35)  # room for the text behind the longest bar
    axes.set_ylim(len(epochs) - 0.5, -0.5)
    dress(axes, title, "tokens of one epoch", "")
    axes.set_yticks(range(len(epochs)), list(epochs))
    keys = [Patch(color=SAMPLE_COLOURS[0], label="real tokens"), Patch(color=PADDING, label="padding")]
    if any(dropped for *_, dropped in epochs.values()):
        keys.append(Patch(facecolor="none", edgecolor=FAINT, linestyle="--", label="dropped samples"))
    legend(figure, keys)
    return figure
