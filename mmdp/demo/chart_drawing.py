"""Bar charts: upright or lying bars, each with its value.

Adds: `chart_room`, which says how many bars a chart of a given size can hold; `axis_ticks`; `draw_chart`.
Leaves out: the values (`facts`).
"""

from __future__ import annotations

from mmdp.demo.canvas import Canvas
from mmdp.demo.colours import COLOURS, INK, TRACK
from mmdp.demo.layout import Box
from mmdp.demo.lettering import SMALLEST, fit, line_height, text_length
from mmdp.demo.records import Facts


def chart_room(width: int, height: int) -> int:
    """How many bars a chart of this size can show."""
    return max(3, min(8, (height - 36) // 17, (width - 40) // 26))


def axis_ticks(largest: int) -> list[int]:
    """Round numbers from 0 to at least `largest`, at most six of them."""
    step = next(s for power in range(9) for s in (10**power, 2 * 10**power, 5 * 10**power) if s * 5 >= largest)
    return list(range(0, step * 6, step))[: -(-largest // step) + 1]


def draw_chart(canvas: Canvas, facts: Facts, body: Box) -> None:
    """Draws the chart into the space below the title; notes each bar."""
    bars: list[tuple[str, int]] = facts["bars"]
    small = max(SMALLEST, canvas.base - 2)
    line = line_height(small)
    ticks = axis_ticks(max(value for _, value in bars))
    longest_word = max(text_length(word, SMALLEST) for name, _ in bars for word in name.split())
    number_width = text_length(f"{ticks[-1]}", small) + 6
    canvas.text(
        facts["unit"], Box(body.left, body.top, body.right, body.top + line), small, align="left", fill="#555555"
    )
    body = Box(body.left, body.top + line + 2, body.right, body.bottom)
    upright = facts["want_upright"] and (body.width - number_width) / len(bars) * 0.94 > longest_word + 1
    if upright:
        upright = body.height > 8 * line
    if upright:
        names_height = line * (3.2 if any(" " in name for name, _ in bars) else 1.6)
        plot = Box(body.left + number_width, body.top + line, body.right, body.bottom - names_height)
    else:
        names_width = min(0.4 * body.width, max(text_length(name, small) for name, _ in bars) + 8)
        names_width = max(names_width, longest_word + 6)
        plot = Box(body.left + names_width, body.top, body.right - number_width, body.bottom - line)
    plot = Box(*(round(v) for v in plot))
    for tick in ticks:
        share = tick / ticks[-1]
        if upright:
            y = plot.bottom - share * plot.height
            canvas.line([(plot.left, y), (plot.right, y)], TRACK, 1)
            canvas.text(
                f"{tick}",
                Box(body.left, y - line / 2, plot.left - 4, y + line / 2),
                small,
                align="right",
                fill="#555555",
            )
        else:
            x = plot.left + share * plot.width
            canvas.line([(x, plot.top), (x, plot.bottom)], TRACK, 1)
            room = plot.width / (len(ticks) - 1)
            canvas.text(
                f"{tick}",
                Box.around((x, plot.bottom + line / 2), min(room, number_width + 8), line),
                small,
                fill="#555555",
            )
    slot = (plot.width if upright else plot.height) / len(bars)
    label_size = (slot * 0.94, body.bottom - plot.bottom) if upright else (plot.left - body.left - 5, slot)
    fitted = [fit(name, *label_size, canvas.base) for name, _ in bars]
    largest = min(found[0] for found in fitted if found)  # all names in one size
    for number, (name, value) in enumerate(bars):
        near, far = round((number + 0.17) * slot), round((number + 0.83) * slot)
        colour = COLOURS[facts["colours"][number % len(facts["colours"])]]
        length = round(value / ticks[-1] * (plot.height if upright else plot.width))
        if upright:
            bar = Box(plot.left + near, plot.bottom - length, plot.left + far, plot.bottom)
            figure = Box.around((bar.centre[0], bar.top - line / 2), slot, line)
            label = Box.around((bar.centre[0], (plot.bottom + body.bottom) / 2 + 1), *label_size)
        else:
            bar = Box(plot.left, plot.top + near, plot.left + length, plot.top + far)
            figure = Box(
                bar.right + 3, bar.centre[1] - line / 2, bar.right + 3 + number_width, bar.centre[1] + line / 2
            )
            label = Box(body.left, bar.centre[1] - slot / 2, plot.left - 5, bar.centre[1] + slot / 2)
        canvas.card(bar, colour, colour, 0.5)
        canvas.place(name, bar)
        assert canvas.text(f"{value}", figure, small), f"{value} does not fit"
        align = "middle" if upright else "right"
        assert canvas.text(name, label, largest, align=align), f"{name!r} does not fit {label}"
    ends = (plot.left, plot.top), (plot.left, plot.bottom), (plot.right, plot.bottom)
    canvas.line(ends if upright else ends[:2], INK, 1.2)
