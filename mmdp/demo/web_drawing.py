"""Food webs: levels of living things, producers at the bottom (or at the left), arrows from the food to its eater.

Adds: `web_room` and `web_fits`, which say how much a web of a given size can hold; `draw_web`.
Leaves out: who eats whom (`facts`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from mmdp.demo.canvas import Canvas
from mmdp.demo.colours import COLOURS, tint
from mmdp.demo.layout import Box, Point, base_size, card_pad, space
from mmdp.demo.lettering import SMALLEST, fit
from mmdp.demo.records import Facts


def _sideways(width: int, height: int) -> bool:
    return width > 1.15 * height


def web_room(width: int, height: int) -> tuple[int, int]:
    """How many levels, and living things a level, a food web of this size can show."""
    if _sideways(width, height):
        return 4 if width >= 300 else 3, max(1, min(4, (height - 34) // 30))
    return 4 if height >= 240 else 3, max(1, min(4, width // 78))


def web_fits(name: str, width: int, height: int, title: str, levels: int, nodes: int) -> bool:
    """Whether a name can be read in its card."""
    card = _web_card(width, height, title, levels, nodes)
    return fit(name, card[0] - 2 * card_pad(base_size(width, height)), card[1] - 2, SMALLEST) is not None


def _web_card(width: int, height: int, title: str, levels: int, nodes: int) -> Point:
    body, base = space(width, height, title), base_size(width, height)
    across, down = body.width, body.height - 1.6 * base
    if _sideways(width, height):
        card = across / levels * (0.74 if width < 480 else 0.66), down / nodes * 0.72
    else:
        card = across / nodes * 0.84, down / levels * 0.56
    return card[0], min(card[1], max(card[0] * 0.62, 2.4 * base))


def draw_web(canvas: Canvas, facts: Facts, body: Box) -> None:
    """Draws the web into the space below the title; notes the card of each living thing."""
    sideways = _sideways(canvas.width, canvas.height)
    legend = canvas.base * 1.6
    canvas.text(
        "An arrow points from the food to its eater.",
        Box(body.left, body.bottom - legend, body.right, body.bottom),
        max(SMALLEST, canvas.base - 2),
        fill="#555555",
    )
    body = Box(body.left, body.top, body.right, body.bottom - legend)
    levels: list[list[str]] = facts["levels"]
    nodes = max(len(level) for level in levels)
    width, height = _web_card(canvas.width, canvas.height, facts["title"], len(levels), nodes)
    boxes: dict[str, Box] = {}
    for depth, level in enumerate(levels):
        for place, name in enumerate(level):
            share = (place + 0.5) / len(level)
            if sideways:
                # The first and the last column touch the margins: the arrows get all the space between.
                x = body.left + width / 2 + depth * (body.width - width) / (len(levels) - 1)
                centre = x, body.top + share * body.height
            else:
                y = body.bottom - height / 2 - depth * (body.height - height) / (len(levels) - 1)
                centre = body.left + share * body.width, y
            boxes[name] = Box.around(centre, width, height)
    stroke = max(1.0, canvas.base / 9)
    for eater, food in facts["eats"]:
        start, end = boxes[food], boxes[eater]
        # Arrows leave and arrive at ports of their own along the side, so that they can be told apart.
        out = _port([e for e, f in facts["eats"] if f == food], eater, boxes, sideways)
        into = _port([f for e, f in facts["eats"] if e == eater], food, boxes, sideways)
        if sideways:
            a, b = (start.right, start.centre[1] + out * height), (end.left, end.centre[1] + into * height)
            bend = ((b[0] - a[0]) / 2, 0.0)
        else:
            a, b = (start.centre[0] + out * width, start.top), (end.centre[0] + into * width, end.bottom)
            bend = (0.0, (b[1] - a[1]) / 2)
        curve = list(_curve(a, b, bend))
        head = max(5.0, canvas.base * 0.75)
        tail = [point for point in curve if math.dist(point, b) > head * 0.7]
        canvas.line([*tail, _towards(b, tail[-1], head * 0.7)] if tail else curve, "#5a6270", stroke)
        from_ = tail[-1] if tail else a
        canvas.arrowhead(b, math.atan2(b[1] - from_[1], b[0] - from_[0]), head)
    for depth, level in enumerate(levels):
        colour = COLOURS[("green", "orange", "blue", "pink")[depth]]
        for name in level:
            box = boxes[name]
            canvas.card(box, tint(colour, 0.22), colour, stroke * 1.2, radius=min(box.height * 0.25, canvas.base))
            assert canvas.text(name, box.inset(card_pad(canvas.base), 1), canvas.base + 4), (
                f"{name!r} does not fit its box"
            )
            canvas.place(name, box)


def _port(others: list[str], other: str, boxes: dict[str, Box], sideways: bool) -> float:
    """Where along a box's side, -0.5..0.5, the arrow from or to another box sits: in the order the others stand."""
    ordered = sorted(others, key=lambda name: boxes[name].centre[1 if sideways else 0])
    return ((ordered.index(other) + 0.5) / len(ordered) - 0.5) * 0.7


def _curve(a: Point, b: Point, bend: Point, steps: int = 20) -> Iterable[Point]:
    """Points of a cubic Bezier curve that leaves `a` and reaches `b` along `bend`."""
    for step in range(steps + 1):
        t = step / steps
        weights = (1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3
        xs = a[0], a[0] + bend[0], b[0] - bend[0], b[0]
        ys = a[1], a[1] + bend[1], b[1] - bend[1], b[1]
        yield sum(w * x for w, x in zip(weights, xs, strict=True)), sum(w * y for w, y in zip(weights, ys, strict=True))


def _towards(start: Point, goal: Point, distance: float) -> Point:
    whole = math.dist(start, goal) or 1.0
    share = min(1.0, distance / whole)
    return start[0] + (goal[0] - start[0]) * share, start[1] + (goal[1] - start[1]) * share
