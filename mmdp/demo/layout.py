"""Where things go in a picture, in pixels: boxes, the font size that suits it, and the space below its title.

Adds: `Point`, `Box`; `base_size`, `card_pad`, `space`. Leaves out: drawing (`canvas`).
"""

from __future__ import annotations

from typing import NamedTuple

from mmdp.demo.lettering import SMALLEST, fit, line_height

Point = tuple[float, float]


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


def base_size(width: int, height: int) -> int:
    """The font size that suits a picture of this size."""
    return max(SMALLEST, min(24, round(min(width, 1.3 * height) / 28)))


def card_pad(base: int) -> float:
    """Pixels between the side of a card and the text in it."""
    return max(3, 0.4 * base)


def space(width: int, height: int, title: str) -> Box:
    """What a picture has left below its title, margins taken off."""
    margin, size = max(4, round(min(width, height) / 45)), base_size(width, height) + 2
    lines = 1 if fit(title, width - 2 * margin, line_height(size), size) else 2
    top = 1.2 * margin + lines * line_height(size if lines == 1 else size - 2)
    return Box(margin, round(top), width - margin, height - margin)
