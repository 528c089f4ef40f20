"""The pictures of the demo set: food webs, cycles, bar charts and labelled parts, drawn from facts.

Adds: `draw(facts)` -> the picture and where each thing stands in it; `web_room`, `cycle_room`, `chart_room` and
`parts_room`, which say how much a picture of a given size can hold; `OBJECTS`, the things with parts.
Leaves out: making up facts, and asking about them (`demo`).

A drawing is a pure function of its facts: the same facts give the same pixels. Shapes are drawn at twice the size and
reduced, so that slanted lines are smooth; text goes on top at the final size, in the font that Pillow brings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache
from itertools import combinations
from typing import Any, NamedTuple

from PIL import Image, ImageDraw, ImageFont

Facts = dict[str, Any]
Point = tuple[float, float]

COLOURS = {  # Okabe and Ito, "Color Universal Design" (2008), and three neutrals
    "orange": "#e69f00",
    "sky": "#56b4e9",
    "green": "#009e73",
    "yellow": "#f0e442",
    "blue": "#0072b2",
    "red": "#d55e00",
    "pink": "#cc79a7",
    "brown": "#8c6239",
    "grey": "#9a9a9a",
    "white": "#ffffff",
}
SERIES = ("blue", "orange", "green", "pink", "sky", "red")
INK = "#222222"
TRACK = "#c9ced6"
SMALLEST = 8  # pixels; below it the letters of Pillow's font run together


class Box(NamedTuple):
    """A rectangle in pixels; right and bottom are the first pixels outside."""

    left: float
    top: float
    right: float
    bottom: float

    @property
    def width(self) -> float:
        """Pixels across."""
        return self.right - self.left

    @property
    def height(self) -> float:
        """Pixels down."""
        return self.bottom - self.top

    @property
    def centre(self) -> Point:
        """The middle."""
        return (self.left + self.right) / 2, (self.top + self.bottom) / 2

    def inset(self, across: float, down: float | None = None) -> Box:
        """The box with a margin taken off each side."""
        down = across if down is None else down
        return Box(self.left + across, self.top + down, self.right - across, self.bottom - down)

    @classmethod
    def around(cls, centre: Point, width: float, height: float) -> Box:
        """The box of a size with this middle."""
        x, y = centre
        return cls(x - width / 2, y - height / 2, x + width / 2, y + height / 2)


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size=size)
    assert isinstance(font, ImageFont.FreeTypeFont), "the demo set needs a Pillow built with FreeType (wheels are)"
    return font


@cache
def _length(text: str, size: int) -> float:
    return _font(size).getlength(text)


@cache
def _line_height(size: int) -> int:
    return sum(_font(size).getmetrics())


def _wrap(text: str, width: float, size: int) -> list[str] | None:
    """The lines of a text at this size; None where one word is wider than the space."""
    lines: list[str] = []
    for word in text.split():
        if _length(word, size) > width:
            return None
        if lines and _length(f"{lines[-1]} {word}", size) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def fit(text: str, width: float, height: float, largest: int) -> tuple[int, list[str]] | None:
    """The largest font size, and the lines, with which a text stays inside; None where none from 8 pixels on does."""
    for size in range(largest, SMALLEST - 1, -1):
        lines = _wrap(text, width, size)
        if lines is not None and len(lines) * _line_height(size) <= height:
            return size, lines
    return None


@cache
def _palette() -> Image.Image:
    """The colours of all drawings: each one, its tints, its shades, and greys."""
    colours = [[step * 255 // 31] * 3 for step in range(32)]
    for colour in COLOURS.values():
        colours += [list(_tint(colour, strength)) for strength in (1, 0.8, 0.6, 0.4, 0.2, 0.1)]
        colours += [[round(v * share) for v in _tint(colour, 1)] for share in (0.75, 0.5, 0.25)]
    image = Image.new("P", (1, 1))
    image.putpalette([value for colour in colours for value in colour])
    return image


def _base(width: int, height: int) -> int:
    """The font size that suits a picture of this size."""
    return max(SMALLEST, min(24, round(min(width, 1.3 * height) / 28)))


def _pad(base: int) -> float:
    """Pixels between the side of a card and the text in it."""
    return max(3, 0.4 * base)


def space(width: int, height: int, title: str) -> Box:
    """What a picture has left below its title, margins taken off."""
    margin, size = max(4, round(min(width, height) / 45)), _base(width, height) + 2
    lines = 1 if fit(title, width - 2 * margin, _line_height(size), size) else 2
    top = 1.2 * margin + lines * _line_height(size if lines == 1 else size - 2)
    return Box(margin, round(top), width - margin, height - margin)


def _tint(colour: str, strength: float) -> tuple[int, int, int]:
    """A colour mixed with white: strength 1 is the colour itself."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return (
        round(255 - (255 - red) * strength),
        round(255 - (255 - green) * strength),
        round(255 - (255 - blue) * strength),
    )


class Canvas:
    """A picture being drawn, in pixels of the final size.

    Args:
        width: pixels.
        height: pixels.
        smooth: shapes are drawn this many times larger.
    """

    def __init__(self, width: int, height: int, smooth: int = 2) -> None:
        self.width, self.height, self.smooth = width, height, smooth
        self.base = _base(width, height)
        self.places: dict[str, list[int]] = {}
        self._image = Image.new("RGB", (width * self.smooth, height * self.smooth), "white")
        self._draw = ImageDraw.Draw(self._image)
        self._lines: list[tuple[Point, str, int, str, str]] = []

    def polygon(self, points: Iterable[Point], fill: Any, outline: Any = None, width: float = 1) -> None:
        """A filled shape."""
        scaled = self._scaled(points)
        self._draw.polygon(scaled, fill=fill)
        if outline is not None:
            self._draw.line(
                [*scaled, scaled[0], scaled[1]], fill=outline, width=round(width * self.smooth), joint="curve"
            )

    def line(self, points: Iterable[Point], fill: Any, width: float) -> None:
        """An open line through points, with round ends."""
        scaled = self._scaled(points)
        self._draw.line(scaled, fill=fill, width=max(1, round(width * self.smooth)), joint="curve")
        if width >= 2:
            for x, y in (scaled[0], scaled[-1]):
                r = width * self.smooth / 2
                self._draw.ellipse((x - r, y - r, x + r, y + r), fill=fill)

    def oval(self, box: Box, fill: Any = None, outline: Any = None, width: float = 1) -> None:
        """A filled ellipse, or a ring where `fill` is None."""
        self._draw.ellipse(
            [v * self.smooth for v in box], fill=fill, outline=outline, width=max(1, round(width * self.smooth))
        )

    def card(self, box: Box, fill: Any, outline: Any = None, width: float = 1.5, radius: float = 0) -> None:
        """A filled rectangle with round corners."""
        scaled = [round(v * self.smooth) for v in box]
        scaled[2], scaled[3] = scaled[2] - 1, scaled[3] - 1  # Pillow counts the last pixel in
        self._draw.rounded_rectangle(scaled, radius * self.smooth, fill, outline, max(1, round(width * self.smooth)))

    def arrowhead(self, tip: Point, angle: float, size: float) -> None:
        """A filled triangle that points along `angle` (radians)."""
        x, y = tip
        back = [(x - size * math.cos(angle + turn), y - size * math.sin(angle + turn)) for turn in (-0.42, 0.42)]
        self.polygon([tip, *back], INK)

    def text(self, text: str, box: Box, largest: int, *, align: str = "middle", fill: str = INK) -> Box | None:
        """Writes a text inside a box, wrapped and as large as fits; the box of the writing, None where none fits."""
        fitted = fit(text, box.width, box.height, largest)
        if fitted is None:
            return None
        size, lines = fitted
        step, widest = _line_height(size), max(_length(line, size) for line in lines)
        top = box.centre[1] - step * len(lines) / 2
        x, anchor = {"middle": (box.centre[0], "ma"), "left": (box.left, "la"), "right": (box.right, "ra")}[align]
        for number, line in enumerate(lines):
            self._lines.append(((x, round(top) + number * step), line, size, anchor, fill))
        left = {"middle": x - widest / 2, "left": x, "right": x - widest}[align]
        return Box(left, top, left + widest, top + step * len(lines))

    def title(self, text: str) -> Box:
        """Writes the title; the space left for the drawing."""
        body = space(self.width, self.height, text)
        head = Box(body.left, body.left * 0.6, body.right, body.top - body.left * 0.6)
        assert self.text(text, head, _base(self.width, self.height) + 2), f"title {text!r} does not fit"
        return body

    def place(self, name: str, box: Box) -> None:
        """Notes where a thing stands."""
        self.places[name] = [round(v) for v in box]

    def finish(self) -> Image.Image:
        """The picture at its final size."""
        image = self._image.reduce(self.smooth)
        draw = ImageDraw.Draw(image)
        for position, line, size, anchor, fill in self._lines:
            draw.text(position, line, fill, _font(size), anchor)
        # A palette makes a PNG three times quicker to write and half as large.
        return image.quantize(palette=_palette(), dither=Image.Dither.NONE)

    def _scaled(self, points: Iterable[Point]) -> list[Point]:
        return [(x * self.smooth, y * self.smooth) for x, y in points]


def draw(facts: Facts) -> tuple[Image.Image, dict[str, list[int]]]:
    """Draws what the facts say.

    Args:
        facts: `family`, `width`, `height`, `title` and what the family needs; made by `demo`.

    Returns:
        The picture (mode P), and the box [left, top, right, bottom], in pixels, of each living thing, stage, bar or
        letter.
    """
    # Bars have no slanted edge to smooth.
    canvas = Canvas(facts["width"], facts["height"], smooth=1 if facts["family"] == "bar_chart" else 2)
    painters: dict[str, Callable[[Canvas, Facts, Box], None]] = {
        "food_web": _draw_web,
        "cycle": _draw_cycle,
        "bar_chart": _draw_chart,
        "labelled_parts": _draw_parts,
    }
    painters[facts["family"]](canvas, facts, canvas.title(facts["title"]))
    return canvas.finish(), canvas.places


# Food web: levels of living things, producers at the bottom (or at the left), arrows from the food to its eater.


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
    return fit(name, card[0] - 2 * _pad(_base(width, height)), card[1] - 2, SMALLEST) is not None


def _web_card(width: int, height: int, title: str, levels: int, nodes: int) -> Point:
    body, base = space(width, height, title), _base(width, height)
    across, down = body.width, body.height - 1.6 * base
    if _sideways(width, height):
        card = across / levels * (0.74 if width < 480 else 0.66), down / nodes * 0.72
    else:
        card = across / nodes * 0.84, down / levels * 0.56
    return card[0], min(card[1], max(card[0] * 0.62, 2.4 * base))


def _draw_web(canvas: Canvas, facts: Facts, body: Box) -> None:
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
            canvas.card(box, _tint(colour, 0.22), colour, stroke * 1.2, radius=min(box.height * 0.25, canvas.base))
            assert canvas.text(name, box.inset(_pad(canvas.base), 1), canvas.base + 4), f"{name!r} does not fit its box"
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


# Cycle: stages on a ring, in the order of the arrows.

START = -math.pi / 2  # the first stage stands at the top


def cycle_room(width: int, height: int) -> int:
    """How many stages a cycle of this size can show."""
    return 4 if width < 260 or height < 180 else 6 if width < 440 or height < 300 else 8


def cycle_fits(width: int, height: int, title: str, stages: list[str]) -> bool:
    """Whether all names fit their cards."""
    base = _base(width, height)
    cards, _, _ = _ring(len(stages), _cycle_body(width, height, title), base)
    inner = cards[0].inset(_pad(base), 1)
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


def _draw_cycle(canvas: Canvas, facts: Facts, body: Box) -> None:
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
            box, _tint(colour, 0.2), colour, max(1.2, canvas.base / 8), radius=min(box.height * 0.3, canvas.base)
        )
        text = f"{number}. {name}"
        assert canvas.text(text, box.inset(_pad(canvas.base), 1), canvas.base + 3), f"{text!r} does not fit its card"
        canvas.place(name, box)


# Bar chart: upright or lying bars, each with its value.


def chart_room(width: int, height: int) -> int:
    """How many bars a chart of this size can show."""
    return max(3, min(8, (height - 36) // 17, (width - 40) // 26))


def axis_ticks(largest: int) -> list[int]:
    """Round numbers from 0 to at least `largest`, at most six of them."""
    step = next(s for power in range(9) for s in (10**power, 2 * 10**power, 5 * 10**power) if s * 5 >= largest)
    return list(range(0, step * 6, step))[: -(-largest // step) + 1]


def _draw_chart(canvas: Canvas, facts: Facts, body: Box) -> None:
    bars: list[tuple[str, int]] = facts["bars"]
    small = max(SMALLEST, canvas.base - 2)
    line = _line_height(small)
    ticks = axis_ticks(max(value for _, value in bars))
    longest_word = max(_length(word, SMALLEST) for name, _ in bars for word in name.split())
    number_width = _length(f"{ticks[-1]}", small) + 6
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
        names_width = min(0.4 * body.width, max(_length(name, small) for name, _ in bars) + 8)
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


# Labelled parts: a drawing, and letters that point at its parts.

SHAPES = """
flower: a flower
line brown 1.5 50 86 38 98; line brown 1.5 50 86 62 98; line brown 1.5 50 84 50 99; line green 3 50 45 50 86
poly green 50 86 62 74 86 70 74 86; poly green 50 74 36 60 16 58 28 72; line green 2 50 72 72 60
oval pink 68 51 79 64; oval pink 38 2 62 26; oval pink 53 10 77 34; oval pink 53 26 77 50; oval pink 38 33 62 57
oval pink 23 26 47 50; oval pink 23 10 47 34; oval yellow 38 18 62 42
part petal 28 20: draws insects with its colour; part stem 50 68: carries water up to the blossom
part leaf 74 78: makes sugar from sunlight; part pollen disc 50 30: holds the pollen
part root 41 95: takes up water from the soil; part bud 74 57: opens into the next blossom

fish: a fish
poly orange 76 50 98 30 92 50 98 70; poly orange 34 28 52 12 66 30; poly orange 44 70 50 84 60 70; oval sky 8 26 82 74
poly orange 44 52 58 46 58 62; line grey 1 34 50 76 50; line brown 1.2 30 36 33 50 30 64; oval white 15 40 24 49
oval ink 18 42 22 46; line ink 1.5 9 55 17 57
part tail fin 92 40: drives the animal forward; part back fin 52 20: keeps the body from rolling over
part belly fin 51 78: helps to brake and to turn; part eye 20 44: sees the prey
part gill slit 32 50: takes oxygen out of the water; part mouth 10 56: takes in the food
part side line 68 50: feels pressure waves in the water; part breast fin 54 54: steers up and down

boat: a sailing boat
poly sky 0 80 100 80 100 92 0 92; poly brown 40 82 56 82 52 98 44 98; poly red 84 72 90 72 88 94 83 94
poly orange 8 68 90 68 80 84 20 84; line brown 1.6 48 4 48 68; line brown 1.4 48 62 84 62; poly white 50 8 50 59 82 59
poly yellow 46 14 46 62 14 62; poly pink 48 3 60 6 48 10
part mast 48 65: holds up the sails; part mainsail 60 48: catches most of the wind
part jib 36 50: is the small sail in front; part hull 30 77: keeps the water out and floats; part rudder 86 88: steers
part keel 48 92: keeps the vessel from tipping over; part boom 74 62: stretches the foot of the large sail
part pennant 53 6: shows where the wind comes from

bicycle: a bicycle
ring ink 1.6 3 48 43 88; ring ink 1.6 57 48 97 88; line grey 0.6 23 48 23 88; line grey 0.6 3 68 43 68
line grey 0.6 77 48 77 88; line grey 0.6 57 68 97 68; line red 2.4 23 68 36 36 66 36 50 68 23 68
line red 2.4 36 36 50 68; line red 2 33 29 36 36; poly ink 26 25 43 25 41 30 28 30; line blue 2.2 64 24 66 36 77 68
line ink 2.2 56 22 64 24 74 20; oval yellow 65 27 73 35; line grey 1.2 23 65 50 64 50 72 23 71; oval grey 45 63 55 73
line ink 1.4 50 68 56 78; line ink 2.4 52 79 60 77
part saddle 34 27: carries the rider; part handlebar 59 23: turns the front of the machine
part chain 36 71: brings the power to the back; part pedal 57 78: takes the push of the foot
part front wheel 95 60: rolls first over every stone; part rear wheel 5 60: is driven
part fork 73 56: holds the axle that is steered; part frame 54 37: joins all the other pieces
part lamp 69 31: lights the road

house: a house
box green 0 92 100 98; box brown 66 10 76 34; poly red 10 44 50 10 90 44; box white 18 44 82 92; box brown 42 60 58 92
oval yellow 54 75 57 78; box sky 24 54 36 68; box sky 64 54 76 68; line ink 0.8 30 54 30 68; line ink 0.8 24 61 36 61
line ink 0.8 70 54 70 68; line ink 0.8 64 61 76 61; box grey 38 92 62 96; oval sky 44 26 56 38
poly orange 24 68 36 68 34 72 26 72
part roof 32 34: keeps off the rain; part chimney 71 18: leads the smoke away; part door 48 80: lets people in
part window 70 64: lets daylight into the room; part wall 22 82: bears the beams
part step 50 94: leads up to the entrance; part attic window 50 32: lights the space under the tiles
part flower box 30 70: is planted in spring

volcano: a volcano
oval grey 34 2 56 20; oval grey 48 0 72 18; oval grey 42 8 62 26; box brown 0 78 100 98; box orange 0 84 100 88
poly brown 6 78 40 28 60 28 94 78; oval red 34 80 66 98; poly red 47 82 53 82 52 28 48 28
poly red 50 27 60 28 76 52 68 54; line red 2.4 50 62 30 52 26 50; poly orange 18 56 24 46 30 54
line ink 0.8 40 28 60 28
part ash cloud 52 12: darkens the sky; part crater 44 28: is the open mouth at the top
part main pipe 50 44: leads the melt up; part magma chamber 44 90: stores the melt
part lava stream 68 44: glows on the slope; part side pipe 38 56: feeds a smaller opening
part rock layer 14 86: was laid down long before

cell: a plant cell
card green 4 8 96 94; card yellow 8 12 92 90; oval pink 14 20 44 50; oval red 24 30 34 40; card sky 46 36 84 80
oval green 52 17 68 27; oval green 16 62 32 72; oval green 72 19 88 29; oval orange 18 76 38 86
oval orange 36 54 44 70
part wall 6 60: gives a stiff shape; part nucleus 18 35: keeps the plan of the whole unit
part nucleolus 29 35: builds ribosomes; part vacuole 66 60: stores water and salts
part chloroplast 60 22: turns light into sugar; part mitochondrion 28 81: frees energy from food
part cytoplasm 44 85: is the jelly around everything else

ant: an ant
line ink 1.4 40 52 30 72 24 90; line ink 1.4 46 52 48 74 44 92; line ink 1.4 52 52 64 72 70 90
line ink 1.2 20 40 10 22 2 18; line ink 1.2 24 38 20 20 12 10; poly ink 8 52 2 60 12 57; oval brown 58 32 98 64
oval brown 53 44 61 52; oval red 32 38 56 56; oval orange 6 34 34 58; oval ink 12 41 18 47
part feeler 12 10: smells and touches; part eye 15 44: sees movement; part jaw 5 57: cuts and carries
part head 26 50: holds the brain; part chest 46 47: moves all the legs; part abdomen 82 46: holds the stomach
part leg 65 75: walks; part waist 57 48: lets the body bend

mushroom: a mushroom
box green 0 84 100 88; line grey 1.2 44 88 30 98; line grey 1.2 50 88 50 99; line grey 1.2 56 88 72 97
oval white 36 74 64 94; poly white 43 44 57 44 60 86 40 86; poly orange 20 42 80 42 60 52 40 52
poly white 40 56 60 56 66 64 34 64; oval red 12 6 88 46; oval white 28 16 38 24; oval white 50 10 62 18
oval white 66 24 76 32; oval white 42 28 50 34
part cap 20 30: shelters the spores from rain; part gills 32 46: let the spores fall
part stalk 50 72: lifts the head up; part ring 38 60: is left of the veil
part cup 38 84: is left of the young wrapping; part threads 68 95: feed on rotting wood
part scale 56 14: is a flake on the skin

rocket: a rocket
poly yellow 40 82 60 82 50 100; poly red 45 82 55 82 50 93; poly grey 38 76 62 76 66 84 34 84
poly blue 34 54 34 78 14 86; poly blue 66 54 66 78 86 86; poly white 34 30 66 30 66 78 34 78
poly red 34 30 50 2 66 30; oval sky 43 35 57 49; box orange 34 54 66 58; card grey 44 62 56 74
part nose cone 50 16: cuts through the air; part porthole 50 42: lets the crew look out
part fin 22 80: keeps the flight straight; part nozzle 62 80: aims the jet; part flame 50 94: is burning gas
part hatch 50 68: lets the crew in; part stripe 38 56: marks where the stages part; part tank 62 66: carries the fuel

tree: a tree
box green 0 90 100 94; line brown 2 46 90 30 99; line brown 2 54 90 72 99; line brown 2 50 90 50 99
poly brown 43 92 57 92 54 40 46 40; line brown 3 50 62 74 46; line brown 3 50 58 26 44; oval green 8 18 50 58
oval green 50 18 92 58; oval green 24 2 76 46; oval red 24 36 30 42; oval red 70 30 76 36; oval red 46 14 52 20
oval ink 46 66 54 78; poly orange 62 50 76 44 78 52 68 55
part crown 34 12: turns sunlight into sugar; part trunk 46 84: bears the weight; part root 68 97: grips the soil
part fruit 73 33: carries the seeds; part hollow 50 72: shelters an owl; part nest 72 50: holds eggs in spring

kettle: a kettle
ring ink 3 34 8 70 50; poly sky 76 48 96 30 98 36 80 64; poly sky 24 40 78 40 88 88 14 88; oval grey 28 34 74 44
oval ink 47 27 55 35; box red 14 88 88 94; card white 40 54 62 64; line blue 1 42 70 60 70; line blue 1 42 76 60 76
line grey 1.4 96 26 94 22 98 17 94 12 98 7
part spout 92 38: pours; part lid 34 39: closes the top; part knob 51 30: is lifted to fill in water
part handle 36 20: is held while pouring; part body 24 76: holds the water; part base 30 91: heats
part steam 96 14: shows that the water boils; part gauge 51 59: shows how hot the water is
"""


class Part(NamedTuple):
    """A part of an object: its name, where it is (0..100 across and down), and what it does."""

    name: str
    point: Point
    role: str


def _read_objects() -> dict[str, tuple[str, list[list[str]], list[Part]]]:
    objects = {}
    for block in SHAPES.strip().split("\n\n"):
        head, *lines = block.split("\n")
        key, _, title = head.partition(": ")
        shapes, parts = [], []
        for entry in "; ".join(lines).split("; "):
            words = entry.split()
            if words[0] == "part":
                named, _, role = entry.partition(": ")
                *name, x, y = named.split()[1:]
                parts.append(Part(" ".join(name), (float(x), float(y)), role))
            else:
                shapes.append(words)
        objects[key] = title, shapes, parts
    return objects


OBJECTS = _read_objects()


def parts_room(width: int, height: int) -> int:
    """How many letters a drawing of this size can show."""
    base = _base(width, height)
    return max(4, min(8, 2 * int((height - 3 * base) / (2.2 * base))))


def _draw_parts(canvas: Canvas, facts: Facts, body: Box) -> None:
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
