"""Labelled parts: an object, and letters that point at its parts.

Adds: `parts_room`, which says how many letters a drawing of a given size can hold; `draw_parts`.
Leaves out: the objects (`shapes`), and which parts are marked (`facts`).
"""

from __future__ import annotations

from mmdp.demo.canvas import Canvas
from mmdp.demo.colours import COLOURS, INK
from mmdp.demo.layout import Box, Point, base_size
from mmdp.demo.records import Facts
from mmdp.demo.shapes import OBJECTS


def parts_room(width: int, height: int) -> int:
    """How many letters a drawing of this size can show."""
    base = base_size(width, height)
    return max(4, min(8, 2 * int((height - 3 * base) / (2.2 * base))))


def draw_parts(canvas: Canvas, facts: Facts, body: Box) -> None:
    """Draws the object and its marks into the space below the title; notes the badge of each letter."""
    badge = canvas.base * 1.75
    side = min(body.width - 4.2 * badge, body.height)
    frame = Box.around(body.centre, side, side)
    unit = side / 100

    def at(x: float, y: float) -> Point:
        return frame.left + x * unit, frame.top + y * unit

    thin = max(0.8, side / 330)
    for kind, colour, *rest in OBJECTS[facts["object"]][1]:
        numbers = [float(word) for word in rest]
        fill = COLOURS.get(colour, INK)
        if kind in ("line", "ring"):
            stroke, *numbers = numbers
        points = [at(x, y) for x, y in zip(numbers[::2], numbers[1::2], strict=True)]
        box = Box(*points[0], *points[-1])
        if kind == "line":
            canvas.line(points, fill, max(1.0, stroke * unit))
        elif kind == "ring":
            canvas.oval(box, outline=fill, width=max(1.2, stroke * unit))
        elif kind == "oval":
            canvas.oval(box, fill, INK, thin)
        elif kind == "poly":
            canvas.polygon(points, fill, INK, thin)
        else:
            canvas.card(box, fill, INK, thin, radius=8 * unit if kind == "card" else 0)
    labels = sorted(facts["labels"], key=lambda label: label["point"][0])
    left = len(labels) // 2
    for group, x in ((labels[:left], frame.left - 1.2 * badge), (labels[left:], frame.right + 1.2 * badge)):
        ordered = sorted(group, key=lambda label: label["point"][1])
        for number, label in enumerate(ordered):
            y = body.top + (number + 0.5) / len(ordered) * body.height
            tip = at(*label["point"])
            canvas.line([(x, y), tip], "white", thin * 3.2)
            canvas.line([(x, y), tip], INK, thin * 1.2)
            dot = max(1.8, side / 130)
            canvas.oval(Box.around(tip, 2 * dot, 2 * dot), INK, "white", thin * 0.8)
            box = Box.around((x, y), badge, badge)
            canvas.oval(box, "white", INK, thin * 1.4)
            assert canvas.text(label["letter"], box.inset(1), canvas.base + 1), "a letter fits its badge"
            canvas.place(label["letter"], box)
