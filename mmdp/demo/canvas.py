"""A picture being drawn: shapes, text, and a note of where each thing stands.

Adds: `Canvas`. Leaves out: what is drawn (`*_drawing`).

Shapes are drawn at twice the size and reduced, so that slanted lines are smooth; text goes on top at the final size, in
the font that Pillow brings.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from PIL import Image, ImageDraw

from mmdp.demo.colours import INK, palette
from mmdp.demo.layout import Box, Point, base_size, space
from mmdp.demo.lettering import fit, font, line_height, text_length


class Canvas:
    """A picture being drawn, in pixels of the final size.

    Args:
        width: pixels.
        height: pixels.
        smooth: shapes are drawn this many times larger.
    """

    def __init__(self, width: int, height: int, smooth: int = 2) -> None:
        self.width, self.height, self.smooth = width, height, smooth
        self.base = base_size(width, height)
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
        step, widest = line_height(size), max(text_length(line, size) for line in lines)
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
        assert self.text(text, head, base_size(self.width, self.height) + 2), f"title {text!r} does not fit"
        return body

    def place(self, name: str, box: Box) -> None:
        """Notes where a thing stands."""
        self.places[name] = [round(v) for v in box]

    def finish(self) -> Image.Image:
        """The picture at its final size."""
        image = self._image.reduce(self.smooth)
        draw = ImageDraw.Draw(image)
        for position, line, size, anchor, fill in self._lines:
            draw.text(position, line, fill, font(size), anchor)
        # A palette makes a PNG three times quicker to write and half as large.
        return image.quantize(palette=palette(), dither=Image.Dither.NONE)

    def _scaled(self, points: Iterable[Point]) -> list[Point]:
        return [(x * self.smooth, y * self.smooth) for x, y in points]
