"""Cycles: stages on a ring, in the order of the arrows.

Adds: `cycle_room` and `cycle_fits`, which say how much a cycle of a given size can hold; `draw_cycle`.
Leaves out: which stages (`facts`).
"""

from __future__ import annotations

import math
from functools import cache
from itertools import combinations

from mmdp.demo.canvas import Canvas
from mmdp.demo.colours import COLOURS, TRACK, tint
from mmdp.demo.layout import Box, base_size, card_pad, space
from mmdp.demo.lettering import SMALLEST, fit
from mmdp.demo.records import Facts

START = -math.pi / 2  # the first stage stands at the top


def cycle_room(width: int, height: int) -> int:
    """How many stages a cycle of this size can show."""
    return 4 if width < 260 or height < 180 else 6 if width < 440 or height < 300 else 8


def cycle_fits(width: int, height: int, title: str, stages: list[str]) -> bool:
    """Whether all names fit their cards."""
    base = base_size(width, height)
    cards, _, _ = _ring(len(stages), _cycle_body(width, height, title), base)
    inner = cards[0].inset(card_pad(base), 1)
    return all(fit(f"8. {name}", inner.width, inner.height, SMALLEST) for name in stages)


def _cycle_body(width: int, height: int, title: str) -> Box:
    left, top, right, bottom = space(width, height, title)
    return Box(left, top + left * 0.6, right, bottom)


@cache
def _ring(count: int, body: Box, base: int) -> tuple[list[Box], float, float]:
    """The cards of the stages, as large as they can be without touching, and the half axes of the ring."""
    gap = 0.7 * base + 6  # room for an arrowhead
    turns = [START + 2 * math.pi * k / count for k in range(count)]
    apart = [(abs(math.cos(a) - math.cos(b)), abs(math.sin(a) - math.sin(b))) for a, b in combinations(turns, 2)]
    sizes = [
        (min(body.width * across / 100, 230), min(body.height * down / 100, 110))
        for across in range(44, 12, -2)
        for down in range(34, 8, -2)
    ]
    x, y = body.centre
    for width, height in sorted(sizes, key=lambda size: -min(size[0], 2.6 * size[1])):
        rx, ry = (body.width - width) / 2, (body.height - height) / 2
        if all(rx * across >= width + gap or ry * down >= height + gap for across, down in apart):
            cards = [Box.around((x + rx * math.cos(a), y + ry * math.sin(a)), width, height) for a in turns]
            return cards, rx, ry
    raise AssertionError(f"{count} stages do not fit {body}")


def draw_cycle(canvas: Canvas, facts: Facts, body: Box) -> None:
    """Draws the ring into the space below the title; notes the card of each stage."""
    stages: list[str] = facts["stages"]
    turn = 1 if facts["clockwise"] else -1
    body = _cycle_body(canvas.width, canvas.height, facts["title"])
    cards, rx, ry = _ring(len(stages), body, canvas.base)
    boxes = [cards[turn * k % len(stages)] for k in range(len(stages))]
    stroke, head = max(2.0, canvas.base / 4), max(6.0, canvas.base * 0.95)
    x, y = body.centre
    canvas.oval(Box.around((x, y), 2 * rx + stroke, 2 * ry + stroke), outline=TRACK, width=stroke)
    for k in range(len(stages)):
        here, there = boxes[k], boxes[(k + 1) % len(stages)]
        steps = [START + turn * 2 * math.pi * (k + s / 60) / len(stages) for s in range(61)]
        points = [(x + rx * math.cos(a), y + ry * math.sin(a)) for a in steps]
        free = [
            n
            for n, p in enumerate(points)
            if not any(b.left <= p[0] <= b.right and b.top <= p[1] <= b.bottom for b in (here, there))
        ]
        middle = free[len(free) // 2] if free else 30
        before, after = points[max(middle - 1, 0)], points[min(middle + 1, 60)]
        angle = math.atan2(after[1] - before[1], after[0] - before[0])
        px, py = points[middle]
        canvas.arrowhead((px + head / 2 * math.cos(angle), py + head / 2 * math.sin(angle)), angle, head)
    colour = COLOURS[facts["colour"]]
    for number, (name, box) in enumerate(zip(stages, boxes, strict=True), start=1):
        canvas.card(
            box, tint(colour, 0.2), colour, max(1.2, canvas.base / 8), radius=min(box.height * 0.3, canvas.base)
        )
        text = f"{number}. {name}"
        assert canvas.text(text, box.inset(card_pad(canvas.base), 1), canvas.base + 3), (
            f"{text!r} does not fit its card"
        )
        canvas.place(name, box)
