"""How much room a text takes in the font that Pillow brings, and the largest size that fits a space.

Adds: `fit`; `font`, `text_length` and `line_height` of a size; `SMALLEST`. All sizes are pixels.
Leaves out: writing it (`canvas`).
"""

from __future__ import annotations

from functools import cache

from PIL import ImageFont

SMALLEST = 8  # pixels; below it the letters of Pillow's font run together


@cache
def font(size: int) -> ImageFont.FreeTypeFont:
    """Pillow's own font."""
    loaded = ImageFont.load_default(size=size)
    assert isinstance(loaded, ImageFont.FreeTypeFont), "the demo set needs a Pillow built with FreeType (wheels are)"
    return loaded


@cache
def text_length(text: str, size: int) -> float:
    """Pixels across."""
    return font(size).getlength(text)


@cache
def line_height(size: int) -> int:
    """Pixels from one line to the next."""
    return sum(font(size).getmetrics())


def _wrap(text: str, width: float, size: int) -> list[str] | None:
    """The lines of a text at this size; None where one word is wider than the space."""
    lines: list[str] = []
    for word in text.split():
        if text_length(word, size) > width:
            return None
        if lines and text_length(f"{lines[-1]} {word}", size) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def fit(text: str, width: float, height: float, largest: int) -> tuple[int, list[str]] | None:
    """The largest font size, and the lines, with which a text stays inside; None where none from 8 pixels on does."""
    for size in range(largest, SMALLEST - 1, -1):
        lines = _wrap(text, width, size)
        if lines is not None and len(lines) * line_height(size) <= height:
            return size, lines
    return None
